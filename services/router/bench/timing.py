"""How long simulated workers take: rates measured on one GPU for a 4B hybrid (Qwen3.5-4B's shape, bf16, fp32 states).

Prefill of n tokens from nothing and decode steps by batch are interpolated between measurements; decode steps grow with the
context that they read. All times in seconds.
"""

from bisect import bisect_right
from dataclasses import dataclass

Points = tuple[tuple[int, float], ...]

PREFILL: Points = ((0, 0.030), (1024, 0.0484), (4096, 0.0700), (16384, 0.278), (32768, 0.613), (131072, 3.4))
STEP: Points = ((0, 0.0034), (1, 0.00353), (8, 0.00401), (32, 0.00498), (64, 0.00638), (128, 0.00886), (256, 0.01485))
STEP_CONTEXT_TOKENS = 1024  # behind each sequence of STEP
CONTEXT_TOKEN_S = 9.6e-9  # per token more than that: (7.18 − 4.98) ms / (32 × 7,168)


@dataclass(frozen=True, slots=True)
class Timing:
    """The last point of PREFILL continues the line through the two before it, steepened by attention's square. `prefill`: by
    tokens from nothing; `step`: by sequences with STEP_CONTEXT_TOKENS behind each."""

    prefill: Points = PREFILL
    step: Points = STEP
    link_bytes_per_s: float = 15e9  # what hand-offs over NIXL reached
    link_s: float = 0.002  # to open and confirm a hand-off

    def prefill_s(self, have_tokens: int, tokens: int) -> float:
        """To compute `tokens` behind `have_tokens`: no less than if they stood alone."""
        alone = interpolate(self.prefill, tokens)
        return max(alone, interpolate(self.prefill, have_tokens + tokens) - interpolate(self.prefill, have_tokens))

    def step_s(self, sequences: int, context_tokens: int) -> float:
        """Of all of `sequences`, which have `context_tokens` together."""
        more = max(0, context_tokens - sequences * STEP_CONTEXT_TOKENS)
        return interpolate(self.step, sequences) + more * CONTEXT_TOKEN_S

    def transfer_s(self, size_bytes: int) -> float:
        return size_bytes / self.link_bytes_per_s


def interpolate(points: Points, x: float) -> float:
    """Straight lines between points, the last one continued."""
    at = min(max(1, bisect_right([p[0] for p in points], x)), len(points) - 1)
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
