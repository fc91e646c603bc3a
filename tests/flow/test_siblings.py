"""A state at a shared boundary, asked for and moved beside the hand-off: afterwards a sibling prompt runs on the decode worker
alone, and computes its own suffix and nothing else."""

from pathlib import Path

import pytest

from tests.flow.conftest import Flow, run_flow
from tests.flow.test_flow import NEW, Oracle, complete, text_of
from tests.models.tiny import prompt

SHARED = prompt(1, 200)  # three blocks of 64 and 8 tokens
JUNCTION = 192


def sibling(k: int) -> list[int]:
    return SHARED + prompt(10 + k, 90)


def prefilled(flow: Flow, worker: str) -> int:
    return flow.engines[worker].runner.work.prefill_tokens


@pytest.mark.parametrize("verify", ["none", "checksum"])
async def test_the_second_sibling_brings_the_state_and_the_third_runs_here(
    checkpoint: Path, oracle: Oracle, verify: str
) -> None:
    # by `cost`, where 98 tokens run would be a matter of how fast the two workers happen to be here
    async with run_flow(checkpoint, local_max_tokens=100, policy="attention_only", verify=verify) as flow:
        layout = flow.engines["d"].model.layout
        first = await complete(flow, sibling(0))
        assert first["twinflow"]["route"] == "remote"
        assert first["twinflow"]["slots_moved"] == 1, "nothing is known of siblings yet"

        second = await complete(flow, sibling(1))
        stats = second["twinflow"]
        assert stats["route"] == "remote" and JUNCTION <= stats["decode_attention_tokens"] <= len(SHARED)
        assert (stats["blocks_moved"], stats["slots_moved"]) == (2, 2)  # blocks 3 and 4 of 0..4, h(N) and h(192)
        assert stats["bytes_moved"] == 2 * layout.block_bytes + 2 * layout.slot_bytes

        before = prefilled(flow, "p"), prefilled(flow, "d")
        third = await complete(flow, sibling(2))
        stats = third["twinflow"]
        assert stats["route"] == "local", stats["reason"]
        assert JUNCTION in stats["decode_checkpoints"]
        assert stats["cached_tokens"] == JUNCTION
        assert prefilled(flow, "p") == before[0], "the prefill worker had no part in it"
        assert prefilled(flow, "d") == before[1] + len(sibling(2)) - JUNCTION
        assert stats["bytes_moved"] == 0
        for k, answer in enumerate((first, second, third)):
            assert answer["choices"][0]["text"] == text_of(flow, oracle(sibling(k), NEW)), k
        await flow.clean()


async def test_without_a_slot_the_hand_off_goes_on_without_the_state(checkpoint: Path, oracle: Oracle) -> None:
    """Best effort: every slot of the decode worker is taken by what is worth more, or running."""
    async with run_flow(
        checkpoint, local_max_tokens=100, max_running=1, checkpoint_slots=0, cache_bytes=400_000
    ) as flow:
        for k in range(3):
            answer = await complete(flow, sibling(k))
            assert answer["choices"][0]["text"] == text_of(flow, oracle(sibling(k), NEW)), k
        await flow.clean()
