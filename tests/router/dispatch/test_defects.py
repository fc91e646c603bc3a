"""A worker that says what cannot be read: its session ends there, and no reply is given on without what was lost."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence

import pytest

from services.router.dispatch.link import LinkSettings, WorkerLink
from services.router.dispatch.reports import Reports
from services.router.http.events import Lane
from services.router.view.view import View
from tests.node.test_stream import BABBLE, babbling
from tests.router.conftest import running, until
from tests.router.dispatch.test_migration import NEW, streamed
from tests.router.fake_worker import FakeWorker
from twinflow.contracts.errors import BadRequest, TwinflowError
from twinflow.contracts.requests import RequestStats, Sample
from twinflow.contracts.workers import Role, WorkerRecord
from twinflow.rpc.v1 import engine_pb2 as pb

Spoil = Callable[[pb.StepReport], None]


def fewer_tokens(step: pb.StepReport) -> None:
    del step.token_ids[-1:]
    for output in step.outputs:
        step.token_requests.append(output.id)


def unknown_finish(step: pb.StepReport) -> None:
    for output in step.outputs:
        output.samples[-1].finish = "tired"


def lame_logprobs(step: pb.StepReport) -> None:
    for output in step.outputs:
        output.samples[-1].logprobs.top_ids.append(7)


DEFECTS = {
    "columns": (fewer_tokens, "a step has 0 tokens for 1 requests"),
    "finish": (unknown_finish, "unknown finish 'tired'"),
    "logprobs": (lame_logprobs, "ValueError"),
}


def once(spoil: Spoil, at: int) -> Spoil:
    """Of the steps that have tokens, the one with this index."""
    numbers = itertools.count()

    def spoil_one(step: pb.StepReport) -> None:
        if (step.outputs or step.token_ids) and next(numbers) == at:
            spoil(step)

    return spoil_one


@pytest.mark.parametrize("at", [0, 5], ids=["first-token", "later"])
@pytest.mark.parametrize("defect", DEFECTS)
async def test_a_defective_step_costs_no_token(model_folder, caplog, defect, at):
    """Three requests are inside: all go on elsewhere, and the answers are what they are without any fault."""
    spoil, told = DEFECTS[defect]
    prompts = ["one two three", "four five", "six"]
    async with running(model_folder) as c:
        first = await c.add(FakeWorker("toy", "d0"))
        first.delay_s, first.spoil, first.gate = 0.005, once(spoil, at), asyncio.Event()
        first.columns = defect == "columns"
        asked = [asyncio.create_task(streamed(c, prompt=p)) for p in prompts]
        await until(lambda: len(first.submits) == len(prompts))
        other = await c.add(FakeWorker("toy", "d1"))
        with caplog.at_level(logging.WARNING):
            first.gate.set()
            texts = [(await task)[0] for task in asked]
        for prompt, text in zip(prompts, texts, strict=True):
            ids = c.encode(prompt)
            assert text == c.text.texts.tokenizer.decode([ids[i % len(ids)] for i in range(NEW)])
        assert len(other.submits) == len(prompts)
        counted = c.router.metrics.registry.get_sample_value
        moved = [counted(f"twinflow_router_{name}_total") for name in ("migrations", "retries")]
        assert sum(moved) == len(prompts) and moved[0] == sum(bool(s.forced) for s in other.submits)
        why = f"no session with worker d0 at {first.record.addresses[0]}: a step could not be handled: {told}"
        assert why in caplog.text
        await until(lambda: c.router.view.is_connected(first.record.key))
        assert first.sessions == 2 and other.sessions == 1


async def test_a_worker_that_never_makes_sense_is_dialled_ever_more_rarely(model_folder):
    async with running(model_folder) as c:
        worker = FakeWorker("toy", "d0")
        began = list[float]()
        worker.spoil = lambda step: step.token_requests.append("x")

        async def begin() -> None:
            while worker.sessions < 5:
                if len(began) < worker.sessions:
                    began.append(time.monotonic())
                    worker.emit()
                await asyncio.sleep(0.005)
            began.append(time.monotonic())

        beginning = asyncio.create_task(begin())
        await worker.start(c.router.grpc_address)
        c.workers.append(worker)
        await asyncio.wait_for(beginning, 20)
        gaps = [b - a for a, b in itertools.pairwise(began)]
        assert all(gap > 0.9 * least for gap, least in zip(gaps, (0.2, 0.4, 0.8, 1.6), strict=True)), gaps


async def test_it_is_left_alone_after_three_times(model_folder):
    async with running(model_folder) as c:
        bad, good = [await c.add(FakeWorker("toy", f"d{i}")) for i in range(2)]
        bad.spoil = unknown_finish
        async with asyncio.timeout(30):
            while not c.router.view.breakers.open():
                assert (await c.complete(max_tokens=2)).status_code == 200
                await asyncio.sleep(0.02)
        assert c.router.view.breakers.open() == {("", "d0")}
        assert len(bad.submits) == 3 and len(good.submits) >= 3


async def test_what_only_a_newer_release_says_is_ignored(cluster, caplog):
    """Kinds of messages and of cache events that are not known here end nothing."""
    (worker,) = cluster.workers
    unknown = pb.WorkerMessage.FromString(b"\xfa\x06\x00")  # field 111 of the oneof
    assert unknown.WhichOneof("message") is None
    worker._outs[0].put_nowait(unknown)
    worker._outs[0].put_nowait(pb.WorkerMessage(step=pb.StepReport(events=[pb.CacheEvent(sequence=1, kind="moved")])))
    assert (await cluster.complete(max_tokens=3)).status_code == 200
    assert worker.sessions == 1 and "cache events of worker d0 are passed over" in caplog.text
    assert "unknown event kind 'moved'" in caplog.text


@pytest.mark.parametrize("how", ["step", "snapshot"])
async def test_cache_events_that_make_no_sense_cost_hints_alone(cluster, caplog, how):
    (worker,) = cluster.workers
    events = [pb.CacheEvent(sequence=n + 1, kind="block_stored", prefix_hash=b"???") for n in range(17)]
    said = {"step": pb.StepReport(events=events)} if how == "step" else {"snapshot": pb.Snapshot(sequence=17)}
    if how == "snapshot":
        said["snapshot"].events.extend(pb.CacheEvent(kind="moved") for _ in range(2))
    worker._outs[0].put_nowait(pb.WorkerMessage(**said))
    assert (await cluster.complete(max_tokens=3)).status_code == 200
    assert worker.sessions == 1 and caplog.text.count("cache events of worker d0 are passed over") == 1


async def test_a_worker_whose_hello_is_no_message_is_dialled_again(caplog):
    async with babbling("Worker", "Serve", BABBLE) as address:
        record = WorkerRecord("d0", "i1", Role.DECODE, (address,), "m", "f", 4096, 2048, 64)
        link = WorkerLink(record, View(), LinkSettings())
        dials, dial = 0, link._dial

        async def counting() -> tuple[str, bool]:
            nonlocal dials
            dials += 1
            return await dial()

        link._dial = counting
        running_link = asyncio.create_task(link.run())
        await until(lambda: dials == 3)
        running_link.cancel()
        await asyncio.gather(running_link, return_exceptions=True)
    assert f"no session with worker d0 at {address}: it sent bytes that are no message" in caplog.text


class Taker:
    def __init__(self) -> None:
        self.stats: RequestStats | None = None
        self.begun = True
        self.got: list[int] = []

    def put(self, samples: Sequence[Sample]) -> None:
        self.got += [s.token_id for s in samples]

    def put_token(self, token_id: int) -> None:
        self.got.append(token_id)

    def fail(self, error: TwinflowError) -> None:
        raise AssertionError(error)


def test_columns_that_do_not_match_give_nothing_on():
    """Whose token is missing is not known: none may be another request's."""
    takers = {"a": Taker(), "b": Taker()}
    record = WorkerRecord("d0", "i1", Role.DECODE, ("h:1",), "m", "f", 4096, 2048, 64)
    reports = Reports(record, View(), takers, lambda: None)
    with pytest.raises(BadRequest, match="2 tokens for 3 requests"):
        reports.handle(pb.WorkerMessage(step=pb.StepReport(token_requests=["a", "b", "a"], token_ids=[1, 2])))
    assert [t.got for t in takers.values()] == [[], []]


async def test_a_reply_whose_text_cannot_be_given_on_ends_alone(model_folder, monkeypatch):
    """The fault is this router's own: it takes no worker's session with it, and is not tried elsewhere."""
    push = Lane.push

    def failing(self: Lane, text: str) -> None:
        if "two" in text:
            raise RuntimeError("a defect")
        push(self, text)

    monkeypatch.setattr(Lane, "push", failing)
    async with running(model_folder) as c:
        workers = [await c.add(FakeWorker("toy", f"d{i}")) for i in range(2)]
        for worker in workers:
            worker.delay_s = 0.005
        (_, lines), (text, _) = await asyncio.gather(streamed(c), streamed(c, prompt="four five six"))
        assert lines[-1]["error"]["code"] == "internal" and "defect" not in lines[-1]["error"]["message"]
        ids = c.encode("four five six")
        assert text == c.text.texts.tokenizer.decode([ids[i % len(ids)] for i in range(NEW)])
        assert sum(len(w.submits) for w in workers) == 2 and [w.sessions for w in workers] == [1, 1]
