"""Between `PullDone` and `Confirm`: a received sequence is made ready, and nothing of what it received is used."""

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from tests.engine.conftest import Oracle
from tests.engine.harness import Pair, Result, Worker, request
from tests.models.tiny import prompt
from twinflow.engine import base
from twinflow.engine.base import Mode, Notice
from twinflow.engine.batch import Part, Plan
from twinflow.engine.sequence import Phase
from twinflow.kernels.paged_attention.shared import SharedPrefixes
from twinflow.models.base import HybridModel

NEW = 6


class Undecided(Pair):
    """Its prefill worker says nothing to a `Pulled` until the test has it `decide`."""

    def __init__(self, prefill: Worker, decode: Worker) -> None:
        super().__init__(prefill, decode)
        self.pulled: dict[str, Callable[[], None]] = {}

    def confirm(self, id: str, blocks: Iterable[int], slots: Iterable[int]) -> None:
        self.pulled[id] = lambda: super(Undecided, self).confirm(id, blocks, slots)

    def relay_decode(self, notices: Iterable[Notice]) -> None:
        notices = list(notices)
        for notice in notices:
            if isinstance(notice, base.HandoffLost | base.Done):
                self.pulled.pop(notice.id, None)
            assert not isinstance(notice, base.Generated) or notice.id not in self.pulled
        super().relay_decode(notices)

    def beside(self, id: str, ids: list[int], new: int) -> None:
        """On the decode worker alone."""
        self.results[id] = Result()
        self.open.add(id)
        local = request(id, ids, self.decode.root, max_tokens=new)
        self.relay_decode(self.decode.turn(base.Submit(local, Mode.LOCAL)))

    def decide(self, id: str) -> None:
        self.pulled.pop(id)()

    def until_pulled(self, id: str) -> None:
        for _ in range(3000):
            if id in self.pulled:
                return
            self.drive(turns=1)
        raise AssertionError(f"{id} was not pulled")

    @property
    def free_rows(self) -> int:
        return len(self.decode.engine.runner.tables._free)


@pytest.fixture
def undecided(model: HybridModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[Undecided]:
    pair = Undecided.build(model)
    assert isinstance(pair, Undecided)
    launch = pair.decode.engine.runner.launch

    def checked(parts: list[Part]) -> Any:
        assert all(p.sequence.phase is Phase.RUNNING for p in parts)
        return launch(parts)

    monkeypatch.setattr(pair.decode.engine.runner, "launch", checked)
    yield pair
    for _ in range(200):
        if pair.quiet():
            break
    assert pair.quiet() and pair.free_rows == pair.decode.engine.config.max_running
    pair.close()


def test_that_all_is_read_is_told_before_the_turns_step(
    undecided: Undecided, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of others takes long: the confirmation does not begin behind it."""
    other, p = prompt(9, 30), prompt(1, 150)
    running = undecided.submit(other, max_tokens=60)
    undecided.until_pulled(running)
    undecided.decide(running)
    id = undecided.submit(p, max_tokens=NEW)
    engine = undecided.decode.engine
    launched: list[int] = []
    launch = engine.runner.launch

    def counted(parts: list[Part]) -> Any:
        launched.append(len(parts))
        return launch(parts)

    monkeypatch.setattr(engine.runner, "launch", counted)
    for _ in range(3000):
        undecided.relay_prefill(undecided.prefill.turn())
        before = len(launched)
        notices = undecided.decode.turn()
        undecided.relay_decode(notices)
        if any(isinstance(n, base.PullDone) for n in notices):
            break
        assert running in undecided.open, "it ran all the time"
    assert len(launched) == before and engine.busy
    undecided.relay_decode(undecided.decode.turn())
    assert len(launched) == before + 1
    undecided.decide(id)
    undecided.drive()
    assert (undecided.results[id].tokens, undecided.results[running].tokens) == (oracle(p, NEW), oracle(other, 60))


def test_a_pulled_sequence_is_ready_and_nothing_of_it_is_used(undecided: Undecided, oracle: Oracle) -> None:
    p = prompt(1, 150)
    id = undecided.submit(p, max_tokens=NEW)
    undecided.until_pulled(id)
    engine = undecided.decode.engine
    sequence, held, stored = engine.sequences[id], bytes(undecided.decode.arena.storage.numpy()), engine.cache.stored()
    assert sequence.row is None and engine.busy
    for _ in range(3):
        undecided.relay_decode(undecided.decode.turn())
    assert sequence.row is not None and undecided.free_rows == engine.config.max_running - 1
    assert not engine.busy and not engine.running and sequence.phase is Phase.PULLING
    assert (sequence.generated, len(sequence.chain)) == ([], len(p))
    assert bytes(undecided.decode.arena.storage.numpy()) == held and engine.cache.stored() == stored
    undecided.decide(id)
    undecided.drive()
    assert undecided.results[id].tokens == oracle(p, NEW)


@pytest.mark.parametrize("turns", [0, 1, 4], ids=["at once", "when ready", "late"])
def test_confirmed(undecided: Undecided, turns: int) -> None:
    """Also with what the sampler knows of the first token: it counts it once, whoever drew it."""
    p = prompt(3, 130)
    params: dict[str, Any] = {
        "max_tokens": 12,
        "temperature": 1.0,
        "seed": 5,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.3,
    }
    want = undecided.prefill.local(p, **params).tokens
    undecided.prefill.flush()
    id = undecided.submit(p, **params)
    undecided.until_pulled(id)
    for _ in range(turns):
        undecided.relay_decode(undecided.decode.turn())
    undecided.decide(id)
    undecided.drive()
    assert undecided.results[id].tokens == want and id not in undecided.lost


@pytest.mark.parametrize("turns", [0, 1, 4], ids=["at once", "when ready", "late"])
@pytest.mark.parametrize("end", ["refused", "session lost", "given up"])
def test_not_confirmed(undecided: Undecided, oracle: Oracle, end: str, turns: int) -> None:
    """The request starts over from what is held here; the place that was made ready is given back."""
    p = prompt(1, 150)
    id = undecided.submit(p, max_tokens=NEW)
    undecided.until_pulled(id)
    for _ in range(turns):
        undecided.relay_decode(undecided.decode.turn())
    if end == "refused":
        undecided.end_lease(id)
        undecided.decide(id)
    elif end == "session lost":
        undecided.relay_decode(
            undecided.decode.turn(base.HandoffFailed(id, "handoff_failed", "the session was lost"), base.Confirm(id))
        )
    else:
        undecided.relay_decode(undecided.decode.turn(base.HandoffFailed(id, "handoff_failed", "it was superseded")))
    undecided.until_pulled(id)
    assert undecided.free_rows >= undecided.decode.engine.config.max_running - 1
    undecided.decide(id)
    undecided.drive()
    assert len(undecided.lost[id]) == 1 and undecided.results[id].tokens == oracle(p, NEW)


@pytest.mark.parametrize("turns", [0, 1, 4], ids=["at once", "when ready", "late"])
@pytest.mark.parametrize("end", ["cancel", "cancel, then confirmed", "shutdown"])
def test_ended(undecided: Undecided, oracle: Oracle, end: str, turns: int) -> None:
    p = prompt(1, 150)
    id = undecided.submit(p, max_tokens=NEW)
    undecided.until_pulled(id)
    for _ in range(turns):
        undecided.relay_decode(undecided.decode.turn())
    stored = undecided.decode.engine.cache.stored()
    commands: dict[str, list[base.Command]] = {
        "cancel": [base.Cancel(id)],
        "cancel, then confirmed": [base.Cancel(id), base.Confirm(id)],
        "shutdown": [base.Shutdown()],
    }
    undecided.relay_decode(undecided.decode.turn(*commands[end]))
    assert undecided.results[id].tokens == oracle(p, 1) and not undecided.open
    assert undecided.decode.engine.cache.stored() == stored, "what was not confirmed is nobody's prefix"
    if end != "shutdown":
        again = undecided.submit(p, max_tokens=NEW)
        undecided.until_pulled(again)
        undecided.decide(again)
        undecided.drive()
        assert undecided.results[again].tokens == oracle(p, NEW)


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_verdicts(undecided: Undecided, oracle: Oracle, seed: int) -> None:
    """Four requests at a time, of which each is confirmed, refused, lost or cancelled at any moment, beside local ones."""
    rng = random.Random(seed)
    prompts: dict[str, list[int]] = {}
    cancelled: set[str] = set()
    for n in range(rng.randint(6, 9)):
        p = prompt(rng.randint(1, 5), rng.choice([70, 128, 150]))
        prompts[undecided.submit(p, max_tokens=NEW)] = p
        for _ in range(rng.randint(0, 12)):
            undecided.drive(turns=1)
            for id in list(undecided.pulled):
                verdict = rng.choice(["wait", "wait", "confirm", "confirm", "refuse", "lose", "cancel"])
                if verdict == "confirm":
                    undecided.decide(id)
                elif verdict == "refuse":
                    undecided.end_lease(id)
                    undecided.decide(id)
                elif verdict == "lose":
                    undecided.decode.inbox.put(base.HandoffFailed(id, "handoff_failed", "the session was lost"))
                    del undecided.pulled[id]
                elif verdict == "cancel":
                    cancelled.add(id)
                    undecided.decode.inbox.put(base.Cancel(id))
        if n % 3 == 0:
            prompts[f"local-{n}"] = prompt(n, 40)
            undecided.beside(f"local-{n}", prompt(n, 40), NEW)
    for _ in range(3000):
        if not undecided.open:
            break
        undecided.drive(turns=1)
        for id in list(undecided.pulled):
            undecided.decide(id)
    assert not undecided.open
    for id, p in prompts.items():
        got, want = undecided.results[id].tokens, oracle(p, NEW)
        assert got == (want[: len(got)] if id in cancelled else want)


def test_a_row_of_another_batch_does_not_find_shared_blocks_anew(
    undecided: Undecided, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the steps of others know of each other stays while a sequence beside them is made ready; a lone one has nobody."""
    found: list[int] = []
    sharing = undecided.decode.engine.runner._sharing
    find = sharing._find

    def noted(plan: Plan, sequences: int) -> SharedPrefixes | None:
        found.append(len(plan.parts))
        return find(plan, sequences)

    monkeypatch.setattr(sharing, "_find", noted)
    for n, id in enumerate("ab"):
        undecided.beside(id, prompt(n, 30), 60)
    undecided.drive(turns=6)
    before = len(found)
    id = undecided.submit(prompt(1, 70), max_tokens=2)
    undecided.until_pulled(id)
    undecided.relay_decode(undecided.decode.turn())
    assert undecided.decode.engine.sequences[id].row is not None
    assert len(undecided.decode.engine.running) == 2 and found == [2] and before == 1
    undecided.decide(id)
    undecided.drive()
    assert set(found[1:]) == {2, 3}
    undecided.beside("alone", prompt(4, 20), 4)
    undecided.drive()
    assert 1 not in found
