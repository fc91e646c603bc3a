"""What is on its way over one worker's link, as far as this router's own hand-offs tell: out of a prefill worker, into a decode
worker.

Nobody reports how far a read has come. It is charged like a prompt: its bytes begin to move when the prompt is computed, and go
on evenly until the choice expects it to be over, or its request ends. So a link that several share drains as a whole about as
fast as it really does, whichever of them is over first.
"""

from dataclasses import dataclass, field

from services.router.schedule.base import Choice
from twinflow.contracts.facts import fact


@fact(frozen=True, slots=True)
class _Read:
    size_bytes: float
    begins_s: float
    ends_s: float


@dataclass(slots=True)
class Traffic:
    """Of one worker incarnation. Times are those of the view's clock."""

    _reads: dict[str, _Read] = field(default_factory=dict)  # by request

    @property
    def reads(self) -> int:
        """That are not over, as of the last time that somebody asked for what is left."""
        return len(self._reads)

    def hand_off(self, request_id: str, choice: Choice, prompt_tokens: int, now_s: float) -> None:
        """Chosen just now. Counts for nothing where the policy's terms are no times (those that are name the link) or the record
        tells no sizes."""
        record, terms = choice.decode, choice.terms
        if "link" not in terms or not record.block_bytes:
            return
        missing = (prompt_tokens - choice.decode_attention_tokens) * record.block_bytes / record.block_tokens
        begins_s = now_s + terms["wait"] / 1e3
        moves_ms = terms["prefill"] + terms["link"] + terms["transfer"] + terms["hidden"]
        if moves_ms > 0:
            size_bytes = max(0.0, missing) + record.slot_bytes
            self._reads[request_id] = _Read(size_bytes, begins_s, begins_s + moves_ms / 1e3)

    def ended(self, request_id: str) -> None:
        """Whatever came of it, nothing is read for it any more. Unknown ids are ignored."""
        self._reads.pop(request_id, None)

    def left_bytes(self, now_s: float) -> float:
        """That have not arrived yet, those whose prompts still wait included."""
        self._reads = {id: read for id, read in self._reads.items() if read.ends_s > now_s}
        return sum(
            read.size_bytes * min(1.0, (read.ends_s - now_s) / (read.ends_s - read.begins_s))
            for read in self._reads.values()
        )
