"""The decode side's state machine: what it asks for, what it refuses, and that nothing else leads to Adopt."""

import dataclasses
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from twinflow.contracts.tags import StateTag
from twinflow.transfer.intake import (
    Action,
    Adopt,
    CancelPull,
    Fail,
    FailReason,
    Intake,
    Moved,
    Phase,
    Pull,
    Reserve,
    SayPulled,
    Unpin,
    Verify,
)

TAG = StateTag(b"h" * 16, 37, "fp")  # 37 tokens in blocks of 8: 5 blocks, the last one partial
LOCAL = [50, 51, 52, 53, 54, 55, 56]


def intake(**more: Any) -> Intake:
    return Intake("r", 8, more.pop("have_blocks", 2), TAG, session_epoch=7, **more)


def reason(actions: list[Action]) -> FailReason:
    (fail,) = [a for a in actions if isinstance(a, Fail)]
    assert fail.message
    return fail.reason


def test_a_whole_hand_off() -> None:
    i = intake()
    assert i.announced(0, [10, 11, 12]) == [Reserve()]
    assert i.announced(3, [13]) == []  # buffered until memory is here
    assert i.reserved(LOCAL, 5) == [Pull("r/1", ((12, 52), (13, 53)), ())]
    assert (i.outstanding_blocks, i.outstanding_slots) == ((52, 53), ())
    assert i.finished(4, [14], [], 3, 0, TAG) == [Pull("r/2", ((14, 54),), ((3, 5),))]
    assert i.outstanding_slots == (5,)
    assert i.pull_finished("r/2", True, bytes=100, seconds=0.5, descriptors=2, transport="t", began=1.0) == [
        Unpin((54,), (5,))
    ]
    assert i.phase is Phase.PULLING
    said = i.pull_finished("r/1", True, bytes=10, seconds=0.25, descriptors=1, transport="t", began=2.0)
    assert said == [Unpin((52, 53), ()), SayPulled((12, 13, 14), (3,))]
    assert i.confirmed(6) == []  # of another session
    assert i.confirmed(7) == [Adopt(TAG)]
    assert i.phase is Phase.CONFIRMED
    assert i.moved == Moved(
        blocks=3, slots=1, bytes=110, seconds=0.75, descriptors=3, pulls=2, transport="t", until=2.25
    )
    assert i.confirmed(7) == i.cancelled() == i.session_lost() == i.announced(0, [1]) == []


def test_everything_but_the_slot_is_here_already() -> None:
    i = intake(have_blocks=5)
    assert i.announced(0, [10, 11]) == []
    assert i.finished(2, [12, 13, 14], [], 3, 0, TAG) == [Reserve()]
    assert i.reserved(LOCAL[:5], 5) == [Pull("r/1", (), ((3, 5),))]
    assert i.pull_finished("r/1", True) == [Unpin((), (5,)), SayPulled((), (3,))]


@pytest.mark.parametrize("held", [2, 3, 4, 5])
def test_what_has_come_here_meanwhile_is_not_read(held: int) -> None:
    i = intake(verify=True)
    assert i.announced(1, [11, 12, 13], [1, 2, 3]) == [Reserve()]
    i.hold(held)
    missing = [index for index in (2, 3) if index >= held]
    first = [Pull("r/1", tuple((10 + index, 50 + index) for index in missing), ())] if missing else []
    assert i.reserved(LOCAL, 5) == first
    last = ((14, 54),) if held < 5 else ()
    pull = f"r/{len(first) + 1}"
    assert i.finished(4, [14], [4], 3, 7, TAG) == [Pull(pull, last, ((3, 5),))]
    for each in first:
        i.pull_finished(each.pull_id, True)
    *_, verify = i.pull_finished(pull, True)
    named = tuple(range(50 + held, 55))
    assert verify == Verify(named, (5,))
    assert i.verified(dict(zip(named, (2, 3, 4)[held - 2 :], strict=True)), {5: 7}) == [
        SayPulled(tuple(range(10 + held, 15)), (3,))
    ]


def test_what_is_here_cannot_become_less_nor_change_later() -> None:
    i = intake()
    for blocks in (1, 6):
        with pytest.raises(ValueError, match=f"{blocks} of 5 blocks"):
            i.hold(blocks)
    i.announced(2, [12])
    i.reserved(LOCAL, 5)
    with pytest.raises(ValueError, match="in pulling"):
        i.hold(3)


@pytest.mark.parametrize(
    ("first", "blocks", "says"),
    [
        pytest.param(-1, [1], "outside", id="negative"),
        pytest.param(5, [1], "outside", id="beyond"),
        pytest.param(3, [1, 2, 3], "outside", id="straddles-the-end"),
        pytest.param(2, [12], "announced twice", id="same-again"),
        pytest.param(2, [99], "announced twice", id="contradiction"),
        pytest.param(3, [12], "two blocks", id="one-remote-block-twice"),
    ],
)
def test_announcements_that_contradict(first: int, blocks: list[int], says: str) -> None:
    i = intake()
    i.announced(2, [12])
    (fail,) = i.announced(first, blocks)
    assert fail == Fail(FailReason.PROTOCOL, fail.message)  # type: ignore[union-attr]
    assert says in fail.message  # type: ignore[union-attr]
    assert i.phase is Phase.TERMINAL


@pytest.mark.parametrize(
    "tag",
    [
        dataclasses.replace(TAG, prefix_hash=b"x" * 16),
        dataclasses.replace(TAG, position=36),
        dataclasses.replace(TAG, fingerprint="other"),
    ],
    ids=["hash", "position", "fingerprint"],
)
def test_a_wrong_tag(tag: StateTag) -> None:
    assert reason(intake().finished(0, [10, 11, 12, 13, 14], [], 0, 0, tag)) is FailReason.TAG


def test_finished_must_be_complete_and_the_last_word() -> None:
    assert reason(intake().finished(2, [12, 13], [], 0, 0, TAG)) is FailReason.PROTOCOL
    for late in ("announced", "finished"):
        i = intake()
        i.finished(2, [12, 13, 14], [], 0, 0, TAG)
        again = i.announced(2, [12]) if late == "announced" else i.finished(2, [], [], 0, 0, TAG)
        assert reason(again) is FailReason.PROTOCOL


def test_checksums() -> None:
    assert reason(intake(verify=True).announced(2, [12])) is FailReason.PROTOCOL  # none given
    assert reason(intake().announced(2, [12], [1, 2])) is FailReason.PROTOCOL
    for wrong in (None, "block", "missing", "slot"):
        i = intake(verify=True)
        i.announced(0, [10, 11, 12], [1, 2, 3])
        i.reserved(LOCAL, 5)
        i.finished(3, [13, 14], [4, 5], 3, 6, TAG)
        i.pull_finished("r/1", True)
        assert i.pull_finished("r/2", True)[1:] == [Verify((52, 53, 54), (5,))]
        assert i.phase is Phase.PULLING
        got = {52: 3, 53: 4, 54: 5}
        if wrong == "block":
            got[53] = 9
        if wrong == "missing":
            del got[53]
        out = i.verified(got, {5: 9 if wrong == "slot" else 6})
        if wrong:
            assert reason(out) is FailReason.CHECKSUM
        else:
            assert out == [SayPulled((12, 13, 14), (3,))]
            assert i.verified(got, {5: 6}) == []


def test_seconds_are_those_with_a_read_out() -> None:
    moved = Moved()
    for began, ended in ((10.0, 12.0), (11.0, 13.0), (12.5, 13.0), (20.0, 21.0)):
        moved.took(began, ended - began)
    assert moved.seconds == pytest.approx(4.0)


def test_failing_waits_for_reads() -> None:
    i = intake()
    i.announced(2, [12, 13])
    i.reserved(LOCAL, 5)
    i.finished(4, [14], [], 3, 0, TAG)
    assert i.session_lost()[:-1] == [CancelPull("r/1"), CancelPull("r/2")]
    assert i.phase is Phase.FAILED
    assert i.outstanding_blocks == (52, 53, 54)
    assert i.pull_finished("r/1", True) == [Unpin((52, 53), ())]
    assert i.phase is Phase.FAILED
    assert i.pull_finished("r/2", False, "ERR") == [Unpin((54,), (5,))]
    assert i.phase is Phase.TERMINAL
    assert i.pull_finished("r/2", True) == []
    assert i.confirmed(7) == []


def test_a_failed_read_fails_the_hand_off_and_stops_the_others() -> None:
    i = intake()
    i.announced(2, [12, 13])
    i.reserved(LOCAL, 5)
    i.finished(4, [14], [], 3, 0, TAG)
    out = i.pull_finished("r/1", False, "peer gone")
    assert out == [Unpin((52, 53), ()), CancelPull("r/2"), Fail(FailReason.TRANSFER, "peer gone")]


def test_the_engines_own_mistakes_raise() -> None:
    with pytest.raises(ValueError, match="have_blocks=6"):
        intake(have_blocks=6)
    for local in (LOCAL[:4], [50, 50, 51, 52, 53]):
        i = intake()
        i.announced(2, [12])
        with pytest.raises(ValueError, match="5 distinct local blocks"):
            i.reserved(local, 5)
    i = intake()
    i.announced(2, [12])
    i.reserved(LOCAL, 5)
    with pytest.raises(ValueError, match="twice"):
        i.reserved(LOCAL, 5)


class HandOff(RuleBasedStateMachine):
    """Any inputs in any order, right ones and wrong ones; what Adopt needs is tracked apart from the machine."""

    def __init__(self) -> None:
        super().__init__()
        self.intake = intake()
        self.log: list[Action] = []
        self.open_pulls: dict[str, Pull] = {}
        self.read: set[tuple[str, int, int]] = set()
        self.rest_seen = self.reserve_asked = self.reserved_done = self.failed = self.adopted = False
        self.said: SayPulled | None = None

    def take(self, actions: list[Action], *, confirmed: bool = False) -> None:
        assert not (actions and self.adopted), actions
        for a in actions:
            self.log.append(a)
            if isinstance(a, Pull):
                assert self.reserved_done
                assert not self.failed
                assert a.pull_id not in self.open_pulls
                self.open_pulls[a.pull_id] = a
            elif isinstance(a, Reserve):
                assert not self.reserve_asked
                self.reserve_asked = True
            elif isinstance(a, SayPulled):
                assert self.rest_seen
                assert not self.open_pulls
                assert {("block", r) for r in a.blocks} | {("slot", r) for r in a.slots} == {x[:2] for x in self.read}
                assert len(a.blocks) == 5 - self.intake.have_blocks
                assert len(a.slots) == 1
                self.said = a
            elif isinstance(a, Adopt):
                assert confirmed
                assert self.said is not None
                assert not self.failed
                assert a.tag == TAG
                self.adopted = True
            elif isinstance(a, Fail):
                assert not self.failed
                assert not self.adopted
                self.failed = True
            elif isinstance(a, CancelPull):
                assert a.pull_id in self.open_pulls

    @rule(first=st.sampled_from([0, 2, 2, 3, 4, 5]), n=st.integers(0, 3), base=st.sampled_from([10, 10, 10, 11]))
    def announced(self, first: int, n: int, base: int) -> None:
        self.take(self.intake.announced(first, [base + first + i for i in range(n)]))

    @rule(data=st.data(), tag=st.sampled_from([TAG, TAG, TAG, dataclasses.replace(TAG, position=1)]))
    def finished(self, data: st.DataObject, tag: StateTag) -> None:
        first = data.draw(st.sampled_from([2, 3, 4, 5]))
        self.rest_seen = True
        self.take(self.intake.finished(first, [10 + i for i in range(first, 5)], [], 3, 0, tag))

    @rule(blocks=st.integers(2, 5))
    def hold(self, blocks: int) -> None:
        if self.intake.phase is Phase.OPEN and blocks >= self.intake.have_blocks:
            self.intake.hold(blocks)
        else:
            with pytest.raises(ValueError, match="blocks, in"):
                self.intake.hold(blocks)

    @rule()
    def reserved(self) -> None:
        if self.reserve_asked and not self.reserved_done:
            self.reserved_done = True
            self.take(self.intake.reserved(LOCAL, 5))

    @rule(data=st.data(), ok=st.sampled_from([True, True, True, True, False]))
    def pull_finished(self, data: st.DataObject, ok: bool) -> None:
        if not self.open_pulls:
            return
        pull = self.open_pulls.pop(data.draw(st.sampled_from(sorted(self.open_pulls))))
        if ok:
            self.read |= {("block", *p) for p in pull.blocks} | {("slot", *p) for p in pull.slots}
        actions = self.intake.pull_finished(pull.pull_id, ok)
        assert actions[0] == Unpin(tuple(d for _, d in pull.blocks), tuple(d for _, d in pull.slots))
        self.take(actions[1:])

    @rule(epoch=st.sampled_from([7, 7, 6]))
    def confirmed(self, epoch: int) -> None:
        self.take(self.intake.confirmed(epoch), confirmed=epoch == 7)

    @rule(how=st.sampled_from(["cancelled", "session_lost", "failed", "none", "none", "none"]))
    def end(self, how: str) -> None:
        if how != "none":
            self.take(self.intake.failed("said so") if how == "failed" else getattr(self.intake, how)())

    @invariant()
    def outstanding_is_what_was_pulled(self) -> None:
        assert sorted(self.intake.outstanding_blocks) == sorted(
            d for p in self.open_pulls.values() for _, d in p.blocks
        )
        assert (self.intake.phase is Phase.CONFIRMED) == self.adopted
        assert (self.intake.phase in (Phase.FAILED, Phase.TERMINAL)) == self.failed
        if self.failed:
            assert (self.intake.phase is Phase.TERMINAL) == (not self.open_pulls)


HandOff.TestCase.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
TestHandOff = HandOff.TestCase
