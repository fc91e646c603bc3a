"""Executes one planned step: cursors, forward pass, sampling. Knows nothing of requests' lives outside the step."""

from collections.abc import Sequence as Seq

import torch

from twinflow.cache.arena import Arena
from twinflow.cache.base import Cache
from twinflow.contracts.requests import Sample
from twinflow.engine import sampling
from twinflow.engine.base import Work
from twinflow.engine.batch import BlockTables, build_batch
from twinflow.engine.sequence import Sequence
from twinflow.models.base import HybridModel


class Runner:
    """Owned by the engine's loop. After `run` returns, all writes of the step are done."""

    def __init__(self, model: HybridModel, arena: Arena, cache: Cache, rows: int, device: str) -> None:
        self.model = model
        self.arena = arena
        self.cache = cache
        self.device = device
        blocks = -(-min(cache.max_request_tokens(), model.max_model_tokens) // model.layout.block_tokens)
        self.tables = BlockTables(rows, blocks, device)
        self.work = Work()  # of the steps that ended well

    def run(self, parts: Seq[tuple[Sequence, int]]) -> list[tuple[Sequence, Sample]]:
        """Feeds `tokens` more tokens of each sequence; returns a new token for those whose known tokens are all fed.

        Cursors have moved, `generated` and `chain` have grown, full blocks are committed, checkpoints taken at cuts.
        On an exception the step counts as done and nothing of it was published.
        """
        batch, sampled = build_batch(parts, self.tables, self.arena.geometry, self.device)
        prefill_tokens = sum(prompt_tokens(s, n) for s, n in parts)
        step = self.cache.begin_step()
        try:
            for sequence, tokens in parts:
                assert sequence.holding is not None
                self.cache.advance(sequence.holding, tokens)
            logits = self.model.forward(batch, self.arena)
            samples = [(s, self._sample(s, logits[i])) for i, s in enumerate(sampled)]
        finally:
            self._wait()
            self.cache.end_step(step)
        for sequence, _ in parts:
            assert sequence.holding is not None
            self.cache.commit(sequence.holding)
            if sequence.holding.position == sequence.cut:
                self.cache.checkpoint(sequence.holding, sequence.cuts.pop(sequence.holding.position))
        self.work = Work(
            steps=self.work.steps + 1,
            prefill_tokens=self.work.prefill_tokens + prefill_tokens,
            decode_tokens=self.work.decode_tokens + sum(n for _, n in parts) - prefill_tokens,
        )
        return samples

    def settle(self) -> None:
        """An empty step: copies that the cache has queued since the last one are done when it ends."""
        step = self.cache.begin_step()
        self._wait()
        self.cache.end_step(step)

    def _wait(self) -> None:
        """Until everything queued on the compute stream is done. The CPU queues nothing."""
        if self.device != "cpu":
            torch.cuda.current_stream().synchronize()

    def _sample(self, sequence: Sequence, logits: torch.Tensor) -> Sample:
        params = sequence.request.sampling
        row = sampling.adjust(logits, params, sequence.prompt_ids, sequence.generated)
        token = sampling.draw(row, params, len(sequence.generated))
        logprobs = None
        if params.logprobs is not None:
            logprobs = sampling.token_logprobs(logits, token, params.logprobs)
        sequence.generated.append(token)
        sequence.chain.append([token])
        return Sample(token, sequence.finish_of(token), logprobs)


def prompt_tokens(sequence: Sequence, tokens: int) -> int:
    """How many of the next `tokens` tokens belong to the prompt (or are forced)."""
    assert sequence.holding is not None
    return max(0, min(tokens, sequence.start_tokens - sequence.holding.position))
