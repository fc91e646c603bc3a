"""What a client waits for between the first token and the second one: nothing that could be done before or after."""

import pytest

from tests.engine.harness import Pair, request
from tests.models.tiny import prompt
from twinflow.contracts.events import EventKind
from twinflow.engine import base
from twinflow.engine.base import Mode, Report
from twinflow.models.base import HybridModel
from twinflow.transfer.loopback import Manual

BLOCKS = 5
TOKENS = prompt(7, BLOCKS * 64 + 10)


@pytest.mark.parametrize(
    ("chunk_tokens", "told"), [(512, []), (128, [(0, 2), (2, 2)])], ids=["in-one-chunk", "by-chunks"]
)
def test_the_last_blocks_are_told_with_the_end(
    model: HybridModel, chunk_tokens: int, told: list[tuple[int, int]]
) -> None:
    pair = Pair.build(model, chunk_tokens=chunk_tokens, step_tokens=chunk_tokens)
    offer = base.Submit(request("r", TOKENS, pair.prefill.root), Mode.OFFER)
    notices = pair.prefill.turn(offer)
    for _ in range(10):
        notices += pair.prefill.turn()
    assert [(n.first_index, len(n.blocks)) for n in notices if isinstance(n, base.Offered)] == told
    (end,) = [n for n in notices if isinstance(n, base.Prefilled)]
    assert (end.first_index, len(end.blocks)) == (2 * len(told), BLOCKS + 1 - 2 * len(told))
    pair.close()


def test_after_the_end_one_read_is_left(model: HybridModel) -> None:
    reads = Manual()
    pair = Pair.build(model, reads, chunk_tokens=512, step_tokens=512)
    id = pair.submit(TOKENS, max_tokens=3)
    for _ in range(3000):
        if id not in pair.open:
            break
        for read in reads.reads:
            read.copy()
            read.done()
        pair.drive(turns=1)
    stats = pair.results[id].stats
    assert stats.extra[base.PULLS] == 1 and stats.extra[base.EARLY_BYTES] == 0
    assert (stats.blocks_moved, stats.slots_moved) == (BLOCKS + 1, 1)
    told = [stats.extra[part] for part in (base.POST_S, base.TAIL_S, base.CONFIRM_S, base.STEP_S)]
    assert min(told) > 0 and told[0] <= told[1]
    pair.close()


def test_what_was_received_is_published_behind_the_second_token(
    model: HybridModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair.build(model)
    reports: list[Report] = []
    turn = pair.decode.engine.turn

    def noted(inbound: object) -> Report | None:
        report = turn(inbound)  # type: ignore[arg-type]
        reports.extend([report] if report else [])
        return report

    monkeypatch.setattr(pair.decode.engine, "turn", noted)
    pair.remote(TOKENS, max_tokens=6)
    drew = [i for i, r in enumerate(reports) if any(isinstance(n, base.Generated | base.Continued) for n in r.notices)]
    stored = [i for i, r in enumerate(reports) for e in r.events if e.kind == EventKind.BLOCK_STORED]
    assert len(stored) == BLOCKS and drew[0] < min(stored) and max(stored) <= drew[-1]
    assert pair.decode.local([*TOKENS, 1, 2], max_tokens=2).stats.cached_tokens == len(TOKENS)
    pair.close()


@pytest.mark.parametrize("max_tokens", [2, 3])
def test_a_short_reply_leaves_what_was_received(model: HybridModel, max_tokens: int) -> None:
    """It ends with the very step that would not have published yet, or with the next one."""
    pair = Pair.build(model)
    pair.remote(TOKENS, max_tokens=max_tokens)
    assert pair.decode.engine.cache.counts()["attention"].cached >= BLOCKS
    assert pair.decode.local([*TOKENS, 1, 2], max_tokens=2).stats.cached_tokens == len(TOKENS)
    pair.close()


def test_no_report_where_nothing_is_new(model: HybridModel) -> None:
    pair = Pair.build(model)
    engine = pair.decode.engine
    assert engine.turn([base.Inspect(walk=False)]) is not None
    assert engine.turn([base.Cancel("unknown")]) is None
    assert engine.turn([base.BlocksAnnounced("unknown", 0, (1,))]) is None
    submitted = engine.turn([base.Submit(request("r", TOKENS, pair.decode.root), Mode.CLAIM)])
    assert submitted is not None and len(submitted.notices) == 1
    cancelled = engine.turn([base.Cancel("r")])
    assert cancelled is not None and isinstance(cancelled.notices[0], base.Done)
    assert engine.turn([base.Cancel("r")]) is None
    pair.close()
