"""The reference kernels give on an accelerator what they give on the CPU."""

import pytest
import torch

from tests.models.conftest import Pair
from tests.models.reference import relative_error
from tests.models.tiny import Runner, prompt
from twinflow.models.loader import load_model


@pytest.mark.gpu
def test_mixed_batches_equal_the_cpu(pair: Pair) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no accelerator")
    runners = [
        Runner(pair.model, sequences=3),
        Runner(load_model(str(pair.folder), device="cuda"), sequences=3, device="cuda"),
    ]
    for runner in runners:
        a, b, c = (runner.add() for _ in range(3))  # the same three numbers in both
    for work in ({a: prompt(0, 130), b: [5]}, {a: [7], b: prompt(1, 65), c: prompt(2, 3)}, {a: [8], b: [9], c: [10]}):
        ours, theirs = (runner.step(work) for runner in runners)
        for seq in work:
            assert relative_error(theirs[seq].cpu(), ours[seq]) < 1e-5
    for seq in (a, b, c):
        for name in ("temporal", "conv"):
            for x, y in zip(runners[0].state(seq, name), runners[1].state(seq, name), strict=True):
                assert relative_error(y.cpu(), x) < 1e-5
