"""Which GPUs and which releases of Triton get the kernels written in Gluon."""

import subprocess
import sys

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")
from twinflow.kernels.triton_tools import runs_gluon  # noqa: E402

# Another release: neither its Gluon nor anything that imports it is there.
OTHER_RELEASE = """
import sys
sys.modules["triton.experimental"] = None
from twinflow.kernels.select import triton_kernels
triton_kernels()
"""


@pytest.mark.parametrize(
    ("device", "capability", "release", "runs"),
    [
        ("cuda:0", (9, 0), "3.6.0", True),
        ("cuda:1", (9, 0), "3.6.1+local", True),
        ("cuda:2", (8, 9), "3.6.0", False),
        ("cuda:3", (10, 0), "3.6.0", False),
        ("cuda:4", (9, 0), "3.7.0", False),
        ("cpu", (9, 0), "3.6.0", False),
    ],
)
def test_hopper_and_the_release_they_are_written_for(
    device: str, capability: tuple[int, int], release: str, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(triton, "__version__", release)
    runs_gluon.cache_clear()
    assert runs_gluon(torch.device(device)) is runs
    runs_gluon.cache_clear()


def test_the_others_need_no_gluon() -> None:
    subprocess.run([sys.executable, "-c", OTHER_RELEASE], check=True, timeout=120)
