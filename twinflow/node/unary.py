"""Unary handlers: our errors end the call with their code, and calls that change something leave a line in the log."""

import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from grpc import aio

from twinflow.contracts.errors import TwinflowError
from twinflow.node.stream import abort

S = TypeVar("S")
Q = TypeVar("Q")
A = TypeVar("A")

log = logging.getLogger(__name__)

Method = Callable[[S, Q], Awaitable[A]]
Handler = Callable[[S, Q, "aio.ServicerContext[Any, Any]"], Awaitable[A]]


def unary(method: "Method[S, Q, A]") -> "Handler[S, Q, A]":
    """`method(self, request)` as gRPC wants it."""

    @functools.wraps(method)
    async def handler(self: S, request: Q, context: "aio.ServicerContext[Any, Any]") -> A:
        try:
            return await method(self, request)
        except TwinflowError as e:
            log.info("%s of %s was refused: %s", method.__name__, context.peer(), e.message)
            await abort(context, e)
            raise AssertionError("abort always raises") from e

    return handler


def audited(method: "Method[S, Q, A]") -> "Handler[S, Q, A]":
    """The same for a call that changes something: who called it and with what is logged."""
    call = unary(method)

    @functools.wraps(method)
    async def handler(self: S, request: Q, context: "aio.ServicerContext[Any, Any]") -> A:
        fields = " ".join(str(request).split())
        log.info("admin: %s(%s) by %s", method.__name__, fields, context.peer())
        return await call(self, request, context)

    return handler
