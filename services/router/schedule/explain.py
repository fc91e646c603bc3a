"""The last decisions, for whoever asks why a request went where it went."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from services.router.schedule.base import Choice
from twinflow.contracts.requests import RequestStats

KEPT = 512


@dataclass(slots=True)
class _Decision:
    prompt_tokens: int
    choice: Choice
    stats: RequestStats | None = None


class Decisions:
    """Bounded: the oldest goes first. Ids are those of attempts: the request's id, a dash, the attempt's number."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._decisions: OrderedDict[str, _Decision] = OrderedDict()

    def add(self, attempt_id: str, prompt_tokens: int, choice: Choice) -> None:
        self._decisions[attempt_id] = _Decision(prompt_tokens, choice)
        if len(self._decisions) > self._kept:
            self._decisions.popitem(last=False)

    def ended(self, attempt_id: str, stats: RequestStats | None) -> None:
        """What the workers then found, if they have told."""
        if attempt_id in self._decisions:
            self._decisions[attempt_id].stats = stats

    def newest(self, limit: int, request_id: str = "") -> list[dict[str, Any]]:
        """Newest first; with `request_id`, only its attempts."""
        found = [
            explain(id, d)
            for id, d in reversed(self._decisions.items())
            if not request_id or id.rpartition("-")[0] == request_id
        ]
        return found[:limit]


def explain(attempt_id: str, decision: _Decision) -> dict[str, Any]:
    """Plain values; costs in milliseconds."""
    choice, stats = decision.choice, decision.stats
    told: dict[str, Any] = {
        "attempt": attempt_id,
        "kind": choice.kind.value,
        "reason": choice.reason.value,
        "decode_worker": choice.decode.id,
        "prefill_workers": [{"id": c.record.id, "usable_tokens": c.usable_tokens} for c in choice.candidates],
        "prompt_tokens": decision.prompt_tokens,
        "predicted": {
            "decode_attention_tokens": choice.decode_attention_tokens,
            "decode_usable_tokens": choice.decode_usable_tokens,
            "prefill_tokens": choice.prefill_tokens,
        },
        "local_max_tokens": choice.local_max_tokens,
        "terms_ms": {name: round(ms, 3) for name, ms in choice.terms.items()},
        "others_ms": {name: round(ms, 3) for name, ms in choice.others.items()},
        "dropped": dict(choice.dropped),
    }
    if stats is not None:
        told["found"] = {
            "route": stats.route,
            "prefill_worker": stats.prefill_worker,
            "decode_attention_tokens": stats.decode_attention_tokens,
            "decode_resumed_tokens": stats.decode_resumed_tokens,
            "prefill_resumed_tokens": stats.prefill_resumed_tokens,
            "cached_tokens": stats.cached_tokens,
        }
    return told
