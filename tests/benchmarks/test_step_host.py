"""The benchmark of the host's share of a step, on a small engine: its parts add up, and its other process ends with it."""

import argparse
import multiprocessing
from pathlib import Path

import pytest
import torch

from benchmarks.step_host import PARTS, front, measure
from tests.models.tiny import make_checkpoint


def test_parts_of_a_step(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    args = argparse.Namespace(
        model=str(make_checkpoint(tmp_path, "qwen3_5", 0)),
        load_format="auto",
        dtype="auto",
        device="cpu",
        batch=3,
        context=20,
        steps=4,
        step_tokens=64,
    )
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    other = context.Process(target=front, args=(theirs, 0.01), daemon=True)
    other.start()
    theirs.close()
    found = measure(args, ours)
    ours.close()
    other.join(timeout=20)
    assert other.exitcode == 0
    assert found["wait_s"] == 0.0  # nothing is queued on a CPU
    assert 0 < found["launch_s"] + found["land_s"] + found["send_s"] <= found["host_s"]
    assert found["host_s"] == pytest.approx(found["wall_s"], rel=0.5)
    assert all(found[f"{part}_s"] >= 0 for part in (*PARTS, "rest", "gc"))
    assert sum(found[f"{part}_s"] for part in (*PARTS, "rest")) == pytest.approx(found["host_s"])
    assert found["longest_s"] >= found["host_s"]
