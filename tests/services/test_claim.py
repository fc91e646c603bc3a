"""Which state is asked for besides a hand-off: one at which a sibling like this prompt could start here."""

from contextlib import AsyncExitStack

import pytest

from services.decode.claim import wanted_checkpoint
from tests.services.cluster import DecodeClient, open_message
from tests.services.conftest import Pair
from twinflow.contracts.groups import GroupKind
from twinflow.contracts.hits import GroupHit, usable_tokens
from twinflow.engine.base import Matched


def matched(reach: int, checkpoints: tuple[int, ...], prompt: int) -> Matched:
    hits = (
        GroupHit("attention", GroupKind.ATTENTION, reach),
        GroupHit("state", GroupKind.STATE, max(checkpoints, default=0), checkpoints),
    )
    return Matched("r", hits, usable_tokens(hits, prompt), reach // 64 * 64, prompt)


@pytest.mark.parametrize(
    ("reach", "checkpoints", "prompt", "want"),
    [
        pytest.param(0, (), 300, 0, id="cold"),
        pytest.param(200, (), 290, 192, id="attention-without-a-state"),
        pytest.param(200, (64,), 290, 192, id="a-shallower-state"),
        pytest.param(200, (192,), 290, 0, id="the-state-is-here"),
        pytest.param(200, (200,), 290, 0, id="a-deeper-one-is-here"),
        pytest.param(200, (250,), 290, 192, id="a-state-beyond-the-reach"),
        pytest.param(50, (), 90, 0, id="less-than-a-block"),
        pytest.param(200, (200,), 200, 192, id="the-same-prompt-again"),
        pytest.param(256, (), 256, 192, id="a-whole-number-of-blocks"),
        pytest.param(200, (), 400, 0, id="a-sibling-would-be-too-long-to-run-here"),
    ],
)
def test_wanted(reach: int, checkpoints: tuple[int, ...], prompt: int, want: int) -> None:
    assert wanted_checkpoint(matched(reach, checkpoints, prompt), 64, local_max_tokens=100) == want


def test_nothing_is_wanted_where_nothing_runs_locally() -> None:
    assert wanted_checkpoint(matched(200, (), 201), 64, local_max_tokens=0) == 0


@pytest.mark.parametrize(("want", "ok"), [(0, True), (4, True), (8, True), (3, False), (12, False)])
async def test_what_is_asked_for_lies_at_a_block_inside_the_prompt(
    pair: Pair, opened: AsyncExitStack, want: int, ok: bool
) -> None:
    """The prompt has 10 tokens, a block 4."""
    client = DecodeClient(pair.p.address, features=("checkpoint",))
    opened.push_async_callback(client.close)
    message = open_message("a")
    message.want_checkpoint_at = want
    client.open(message)
    if ok:
        await client.wait("accepted")
    else:
        error = (await client.wait("failed")).error
        assert (error.reason, error.param) == ("bad_request", "want_checkpoint_at")
        assert f"want_checkpoint_at={want} must be a multiple of 4 below the 10 prompt tokens" in error.message
