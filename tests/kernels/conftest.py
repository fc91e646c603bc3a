"""Where the Triton kernels run in tests: on an accelerator, else in Triton's interpreter on the CPU."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(params=[pytest.param("cpu", id="interpreter"), pytest.param("cuda", id="gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no accelerator")
    if request.param == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles for the accelerator in this process; its interpreter is off")
    return request.param


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[pytest.MonkeyPatch]:
    """Undone, it leaves Triton's own interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
            from tests.kernels.quicker import install  # needs Triton

            install(patch)
        yield patch


# What the interpreter warns about and a GPU doesn't: loop bounds are arrays of one element there, and decays above a
# matrix's diagonal may overflow before they are masked.
INTERPRETER_WARNINGS = (
    "ignore:Conversion of an array with ndim:DeprecationWarning",
    "ignore:overflow encountered:RuntimeWarning",
    "ignore:invalid value encountered:RuntimeWarning",
)


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            if item.get_closest_marker("slow_interpreted") and "interpreter" in item.name:
                item.add_marker(pytest.mark.slow)
            for warning in INTERPRETER_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))
