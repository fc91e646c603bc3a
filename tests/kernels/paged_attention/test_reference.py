from dataclasses import dataclass

import pytest
import torch

from tests.kernels.varlen import SPLITS, cu
from twinflow.kernels.paged_attention.reference import paged_attention, write_kv

H, HKV, D, BLOCK = 4, 2, 8, 16


@dataclass
class Cache:
    """Uninitialised blocks, handed out in a scattered order."""

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor

    @classmethod
    def empty(cls, sequences: int, blocks: int) -> "Cache":
        shape = (sequences * blocks + 1, 3, HKV, BLOCK, D)  # a gap between blocks, as the arena's views have
        k, v = torch.full(shape, float("nan")), torch.full(shape, float("nan"))
        order = torch.randperm(sequences * blocks, generator=torch.Generator().manual_seed(1)) + 1
        return cls(k[:, 0], v[:, 1], order.view(sequences, blocks).to(torch.int32))

    def slots(self, seq: int, start: int, end: int) -> torch.Tensor:
        at = torch.arange(start, end)
        return self.table[seq].long()[at // BLOCK] * BLOCK + at % BLOCK

    def run(
        self, work: list[tuple[int, int]], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seqs: list[int]
    ) -> torch.Tensor:
        """`work`: (start, tokens) of each sequence in `seqs`."""
        slots = torch.cat([self.slots(s, a, a + n) for s, (a, n) in zip(seqs, work, strict=True)])
        write_kv(k, v, self.k, self.v, slots)
        contexts = torch.tensor([a + n for a, n in work], dtype=torch.int32)
        tables = self.table[seqs].clone()
        for i, (a, n) in enumerate(work):
            tables[i, -(-(a + n) // BLOCK) :] = -1
        lens = tuple(n for _, n in work)
        return paged_attention(q, self.k, self.v, tables, contexts, cu(lens), lens, D**-0.5)


def inputs(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return torch.randn(tokens, H, D), torch.randn(tokens, HKV, D), torch.randn(tokens, HKV, D)


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Query by query, head by head, in fp64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for t in range(len(q)):
        for h in range(H):
            keys, values = (x[: t + 1, h // (H // HKV)].double() for x in (k, v))
            out[t, h] = (keys @ q[t, h].double() * D**-0.5).softmax(0) @ values
    return out.float()


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 63, 100])
def test_equals_a_loop_over_queries(tokens: int) -> None:
    q, k, v = inputs(tokens)
    cache = Cache.empty(1, 9)
    got = cache.run([(0, tokens)], q, k, v, [0])
    torch.testing.assert_close(got, naive(q, k, v), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_any_split_gives_the_same(split: tuple[int, ...]) -> None:
    q, k, v = inputs(129)
    expected = naive(q, k, v)
    cache, start, got = Cache.empty(1, 9), 0, []
    for n in split:
        t = slice(start, start + n)
        got.append(cache.run([(start, n)], q[t], k[t], v[t], [0]))
        start += n
    torch.testing.assert_close(torch.cat(got), expected, rtol=1e-5, atol=1e-6)


def test_a_mixed_batch_equals_its_sequences_alone() -> None:
    lengths, news = [40, 1, 20, 70, 16], [1, 1, 20, 33, 1]  # decode, fresh token, fresh prompt, chunk, decode
    cache, qs, ks, vs = Cache.empty(5, 5), [], [], []
    expected = []
    for s, (length, new) in enumerate(zip(lengths, news, strict=True)):
        q, k, v = inputs(length, seed=s)
        start = length - new
        if start:
            cache.run([(0, start)], q[:start], k[:start], v[:start], [s])
        expected.append(naive(q, k, v)[start:])
        for rest, x in ((qs, q), (ks, k), (vs, v)):
            rest.append(x[start:])
    work = [(length - new, new) for length, new in zip(lengths, news, strict=True)]
    got = cache.run(work, torch.cat(qs), torch.cat(ks), torch.cat(vs), [0, 1, 2, 3, 4])
    torch.testing.assert_close(got, torch.cat(expected), rtol=1e-5, atol=1e-6)


def test_slots_of_minus_one_are_not_written() -> None:
    cache = Cache.empty(1, 2)
    _, k, v = inputs(5)
    slots = cache.slots(0, 0, 5)
    slots[[1, 3]] = -1
    write_kv(k, v, cache.k, cache.v, slots)
    written = cache.k[cache.table[0, 0].long()][:, :5].isfinite().all(-1).all(0)
    assert written.tolist() == [True, False, True, False, True]
    assert cache.k.isfinite().sum() == 3 * HKV * D


def test_keys_already_there_are_read_not_written() -> None:
    q, k, v = inputs(30)
    cache = Cache.empty(1, 2)
    write_kv(k, v, cache.k, cache.v, cache.slots(0, 0, 30))
    write_kv(k[9:] * 0, v[9:] * 0, cache.k, cache.v, torch.full((21,), -1))
    got = paged_attention(q[9:], cache.k, cache.v, cache.table, torch.tensor([30]), cu([21]), (21,), D**-0.5)
    torch.testing.assert_close(got, naive(q, k, v)[9:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lens", [(1, 1, 1), (3, 1, 2)], ids=str)
def test_padding_sequences_give_zero(lens: tuple[int, ...]) -> None:
    cache = Cache.empty(1, 2)
    q, k, v = inputs(sum(lens))
    middle = slice(lens[0], lens[0] + 1)
    write_kv(k[middle], v[middle], cache.k, cache.v, cache.slots(0, 0, 1))
    tables = torch.full((3, 2), -1, dtype=torch.int32)
    tables[1] = cache.table[0]
    got = paged_attention(q, cache.k, cache.v, tables, torch.tensor([0, 1, 0]), cu(lens), lens, D**-0.5)
    torch.testing.assert_close(got[middle], naive(q[middle], k[middle], v[middle]), rtol=1e-5, atol=1e-6)
    assert got[: lens[0]].eq(0).all()
    assert got[middle.stop :].eq(0).all()


def test_bf16_cache() -> None:
    q, k, v = (x.bfloat16() for x in inputs(20))
    cache = Cache.empty(1, 2)
    cache.k, cache.v = cache.k.bfloat16(), cache.v.bfloat16()
    got = cache.run([(0, 20)], q, k, v, [0])
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), naive(q.float(), k.float(), v.float()), rtol=1e-2, atol=1e-2)
