"""`twinflow admin …`: asks a router, or a single worker, over the gRPC admin API, and shows the answer.

Exit codes: 0 every worker answered, 1 some did not (named on stderr, the others are shown), 2 the call itself failed.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from services.cli.console import fail
from twinflow.contracts.errors import BadRequest

if TYPE_CHECKING:
    from services.cli.admin_tables import Section

ROUTER = "127.0.0.1:7000"
TIMEOUT_S = 10.0  # longer than a router waits for its workers, so that it can say which of them is silent

Arguments = argparse.Namespace


@dataclass(frozen=True, slots=True)
class Operation:
    """`method` of the service, `fields` of its request besides worker_id, `show` makes sections of its answer."""

    name: str
    help: str
    method: str
    show: str
    fields: Callable[[Arguments], dict[str, Any]] = lambda args: {}
    options: Callable[[argparse.ArgumentParser], None] = lambda parser: None


def match_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", nargs="?", metavar="TEXT", help="the prompt; - reads it from the standard input")
    parser.add_argument("--tokens", metavar="IDS", help="the prompt as token ids, separated by commas, instead of TEXT")
    parser.add_argument("--salt", default="", metavar="SALT", help="the request's cache_salt (default: none)")
    parser.add_argument(
        "--tenant", default="", metavar="TENANT", help="of the request's API key, if that isolates its prefixes"
    )


def match_fields(args: Arguments) -> dict[str, Any]:
    """Raises BadRequest unless there is one prompt."""
    if (args.text is None) == (args.tokens is None):
        raise BadRequest("give the prompt: either TEXT or --tokens")
    whose = {"cache_salt": args.salt, "tenant": args.tenant}
    if args.tokens is None:
        return {"text": sys.stdin.read() if args.text == "-" else args.text, **whose}
    try:
        ids = [int(part) for part in args.tokens.split(",") if part.strip()]
    except ValueError:
        raise BadRequest(f"--tokens {args.tokens!r} is no list of numbers, such as 1,2,3") from None
    if not all(0 <= i < 1 << 32 for i in ids):
        raise BadRequest("--tokens has a number that is no token id")
    return {"token_ids": ids, **whose}


def cancel_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request_id", metavar="ID", help="as the client saw it, or as `requests` lists it")


def flush_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--group", default="", metavar="GROUP", help="attention or state (default: all groups)")


OPERATIONS: tuple[Operation, ...] = (
    Operation("workers", "who is there and how busy", "ListWorkers", "workers"),
    Operation("capacity", "what each cache group of each worker holds", "GetCapacity", "capacity"),
    Operation(
        "match", "what each worker's cache holds of a prompt", "MatchPrompt", "match", match_fields, match_options
    ),
    Operation("requests", "what runs, and what prefill workers keep for decode workers", "ListRequests", "requests"),
    Operation(
        "cancel",
        "end a request wherever it runs",
        "CancelRequest",
        "cancel",
        lambda args: {"request_id": args.request_id},
        cancel_options,
    ),
    Operation("drain", "take no new work, finish what is there; again to see what is left", "Drain", "drain"),
    Operation("undrain", "take new work again", "Undrain", "drain"),
    Operation(
        "flush",
        "drop cached entries that nothing refers to",
        "FlushCache",
        "flush",
        lambda args: {"group": args.group},
        flush_options,
    ),
)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "admin",
        allow_abbrev=False,
        help="look into a running cluster and steer it",
        description="Asks the router of a running cluster (or one worker, at its own address) over the gRPC admin API.",
    )
    operations = parser.add_subparsers(
        title="operations", dest="operation", required=True, metavar="OPERATION", help="one of these; each has --help"
    )
    for operation in OPERATIONS:
        sub = operations.add_parser(
            operation.name, allow_abbrev=False, help=operation.help, description=f"{operation.help.capitalize()}."
        )
        operation.options(sub)
        sub.add_argument(
            "--router", default=ROUTER, metavar="HOST:PORT",
            help="gRPC address of the router, or of one worker (default: %(default)s)",
        )  # fmt: skip
        sub.add_argument("--worker", default="", metavar="ID", help="this worker only (default: all)")
        sub.add_argument("--json", action="store_true", help="print the answer as JSON, with the names of admin.proto")
        sub.add_argument(
            "--timeout", type=float, default=TIMEOUT_S, metavar="S", help="for the whole call (default: %(default)s)"
        )
        sub.set_defaults(run=lambda args, operation=operation: run(operation, args))


def run(operation: Operation, args: Arguments) -> int:
    from services.cli import admin_tables  # gRPC is imported only when it is needed
    from twinflow.rpc.admin import call
    from twinflow.rpc.v1 import admin_pb2

    request = getattr(admin_pb2, f"{operation.method}Request")(worker_id=args.worker, **operation.fields(args))
    kind = getattr(admin_pb2, f"{operation.method}Response")
    answer: Any = call(args.router, operation.method, request, kind, args.timeout)
    failed = [w for w in answer.workers if "error" in w.DESCRIPTOR.fields_by_name and w.HasField("error")]
    if args.json:
        print(json.dumps(admin_tables.as_dict(answer), indent=2))
    elif not failed or len(failed) < len(answer.workers):
        show(getattr(admin_tables, operation.show)(answer))
    for worker in failed:
        fail(f"{worker.worker_id}: {worker.error.message}")
    return 1 if failed else 0


def show(sections: "Sequence[Section]") -> None:
    for i, section in enumerate(sections):
        for line in ([""] if i else []) + section.lines():
            print(line)
