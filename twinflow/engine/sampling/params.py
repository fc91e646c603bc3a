"""From a request's sampling parameters to what the kernels read: the random number, the record, the edits, the history."""

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
import torch

from twinflow.contracts.requests import SamplingParams
from twinflow.kernels.sampling.tables import BAN_BIT, COUNT_MASK, EDIT_BLOCK, WORDS

LEAST_TEMPERATURE = 1e-6  # what lies between 0 and this would leave fp32's range; it differs from greedy in ties only


def hasher(seed: int, sample_index: int) -> "hashlib.blake2b":
    """What every random number of one sample starts from: blake2b fed with two uint64, little-endian."""
    return hashlib.blake2b(struct.pack("<QQ", seed & (2**64 - 1), sample_index), digest_size=8, person=b"sample")


def uniform_bits(source: "hashlib.blake2b", position: int) -> int:
    """53 random bits from `source` and the position, another uint64."""
    copy = source.copy()
    copy.update(position.to_bytes(8, "little"))
    return int.from_bytes(copy.digest(), "little") >> 11


def uniform(source: "hashlib.blake2b", position: int) -> float:
    """The same bits as a number in [0, 1)."""
    return uniform_bits(source, position) / float(1 << 53)


def ending_ids(params: SamplingParams) -> list[int]:
    """Token ids that end the request: stop ids always, EOS unless ignored."""
    return sorted({*params.stop_token_ids, *(() if params.ignore_eos else params.eos_token_ids)})


def needs_history(params: SamplingParams) -> bool:
    """Whether what was generated (or stood in the prompt) changes the logits."""
    return params.repetition_penalty != 1.0 or bool(params.presence_penalty or params.frequency_penalty)


def needs_threshold(params: SamplingParams) -> bool:
    """Whether the least likely token that may be drawn has to be searched for."""
    return params.temperature > 0.0 and (params.top_k > 0 or params.top_p < 1.0)


def record(params: SamplingParams, vocab_size: int, history: int, edits: tuple[int, int]) -> torch.Tensor:
    """(WORDS,) int64 for `RowTables.records`; `history` is -1 without one, `edits` = (start, count)."""
    temperature = max(params.temperature, LEAST_TEMPERATURE) if params.temperature > 0.0 else 0.0
    filters = (temperature, params.top_p, params.min_p)
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    top_k = params.top_k if 0 < params.top_k < vocab_size else 0
    packed = struct.pack("<6d5q", *filters, *penalties, top_k, params.min_tokens, history, *edits)
    return torch.frombuffer(bytearray(packed.ljust(8 * WORDS, b"\0")), dtype=torch.int64)


def edits(params: SamplingParams, vocab_size: int) -> tuple[torch.Tensor, int]:
    """Biases and ids banned until `min_tokens`: a span of `RowTables.edits` and how many edits are in it; empty without any.

    Biases of one id add up. Raises ValueError for ids outside the vocabulary.
    """
    bias: dict[int, float] = {}
    for token, value in params.logit_bias:
        bias[token] = bias.get(token, 0.0) + value
    banned = set(ending_ids(params)) if params.min_tokens > 0 else set()
    ids = np.array(sorted(bias.keys() | banned), dtype=np.int64)
    if not len(ids):
        return torch.empty(0, dtype=torch.int64), 0
    if not 0 <= ids[0] <= ids[-1] < vocab_size:
        raise ValueError(f"token ids {ids[0]}..{ids[-1]} in logit_bias or among the ending ids; there are {vocab_size}")
    values = np.array([bias.get(i, 0.0) for i in ids.tolist()], dtype=np.float32).view(np.uint32).astype(np.int64)
    bans = np.array([i in banned for i in ids.tolist()], dtype=np.int64)
    blocks = -(-vocab_size // EDIT_BLOCK)
    before = np.searchsorted(ids, np.arange(blocks + 1) * EDIT_BLOCK)
    return torch.from_numpy(np.concatenate([(ids << 1 | bans) << BAN_BIT | values, before])), len(ids)


def counted(generated: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct ids (d,) int64 and how often each was generated, int16, saturating."""
    ids, counts = np.unique(np.asarray(generated, dtype=np.int64), return_counts=True)
    return torch.from_numpy(ids), torch.from_numpy(counts.clip(max=COUNT_MASK).astype(np.int16))
