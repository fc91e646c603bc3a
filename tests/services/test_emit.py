"""What a request's output says, and when: each token as it comes, or several together where nobody looks at a part."""

import pytest

from services.decode.emit import Answer
from twinflow.contracts.errors import Draining
from twinflow.contracts.requests import FinishReason, RequestStats, Sample, TokenLogprobs
from twinflow.contracts.workers import Load
from twinflow.engine.base import Done
from twinflow.engine.routers import RouterStream
from twinflow.node.outbox import Outbox
from twinflow.rpc.convert import samples_from_pb
from twinflow.rpc.v1 import engine_pb2 as pb

LAST = Sample(99, FinishReason.LENGTH)
STATS = RequestStats(prompt_tokens=5)


class Heard:
    """A router's stream, and every output that went into it, with the report that it was in."""

    def __init__(self) -> None:
        self.box: Outbox[pb.WorkerMessage] = Outbox()
        self.stream = RouterStream("r", self.box, Load)
        self.reports = 0
        self.outputs: list[tuple[int, pb.Output]] = []

    def report(self) -> None:
        self.reports += 1
        self.stream.flush()
        while self.box._waiting:
            self.outputs += [(self.reports, o) for o in self.box._waiting.popleft().step.outputs]

    @property
    def samples(self) -> list[Sample]:
        return [s for _, o in self.outputs for s in samples_from_pb(o.samples)]


def run(gather_tokens: int, samples: list[Sample], plain: bool = False) -> Heard:
    """One token a report."""
    heard = Heard()
    answer = Answer("a", heard.stream, "d0", "", gather_tokens)
    for sample in samples:
        if plain and sample.finish is None:
            answer.add_token(sample.token_id)
        else:
            answer.add([sample])
        if sample.finish is not None:
            answer.finish(Done("a", STATS))
        heard.report()
    return heard


@pytest.mark.parametrize("plain", [False, True], ids=["samples", "tokens"])
@pytest.mark.parametrize(
    ("gather", "told"),
    [(0, list(range(1, 11))), (1, list(range(1, 11))), (4, [1, 5, 9, 10]), (100, [1, 10])],
    ids=["0", "1", "4", "100"],
)
def test_the_first_token_goes_at_once_and_others_together(gather, told, plain):
    samples = [*map(Sample, range(9)), LAST]
    heard = run(gather, samples, plain)
    assert [report for report, _ in heard.outputs] == told
    assert heard.samples == samples
    assert [o.HasField("stats") for _, o in heard.outputs] == [False] * (len(told) - 1) + [True]


@pytest.mark.parametrize("gather", [0, 4])
def test_a_reply_of_one_token_is_one_output(gather):
    heard = run(gather, [LAST])
    assert [report for report, _ in heard.outputs] == [1]
    assert heard.samples == [LAST]


def test_logprobs_stay_with_their_tokens():
    samples = [Sample(i, None, TokenLogprobs(-float(i), ((i, -float(i)),))) for i in range(6)]
    assert run(4, [*samples, LAST]).samples == [*samples, LAST]


@pytest.mark.parametrize("how", ["engine", "front"])
def test_what_was_not_told_comes_with_the_error(how):
    heard = Heard()
    answer = Answer("a", heard.stream, "d0", "", 100)
    for i in range(5):
        answer.add_token(i)
        heard.report()
    if how == "engine":
        answer.finish(Done("a", STATS, error_reason="draining", error_message="it leaves"))
    else:
        answer.fail(Draining("it leaves"))
    heard.report()
    assert heard.samples == [Sample(i) for i in range(5)]
    assert [o.error.reason for _, o in heard.outputs] == ["", "draining"]
    answer.add_token(9)
    heard.report()
    assert len(heard.samples) == 5


@pytest.mark.parametrize("columns", [False, True], ids=["outputs", "columns"])
def test_tokens_in_columns_only_for_a_router_that_reads_them(columns):
    """And never ahead of an output of the same request that came before them."""
    box: Outbox[pb.WorkerMessage] = Outbox()
    stream = RouterStream("r", box, Load, columns)
    stream.add_token("a", 1)
    stream.add_token("b", 2)
    stream.add_token("a", 3)
    stream.add(pb.Output(id="b", samples=[pb.Sample(token_id=4)]))
    stream.add_token("b", 5)
    stream.add_token("a", 6)
    stream.flush()
    stream.add_token("b", 7)
    stream.flush()
    first, second = (message.step for message in box._waiting)
    told = [(o.id, s.token_id) for o in first.outputs for s in o.samples]
    if columns:
        assert list(zip(first.token_requests, first.token_ids, strict=True)) == [("a", 1), ("b", 2), ("a", 3), ("a", 6)]
        assert told == [("b", 4), ("b", 5)]
        assert (list(second.token_requests), list(second.token_ids), len(second.outputs)) == (["b"], [7], 0)
    else:
        assert told == [("a", 1), ("b", 2), ("a", 3), ("b", 4), ("b", 5), ("a", 6)]
        assert not first.token_ids and not second.token_ids and len(second.outputs) == 1
