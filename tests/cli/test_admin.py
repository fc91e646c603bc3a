"""`twinflow admin`: tables, JSON, errors and exit codes, against a stub of the service."""

import json
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest

from services.cli.admin import OPERATIONS
from services.cli.admin_tables import size
from services.cli.main import main
from twinflow.rpc.failure import REASON_KEY
from twinflow.rpc.v1 import admin_pb2 as pb
from twinflow.rpc.v1 import admin_pb2_grpc as pb_grpc
from twinflow.rpc.v1 import engine_pb2

ARGUMENTS = {"match": ["--tokens", "1,2,3"], "cancel": ["cmpl-1"]}
LOST = engine_pb2.Error(reason="worker_lost", message="worker d1 at h:1 is gone")


class Stub(pb_grpc.AdminServicer):
    """Answers with `answers[method]`, or refuses with `error`; `asked` is the last request."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.error: tuple[grpc.StatusCode, str, str] | None = None
        self.asked: Any = None
        self.address = ""


def answering(method: str) -> Any:
    def handler(self: Stub, request: Any, context: Any) -> Any:
        self.asked = request
        if self.error is not None:
            code, reason, message = self.error
            context.set_trailing_metadata(((REASON_KEY, reason),))
            context.abort(code, message)
        return self.answers.get(method, getattr(pb, f"{method}Response")())

    return handler


for operation in OPERATIONS:
    setattr(Stub, operation.method, answering(operation.method))


@pytest.fixture
def stub() -> Iterator[Stub]:
    found = Stub()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    pb_grpc.add_AdminServicer_to_server(found, server)
    found.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield found
    server.stop(0).wait()


def run(stub: Stub, name: str, *options: str) -> int:
    return main(["admin", name, *(options or ARGUMENTS.get(name, [])), "--router", stub.address])


def group(name: str, **units: int) -> pb.GroupCapacity:
    tokens = 64 if name == "attention" else 0
    return pb.GroupCapacity(group=name, kind=name, unit_bytes=32768 + len(name), block_tokens=tokens, **units)


RECORD = engine_pb2.WorkerRecord(
    id="decode-0", role="decode", addresses=["h:7100"], model="m",
    load=engine_pb2.Load(waiting=2, free_blocks=5, total_blocks=9, free_slots=1, total_slots=4),
)  # fmt: skip
ANSWERS: dict[str, Any] = {
    "workers": pb.ListWorkersResponse(
        workers=[pb.WorkerStatus(record=RECORD, connected=True, active_requests=3, queued_prefill_tokens=77)]
    ),
    "capacity": pb.GetCapacityResponse(
        workers=[
            pb.WorkerCapacity(
                worker_id="d0",
                groups=[
                    group("attention", total_units=100, free_units=60, cached_units=30, held_units=9, doomed_units=1,
                          pinned_units=2, stored_units=35),
                    group("state", total_units=8, free_units=8),
                ],
            )
        ]
    ),
    "match": pb.MatchPromptResponse(
        prompt_tokens=441,
        workers=[
            pb.WorkerMatch(
                worker_id="d0",
                usable_tokens=384,
                groups=[
                    pb.GroupMatch(group="attention", kind="attention", tokens=440),
                    pb.GroupMatch(group="state", kind="state", tokens=440, checkpoints=[64, 384]),
                ],
            )
        ],
    ),
    "requests": pb.ListRequestsResponse(
        workers=[
            pb.WorkerRequests(
                worker_id="d0",
                requests=[
                    pb.RunningRequest(id="cmpl-1-0-1", mode="claim", phase="running", prompt_tokens=10, blocks=2,
                                      processed_tokens=12, generated_tokens=3, age_s=1.26, slots=1, owner="r")
                ],
            ),
            pb.WorkerRequests(
                worker_id="p0",
                leases=[pb.Lease(lease_id="i/1/7", request_id="cmpl-1-0-1", reader="d0", age_s=0.5, prefilled=True,
                                 blocks=2, slots=1)],
            ),
        ]
    ),
    "cancel": pb.CancelRequestResponse(workers=[pb.WorkerCancel(worker_id="d0", cancelled=["cmpl-1-0-1"])]),
    "drain": pb.DrainResponse(workers=[pb.WorkerDrain(worker_id="d0", draining=True, changed=True, requests=4)]),
    "undrain": pb.UndrainResponse(workers=[pb.WorkerDrain(worker_id="d0")]),
    "flush": pb.FlushCacheResponse(
        workers=[pb.WorkerFlush(worker_id="d0", groups=[pb.GroupFlush(group="state", units=3, bytes=3 << 20)])]
    ),
}  # fmt: skip
TABLES = {
    "workers": """\
worker    role    address  state    model  requests  waiting  to prefill  free blocks  free slots
decode-0  decode  h:7100   serving  m             3        2          77          5/9         1/4
""",
    "capacity": """\
worker  group          unit  tokens  total  free  cached  held  doomed  pinned  stored     capacity
d0      attention  32.0 KiB      64    100    60      30     9       1       2      35  6400 tokens
d0      state      32.0 KiB       -      8     8       0     0       0       0       0     8 states
""",
    "match": """\
of 441 prompt tokens
worker  attention  checkpoints  usable  predicted attention  predicted checkpoints
d0            440  64, 384         384                    -  -
""",
    "requests": """\
worker  request     phase    mode   prompt  processed  generated  age s  blocks  slots  for  prefilled by
d0      cmpl-1-0-1  running  claim      10         12          3    1.3       2      1  r    -

leases
worker  lease  request     reader  state     age s  blocks  slots
p0      i/1/7  cmpl-1-0-1  d0      computed    0.5       2      1
""",
    "cancel": """\
worker  cancelled
d0      cmpl-1-0-1
""",
    "drain": """\
worker  state     since  requests left  hand-offs left
d0      draining  now                4               0
""",
    "undrain": """\
worker  state    since   requests left  hand-offs left
d0      serving  before              0               0
""",
    "flush": """\
worker  group  dropped     size
d0      state        3  3.0 MiB
""",
}


@pytest.mark.parametrize("name", TABLES)
def test_table(stub: Stub, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    operation = next(o for o in OPERATIONS if o.name == name)
    stub.answers[operation.method] = ANSWERS[name]
    assert run(stub, name) == 0
    assert capsys.readouterr().out == TABLES[name]


@pytest.mark.parametrize("name", TABLES)
def test_json_has_every_field(stub: Stub, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    operation = next(o for o in OPERATIONS if o.name == name)
    stub.answers[operation.method] = ANSWERS[name]
    assert run(stub, name, *ARGUMENTS.get(name, []), "--json") == 0
    (first, *_) = json.loads(capsys.readouterr().out)["workers"]
    fields = {f.name for f in ANSWERS[name].workers[0].DESCRIPTOR.fields}
    assert set(first) == fields - {"error"}
    if name == "capacity":
        assert first["groups"][0]["unit_bytes"] == 32768 + len("attention")  # a number, not a string


@pytest.mark.parametrize("name", [o.name for o in OPERATIONS if o.name != "workers"])
@pytest.mark.parametrize("as_json", [False, True], ids=["table", "json"])
def test_a_silent_worker_is_named_and_the_others_are_shown(
    stub: Stub, name: str, as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    operation = next(o for o in OPERATIONS if o.name == name)
    answer = type(ANSWERS[name])()
    answer.CopyFrom(ANSWERS[name])
    answer.workers.add(worker_id="d1", error=LOST)
    stub.answers[operation.method] = answer
    assert run(stub, name, *ARGUMENTS.get(name, []), *(["--json"] if as_json else [])) == 1
    out, err = capsys.readouterr()
    assert err == "twinflow: error: d1: worker d1 at h:1 is gone\n"
    assert json.loads(out)["workers"][-1]["error"]["reason"] == "worker_lost" if as_json else out == TABLES[name]


def test_nothing_is_said_plainly(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    said = {name: (run(stub, name), capsys.readouterr().out) for name in ("workers", "requests", "cancel")}
    assert said == {
        "workers": (0, "no worker is registered\n"),
        "requests": (0, "no request is running\n"),
        "cancel": (0, "it runs nowhere\n"),
    }


@pytest.mark.parametrize(
    ("argv", "fields"),
    [
        (["workers", "--worker", "d0"], {"worker_id": "d0"}),
        (["match", "once upon", "--salt", "s"], {"text": "once upon", "cache_salt": "s"}),
        (["match", "once", "--tenant", "team"], {"text": "once", "tenant": "team"}),
        (["match", "--tokens", "5, 6,7"], {"token_ids": [5, 6, 7]}),
        (["cancel", "cmpl-1", "--worker", "d0"], {"request_id": "cmpl-1", "worker_id": "d0"}),
        (["flush", "--group", "state"], {"group": "state"}),
        (["drain"], {}),
    ],
    ids=" ".join,
)
def test_what_is_asked(stub: Stub, argv: list[str], fields: dict[str, Any]) -> None:
    assert run(stub, argv[0], *(argv[1:] or ["--timeout", "5"])) == 0
    assert stub.asked == type(stub.asked)(**fields)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["match"], "give the prompt: either TEXT or --tokens"),
        (["match", "a", "--tokens", "1"], "give the prompt: either TEXT or --tokens"),
        (["match", "--tokens", "one"], "--tokens 'one' is no list of numbers"),
        (["match", "--tokens", "1,-1"], "no token id"),
    ],
    ids=" ".join,
)
def test_bad_arguments(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["admin", *argv]) == 2
    assert message in capsys.readouterr().err


def test_errors_of_the_call(stub: Stub, taken_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    stub.error = (grpc.StatusCode.NOT_FOUND, "unknown_worker", "unknown worker 'x' (known: d0)")
    assert run(stub, "drain", "--worker", "x") == 2
    assert capsys.readouterr().err == "twinflow: error: unknown worker 'x' (known: d0)\n"
    assert main(["admin", "workers", "--router", "127.0.0.1:1"]) == 2
    assert "nobody answers at 127.0.0.1:1 (" in capsys.readouterr().err
    assert main(["admin", "workers", "--router", f"127.0.0.1:{taken_port}", "--timeout", "0.2"]) == 2
    assert "DEADLINE_EXCEEDED" in capsys.readouterr().err


@pytest.mark.parametrize("name", [o.name for o in OPERATIONS])
def test_every_option_has_a_help_text(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["admin", name, "--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(option in out for option in ("--router", "--worker", "--json", "--timeout"))


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 40, "5.0 TiB")])
def test_size(count: int, text: str) -> None:
    assert size(count) == text
