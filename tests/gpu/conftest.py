"""Skips everything here, saying so, where there is no accelerator."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _accelerator() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no accelerator")
