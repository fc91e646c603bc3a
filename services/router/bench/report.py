"""What came of a replay, in numbers: one row a run."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from services.router.bench.replay import Asked


@dataclass(frozen=True, slots=True)
class Targets:
    """A request is good if both hold; one that was shed is not."""

    ttft_s: float = 1.0
    tpot_s: float = 0.025


@dataclass(frozen=True, slots=True)
class Summary:
    """Shares are of all requests asked, those of tokens of the prompt tokens of admitted ones. Milliseconds of admitted ones."""

    policy: str
    load: float
    requests: int
    shed: int
    good: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p90_ms: float
    stood_p90_ms: float  # from the first token of a hand-off until the decode worker could go on
    moved_bytes: float  # per admitted request
    cached_tokens: float  # not computed anywhere
    prefill_attention_tokens: float  # reach on the prefill worker, of remote requests
    prefill_resumed_tokens: float  # where attention and state agree
    decode_attention_tokens: float  # reach on the decode worker: not moved
    decode_resumed_tokens: float  # of local requests
    local: float

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def summarise(policy: str, load: float, asked: Sequence[Asked], targets: Targets) -> Summary:
    done = [a for a in asked if not a.shed]
    ttft = [ttft_s(a) for a in done]
    tpot = [tpot_s(a) for a in done if a.reply_tokens > 1]
    good = sum(ttft_s(a) <= targets.ttft_s and tpot_s(a) <= targets.tpot_s for a in done)
    tokens = max(1, sum(a.prompt.tokens for a in done))
    return Summary(
        policy=policy,
        load=load,
        requests=len(asked),
        shed=len(asked) - len(done),
        good=good / max(1, len(asked)),
        ttft_p50_ms=1e3 * quantile(ttft, 0.5),
        ttft_p90_ms=1e3 * quantile(ttft, 0.9),
        ttft_p99_ms=1e3 * quantile(ttft, 0.99),
        tpot_p50_ms=1e3 * quantile(tpot, 0.5),
        tpot_p90_ms=1e3 * quantile(tpot, 0.9),
        stood_p90_ms=1e3 * quantile([a.stats.extra.get("stood_s", 0.0) for a in done], 0.9),
        moved_bytes=sum(a.stats.bytes_moved for a in done) / max(1, len(done)),
        cached_tokens=sum(a.stats.cached_tokens for a in done) / tokens,
        prefill_attention_tokens=sum(a.stats.prefill_attention_tokens for a in done) / tokens,
        prefill_resumed_tokens=sum(a.stats.prefill_resumed_tokens for a in done) / tokens,
        decode_attention_tokens=sum(a.stats.decode_attention_tokens for a in done) / tokens,
        decode_resumed_tokens=sum(a.stats.decode_resumed_tokens for a in done) / tokens,
        local=sum(a.stats.route == "local" for a in done) / max(1, len(done)),
    )


def ttft_s(asked: Asked) -> float:
    assert asked.first_s is not None, f"request {asked.id} never got a token"
    return asked.first_s - asked.asked_s


def tpot_s(asked: Asked) -> float:
    """Mean time per token after the first; 0 for replies of one token."""
    assert asked.first_s is not None and asked.ended_s is not None, f"request {asked.id} never ended"
    return (asked.ended_s - asked.first_s) / max(1, asked.reply_tokens - 1)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed; 0 of none."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else 0.0


HEAD = (
    f"{'load':>5} {'policy':<15}{'TTFT p50':>9}{'p90':>7}{'p99':>7}{'TPOT p50':>10}{'p90':>6}{'stood':>7}{'MB':>6}"
    f"{'good':>7}{'shed':>6}"
    f"{'cached':>8}{'P att.':>8}{'P both':>8}{'D att.':>8}{'D both':>8}{'local':>7}"
)


def line(s: Summary) -> str:
    shares = (
        s.cached_tokens, s.prefill_attention_tokens, s.prefill_resumed_tokens, s.decode_attention_tokens,
        s.decode_resumed_tokens, s.local,
    )  # fmt: skip
    widths = (8, 8, 8, 8, 8, 7)
    return (
        f"{s.load:5.2f} {s.policy:<15}{s.ttft_p50_ms:9.0f}{s.ttft_p90_ms:7.0f}{s.ttft_p99_ms:7.0f}"
        f"{s.tpot_p50_ms:10.2f}{s.tpot_p90_ms:6.1f}{s.stood_p90_ms:7.0f}{s.moved_bytes / 1e6:6.0f}"
        f"{s.good:7.1%}{s.shed:6}" + "".join(f"{share:{width}.1%}" for share, width in zip(shares, widths, strict=True))
    )
