"""Where a request's states are worth saving: a pure plan, made once the hit is known, followed by the engine's steps.

The end of a request donates its slot and needs no plan; here is what is copied in passing:

* BOUNDARY: the largest block boundary below the prompt's last token; the same prompt, or one that differs in its last
  tokens, resumes there.
* JUNCTION: attention reached deeper than any checkpoint, so an earlier prompt went another way from there on. The next
  sibling resumes where the reach ended, rounded down to a block: siblings often agree on a few tokens more by accident, and
  a state behind those is of no use to the others.
* INTERVAL: multiples of a distance, for prompts that will part where nobody has parted yet; while generating, too, since
  the next turn may keep only a part of a long reply.
"""

from enum import IntEnum

from twinflow.contracts.groups import CacheLayout

INTERVAL_STATE_SHARE = 4  # states at the default interval add at most 1/4 to the bytes of the KV that they lie in


class CheckpointKind(IntEnum):
    """Why a state is kept; how often each kind pays is learnt by eviction (`worth.py`)."""

    END = 0  # donated by a request that finished or was cancelled
    BOUNDARY = 1
    JUNCTION = 2
    INTERVAL = 3
    RECEIVED = 4  # decode's copy of h(N)


def default_interval_tokens(layout: CacheLayout) -> int:
    """The distance at which states cost 1/`INTERVAL_STATE_SHARE` of their KV's bytes, in whole blocks."""
    blocks = -(-INTERVAL_STATE_SHARE * layout.slot_bytes // layout.block_bytes)
    return max(1, blocks) * layout.block_tokens


def checkpoint_positions(
    resumed_tokens: int,
    reach_tokens: int,
    prompt_tokens: int,
    block_tokens: int,
    interval_tokens: int,
    total_tokens: int = 0,
) -> dict[int, CheckpointKind]:
    """Positions, ascending, at which to save the state, each with its reason. All of them are block
    boundaries in (`resumed_tokens`, `total_tokens`), the most that prompt and reply can have; from `prompt_tokens` on they
    are those at intervals alone. A reply that ends earlier never comes by the rest.

    `interval_tokens` 0 = none at intervals; otherwise rounded up to whole blocks, and none within half of it of a deeper
    position that is saved anyway, nor of the prompt's last one.
    """
    last = (prompt_tokens - 1) // block_tokens * block_tokens
    cuts: dict[int, CheckpointKind] = {}
    if last > resumed_tokens:
        cuts[last] = CheckpointKind.BOUNDARY
    junction = min(reach_tokens // block_tokens * block_tokens, last)
    if resumed_tokens < junction < last:
        cuts[junction] = CheckpointKind.JUNCTION
    if interval_tokens > 0:
        step = -(-interval_tokens // block_tokens) * block_tokens
        fixed = sorted(cuts)
        for at in range((resumed_tokens // step + 1) * step, last, step):
            if not any(0 <= f - at < step // 2 or f == at for f in fixed):
                cuts[at] = CheckpointKind.INTERVAL
        first = -(-max(prompt_tokens, resumed_tokens + 1, last + step // 2) // step) * step
        cuts.update(dict.fromkeys(range(first, total_tokens, step), CheckpointKind.INTERVAL))
    return dict(sorted(cuts.items()))
