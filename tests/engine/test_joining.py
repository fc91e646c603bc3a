"""Between `PullDone` and `Confirm`: a received sequence is made ready, and nothing of what it received is used."""

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from tests.engine.conftest import Oracle
from tests.engine.harness import Pair, Result, Worker, request
from tests.models.tiny import prompt
from twinflow.cache.base import Holding
from twinflow.contracts.hashing import TokenChain, pack_tokens
from twinflow.engine import base
from twinflow.engine.base import Mode, Notice
from twinflow.engine.batch import Fields, Part, Plan, Shape
from twinflow.engine.runner import Runner
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

    def blocks(self, id: str) -> list[int]:
        holding = self.decode.engine.sequences[id].holding
        assert holding is not None
        return list(holding.blocks)

    def take_memory(self) -> Holding:
        """Of the decode worker, as another request would: what was given back serves nobody else."""
        taken = self.decode.engine.cache.reserve(TokenChain(b"another", 64, pack_tokens(prompt(2, 10))), 150)
        assert taken is not None
        return taken

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
    assert (sequence.generated, sequence.holding.position) == ([], 0)
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
    blocks = undecided.blocks(id)
    commands: list[base.Command] = [base.HandoffFailed(id, "handoff_failed", end)]
    if end == "refused":
        undecided.end_lease(id)
        undecided.decide(id)
        commands = []
    elif end == "session lost":
        commands.append(base.Confirm(id))
    notices = undecided.decode.turn(*commands)
    taken = undecided.take_memory()
    assert taken.blocks == blocks
    undecided.relay_decode(notices)
    undecided.until_pulled(id)
    assert not set(undecided.blocks(id)) & set(blocks)
    assert undecided.free_rows >= undecided.decode.engine.config.max_running - 1
    undecided.decide(id)
    undecided.drive()
    assert len(undecided.lost[id]) == 1 and undecided.results[id].tokens == oracle(p, NEW)
    undecided.decode.engine.cache.release(taken, donate=False)


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


class Replayed:
    """A captured step of one sequence where there is no GPU: runs the pass on whatever its buffer holds."""

    def __init__(self, runner: Runner) -> None:
        self.shape = Shape(1, 1)
        self.buffer = torch.zeros(self.shape.size_bytes, dtype=torch.uint8)
        self.fields = Fields.of(self.buffer, self.shape)
        self.logits = torch.zeros(1, runner.model.vocab_size)
        self.graph = self
        self.shared = None
        self._runner = runner

    def replay(self) -> None:
        self._runner._forward(self.fields, self.shape, (1,), None, False, out=self.logits)


@pytest.fixture(params=["eager", "captured"])
def packed(undecided: Undecided, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[int]:
    """How many sequences were in each step whose inputs were copied, in order; steps of one run from a captured graph, or not."""
    runner = undecided.decode.engine.runner
    sizes: list[int] = []
    fill = runner._fill

    def noted(plan: Plan, shape: Shape, buffer: torch.Tensor) -> None:
        sizes.append(len(plan.parts))
        fill(plan, shape, buffer)

    monkeypatch.setattr(runner, "_fill", noted)
    if request.param == "captured":
        one = Replayed(runner)
        monkeypatch.setattr(runner.graphs, "fit", lambda plan, shared: one if plan.shape == one.shape else None)
    return sizes


def made_ready(pair: Undecided, p: list[int], new: int = NEW) -> str:
    id = pair.submit(p, max_tokens=new)
    pair.until_pulled(id)
    for _ in range(2):
        pair.relay_decode(pair.decode.turn())
    assert pair.decode.engine.sequences[id].row is not None
    return id


@pytest.mark.parametrize("tokens", [127, 128, 150])
def test_a_lone_sequence_has_the_inputs_of_its_first_step(
    undecided: Undecided, oracle: Oracle, packed: list[int], tokens: int
) -> None:
    p = prompt(1, tokens)
    id = made_ready(undecided, p)
    before = len(packed)
    assert before == 1
    undecided.decide(id)
    undecided.relay_decode(undecided.decode.turn())  # its first step
    assert len(packed) == before
    undecided.drive()
    assert len(packed) == before + NEW - 2 and undecided.results[id].tokens == oracle(p, NEW)


def test_inputs_are_not_those_of_a_step_that_came_between(
    undecided: Undecided, oracle: Oracle, packed: list[int]
) -> None:
    p, other = prompt(1, 150), prompt(2, 1)
    id = made_ready(undecided, p)
    undecided.beside("other", other, NEW)
    undecided.drive(turns=2)
    undecided.decide(id)
    undecided.drive()
    assert (undecided.results[id].tokens, undecided.results["other"].tokens) == (oracle(p, NEW), oracle(other, NEW))


def test_inputs_are_not_those_of_another_one_that_is_ready(
    undecided: Undecided, oracle: Oracle, packed: list[int]
) -> None:
    a, b = prompt(1, 150), prompt(2, 150)
    first, second = made_ready(undecided, a), made_ready(undecided, b)
    for id in (first, second):
        undecided.decide(id)
        undecided.drive(turns=1)
    undecided.drive()
    assert (undecided.results[first].tokens, undecided.results[second].tokens) == (oracle(a, NEW), oracle(b, NEW))


def test_inputs_go_with_their_hand_off(undecided: Undecided, oracle: Oracle, packed: list[int]) -> None:
    """The prompt's state is here from before, which is of use once its first token is known: after a loss the request goes on
    here, in other memory, with the same step by its numbers."""
    p = prompt(1, 150)
    undecided.decide(made_ready(undecided, p))
    undecided.drive()
    id = made_ready(undecided, p)
    engine = undecided.decode.engine
    blocks = undecided.blocks(id)
    undecided.lost[id] = ["once", "twice"]
    notices = undecided.decode.turn(base.HandoffFailed(id, "handoff_failed", "the session was lost"))
    taken = undecided.take_memory()
    undecided.relay_decode(notices)
    before = len(packed)
    undecided.relay_decode(undecided.decode.turn())
    assert undecided.blocks(id)[-1] not in blocks and len(packed) == before + 1
    undecided.drive()
    assert undecided.results[id].stats.cached_tokens == len(p) and undecided.results[id].tokens == oracle(p, NEW)
    engine.cache.release(taken, donate=False)
