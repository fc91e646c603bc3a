"""Faults that other hand-offs have had: one test for each kind, here or where it lives.

A fault that another file tests better is named in `ELSEWHERE`, and that test has to exist. Here are those of which the hand-off's
own parts are enough.
"""

import ast
from pathlib import Path

import pytest

from services.decode.session import arena_of
from tests.transfer.fence_parts import FINGERPRINT, GEOMETRY, LAYOUT, Nothing
from tests.transfer.test_generations import Reader
from twinflow.cache.arena import ArenaGeometry
from twinflow.cache.hybrid import HybridCache
from twinflow.contracts.errors import Incompatible
from twinflow.contracts.groups import CacheLayout, GroupKind, GroupSpec, TensorSpec
from twinflow.contracts.hashing import TokenChain, pack_tokens
from twinflow.contracts.tags import StateTag
from twinflow.node.handshake import Layout, same_layout
from twinflow.rpc.v1 import engine_pb2 as pb
from twinflow.transfer.base import OfferedState, PeerArena, PullFinished, TransferError
from twinflow.transfer.intake import Adopt, Fail, FailReason, Intake, Pull, Reserve, SayPulled
from twinflow.transfer.leases import LeaseTable, Refusal, SessionKey
from twinflow.transfer.plan import plan_pull, split_posts

ROOT = Path(__file__).parents[2]

ELSEWHERE = {
    "a lease ran out and the reader used memory of a new owner": [
        "tests/engine/test_handoff.py::test_stale_read_is_never_used",
        "tests/transfer/test_fence.py::test_every_order_of_events",
        "tests/transfer/test_fence_model.py::test_every_order_with_two_deviations",
    ],
    "states of unequal shapes moved wrongly, one answer in a thousand": [
        "tests/engine/test_many_prompts.py::test_a_thousand_prompts_through_a_hand_off",
    ],
    "the received state never sat at a boundary, so decode never hit": [
        "tests/flow/test_siblings.py::test_the_second_sibling_brings_the_state_and_the_third_runs_here",
    ],
    "a peer restarted at the same address: crash or wedge": [
        "tests/services/test_restarts.py::test_two_hundred_restarts_leave_nothing_behind",
        "tests/transfer/test_nixl_restarts.py::test_restarted_peers_leave_nothing_behind",
        "tests/services/test_loss.py::test_prefill_worker_restarts",
    ],
    "a configuration mismatch killed the server": [
        "tests/services/test_fence.py::test_layout_is_checked_by_the_prefill_side_too",
    ],
    "KV was held for minutes after the decode worker died": [
        "tests/services/test_fence.py::test_silence_is_noticed_within_three_seconds",
    ],
    "an error of a load killed the engine": ["tests/engine/test_handoff.py::test_a_request_survives_a_raising_read"],
    "a silent fallback to TCP": [
        "tests/transfer/test_paths.py::test_the_refused_peer_fails_and_no_other",
        "tests/transfer/test_nixl.py::test_tcp_is_refused_where_rdma_is_required",
    ],
    "a prefill worker left while its blocks were still to be read": [
        "tests/services/test_drain.py::test_a_prefill_worker_outlives_its_leases",
    ],
}


@pytest.mark.parametrize("fault", list(ELSEWHERE))
def test_the_test_is_there(fault: str) -> None:
    for name in ELSEWHERE[fault]:
        path, _, function = name.partition("::")
        found = ast.walk(ast.parse((ROOT / path).read_text()))
        assert function in {n.name for n in found if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}, name


TAG = StateTag(b"h", 2, "fp")


def intake(**more: object) -> Intake:
    received = Intake("r", 1, 0, TAG, **more)  # type: ignore[arg-type]
    assert received.announced(0, [7]) == [Reserve()]
    received.reserved([0, 1], 0, 1)
    return received


def test_attention_without_its_state_is_no_hit() -> None:
    """Attention KV was restored and the state was not: garbled output. Here nothing is used before both are read."""
    received = intake()
    received.pull_finished("r/1", True)
    (pull,) = received.finished(1, [8], [], 3, 0, TAG)
    assert isinstance(pull, Pull) and pull.slots == ((3, 0),), "the state comes with the last blocks"
    assert isinstance(received.confirmed()[-1], Fail), "confirmed before it was read: refused"
    received = intake()
    received.pull_finished("r/1", True)
    received.finished(1, [8], [], 3, 0, TAG)
    actions = received.pull_finished("r/2", False, "the slot's read failed")
    assert [a.reason for a in actions if isinstance(a, Fail)] == [FailReason.TRANSFER]


@pytest.mark.parametrize("what", ["prefix", "position", "layout"])
@pytest.mark.parametrize("state", ["running", "checkpoint"])
def test_a_state_of_something_else_is_refused(what: str, state: str) -> None:
    """A scratch slot moved instead of the running state, or one of another position: its tag is not the one expected."""
    wrong = {
        "prefix": StateTag(b"x", 2, "fp"), "position": StateTag(b"h", 1, "fp"), "layout": StateTag(b"h", 2, "other")
    }[what]  # fmt: skip
    received = intake(want=TAG)
    if state == "running":
        actions = received.finished(1, [8], [], 3, 0, wrong)
    else:
        actions = received.finished(1, [8], [], 3, 0, TAG, OfferedState(4, 0, wrong))
    (fail,) = [a for a in actions if isinstance(a, Fail)]
    assert fail.reason is FailReason.TAG and str(wrong) in fail.message


def test_one_slot_cannot_be_two_states() -> None:
    received = intake(want=TAG)
    (fail,) = [a for a in received.finished(1, [8], [], 3, 0, TAG, OfferedState(3, 0, TAG)) if isinstance(a, Fail)]
    assert fail.reason is FailReason.PROTOCOL


def test_a_received_state_becomes_a_checkpoint_only_when_confirmed() -> None:
    received = intake(want=TAG)
    received.pull_finished("r/1", True)
    (pull,) = received.finished(1, [8], [], 3, 0, TAG, OfferedState(4, 0, TAG))
    assert isinstance(pull, Pull) and pull.slots == ((3, 0), (4, 1))
    said = received.pull_finished("r/2", True)[-1]
    assert said == SayPulled((7, 8), (3, 4)), "the fence covers both"
    assert received.confirmed() == [Adopt(TAG, (1, TAG))]


def test_unequal_shards_are_refused_by_name() -> None:
    """Slicing conv states for unequal tensor-parallel sizes went wrong without a word: here exactly one rank is read."""
    for ranks in ([], [pb.ArenaInfo(), pb.ArenaInfo()]):
        with pytest.raises(
            Incompatible, match=f"prefill worker p lies on {len(ranks)} ranks, this worker on 1: .* one rank"
        ):
            arena_of(("p", "i"), 1, ranks)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"dtype": "bfloat16"}, id="dtype-of-the-temporal-state"),
        pytest.param({"groups": 2}, id="n_groups"),
        pytest.param({"heads": 2}, id="kv-heads"),
        pytest.param({"block_tokens": 32}, id="block-size"),
    ],
)
def test_what_decides_about_bytes_is_part_of_the_handshake(change: dict[str, object]) -> None:
    """A dtype of the temporal state, or n_groups, was not compared: here both layouts are printed and nothing is moved."""

    def layout(dtype: str = "float32", groups: int = 1, heads: int = 1, block_tokens: int = 64) -> Layout:
        kv = tuple(TensorSpec(name, (heads, 64), "bfloat16") for name in "kv")
        state = (TensorSpec("temporal", (8, 64), dtype), TensorSpec("conv", (3, 64 * groups), "bfloat16"))
        made = CacheLayout(
            "m",
            (
                GroupSpec("attention", GroupKind.ATTENTION, (1,), kv, block_tokens),
                GroupSpec("state", GroupKind.STATE, (0,), state),
            ),
        )
        return Layout("w", made.fingerprint(), made.describe())

    same_layout(layout(), layout())
    ours, theirs = layout(), layout(**change)  # type: ignore[arg-type]
    with pytest.raises(Incompatible) as refused:
        same_layout(ours, theirs)
    assert ours.description in refused.value.message and theirs.description in refused.value.message


def test_a_long_prompt_takes_few_descriptors() -> None:
    """112,000 descriptors for one transfer were slower than the slower link: here neighbours are one, whatever their number."""
    blocks = 4096
    g = ArenaGeometry(blocks * 65536 + 4 * 65536, 65536, 65536, blocks, 4)
    peer = PeerArena("p", "i", 1, 0, g.total_bytes, 65536, 65536, blocks, 4, "DRAM", 0, "a", b"")
    ranges = plan_pull(g, peer, [(i, i) for i in range(blocks)], [(0, 0), (1, 1)])
    assert len(ranges) == 2
    posts = split_posts(ranges)
    assert sum(map(len, posts)) <= 6 and all(sum(r.length for r in post) <= 64 << 20 for post in posts)


def test_memory_changes_its_owner_only_between_steps() -> None:
    """A finished request's late step overwrote a state that had just been received into its slot: here memory that a
    launched step may touch is given to no transfer before that step has ended."""
    cache = HybridCache(LAYOUT, GEOMETRY, Nothing())
    total = GEOMETRY.blocks
    running = cache.reserve(TokenChain(b"r", 1, pack_tokens(range(total))), total)
    assert running is not None
    step = cache.begin_step()
    cache.release(running, donate=False)
    waiting = cache.hold_prefix(TokenChain(b"x", 1, pack_tokens(range(2))))
    assert not cache.complete(waiting, 2), "the step still runs"
    cache.end_step(step)
    assert cache.complete(waiting, 2)
    cache.release(waiting, donate=False)
    cache.check_integrity()


def test_an_earlier_incarnation_is_another_worker() -> None:
    """A peer restarted at the same address: what was read from before, and everything named then, counts no more."""
    session = SessionKey("d", "1", 1)
    old, new = LeaseTable("first", 1), LeaseTable("second", 1)
    for table in (old, new):
        table.open_session(session)
    lease = old.grant(session, "r")
    verdict = new.pulled(session, lease, incarnation="first", epoch=1, generation=1, blocks=[], slots=[])
    assert verdict.refusal is Refusal.INCARNATION
    assert new.grant(session, "r") != lease


def test_one_broken_pair_refuses_nobody_else() -> None:
    """One pair was broken and everybody was refused: here a peer's failure is that peer's."""
    r = Reader()
    r.network.leave("p/1/1")
    r.pull("from-p", "p", 8)
    r.pull("from-q", "q", 8)
    r.done(len(r.manual.reads) - 1)
    assert r.ended == {"from-p": False, "from-q": True}


def test_an_error_is_a_value() -> None:
    """An error of a load killed the engine: here it ends that pull, with its reason, and the transfer goes on."""
    r = Reader()

    def refuse(key: object, ranges: object) -> int:
        raise TransferError("no such memory")

    post, r.agents[1].post = r.agents[1].post, refuse  # type: ignore[method-assign]
    r.pull("a", "p", 8)
    r.agents[1].post = post  # type: ignore[method-assign]
    r.pull("b", "p", 8)
    r.done(0)
    a, b = r.of(PullFinished)
    assert (a.ok, a.error, b.ok) == (False, "no such memory", True)


def test_the_model_of_the_fence_is_a_real_layout() -> None:
    assert LAYOUT.fingerprint() == FINGERPRINT and LAYOUT.block_bytes == LAYOUT.slot_bytes == GEOMETRY.block_bytes
