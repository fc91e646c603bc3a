"""The gate and up products of many tokens on Hopper. Gluon has no interpreter: without a GPU it is compiled only."""

import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch

from tests.kernels.varlen import fused, relative_error
from twinflow.kernels.linear import reference

triton = pytest.importorskip("triton", reason="triton is not installed")
from twinflow.kernels.linear import hopper  # noqa: E402
from twinflow.kernels.linear import triton as fast  # noqa: E402

SHARED = 227 << 10  # of a program, on Hopper
REGISTERS = 64 << 10


def inputs(tokens: int, columns: int, inner: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens as rows of a wider tensor, NaN around them."""
    torch.manual_seed(0)
    weight = (torch.randn(2 * columns, inner) / inner**0.5).to(dtype).to(device)
    return fused(torch.randn(tokens, inner).to(dtype).to(device))[0], weight


def wanted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return reference.linear_swiglu(x.float(), weight.float()).to(x.dtype)


@pytest.fixture
def hopper_gpu() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not a Hopper GPU")


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("tokens", [1, 65, 200, 1001])
@pytest.mark.parametrize(("columns", "inner"), [(96, 192), (1000, 136), (2048, 1024)], ids=str)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 2e-3), (torch.bfloat16, 1e-2)], ids=["fp16", "bf16"])
def test_as_the_reference(tokens: int, columns: int, inner: int, dtype: torch.dtype, bound: float) -> None:
    x, weight = inputs(tokens, columns, inner, dtype, "cuda")
    assert hopper.can_run(x, weight)
    got = hopper.project_gated(x, weight)
    assert got.shape == (tokens, columns) and got.is_contiguous()
    assert relative_error(got, wanted(x, weight)) < bound


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
def test_many_tiles_to_a_program() -> None:
    """More than a program of each multiprocessor takes at once: rings and phases go around many times."""
    x, weight = inputs(5001, 4104, 640, torch.bfloat16, "cuda")
    for _ in range(3):
        assert relative_error(hopper.project_gated(x, weight), wanted(x, weight)) < 1e-2


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
def test_swiglu_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    own = hopper.project_gated

    def project_gated(x: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
        taken.append(x.shape[0])
        return own(x, gate_up)

    monkeypatch.setattr(hopper, "project_gated", project_gated)
    for tokens in (hopper.MIN_TOKENS - 1, hopper.MIN_TOKENS, hopper.MIN_TOKENS + 13):
        x, weight = inputs(tokens, 512, 256, torch.bfloat16, "cuda")
        assert relative_error(fast.linear_swiglu(x, weight), wanted(x, weight)) < 1e-2
    assert taken == [hopper.MIN_TOKENS, hopper.MIN_TOKENS + 13]


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
def test_a_cuda_graph_keeps_its_descriptors() -> None:
    """Replays read what lies at the captured addresses then, though the host's descriptors are gone."""
    x, weight = inputs(1100, 512, 256, torch.bfloat16, "cuda")
    hopper.project_gated(x, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = fast.linear_swiglu(x, weight)
    hopper.project_gated(*inputs(1300, 384, 192, torch.bfloat16, "cuda"))
    for factor in (1.0, -2.0):
        x.mul_(factor)
        got.fill_(float("nan"))
        graph.replay()
        assert relative_error(got, wanted(x, weight)) < 1e-2


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
def test_what_a_gpu_leaves_to_the_library() -> None:
    x, weight = inputs(1100, 64, 256, torch.bfloat16, "cuda")
    assert hopper.faster(x, weight)
    assert not hopper.faster(x[:1000], weight)
    assert not hopper.can_run(x.float(), weight.float())
    assert not hopper.can_run(x[:, 1:241], weight[:, :240].contiguous())  # rows start between multiples of 16 bytes
    assert not hopper.can_run(x[:, :128], weight[:, :128].contiguous())  # too short for the lag
    assert not hopper.can_run(x, weight[:120])  # 60 columns


def test_swiglu_of_many_tokens_goes_where_it_can_run(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    taken: list[int] = []

    def project_gated(x: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
        taken.append(x.shape[0])
        return reference.linear_swiglu(x, gate_up)

    monkeypatch.setattr(hopper, "MIN_TOKENS", 80)
    monkeypatch.setattr(hopper, "project_gated", project_gated)
    for runs in (True, False):
        monkeypatch.setattr(hopper, "can_run", lambda *_, runs=runs: runs)
        for tokens in (0, 3, 79, 80, 101):
            x, weight = inputs(tokens, 48, 64, torch.float16, device)
            got = fast.linear_swiglu(x, weight)
            assert got.shape == (tokens, 48)
            assert not tokens or relative_error(got, wanted(x, weight)) < 2e-3
    assert taken == [80, 101]


@pytest.mark.parametrize(
    ("rows", "columns", "start", "inner", "dtype", "runs"),
    [
        (2000, 1000, 0, 256, torch.bfloat16, True),
        (2000, 1000, 8, 136, torch.float16, True),
        (2000, 1000, 4, 256, torch.bfloat16, False),  # rows start between multiples of 16 bytes
        (2000, 1000, 0, 128, torch.bfloat16, False),  # the second warpgroup would wait for a stage that never fills
        (2000, 1000, 0, 252, torch.bfloat16, False),
        (2000, 1000, 0, 256, torch.float32, False),
        (2000, 1004, 0, 256, torch.bfloat16, False),  # rows of the result too
        (2003, 1000, 0, 256, torch.bfloat16, True),
    ],
)
def test_what_it_can_run(
    monkeypatch: pytest.MonkeyPatch, rows: int, columns: int, start: int, inner: int, dtype: torch.dtype, runs: bool
) -> None:
    monkeypatch.setattr(hopper, "runs_gluon", lambda device: True)
    x = torch.zeros(rows, 320, dtype=dtype)[:, start : start + inner]
    assert hopper.can_run(x, torch.zeros(2 * columns, inner, dtype=dtype)) is runs


def test_nothing_but_hopper_runs_it() -> None:
    assert not hopper.runs_gluon(torch.device("cpu"))
    x, weight = inputs(hopper.MIN_TOKENS, 64, 256, torch.bfloat16, "cpu")
    assert not hopper.can_run(x, weight) and not hopper.faster(x, weight)


def test_registers_are_there() -> None:
    """Two warpgroups that multiply and one in which a warp loads: at the start, and once they are dealt out."""
    assert 3 * 128 * hopper.REGISTERS <= REGISTERS
    assert 2 * hopper.MULTIPLIER_REGISTERS + hopper.LOADER_REGISTERS <= 3 * hopper.REGISTERS


def compile_for_hopper(dtype: str) -> tuple[str, str, int]:
    """Triton's form, PTX, and bytes of shared memory."""
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from twinflow.kernels.linear.hopper_kernel import project_gated

    element = {"fp16": gl.float16, "bf16": gl.bfloat16}[dtype]

    def box(rows: int, columns: int) -> str:
        layout = gl.NVMMASharedLayout.get_default_for([rows, columns], element)
        return f"tensordesc<{dtype}[{rows},{columns}],{layout!r}>"

    signature = {
        "x": box(hopper.TOKENS, hopper.STEP),
        "weight": box(hopper.COLUMNS, hopper.STEP),
        "out": box(hopper.TOKENS, hopper.COLUMNS),
        **dict.fromkeys(("tokens", "columns", "inner"), "i32"),
    }
    source = GluonASTSource(project_gated, signature, {})
    options = {"num_warps": 4, "maxnreg": hopper.REGISTERS}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return compiled.asm["ttgir"], compiled.asm["ptx"], compiled.metadata.shared


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_it_compiles_for_hopper(dtype: str) -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as fresh:  # of what the interpreter changes in Triton's language
        form, ptx, shared = fresh.submit(compile_for_hopper, dtype).result()
    products = re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(\w+)\.", ptx)
    each = hopper.GROUPS * 2 * (hopper.STEP // 16)  # a tile's first stage, and the loop over the others
    assert products == [(str(2 * hopper.COLUMNS), {"bf16": "bf16", "fp16": "f16"}[dtype])] * each
    carried = [types for types in re.findall(r"scf\.for .* -> \(([^)]*)\)", form) if "tensor<" in types]
    assert [types.count("i32") for types in carried] == [
        3
    ] * hopper.GROUPS  # stage, phase, and the stage to be given back
    assert ptx.count(".param .align 64 .b8") + ptx.count(".param .align 128 .b8") == 3  # the descriptors, by value
    assert shared <= SHARED
    assert ".local" not in ptx
