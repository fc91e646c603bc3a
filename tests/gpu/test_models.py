"""Whole models on an accelerator: the same logits, states and tokens as on the CPU, and no wait inside a pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.models.reference import relative_error
from tests.models.tiny import Runner, build_reference, prompt, save
from twinflow.models.loader import load_model

pytestmark = pytest.mark.gpu

TINY = Path(__file__).parents[2] / "models" / "twinflow-tiny"
WORK = [  # a prompt and a token, a mixed batch, decoding
    lambda a, b, c: {a: prompt(0, 130), b: [5]},
    lambda a, b, c: {a: [7], b: prompt(1, 65), c: prompt(2, 3)},
    lambda a, b, c: {a: [8], b: [9], c: [10]},
]


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_next", "nemotron_h"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param) / "model"
    save(build_reference(request.param, 0), folder)
    return folder


@contextmanager
def no_waiting() -> Iterator[None]:
    """Any synchronisation with the host raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 5e-2)])
def test_mixed_batches_equal_the_cpu(folder: Path, dtype: str, tolerance: float) -> None:
    runners = [
        Runner(load_model(str(folder), dtype=dtype, device=device), sequences=3, device=device)
        for device in ("cpu", "cuda")
    ]
    for runner in runners:
        seqs = [runner.add() for _ in range(3)]  # the same three numbers in both
    for make in WORK:
        work = make(*seqs)
        ours, theirs = (runner.step(work) for runner in runners)
        for seq in work:
            assert relative_error(theirs[seq].cpu(), ours[seq]) < tolerance
    for seq in seqs:
        for name in ("temporal", "conv"):
            for x, y in zip(runners[0].state(seq, name), runners[1].state(seq, name), strict=True):
                assert relative_error(y.cpu(), x) < tolerance


def test_wanted_tokens_alone_equal_the_cpu(folder: Path) -> None:
    """Where few tokens want logits, the last layers compute those alone."""
    cpu, gpu = (
        Runner(load_model(str(folder), dtype="float32", device=device), sequences=3, device=device)
        for device in ("cpu", "cuda")
    )
    a, b = [(cpu.add(), gpu.add())[0] for _ in range(2)]
    for wanted, lens in (((69, 102), (70, 33)), ((), (64, 1)), ((0, 40), (1, 40))):
        work = {a: prompt(lens[0], lens[0]), b: prompt(lens[1], lens[1])}
        every = torch.cat(list(cpu.step(work).values()))
        rows = torch.tensor(wanted, dtype=torch.int64, device="cuda")
        logits = gpu.forward(work, replace(gpu.batch(work), logit_rows=rows))
        assert logits.shape == (len(wanted), every.shape[1])
        if wanted:
            assert relative_error(logits.cpu(), every[list(wanted)]) < 1e-4
    for name in ("temporal", "conv"):
        for x, y in zip(cpu.state(b, name), gpu.state(b, name), strict=True):
            assert relative_error(y.cpu(), x) < 1e-4


def test_a_pass_never_waits_for_the_gpu(folder: Path) -> None:
    runner = Runner(load_model(str(folder), device="cuda"), sequences=3, device="cuda")
    seqs = [runner.add() for _ in range(3)]
    for make in WORK:
        work = make(*seqs)
        runner.model.forward(runner.batch(work), runner.arena)  # compiles
        batch = runner.batch(work)
        with no_waiting():
            runner.model.forward(batch, runner.arena)


def test_decoding_in_a_cuda_graph(folder: Path) -> None:
    runner = Runner(load_model(str(folder), device="cuda"), sequences=2, device="cuda")
    a, b = runner.add(), runner.add()
    runner.step({a: prompt(0, 70), b: prompt(1, 3)})
    batch = runner.batch({a: [5], b: [6]})
    before = runner.arena.storage.clone()
    expected = runner.model.forward(batch, runner.arena).clone()
    after = runner.arena.storage.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = runner.model.forward(batch, runner.arena)
    runner.arena.storage.copy_(before)
    graph.replay()
    torch.cuda.synchronize()
    assert logits.equal(expected)
    assert runner.arena.storage.equal(after)


def test_the_shipped_model_says_the_same() -> None:
    if not (TINY / "config.json").exists():
        pytest.skip("models/twinflow-tiny holds no weights")
    said = []
    for device in ("cpu", "cuda"):
        model = load_model(str(TINY), dtype="float32", device=device)
        runner = Runner(model, sequences=4, tokens=256, device=device)
        prompts = [prompt(i, n) for i, n in enumerate((5, 64, 65, 100))]
        said.append(runner.greedy({runner.add(): p for p in prompts}, new=48))
    assert said[0] == said[1]
