"""Once a worker is ready, no request waits for a kernel to be compiled, whatever comes together in its steps."""

import multiprocessing
import random
from pathlib import Path
from typing import Any

import pytest

from tests.models.tiny import build_reference, save
from twinflow.contracts.workers import Role

pytestmark = pytest.mark.gpu

WIDE: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 128,
                        "max_position_embeddings": 65536, "vocab_size": 8192}  # fmt: skip
DELTA = {
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
}
MAMBA = {"mamba_num_heads": 32, "mamba_head_dim": 64, "ssm_state_size": 128}
MODELS = {"qwen3_next": WIDE | DELTA, "nemotron_h": WIDE | MAMBA}
WORKERS: dict[str, dict[str, Any]] = {
    "prefill": {"role": Role.PREFILL, "max_running": 64, "step_tokens": 16384, "chunk_tokens": 4096, "checkpoint_slots": 64},
    "decode": {"role": Role.DECODE, "max_running": 48, "step_tokens": 2048, "chunk_tokens": 256, "checkpoint_slots": 16},
    "both": {"role": Role.BOTH, "max_running": 20, "step_tokens": 8192, "chunk_tokens": 2048, "checkpoint_slots": 16},
    "no graphs": {"role": Role.BOTH, "max_running": 20, "step_tokens": 8192, "chunk_tokens": 2048, "cuda_graphs": "off"},
}  # fmt: skip


def loads(rng: random.Random) -> list[list[list[int]]]:
    """Prompts that come together, in turn: one, few and many, long and short, of which a third goes on from an earlier one."""

    def ids(tokens: int) -> list[int]:
        return rng.choices(range(3, 8000), k=tokens)

    known: list[list[int]] = []
    rounds = []
    for _ in range(40):
        count, most = rng.choice([(1, 9000), (1, 600), (3, 3000), (8, 1500), (30, 300), (60, 40), (60, 300)])
        prompts = []
        for _ in range(count):
            stem = rng.choice(known) if known and rng.random() < 0.3 else []
            prompts.append((stem + ids(rng.randint(1, most)))[:12000])
        known = (known + prompts)[-40:]
        rounds.append(prompts)
    return rounds


def serve(model: Path, worker: dict[str, Any], pipe: Any) -> None:
    """Sends how many kernels were compiled, or loaded, until the worker was ready, and the names of those after."""
    import triton

    from tests.gpu.engine import Driver

    compiled: list[str] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda *, fn, **_: compiled.append(fn.name)  # type: ignore[assignment]
    driver = Driver(model, "cuda", dtype="bfloat16", load_format="dummy", cache_bytes=2 << 30, **worker)
    before = len(compiled)
    for prompts in loads(random.Random(1)):
        driver.run(prompts, tokens=3)
    driver.check()
    pipe.send((before, compiled[before:]))


@pytest.mark.parametrize("worker", WORKERS)
@pytest.mark.parametrize("family", MODELS)
def test_nothing_is_compiled_while_serving(family: str, worker: str, tmp_path: Path) -> None:
    save(build_reference(family, 0, **MODELS[family]), tmp_path / "model")
    context = multiprocessing.get_context("spawn")  # kernels that another test has compiled would not be missed here
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve, args=(tmp_path / "model", WORKERS[worker], theirs))
    process.start()
    theirs.close()
    before, late = pipe.recv()
    process.join()
    assert before > 20
    assert not late, f"compiled while requests waited: {late}"
