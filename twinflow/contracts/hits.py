"""Per-group hits and the longest prefix that every group can resume from."""

from collections.abc import Sequence
from dataclasses import dataclass

from twinflow.contracts.groups import GroupKind


@dataclass(frozen=True, slots=True)
class GroupHit:
    """What one group holds of a prompt.

    ATTENTION: `tokens` = reach, every shorter prefix is held too, `checkpoints` is empty.
    STATE: `checkpoints` = ascending positions with a saved state, `tokens` = the deepest one (0 without any).
    """

    group: str
    kind: GroupKind
    tokens: int
    checkpoints: tuple[int, ...] = ()


def usable_tokens(hits: Sequence[GroupHit], prompt_tokens: int) -> int:
    """Longest prefix from which every group can resume, at most `prompt_tokens` - 1 (the last token must run for logits).

    Not the minimum: attention reach 6 with checkpoints {4, 8} gives 4. 0 when a state group has no usable checkpoint
    or there are no hits at all; position 0 is always resumable.
    """
    limit = max(0, prompt_tokens - 1)
    if not hits:
        return 0
    reach = min([limit, *(h.tokens for h in hits if h.kind is GroupKind.ATTENTION)])
    common: set[int] | None = None
    for h in hits:
        if h.kind is GroupKind.STATE:
            points = set(h.checkpoints)
            common = points if common is None else common & points
    if common is None:
        return reach
    return max((p for p in common if p <= reach), default=0)
