"""Rows on a real engine: what runs is what the row says, and nothing is left behind."""

from pathlib import Path

import pytest

from tests.models.tiny import make_checkpoint
from twinflow.bench.drive import Driver
from twinflow.bench.rows import Row
from twinflow.bench.run import cache_bytes_for, config_for, describe
from twinflow.contracts.errors import TooLong
from twinflow.engine.build import build_engine
from twinflow.engine.core import Engine

ROWS = (Row("prefill", 3, 100), Row("decode", 4, 70))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = make_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3_5", 0)
    engine, _ = build_engine(config_for(ROWS, str(folder), device="cpu", step_tokens=256), lambda _: None, None)
    return engine


def test_prompts_are_computed_anew_each_round(engine: Engine) -> None:
    before = engine.runner.work.prefill_tokens
    timing = Driver(engine).prefill(ROWS[0], rounds=2)
    assert engine.runner.work.prefill_tokens - before == 3 * 3 * 100  # one round does not count
    assert len(timing.rounds) == 2 and timing.seconds in timing.rounds
    assert engine.idle


def test_decoding_counts_whole_steps_of_all_sequences(engine: Engine) -> None:
    steps = []

    def then() -> None:
        before = engine.runner.work
        driver.step(3, 4)
        steps.append(engine.runner.work.decode_tokens - before.decode_tokens)

    driver = Driver(engine)
    timing = driver.decode(ROWS[1], rounds=3, steps=2, then=then)
    assert len(timing.rounds) == 3 and all(s > 0 for s in timing.rounds)
    assert 70 + 8 < timing.context_tokens < 70 + 40
    assert 12 <= steps[0] <= 16  # a step more may have been launched
    assert engine.idle
    engine.cache.check_integrity()


def test_a_request_that_cannot_run_ends_the_measurement(engine: Engine) -> None:
    with pytest.raises(TooLong, match="exceed"):
        Driver(engine).prefill(Row("prefill", 1, 5000), rounds=1)


def test_the_cache_has_room_for_every_row(tmp_path: Path) -> None:
    folder = str(make_checkpoint(tmp_path, "qwen3_5", 0))
    config = config_for(ROWS, folder, device="cpu", block_tokens=16)
    layout = describe(config)
    assert config.cache_bytes == cache_bytes_for(layout, ROWS)
    assert config.max_running == 4
    rest = config.cache_bytes - 8 * layout.slot_bytes
    assert rest // layout.block_bytes >= 4 * (70 + 1024) // 16
    assert config_for(ROWS, folder, cache_bytes=12345).cache_bytes == 12345
