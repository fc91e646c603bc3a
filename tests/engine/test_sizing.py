"""How a worker sizes its arena: by what `twinflow plan` prints, from the device's memory or from bytes that are given."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.cli.main import main
from tests.models.tiny import make_checkpoint
from twinflow.contracts.errors import BadRequest, ModelError
from twinflow.contracts.workers import Role
from twinflow.engine.build import build_engine
from twinflow.engine.capacity import Ask, plan_capacity
from twinflow.engine.config import EngineConfig
from twinflow.engine.memory_table import memory_lines
from twinflow.engine.sizing import plan_worker
from twinflow.models.shape import describe_model

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
GIB = 1 << 30


def settings_of(model: str, **changes: Any) -> EngineConfig:
    values = {"role": Role.DECODE, "max_running": 32, "checkpoint_slots": 8, "dtype": "bfloat16", "device": "cuda"}
    return EngineConfig(**{"model": model, "worker_id": "w", "incarnation": "i", **values, **changes})


@pytest.mark.parametrize("role", Role, ids=lambda role: role.value)
def test_a_gpu_worker_takes_its_share_of_the_device(role: Role) -> None:
    name = str(CONFIGS / "qwen3.5-4b.json")
    shape_, ask, capacity = plan_worker(settings_of(name, role=role, utilisation=0.8), (24 * GIB, 24 * GIB))
    assert capacity == plan_capacity(
        describe_model(json.loads(Path(name).read_text())),
        Ask(role, 32, device_bytes=24 * GIB, utilisation=0.8, checkpoint_slots=8),
    )
    outside = capacity.weights_bytes + capacity.workspace_bytes
    assert 0 <= int(0.8 * 24 * GIB) - outside - capacity.geometry.total_bytes < 256
    assert (ask.cache_bytes, shape_.architecture) == (None, "Qwen3_5ForConditionalGeneration")


@pytest.mark.parametrize(
    ("changes", "memory", "total_bytes"),
    [
        ({"cache_bytes": 4 * GIB}, (GIB, 24 * GIB), 4 * GIB),  # given bytes win: the device is not asked
        ({"cache_bytes": 4 * GIB, "device": "cpu"}, None, 4 * GIB),
        ({"device": "cpu", "max_running": 2, "checkpoint_slots": 1, "utilisation": 0.5}, None, 256 << 20),
    ],
    ids=["bytes on a GPU", "bytes on CPU", "nothing on CPU"],
)
def test_bytes_that_are_given_win_over_a_share(
    changes: dict[str, Any], memory: tuple[int, int] | None, total_bytes: int
) -> None:
    _, _, capacity = plan_worker(settings_of(str(CONFIGS / "qwen3.5-4b.json"), **changes), memory)
    assert capacity.geometry.total_bytes == total_bytes
    assert capacity.usable_bytes is None


@pytest.mark.parametrize("utilisation", [0.0, -0.5, 1.01, float("nan")], ids=str)
def test_a_share_that_is_none_is_refused(utilisation: float) -> None:
    with pytest.raises(BadRequest, match=r"^utilisation=\S+ must be above 0 and at most 1$") as refused:
        settings_of("m", utilisation=utilisation)
    assert refused.value.param == "utilisation"


def test_a_device_that_others_use_is_refused_with_what_is_left() -> None:
    name = str(CONFIGS / "qwen3.5-4b.json")
    with pytest.raises(
        ModelError, match=r"utilisation=0\.9 of cuda is 23,\S+ B, but only 19,\S+ of its .* can be 0\.75"
    ) as refused:
        plan_worker(settings_of(name), (18 * GIB, 24 * GIB))
    assert refused.value.param == "utilisation"
    assert plan_worker(settings_of(name, utilisation=0.75), (18 * GIB, 24 * GIB))[2].usable_bytes == 18 * GIB


def test_a_device_that_is_too_small_is_refused_with_the_numbers() -> None:
    with pytest.raises(ModelError, match=r"40 slots of 51,511,296 B .* it takes a device of 12 GiB"):
        plan_worker(settings_of(str(CONFIGS / "qwen3.5-4b.json")), (8 * GIB, 8 * GIB))


def test_a_worker_says_on_starting_what_plan_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same lines, and an engine whose pools are those."""
    folder = make_checkpoint(tmp_path, "qwen3_5", 0)
    assert main(["plan", str(folder), "--cache-bytes", "6MiB", "--max-running", "3", "--checkpoint-slots", "2"]) == 0
    printed = capsys.readouterr().out.splitlines()
    caplog.set_level(logging.INFO, logger="twinflow.engine.build")
    worker = settings_of(
        str(folder),
        cache_bytes=6 << 20,
        max_running=3,
        checkpoint_slots=2,
        dtype="auto",
        device="cpu",
        transport="none",
    )
    engine, ready = build_engine(worker, on_event=lambda done: None, transport=None)
    said = [record.getMessage() for record in caplog.records if record.name == "twinflow.engine.build"]
    assert len(said) == 5 and said[0].startswith("arena ") and ready.arena_bytes == 6 << 20
    assert [line for line in printed if line in said] == said
    assert engine.config.cache_bytes == ready.arena_bytes
    engine.close()


def test_a_gpu_worker_says_all_of_it() -> None:
    made = plan_worker(settings_of(str(CONFIGS / "qwen3.5-4b.json")), (24 * GIB, 24 * GIB))
    said = "\n".join(memory_lines(*made))
    for name in ("device", "usable", "weights", "workspace", "arena", "  blocks", "  slots", "  unused"):
        assert f"\n{name} " in f"\n{said}"


def test_sizes_and_a_start_leave_torchs_compiler_alone() -> None:
    """In a process of its own, as a worker is: importing the compiler takes as long as importing torch."""
    code = """
import sys
from pathlib import Path
from twinflow.contracts.workers import Role
from twinflow.engine.build import build_engine
from twinflow.engine.config import EngineConfig
from twinflow.engine.sizing import shape_of

for path in Path("examples/configs").glob("*.json"):
    shape_of(str(path), dtype="auto", block_tokens=64, state_dtype="float32", stored=False)
config = EngineConfig("models/twinflow-tiny", "w", "1", Role.BOTH, dtype="float32", cache_bytes=64 << 20)
engine, _ = build_engine(config, lambda event: None, None)
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
engine.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=CONFIGS.parents[1], capture_output=True, text=True, timeout=100
    )
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
