"""What the model is given: inputs of a step packed into one buffer, padding, persistent block tables, shared prefixes."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.harness import Worker, request
from tests.models.tiny import prompt
from twinflow.engine import base, sharing
from twinflow.engine.base import Mode
from twinflow.engine.batch import Fields, Part, Plan, Shape, pack
from twinflow.engine.graphs import decode_ladder, step_shapes
from twinflow.kernels.base import STATE_CHUNK_TOKENS
from twinflow.models.base import HybridModel
from twinflow.transfer.loopback import LoopbackNetwork


@pytest.fixture
def worker(model: HybridModel):
    worker = Worker(model, "w", LoopbackNetwork())
    yield worker
    worker.close()


def running(worker: Worker, prompts: list[list[int]]) -> list:
    """Sequences that have been admitted and fed their prompts."""
    root = worker.root
    worker.turn(*(base.Submit(request(f"r{i}", p, root, max_tokens=50), Mode.LOCAL) for i, p in enumerate(prompts)))
    for _ in range(6):
        worker.turn()
    return list(worker.engine.running.values())


def packed(worker: Worker, plan: Plan, shape: Shape) -> Fields[torch.Tensor]:
    buffer = torch.full((shape.size_bytes,), 0x77, dtype=torch.uint8)  # what is not filled shows
    pack(plan, shape, Fields.of(buffer.numpy(), shape), worker.arena.geometry, worker.engine.runner.tables)
    return Fields.of(buffer, shape)


def test_decode_step_with_padding(worker: Worker) -> None:
    sequences = running(worker, [prompt(i, 60 + i) for i in range(3)])
    plan = Plan.of([Part.next_of(s, 1) for s in sequences])
    f = packed(worker, plan, Shape(5, 5))
    assert f.ids[:3].tolist() == [s.generated[-1] for s in sequences]
    assert f.sources.tolist() == [-1] * 5
    assert f.positions[:3].tolist() == [s.holding.position for s in sequences]
    assert f.contexts.tolist() == [s.holding.position + 1 for s in sequences] + [0, 0]
    assert f.starts.tolist() == [0, 1, 2, 3, 4, 5]
    assert f.state_rows[3:].tolist() == f.kv_slots[3:].tolist() == [-1, -1]
    assert f.rows[3:].tolist() == [worker.engine.runner.tables.empty_row] * 2
    assert f.draw_rows[:3].tolist() == [s.row for s in sequences]
    assert f.logit_rows[:3].tolist() == [0, 1, 2]
    for s, at in zip(sequences, f.kv_slots.tolist(), strict=False):
        assert at == s.holding.blocks[s.holding.position // 64] * 64 + s.holding.position % 64


def test_a_token_in_flight_is_named_by_its_row(model: HybridModel) -> None:
    worker = Worker(model, "w", LoopbackNetwork(), steps_in_flight=2)
    (sequence,) = running(worker, [prompt(1, 20)])
    assert sequence.flying_draws == 1
    part = Part.next_of(sequence, 1)
    assert part.drawn_ahead
    f = packed(worker, Plan.of([part]), Shape(1, 1))
    assert f.sources.tolist() == [sequence.row]
    assert f.positions.tolist() == [len(sequence.chain)]
    worker.close()


@pytest.mark.parametrize("tokens", [75, 80])
def test_chunk_with_padding_in_a_sequence_of_its_own(worker: Worker, tokens: int) -> None:
    """A mixed step: a decoding sequence and a new prompt, in a shape of `tokens` tokens and 4 sequences."""
    (old,) = running(worker, [prompt(1, 60)])
    p = prompt(2, 74)
    worker.turn(base.Submit(request("new", p, worker.root), Mode.CLAIM))
    new = worker.engine.sequences["new"]
    new.holding = worker.engine.cache.reserve(new.chain, 80)
    worker.engine.runner.tables.assign(new)
    plan = Plan.of([Part.next_of(old, 1), Part.next_of(new, 74)])
    assert plan.shape == Shape(75, 2) and plan.lens == (1, 74) and plan.drawing == (0, 1)
    f = packed(worker, plan, Shape(tokens, 4))
    assert f.ids[1:75].tolist() == p
    assert f.positions[1:75].tolist() == list(range(74))
    assert f.starts.tolist() == [0, 1, 75, tokens, tokens]
    assert f.fresh[:2].tolist() == [False, True]
    assert f.logit_rows[:2].tolist() == [0, 74]
    assert f.contexts.tolist()[2:] == [0, 0]
    assert f.kv_slots[75:].tolist() == [-1] * (tokens - 75)
    blocks = np.asarray(new.holding.blocks)
    assert f.kv_slots[1:75].tolist() == [blocks[i // 64] * 64 + i % 64 for i in range(74)]


def test_states_to_keep_are_one_list_by_sequence(worker: Worker) -> None:
    """Of a decoding sequence, two chunks with several each, one with none, and padding."""
    (old,) = running(worker, [prompt(1, 60)])
    parts = [Part.next_of(old, 1)]
    for i, snapshots in enumerate([((64, 3), (128, 7)), (), ((64, 0), (192, 9), (256, 2))]):
        worker.turn(base.Submit(request(f"new{i}", prompt(2 + i, 256), worker.root), Mode.CLAIM))
        new = worker.engine.sequences[f"new{i}"]
        new.holding = worker.engine.cache.reserve(new.chain, 260)
        worker.engine.runner.tables.assign(new)
        parts.append(Part.next_of(new, 256)._replace(snapshots=snapshots))
    plan = Plan.of(parts)
    assert plan.snapshots
    f = packed(worker, plan, Shape(800, 6))
    assert f.snapshot_starts.tolist() == [0, 0, 2, 2, 5, 5, 5]
    assert f.snapshot_after[:5].tolist() == [64, 128, 64, 192, 256]
    row = worker.arena.geometry.slot_row
    assert f.snapshot_rows[:5].tolist() == [row(s) for s in (3, 7, 0, 9, 2)]
    assert packed(worker, Plan.of(parts[:1]), Shape(2, 2)).snapshot_starts.tolist() == [0, 0, 0]


@given(st.lists(st.integers(1, 700), min_size=1, max_size=5))
def test_a_shape_has_room_for_all_states_of_its_tokens(lens: list[int]) -> None:
    shape = Shape(sum(lens), len(lens))
    buffer = np.zeros(shape.size_bytes, dtype=np.uint8)
    fields = Fields.of(buffer, shape)
    kept = sum(n // STATE_CHUNK_TOKENS for n in lens)
    assert len(fields.snapshot_rows) == len(fields.snapshot_after) >= kept
    base = buffer.__array_interface__["data"][0]
    views = [v for name in fields.__slots__ if (v := getattr(fields, name)).nbytes]
    begins = [v.__array_interface__["data"][0] - base for v in views]
    assert all(at % 16 == 0 for at in begins), "a kernel would be compiled anew for how this step's fields are aligned"
    ends = [at + v.nbytes for at, v in zip(begins, views, strict=True)]
    assert all(end <= at for end, at in zip(ends, [*begins[1:], shape.size_bytes], strict=True))
    assert shape.size_bytes - ends[-1] < 16


def test_tables_hold_each_rows_blocks_and_nothing_of_earlier_ones(worker: Worker) -> None:
    tables = worker.engine.runner.tables
    for round, length in enumerate((200, 30, 130)):
        (sequence,) = running(worker, [prompt(round, length)])
        blocks = sequence.holding.blocks
        row = tables.table[sequence.row].tolist()
        assert row[: len(blocks)] == list(blocks)
        assert set(row[len(blocks) :]) == {-1}
        assert tables.table[tables.empty_row].unique().tolist() == [-1]
        worker.turn(base.Cancel("r0"))
        worker.turn()


def test_siblings_share_what_they_hold_in_common(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "LEAST_TOKENS", 1)
    shared = prompt(5, 300)
    worker.local(shared, max_tokens=2)
    sequences = running(worker, [*(shared + prompt(50 + i, 9) for i in range(3)), prompt(9, 40)])
    plan = Plan.of([Part.next_of(s, 1) for s in sequences])
    runner = worker.engine.runner
    found = runner._sharing.of(plan, 8)
    assert found is not None
    assert sharing.saved_tokens(found, 64) == 2 * 256  # two of three need not read the four full blocks
    assert found.own_starts[:4].tolist() == [256, 256, 256, 0]
    assert runner._sharing.of(plan, 8) is found
    worker.turn(base.Cancel("r0"))
    worker.turn()
    rest = Plan.of([Part.next_of(s, 1) for s in worker.engine.running.values()])
    assert runner._sharing.of(rest, 8) is not found


def test_no_sharing_where_it_does_not_pay(worker: Worker) -> None:
    sequences = running(worker, [prompt(5, 300) + prompt(50 + i, 9) for i in range(3)])
    plan = Plan.of([Part.next_of(s, 1) for s in sequences])
    assert worker.engine.runner._sharing.of(plan, 3) is None


def test_rungs() -> None:
    assert decode_ladder(1) == [1]
    assert decode_ladder(9) == [1, 2, 4, 8, 9]
    ladder = decode_ladder(256)
    assert ladder[-1] == 256
    assert all(b <= 1.5 * a + 1 for a, b in pairwise(ladder[3:]))
    shapes = step_shapes(16, 512, decodes=True)
    assert max(s.tokens for s in shapes) == 512
    assert not [s for s in step_shapes(16, 512, decodes=False) if s.is_decode]
    assert replace(shapes[0], tokens=3, sequences=3).is_decode
