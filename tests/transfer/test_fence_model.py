"""The fence over the real parts: no token from unconfirmed bytes, no late write to anybody's memory, all memory back.

`test_fence.py` tries every order of a smaller model. Here two attempts, restarts and generations are in play, too many orders to
try all: every one that takes at most so many *deviations* from the prompt order is tried (a fault is one; putting off what
would come next, until nothing else is left, is one), and random ones without such a bound.
"""

import random
from collections import Counter
from collections.abc import Iterable

import pytest

from tests.transfer.fence_model import Model
from tests.transfer.fence_parts import FAULTS, Violation
from twinflow.transfer import generation as generation_module
from twinflow.transfer import generations as generations_module

PROMPT_ORDER = (
    "deliver to P", "deliver to D", "poll", "done", "copy", "half", "announce", "finish", "open", "P reuses", "D reuses",
    "D retires", "P closes", "fail", *sorted(FAULTS),
)  # fmt: skip
RANK = {verb: k for k, verb in enumerate(PROMPT_ORDER)}


def verb(name: str) -> str:
    head, _, tail = name.rpartition(" ")
    return head if tail.isdigit() else name


def is_fault(name: str) -> bool:
    return verb(name) in FAULTS or verb(name) == "fail"


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")


class Search:
    """Histories by replay: nothing of a model can be copied."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, guard: bool = True) -> None:
        self._patch = monkeypatch
        self._guard = guard
        self.tried: Counter[str] = Counter()
        self.adopted = self.states = self.ends = 0

    def model(self, history: Iterable[str] = ()) -> Model:
        made = Model(max_faults=9, guard=self._guard)
        self._patch.setattr(generation_module, "time", made.clock)
        self._patch.setattr(generations_module, "time", made.clock)
        for name in history:
            made.do(name, check=False)  # was checked when this history was found
        return made

    def step(self, model: Model, history: tuple[str, ...], name: str) -> None:
        """Raises Violation with the history."""
        self.tried[verb(name)] += 1
        try:
            model.do(name)
        except (Violation, AssertionError) as e:
            raise Violation(f"{e}, after {[*history, name]}") from e

    def end(self, model: Model, history: tuple[str, ...]) -> None:
        self.ends += 1
        self.adopted += model.adopted
        try:
            model.finish()
        except (Violation, AssertionError) as e:
            raise Violation(f"{e}, at the end of {list(history)}") from e

    def deviating(self, budget: int) -> None:
        """Depth first. A state that was reached before with as many deviations left, and the same things put off, is done."""
        seen: dict[object, int] = {}
        stack: list[tuple[tuple[str, ...], frozenset[str], int]] = [((), frozenset(), 0)]
        while stack:
            history, late, spent = stack.pop()
            model = self.model(history)
            names = sorted((n for n in model.actions() if not is_fault(n)), key=lambda n: (n in late, RANK[verb(n)], n))
            faults = [n for n in model.actions() if is_fault(n)] if spent < budget else []
            if not names:
                self.end(model, history)
                model = self.model(history)
            choices = [
                (n, late | frozenset(names[:k]), spent + (k > 0))
                for k, n in enumerate(names)
                if not k or spent < budget
            ]
            choices += [(n, late, spent + 1) for n in faults]
            for k, (name, later, cost) in enumerate(choices):
                if k:
                    model = self.model(history)
                before = model.state()
                self.step(model, history, name)
                later = later - {name}
                assert model.state() != before, f"{name} did nothing after {history}"
                key = (model.state(), later)
                if seen.get(key, budget + 1) > cost:
                    seen[key] = cost
                    stack.append(((*history, name), later, cost))
        self.states = len(seen)

    def walk(self, seed: int, steps: int = 60) -> None:
        """One random history; faults are rarer than the rest, so that most get far."""
        rng = random.Random(seed)
        model, history = self.model(), ()
        for _ in range(steps):
            names = model.actions()
            if not names:
                break
            (name,) = rng.choices(names, [0.02 if is_fault(n) else 1.0 for n in names])
            self.step(model, history, name)
            history = (*history, name)
        self.end(model, history)


@pytest.mark.timeout(300)
def test_every_order_with_two_deviations(monkeypatch: pytest.MonkeyPatch) -> None:
    search = Search(monkeypatch)
    search.deviating(2)
    print(
        f"\n{search.states} states, {sum(search.tried.values())} events, {search.ends} ends, {search.adopted} adopted"
    )
    assert set(search.tried) == set(PROMPT_ORDER), "every kind of event was tried"
    assert search.states > 1000 and search.adopted > 20


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_order_with_three_deviations(monkeypatch: pytest.MonkeyPatch) -> None:
    search = Search(monkeypatch)
    search.deviating(3)
    print(
        f"\n{search.states} states, {sum(search.tried.values())} events, {search.ends} ends, {search.adopted} adopted"
    )


@pytest.mark.timeout(300)
def test_random_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    search = Search(monkeypatch)
    for seed in range(600):
        search.walk(seed)
    print(f"\n{search.ends} histories, {sum(search.tried.values())} events, {search.adopted} adopted")
    assert search.adopted > 100


@pytest.mark.timeout(300)
def test_the_search_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill side that confirms whatever it is asked: two deviations are enough to find a wrong byte in use."""
    with pytest.raises(Violation, match="used bytes"):
        Search(monkeypatch, guard=False).deviating(2)
