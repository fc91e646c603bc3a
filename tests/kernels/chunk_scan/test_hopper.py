"""The scan in Gluon against the one in Triton, from the same prepared chunks: emulated on a CPU, compiled on a GPU."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.kernels import gluon_emulator
from tests.kernels.varlen import cu, fused, nan_pool, relative_error
from twinflow.kernels.base import Snapshots

pytest.importorskip("triton", reason="triton is not installed")
from twinflow.kernels.chunk_scan import hopper
from twinflow.kernels.chunk_scan.triton import scan_chunks
from twinflow.kernels.gated_delta_rule.prepare import prepare_chunks

K, V, HK, HV = 128, 128, 1, 2


@pytest.fixture
def scan(device: str) -> ModuleType:
    if device == "cpu":
        return gluon_emulator.load(Path(hopper.__file__))
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("compute capability is not 9.0")
    return hopper


def both(
    scan: ModuleType,
    device: str,
    lens: tuple[int, ...],
    dtype: torch.dtype = torch.float16,
    kept: tuple[tuple[int, ...], ...] = (),
    **tuning: int,
) -> tuple[torch.Tensor, ...]:
    """Outputs and pools, the one in Gluon first. Sequence s has row 2 s, the last one none; the odd ones resume. States are
    `kept` after so many tokens of each, in rows from 2 n on."""
    torch.manual_seed(0)
    total, n = sum(lens), len(lens)
    drawn = [torch.randn(total + 3, *s).to(dtype).to(device) for s in ((HK, K), (HK, K), (HV, V), (HV,), (HV,))]
    for x in drawn:
        x[total:] = float("nan")  # rows of padding
    (q, k, v), (a, b) = fused(*drawn[:3]), fused(*drawn[3:])
    constants = [torch.rand(HV).mul(15).add(1).log().to(device), torch.empty(HV).uniform_(-4, 1).to(device)]
    at = torch.tensor([2 * s for s in range(n - 1)] + ([-1] if n > 1 else [0])).to(device)
    fresh = (torch.arange(n) % 2 == 0).to(device)
    cuts = [cut for one in kept for cut in one]
    snapshots = None
    if kept:
        after = torch.tensor(cuts, dtype=torch.int32, device=device)
        snapshots = Snapshots(
            cu([len(one) for one in kept]).to(device), after, 2 * n + torch.arange(len(cuts)).to(device)
        )
    starts = cu(lens).to(device)
    chunks = prepare_chunks(q, k, a, b, *constants, starts, n, 1e-6)
    pool = nan_pool(2 * n + len(cuts), HV, V, K).to(device)
    for s in range(1, n, 2):
        pool[2 * s] = torch.randn(HV, V, K)
    results = []
    for run, options in ((scan.scan_corrected_chunks, tuning), (scan_chunks, {})):
        out, state = torch.full((total + 3, HV, V), float("nan"), dtype=dtype, device=device), pool.clone()
        skip = [] if run is not scan_chunks else [None]
        run(q, k, v, chunks, *skip, out, state, at, fresh, starts, snapshots, **options)
        results.append((out, state))
    (mine, mine_state), (theirs, theirs_state) = results
    return mine, theirs, mine_state, theirs_state


def check(got: tuple[torch.Tensor, ...], tolerance: float) -> None:
    """The same values, and the same places left alone."""
    for mine, theirs in (got[:2], got[2:]):
        assert mine.isnan().equal(theirs.isnan())
        assert relative_error(mine.nan_to_num(), theirs.nan_to_num()) < tolerance


@pytest.mark.parametrize("tokens", [2, 63, 64, 129, 330])
@pytest.mark.parametrize("parts", [1, 2])
def test_one_sequence(tokens: int, parts: int, device: str, scan: ModuleType) -> None:
    got = both(scan, device, (tokens,), parts=parts)
    assert got[0][:tokens].isfinite().all()
    check(got, 1e-3)


@pytest.mark.parametrize("lens", [(1, 65, 1, 3, 1), (70, 2, 64, 9, 130), (5, 0, 1, 70, 0)], ids=str)
@pytest.mark.parametrize("parts", [1, 2])
def test_a_packed_batch(lens: tuple[int, ...], parts: int, device: str, scan: ModuleType) -> None:
    check(both(scan, device, lens, parts=parts), 1e-3)


@pytest.mark.parametrize("ahead", [2, 3])
def test_fewer_places(ahead: int, device: str, scan: ModuleType) -> None:
    check(both(scan, device, (400, 66), ahead=ahead), 1e-3)


def test_bfloat16(device: str, scan: ModuleType) -> None:
    if device == "cpu":
        pytest.skip("the interpreter of Triton has no bfloat16")
    check(both(scan, device, (300, 77), torch.bfloat16), 1e-2)


@pytest.mark.parametrize("parts", [1, 2])
def test_snapshots(parts: int, device: str, scan: ModuleType) -> None:
    got = both(
        scan, device, (1, 66, 330, 130, 64, 40), kept=((), (64,), (64, 192, 320), (128,), (64,), ()), parts=parts
    )
    assert got[2][12:].isfinite().all()
    check(got, 1e-3)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("pred=done >= AHEAD * SIZE", "pred=False"),
        ("y = warpgroup_mma_wait(1", "y = warpgroup_mma_wait(2"),
        ("queried = warpgroup_mma_wait(1", "queried = warpgroup_mma_wait(2"),
    ],
    ids=("copied over what is read", "read too early", "read before done"),
)
def test_the_emulator_sees_races(right: str, wrong: str, device: str, tmp_path: Path) -> None:
    if device != "cpu":
        pytest.skip("of the emulator")
    source = Path(hopper.__file__).read_text()
    assert right in source
    (tmp_path / "wrong.py").write_text(source.replace(right, wrong))
    with pytest.raises(AssertionError):
        check(both(gluon_emulator.load(tmp_path / "wrong.py"), device, (500,)), 1e-3)
