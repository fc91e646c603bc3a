import re
from http import HTTPStatus

import pytest

from twinflow.contracts import errors
from twinflow.contracts.errors import BY_REASON, Internal, TwinflowError, from_reason


def subclasses(cls):
    return [c for s in cls.__subclasses__() if s.__module__ == errors.__name__ for c in (s, *subclasses(s))]


ALL = subclasses(TwinflowError)
GRPC_CODES = {
    "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "ABORTED",
    "FAILED_PRECONDITION", "INTERNAL",
}  # fmt: skip


def by_name(cls):
    return cls.__name__


@pytest.mark.parametrize("cls", ALL, ids=by_name)
def test_an_error_crosses_the_wire(cls):
    error = from_reason(cls.reason, "why", "max_tokens")
    assert type(error) is cls
    assert (error.message, error.param, str(error)) == ("why", "max_tokens", "why")


def test_reasons_are_unique_and_complete():
    assert sorted(BY_REASON) == sorted(c.reason for c in ALL)
    assert set(BY_REASON.values()) == set(ALL)


def test_a_reason_of_a_newer_peer_is_internal():
    assert type(from_reason("not_invented_yet", "why")) is Internal


@pytest.mark.parametrize("cls", [TwinflowError, *ALL], ids=by_name)
def test_every_error_has_statuses_that_clients_know(cls):
    nonstandard = 499  # client closed its request: nobody is left to read it
    assert cls.http_status == nonstandard or HTTPStatus(cls.http_status) >= HTTPStatus.BAD_REQUEST
    assert cls.grpc_code in GRPC_CODES
    assert re.fullmatch("[a-z_]+", cls.reason)


def test_the_drawing_shows_the_tree_as_it_is():
    drawn = re.findall(r"── (\w+) .*?(\d{3})  (\w+)$", errors.__doc__, re.MULTILINE)
    assert sorted(drawn) == sorted((c.__name__, str(c.http_status), c.grpc_code) for c in ALL)
