import os
from collections.abc import Callable

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")
import triton.language as tl  # noqa: E402

from tests.kernels.quicker import install  # noqa: E402

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton's interpreter is off")


@triton.jit
def _inner(x, scale):
    return tl.where(x > 0, x * scale, tl.exp(x) - 1)


@triton.jit
def _outer(x, scale):
    return _inner(x, scale) + _inner(-x, scale)


@triton.jit
def _several(x_ptr, out_ptr, rows, stride, WIDTH: tl.constexpr, DTYPE: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    inside = (columns < stride) & (row < rows)
    x = tl.load(x_ptr + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    square = tl.dot(
        x[:, None] * tl.full((1, 16), 0.5, tl.float32), tl.trans(x[:, None] + tl.zeros((1, 16), tl.float32))
    )
    y = _outer(x, 3.0) + tl.sum(square, 1) / WIDTH + tl.max(x, 0) + tl.cumsum(x, 0)
    for i in range(3):
        y += (columns // (i + 1) % 2).to(tl.float32)
    tl.store(out_ptr + row * stride + columns, y.to(DTYPE), mask=inside)


@triton.jit
def _odd_block(out_ptr, WIDTH: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, WIDTH), tl.zeros((WIDTH,), tl.float32))


@triton.jit
def _shapes_that_do_not_fit(out_ptr):
    tl.store(out_ptr + tl.arange(0, 8), tl.zeros((8,), tl.float32) + tl.zeros((16,), tl.float32))


@triton.jit
def _wraps_around(out_ptr, large):
    tl.store(out_ptr + tl.arange(0, 2), large + tl.arange(0, 2))


@triton.jit
def _fails_inside(out_ptr):
    tl.store(out_ptr, _inner("no number", 1.0))


def both(patch: pytest.MonkeyPatch, run: Callable[[], object]) -> tuple[object, object]:
    """What comes of it in the quicker interpreter and in Triton's own."""
    quick = run()
    patch.undo()
    try:
        return quick, run()
    finally:
        install(patch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_same_bits(dtype: torch.dtype, quick_interpreter: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 21).to(dtype)
    kind = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]

    def run() -> torch.Tensor:
        out = torch.full_like(x, float("nan"))
        _several[(4,)](x, out, 3, 21, WIDTH=32, DTYPE=kind)
        return out

    quick, own = both(quick_interpreter, run)
    assert quick.isfinite().all()
    assert quick.equal(own)


def test_integers_wrap_around_in_both(quick_interpreter: pytest.MonkeyPatch) -> None:
    def run() -> list[int]:
        out = torch.zeros(2, dtype=torch.int32)
        _wraps_around[(1,)](out, 2**31 - 1)
        return out.tolist()

    quick, own = both(quick_interpreter, run)
    assert quick == own == [2**31 - 1, -(2**31)]


@pytest.mark.parametrize(
    "kernel",
    [lambda out: _odd_block[(1,)](out, WIDTH=24), lambda out: _shapes_that_do_not_fit[(1,)](out), _fails_inside[(1,)]],
    ids=("a block that is no power of two", "shapes that do not fit", "inside a device function"),
)
def test_the_same_errors(kernel: Callable[[torch.Tensor], None], quick_interpreter: pytest.MonkeyPatch) -> None:
    def run() -> str:
        with pytest.raises(Exception, match=r"\w") as error:
            kernel(torch.zeros(32))
        return str(error.value)

    quick, own = both(quick_interpreter, run)
    assert quick == own


def test_a_kernel_runs_after_one_that_failed(quick_interpreter: pytest.MonkeyPatch) -> None:
    with pytest.raises(Exception, match="not supported"):
        _fails_inside[(1,)](torch.zeros(1))
    with pytest.raises(ValueError, match="forget to add"):
        tl.arange(0, 4)  # the language is itself again
    out = torch.zeros(32)
    _odd_block[(1,)](out, WIDTH=32)
    assert out.eq(0).all()
