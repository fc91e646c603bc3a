"""Every condition of a confirmation, and random histories against a model."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from twinflow.transfer.leases import Ended, LeaseTable, Refusal, SessionKey, Verdict

S1, S2 = SessionKey("d1", "x", 1), SessionKey("d2", "x", 1)


def table() -> tuple[LeaseTable, str]:
    t = LeaseTable("inc", 3)
    t.open_session(S1)
    lease = t.grant(S1, "r")
    assert t.offer(lease, [4, 5])
    assert t.offer(lease, [6], [1])
    return t, lease


def pulled(t: LeaseTable, lease: str, **other: object) -> Verdict:
    said = {"session": S1, "incarnation": "inc", "epoch": 1, "generation": 3, "blocks": [4, 6], "slots": [1], **other}
    return t.pulled(said.pop("session"), lease, **said)  # type: ignore[arg-type]


def test_confirmed_ends_the_lease() -> None:
    t, lease = table()
    assert pulled(t, lease) == Verdict(None, "", Ended(lease, "r"))
    assert pulled(t, lease).refusal is Refusal.LEASE
    assert not t.offer(lease, [7])
    assert len(t) == 0
    assert t.grant(S1, "r") != lease


@pytest.mark.parametrize(
    ("said", "refusal"),
    [
        ({"incarnation": "older"}, Refusal.INCARNATION),
        ({"epoch": 2}, Refusal.SESSION),
        ({"session": S2}, Refusal.SESSION),
        ({"session": SessionKey("d1", "x", 2), "epoch": 2}, Refusal.SESSION),
        ({"generation": 2}, Refusal.GENERATION),
        ({"blocks": [4, 7]}, Refusal.NOT_OFFERED),
        ({"slots": [0]}, Refusal.NOT_OFFERED),
        ({"blocks": [1], "slots": [4]}, Refusal.NOT_OFFERED),
    ],
)
def test_each_condition_refuses_and_changes_nothing(said: dict[str, object], refusal: Refusal) -> None:
    t, lease = table()
    verdict = pulled(t, lease, **said)
    assert verdict.refusal is refusal
    assert verdict.message
    assert verdict.ended is None
    assert pulled(t, lease).confirmed


def test_another_session_cannot_use_a_lease() -> None:
    t, lease = table()
    t.open_session(S2)
    assert pulled(t, lease, session=S2).refusal is Refusal.LEASE


def test_a_sessions_end_is_for_good() -> None:
    t, lease = table()
    assert t.end_session(S1) == [Ended(lease, "r")]
    assert t.end_session(S1) == []
    assert pulled(t, lease).refusal is Refusal.SESSION
    t.open_session(S1)  # even the very same session opened again
    assert pulled(t, lease).refusal is Refusal.LEASE
    assert t.release(lease) is None


def test_a_newer_session_ends_the_older_ones_of_the_same_worker() -> None:
    t, lease = table()
    t.open_session(S2)
    kept = t.grant(S2, "q")
    assert t.open_session(SessionKey("d1", "x", 2)) == [Ended(lease, "r")]
    assert pulled(t, lease).refusal is Refusal.SESSION
    assert t.lease_of(S2, "q") == kept
    with pytest.raises(ValueError, match="already open"):
        t.open_session(S2)
    with pytest.raises(ValueError, match="already has lease"):
        t.grant(S2, "q")
    with pytest.raises(ValueError, match="not open"):
        t.grant(S1, "r2")


def test_a_lease_is_of_its_generation() -> None:
    t, lease = table()
    t.open_generation(4)
    newer = t.grant(S1, "q")
    assert t.offer(newer, [4, 6], [1])
    assert pulled(t, newer).refusal is Refusal.GENERATION
    assert pulled(t, lease, generation=4).refusal is Refusal.GENERATION
    assert pulled(t, newer, generation=4).confirmed
    assert pulled(t, lease).confirmed, "the older agent is still there"


def test_a_closed_generation_ends_its_leases() -> None:
    t, lease = table()
    t.open_generation(4)
    newer = t.grant(S1, "q")
    assert t.close_generation(3) == [Ended(lease, "r")]
    assert t.close_generation(3) == []
    assert pulled(t, lease).refusal is Refusal.LEASE
    assert t.lease_of(S1, "q") == newer and t.lease_of(S1, "r") is None


class Leases(RuleBasedStateMachine):
    """Against a flat model: lease -> (session, offered units) while it lives."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable("inc", 1)
        self.open: set[SessionKey] = set()
        self.live: dict[str, tuple[SessionKey, str, set[int], set[int]]] = {}
        self.generation_of: dict[str, int] = {}
        self.ever: list[str] = []
        self.used: set[SessionKey] = set()

    sessions = st.builds(SessionKey, st.sampled_from(["d1", "d2"]), st.sampled_from(["a", "b"]), st.integers(1, 2))
    units = st.sets(st.integers(0, 3), max_size=3)

    def _drop(self, ended: list[Ended], expected: set[str]) -> None:
        assert {e.lease_id for e in ended} == expected
        for e in ended:
            assert self.live.pop(e.lease_id)[1] == e.request_id

    @rule(s=sessions)
    def open_session(self, s: SessionKey) -> None:
        if s in self.open:
            return
        older = {o for o in self.open if o.worker_id == s.worker_id}
        self._drop(self.table.open_session(s), {i for i, v in self.live.items() if v[0] in older})
        self.open = (self.open - older) | {s}

    @rule(s=sessions)
    def end_session(self, s: SessionKey) -> None:
        self._drop(self.table.end_session(s), {i for i, v in self.live.items() if v[0] == s})
        self.open.discard(s)

    @rule(s=sessions, request=st.sampled_from(["r1", "r2"]))
    def grant(self, s: SessionKey, request: str) -> None:
        if s not in self.open or self.table.lease_of(s, request):
            with pytest.raises(ValueError, match=r"session|lease"):
                self.table.grant(s, request)
            return
        lease = self.table.grant(s, request)
        assert lease not in self.ever
        self.ever.append(lease)
        self.live[lease] = (s, request, set(), set())
        self.generation_of[lease] = self.table.generation

    @rule(n=st.integers(0, 30), blocks=units, slots=units)
    def offer(self, n: int, blocks: set[int], slots: set[int]) -> None:
        if self.ever:
            lease = self.ever[n % len(self.ever)]
            assert self.table.offer(lease, blocks, slots) == (lease in self.live)
            if lease in self.live:
                self.live[lease][2].update(blocks)
                self.live[lease][3].update(slots)

    @rule(
        n=st.integers(0, 30),
        s=sessions,
        epoch=st.integers(1, 2),
        generation=st.integers(1, 2),
        blocks=units,
        slots=units,
    )
    def pulled(self, n: int, s: SessionKey, epoch: int, generation: int, blocks: set[int], slots: set[int]) -> None:
        if not self.ever:
            return
        lease = self.ever[n % len(self.ever)]
        verdict = self.table.pulled(
            s, lease, incarnation="inc", epoch=epoch, generation=generation, blocks=blocks, slots=slots
        )
        known = self.live.get(lease)
        right = (
            known is not None
            and known[0] == s
            and epoch == s.epoch
            and generation == self.generation_of[lease]
            and blocks <= known[2]
            and slots <= known[3]
        )
        assert verdict.confirmed == right
        if verdict.ended is not None:
            self._drop([verdict.ended], {lease})

    @rule(n=st.integers(0, 30))
    def release(self, n: int) -> None:
        if self.ever:
            lease = self.ever[n % len(self.ever)]
            ended = self.table.release(lease)
            self._drop([ended] if ended else [], {lease} & set(self.live))

    @rule()
    def open_generation(self) -> None:
        self.table.open_generation(self.table.generation % 2 + 1)

    @rule(generation=st.integers(1, 2))
    def close_generation(self, generation: int) -> None:
        over = {i for i in self.live if self.generation_of[i] == generation}
        self._drop(self.table.close_generation(generation), over)

    @invariant()
    def same_as_the_model(self) -> None:
        assert len(self.table) == len(self.live)
        blocks, slots = self.table.leased()
        assert blocks == {b for v in self.live.values() for b in v[2]}
        assert slots == {b for v in self.live.values() for b in v[3]}
        for lease, (s, request, _, _) in self.live.items():
            assert self.table.lease_of(s, request) == lease


Leases.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestLeases = Leases.TestCase
