"""Logits and states of every family against `transformers`, fp32, however the tokens are cut."""

from dataclasses import replace

import pytest
import torch

from tests.models.conftest import Pair
from tests.models.reference import NEAR_TIE, greedy, one_shot, relative_error
from tests.models.tiny import Runner, prompt

TOLERANCE = 1e-5

CUTS = [
    (200,),
    (1, 199),
    (63, 137),
    (64, 136),
    (65, 135),
    (128, 72),
    (63, 1, 64, 72),
    (190, *[1] * 10),
]


@pytest.mark.parametrize("cuts", CUTS, ids=lambda c: "+".join(map(str, c[:4])))
def test_one_sequence(pair: Pair, cuts: tuple[int, ...]) -> None:
    tokens = prompt(1, 200)
    expected, states = one_shot(pair.oracle, tokens)
    runner = Runner(pair.model, sequences=2)
    seq, start, rows = runner.add(), 0, []
    for n in cuts:
        rows.append(runner.step({seq: tokens[start : start + n]})[seq])
        start += n
    assert relative_error(torch.cat(rows), expected) < TOLERANCE
    assert_states(runner, seq, states)


def test_mixed_batches(pair: Pair) -> None:
    """Sequences of odd lengths join and leave; each step mixes chunks and single tokens."""
    lengths = [130, 65, 7, 1, 97]
    tokens = [prompt(i, n) for i, n in enumerate(lengths)]
    expected = [one_shot(pair.oracle, t) for t in tokens]
    runner = Runner(pair.model, sequences=5)
    seqs = [runner.add() for _ in tokens]
    plan = [(64, 1, 7, 0, 0), (1, 63, 0, 1, 30), (64, 1, 0, 0, 1), (1, 0, 0, 0, 66)]
    at, rows = [0] * 5, [[] for _ in tokens]
    for counts in plan:
        work = {seqs[i]: tokens[i][at[i] : at[i] + n] for i, n in enumerate(counts) if n}
        for i, n in enumerate(counts):
            at[i] += n
        for seq, logits in runner.step(work).items():
            rows[seqs.index(seq)].append(logits)
    assert at == lengths
    for seq, got, (logits, states) in zip(seqs, rows, expected, strict=True):
        assert relative_error(torch.cat(got), logits) < TOLERANCE
        assert_states(runner, seq, states)


def test_memory_of_a_gone_sequence_changes_nothing(pair: Pair) -> None:
    """A slot and blocks full of another sequence's data are as good as new ones."""
    tokens, runner = prompt(1, 70), Runner(pair.model, sequences=1, tokens=128)
    old = runner.add()
    runner.step({old: prompt(2, 100)})
    runner.drop(old)
    seq = runner.add()
    logits = runner.step({seq: tokens})[seq]
    expected, states = one_shot(pair.oracle, tokens)
    assert relative_error(logits, expected) < TOLERANCE
    assert_states(runner, seq, states)


def test_greedy_tokens(pair: Pair) -> None:
    """64 tokens of 20 prompts. A difference is allowed only where the oracle's two best logits nearly tie."""
    new, ties = 64, []
    for length in (5, 100):
        prompts = [prompt(1000 * length + i, length) for i in range(10)]
        oracle = greedy(pair.oracle, prompts, new)
        runner = Runner(pair.model, sequences=10, tokens=192)
        seqs = [runner.add() for _ in prompts]
        ours = runner.greedy(dict(zip(seqs, prompts, strict=True)), new=new)
        for seq, logits in zip(seqs, oracle, strict=True):
            differs = (torch.tensor(ours[seq]) != logits.argmax(-1)).nonzero()
            if len(differs):
                at = int(differs[0])
                first, second = logits[at].topk(2).values.tolist()
                ties.append(f"prompt of {length} tokens, new token {at}: {first:.6f} and {second:.6f}")
                assert first - second < NEAR_TIE, ties[-1]
    for tie in ties:
        print(tie)


def test_chunks_that_need_no_logits(pair: Pair) -> None:
    """Asking for fewer rows of logits changes neither the rows nor the states."""
    tokens = prompt(1, 70)
    full, sparse = (Runner(pair.model, sequences=1, tokens=128) for _ in range(2))
    expected = full.step({full.add(): tokens})[1]
    batch = sparse.batch({sparse.add(): tokens})
    none = pair.model.forward(replace(batch, logit_rows=torch.empty(0, dtype=torch.int64)), sparse.arena)
    assert none.shape == (0, pair.model.vocab_size)
    last = pair.model.forward(replace(batch, logit_rows=torch.tensor([69, 0])), sparse.arena)
    assert relative_error(last, expected[[69, 0]]) < TOLERANCE
    for name in ("temporal", "conv"):
        for ours, theirs in zip(sparse.state(1, name), full.state(1, name), strict=True):
            assert ours.equal(theirs)


def test_padding_sequences_change_nothing(pair: Pair) -> None:
    """A decode batch padded with -1 rows gives the same logits and touches no other memory."""
    runner = Runner(pair.model, sequences=1, tokens=128)
    seq = runner.add()
    runner.step({seq: prompt(1, 66)})
    batch = runner.batch({seq: [5]})
    before = runner.arena.storage.clone()
    expected = pair.model.forward(batch, runner.arena)
    runner.arena.storage.copy_(before)

    def pad(x: torch.Tensor, value: int) -> torch.Tensor:
        return torch.cat([x, torch.full((2, *x.shape[1:]), value, dtype=x.dtype)])

    padded = replace(
        batch,
        input_ids=pad(batch.input_ids, 0),
        positions=pad(batch.positions, 0),
        cu_seqlens=torch.arange(4, dtype=torch.int32),
        seq_lens=(1, 1, 1),
        context_lens=pad(batch.context_lens, 0),
        block_tables=pad(batch.block_tables, -1),
        kv_slots=pad(batch.kv_slots, -1),
        state_rows=pad(batch.state_rows, -1),
        fresh=pad(batch.fresh, 0),
    )
    assert relative_error(pair.model.forward(padded, runner.arena), expected) < TOLERANCE
    own = torch.zeros(len(before), dtype=torch.bool)
    own[runner.geometry.slot_offset(0) :] = True
    for block in batch.block_tables[0, :2].tolist():
        own[runner.geometry.block_offset(block) :][: runner.geometry.block_bytes] = True
    changed = runner.arena.storage != before
    assert changed[own].any()
    assert not changed[~own].any()


def assert_states(runner: Runner, seq: int, states: dict[str, list[torch.Tensor]]) -> None:
    for name, expected in states.items():
        got = runner.state(seq, name)
        assert len(got) == len(expected) == 3
        for ours, theirs in zip(got, expected, strict=True):
            assert relative_error(ours, theirs) < TOLERANCE, name
