from dataclasses import dataclass

import pytest
import torch

from tests.kernels.varlen import cu, fused, relative_error
from twinflow.kernels.paged_attention import reference
from twinflow.kernels.paged_attention.shared import SharedPrefixes, group_prefixes

triton = pytest.importorskip("triton", reason="triton is not installed")
from twinflow.kernels.paged_attention import decode, prefill  # noqa: E402
from twinflow.kernels.paged_attention import triton as fast  # noqa: E402


@dataclass
class Case:
    """Sequences with `context` keys each, of which the last `queries` attend; blocks scattered, the rest NaN."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    tables: torch.Tensor
    contexts: torch.Tensor
    lens: tuple[int, ...]

    @classmethod
    def random(
        cls, work: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, block: int, device: str, **options
    ) -> "Case":
        """`work`: (context, queries) of each sequence."""
        torch.manual_seed(0)
        dtype = options.get("dtype", torch.float32)
        width = max(1, max(-(-c // block) for c, _ in work)) + 1
        units = len(work) * width + 1
        k, v = torch.full((2, units, 3, kv_heads, block, dim), float("nan"), dtype=dtype)
        k, v = k[:, 0], v[:, 1]  # a gap between blocks, as in the arena
        order = (torch.randperm(units - 1) + 1).view(len(work), width).to(torch.int32)
        for i, (context, _) in enumerate(work):
            at = torch.arange(context)
            where = order[i].long()[at // block], slice(None), at % block
            k[where], v[where] = (torch.randn(context, kv_heads, dim).to(dtype) for _ in range(2))
            order[i, -(-context // block) :] = -1
        lens = tuple(n for _, n in work)
        q = fused(torch.randn(sum(lens), heads, dim).to(dtype))[0]
        contexts = torch.tensor([c for c, _ in work], dtype=torch.int32)
        return cls(*(t.to(device) for t in (q, k, v, order, contexts)), lens)

    def run(self, ops, gate: torch.Tensor | None = None, shared: SharedPrefixes | None = None) -> torch.Tensor:
        lens = cu(self.lens).to(self.q.device)
        scale = self.q.shape[-1] ** -0.5
        where = (self.k, self.v, self.tables, self.contexts, lens, self.lens, scale)
        return ops.paged_attention(self.q, *where, gate=gate, shared=shared)


DECODE = [(1, 1), (16, 1), (17, 1), (100, 1), (0, 1), (300, 1)]
PREFILL = [(2, 2), (15, 15), (16, 16), (63, 63), (100, 100)]
MIXED = [(40, 1), (1, 1), (20, 20), (70, 33), (16, 1), (0, 3), (129, 2), (64, 0), (65, 65)]


@pytest.mark.parametrize("work", [DECODE, PREFILL, MIXED], ids=("decode", "prefill", "mixed"))
@pytest.mark.parametrize("block", [16, 24, 64])
def test_equals_the_reference(work: list[tuple[int, int]], block: int, device: str) -> None:
    case = Case.random(work, 4, 2, 32, block, device)
    assert relative_error(case.run(fast), case.run(reference)) < 1e-5


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(2, 2, 64), (6, 2, 80), (8, 1, 128), (5, 1, 256), (32, 1, 8)], ids=str
)
def test_head_shapes(heads: int, kv_heads: int, dim: int, device: str) -> None:
    case = Case.random([(70, 1), (90, 33)], heads, kv_heads, dim, 32, device)
    assert relative_error(case.run(fast), case.run(reference)) < 1e-5


@pytest.mark.parametrize("programs", [1, 2, 8, 32])
@pytest.mark.parametrize("mixed", [False, True], ids=("all one", "mixed"))
def test_any_number_of_programs_gives_the_same(programs: int, mixed: bool, device: str) -> None:
    case = Case.random([*DECODE, (9, 2)] if mixed else DECODE, 4, 2, 32, 16, device)
    expected = case.run(reference)
    got = torch.full_like(expected, float("nan"))
    where = (case.k, case.v, case.tables, case.contexts, cu(case.lens).to(device))
    decode.attend_one_query(case.q, *where, 32**-0.5, got, all_one=not mixed, programs=programs)
    assert relative_error(got[: len(DECODE)], expected[: len(DECODE)]) < 1e-5
    assert got[len(DECODE) :].isnan().all()


@pytest.mark.parametrize("splits", [1, 2, pytest.param(8, marks=pytest.mark.slow_interpreted)])
def test_any_number_of_splits_gives_the_same(splits: int, device: str) -> None:
    case = Case.random(MIXED, 4, 2, 32, 16, device)
    expected = case.run(reference)
    got = torch.full_like(expected, float("nan"))
    where = (case.k, case.v, case.tables, case.contexts, cu(case.lens).to(device))
    options = prefill.LaunchOptions(32, 32, 4, 1, splits)
    prefill.attend_many_queries(case.q, *where, 32**-0.5, got, lens=(20,), options=options)
    one = torch.tensor([n == 1 for n in case.lens for _ in range(n)], device=device)
    assert relative_error(got[~one], expected[~one]) < 1e-5
    assert got[one].isnan().all()


@pytest.mark.parametrize("work", [DECODE, MIXED], ids=("decode", "mixed"))
def test_gate(work: list[tuple[int, int]], device: str) -> None:
    case = Case.random(work, 4, 2, 32, 16, device)
    gate = fused(torch.randn(sum(case.lens), 4 * 32, device=device))[0]
    assert relative_error(case.run(fast, gate), case.run(reference, gate)) < 1e-5


SHARED = [
    ([6, 5, 9, 6], [0, 1, 2, 0, 1, 0, 2]),
    ([5, 20], [0, 1, 0, 1, 1]),
    pytest.param([4], [0] * 40, marks=pytest.mark.slow_interpreted),
]


@pytest.mark.parametrize(("prefixes", "groups"), SHARED, ids=("three", "two", "many rows"))
@pytest.mark.parametrize("block", [16, 24])
@pytest.mark.parametrize("mixed", [False, True], ids=("all one", "mixed"))
def test_shared_prefixes(prefixes: list[int], groups: list[int], block: int, mixed: bool, device: str) -> None:
    """Rows of a group hold its prefix and that of the group before it; one row shares nothing, one is padding."""
    work = [(block * sum(prefixes[max(0, g - 1) : g + 1]) + 1 + 7 * i % 50, 1) for i, g in enumerate(groups)]
    work = [*work, (77, 1), (0, 1)]
    case = Case.random([*work, (40, 9)] if mixed else work, 4, 2, 32, block, device)
    tables = case.tables.cpu()
    first = {g: tables[groups.index(g)].clone() for g in sorted(set(groups))}
    for row, g in enumerate(groups):
        if g > 0 and g - 1 in first:
            tables[row, : prefixes[g - 1]] = first[g - 1][: prefixes[g - 1]]
        shared_blocks = sum(prefixes[max(0, g - 1) : g + 1])
        tables[row, :shared_blocks] = tables[groups.index(g), :shared_blocks]
    case.tables = tables.to(device)
    contexts = torch.where(torch.tensor(case.lens) == 1, case.contexts.cpu(), 0)
    shared = group_prefixes(tables.numpy(), contexts.numpy(), block)
    assert shared is not None and int((shared.own_starts > 0).sum()) == len(groups)
    gate = torch.randn(sum(case.lens), 4 * 32, device=device)
    assert relative_error(case.run(fast, gate, shared.to(device)), case.run(reference, gate)) < 1e-5


def test_nothing_is_read_from_blocks_beyond_the_context(device: str) -> None:
    """Blocks that a sequence has reserved but not filled hold anything."""
    case = Case.random([(20, 1), (40, 5)], 4, 2, 32, 16, device)
    expected = case.run(reference)
    spare = torch.tensor([n for n in range(len(case.k)) if n not in case.tables.flatten().tolist()], dtype=torch.int32)
    case.tables[0, 2:] = spare[: case.tables.shape[1] - 2].to(device)
    assert case.k[case.tables[0, 2].long()].isnan().all()
    assert relative_error(case.run(fast), expected) < 1e-5


def test_padding_sequences_give_zero(device: str) -> None:
    got = Case.random([(0, 1), (5, 1), (0, 2)], 4, 2, 32, 16, device).run(fast)
    assert got[[0, 2, 3]].eq(0).all()
    assert got[1].ne(0).any()


@pytest.mark.parametrize("work", [DECODE, MIXED], ids=("decode", "mixed"))
def test_half_precision(work: list[tuple[int, int]], device: str) -> None:
    case = Case.random(work, 4, 2, 32, 16, device, dtype=torch.float16)
    assert relative_error(case.run(fast), case.run(reference)) < 2e-3


def test_keys_are_split_where_there_are_few_programs() -> None:
    q = torch.empty(0, 16, 256, dtype=torch.bfloat16)  # on a CPU, which counts as four multiprocessors
    assert prefill.launch_options(q, 1, (64,)).splits == 1
    assert prefill.launch_options(q, 1, (4,)).splits == 4
    assert prefill.launch_options(q, 1, (4,)).rows == 64
    assert prefill.launch_options(q, 4, (4096,)).rows == 128


def test_what_splits_leave_fits_the_memory_for_it(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.random(MIXED, 4, 2, 32, 16, device)
    expected = case.run(reference)
    got = torch.full_like(expected, float("nan"))
    where = (case.k, case.v, case.tables, case.contexts, cu(case.lens).to(device))
    blocks = sum(case.lens) // 16 + len(case.lens)
    monkeypatch.setattr(prefill, "PARTS_BYTES", 3 * blocks * 2 * 32 * 32 * 4 - 1)
    made: list[int] = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: made.append(shape[0]) or empty(*shape, **options))
    prefill.attend_many_queries(
        case.q, *where, 32**-0.5, got, lens=(20,), options=prefill.LaunchOptions(32, 32, 4, 1, 8)
    )
    assert made == [2 * blocks * 2] * 2  # of 8 splits the two that fit
    several = torch.tensor([n > 1 for n in case.lens for _ in range(n)], device=device)
    assert relative_error(got[several], expected[several]) < 1e-5


def test_a_launch_takes_neighbours_with_several_queries() -> None:
    """Those with one have a kernel of their own, and between them lie tokens that a launch need not pass."""
    lens = (1, 1, 20, 7, 1, 5000, 4096, 3, 0, 1)
    contexts = (9, 9, 90, 7, 1, 5000, 8000, 3, 0, 1)
    runs = [(run.first, run.start, run.lens, run.long) for run in fast._runs(lens, contexts, True)]
    assert runs == [
        (2, 2, (20, 7), False),
        (5, 30, (5000,), True),
        (6, 5030, (4096,), True),
        (7, 9126, (3,), False),
    ]
    assert [run.lens for run in fast._runs(lens, contexts, False)] == [(20, 7), (5000, 4096, 3)]
    assert [run.lens for run in fast._runs(lens, None, True)] == [lens]  # a graph is replayed with other lengths
    assert fast._runs((1, 1, 0), None, True) == ()
    (far,) = fast._runs((5000,), (100_000,), True)
    assert not far.long  # more keys than are gathered


@pytest.mark.parametrize("known", [False, True], ids=["a graph's", "exact"])
def test_lengths_are_known_or_not(known: bool, device: str) -> None:
    case = Case.random([*MIXED, (33, 5), (7, 1), (50, 20)], 4, 2, 32, 16, device)
    gate = fused(torch.randn(sum(case.lens), 4 * 32, device=device))[0]
    where = (case.k, case.v, case.tables, case.contexts, cu(case.lens).to(device), case.lens, 32**-0.5)
    contexts = tuple(case.contexts.tolist()) if known else None
    got = fast.paged_attention(case.q, *where, gate=gate, host_contexts=contexts)
    assert relative_error(got, case.run(reference, gate)) < 1e-5
