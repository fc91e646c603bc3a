"""What one launch of the sampler gives: tokens on the device at once, on the host once the step is done."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from twinflow.contracts.requests import TokenLogprobs
from twinflow.kernels.sampling.tables import BROKEN, NOTHING_LEFT, OK

_ERRORS = {
    OK: None,
    BROKEN: "the model gave NaN or +inf among the logits of this token",
    NOTHING_LEFT: "every token is banned: logit_bias, min_tokens and the grammar leave none with a finite logit",
}


@dataclass(frozen=True, slots=True)
class RowMasks:
    """What may be drawn for some rows of a batch; for the others, everything. `picks`: their indices. `bits` (m, words) int32 on
    the host: token t may be drawn iff bit t % 32 of word t // 32 is set."""

    picks: tuple[int, ...]
    bits: torch.Tensor


class Drawn(NamedTuple):
    """One row's result. `error` says why there is no token (`token_id` is 0 then): the request has failed, no other has.
    `broken`: its logits were no numbers, so what was computed for it may be none either."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    broken: bool = False


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Host copies, written with the step: `values` (m, 1 + most) fp32 with the token's own first, `ids` (m, most) int64.
    `tops` maps an index of the batch to its line and how many of `most` it wants."""

    values: torch.Tensor
    ids: torch.Tensor
    tops: dict[int, tuple[int, int]]

    def of(self, index: int) -> TokenLogprobs | None:
        if index not in self.tops:
            return None
        line, top = self.tops[index]
        own, *best = self.values[line, : top + 1].tolist()
        return TokenLogprobs(own, tuple(zip(self.ids[line, :top].tolist(), best, strict=True)))


@dataclass(frozen=True, slots=True)
class Draw:
    """What `Sampler.launch` queued. `tokens` (n,) int64 on the device, in the order of the batch, for the next step's input
    (a failed row reads 0). `read` may be called once the stream has passed this launch: wait for the step's event first."""

    tokens: torch.Tensor
    _host: torch.Tensor  # (2, n) int64: tokens and outcomes, pinned
    _logprobs: Logprobs | None = field(default=None)

    def read(self) -> list[Drawn]:
        tokens, outcomes = self._host.tolist()
        if self._logprobs is None and outcomes.count(OK) == len(outcomes):
            return [Drawn(token) for token in tokens]
        return [
            Drawn(
                token,
                self._logprobs.of(i) if self._logprobs and outcome == OK else None,
                _ERRORS[outcome],
                outcome == BROKEN,
            )
            for i, (token, outcome) in enumerate(zip(tokens, outcomes, strict=True))
        ]
