"""Commands about no request: a match query tells what the next request hits, a flush takes one group, a listing shows all."""

from typing import Any

import pytest

from tests.engine.harness import Pair, Worker, request
from tests.models.tiny import prompt
from twinflow.contracts.hashing import pack_tokens, root_hash
from twinflow.contracts.hits import GroupHit
from twinflow.engine import base
from twinflow.engine.base import Mode


def ask(worker: Worker, question: base.Command) -> Any:
    """Its answer, which comes in this very turn."""
    (answer,) = [n for n in worker.turn(question) if isinstance(n, base.Answer)]
    return answer


def query(worker: Worker, ids: list[int], root: bytes = b"") -> base.MatchFound:
    return ask(worker, base.MatchQuery(3, root or worker.root, pack_tokens(ids)))


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_match_equals_what_the_next_request_hits(pair: Pair, length: int) -> None:
    worker, ids = pair.decode, prompt(1, length)
    for reuse in (ids, [*ids, 5, 6, 7], ids[: length // 2 + 1]):
        found = query(worker, reuse)
        assert query(worker, reuse) == found
        attention, state = found.hits
        stats = worker.local(reuse, max_tokens=4).stats
        assert stats.decode_attention_tokens == attention.tokens
        assert stats.decode_checkpoints == state.checkpoints
        assert stats.decode_resumed_tokens == stats.cached_tokens == found.usable_tokens


def test_match_of_another_root_is_empty(pair: Pair) -> None:
    worker, ids = pair.decode, prompt(1, 130)
    worker.local(ids)
    other = query(worker, ids, root_hash(worker.engine.fingerprint, cache_salt="other"))
    assert other.usable_tokens == 0 and [h.tokens for h in other.hits] == [0, 0]
    assert query(worker, ids).usable_tokens == 128


@pytest.mark.parametrize("group", ["attention", "state"])
def test_flush_of_one_group(pair: Pair, group: str) -> None:
    worker, ids = pair.decode, prompt(1, 130)
    before = worker.local(ids, max_tokens=6).tokens
    seen = ask(worker, base.Inspect(1))
    flushed = ask(worker, base.Flush(7, group))
    assert flushed == base.Flushed(7, {group: seen.stored[group]}) and seen.stored[group] > 0
    assert ask(worker, base.Flush(8, group)).units == {group: 0}
    hits: dict[str, GroupHit] = {h.group: h for h in query(worker, ids).hits}
    assert hits[group].tokens == 0
    assert hits["state" if group == "attention" else "attention"].tokens > 0
    assert query(worker, ids).usable_tokens == 0
    assert worker.local(ids, max_tokens=6).tokens == before


def test_flush_of_an_unknown_group_changes_nothing(pair: Pair) -> None:
    worker = pair.decode
    worker.local(prompt(1, 130))
    stored = ask(worker, base.Inspect(1)).stored
    assert "unknown cache group 'kv'" in ask(worker, base.Flush(2, "kv")).error
    assert ask(worker, base.Inspect(3)).stored == stored


def test_listing_follows_a_request(pair: Pair) -> None:
    worker = pair.decode
    first = request("a", prompt(1, 130), worker.root, max_tokens=50)
    second = request("b", prompt(2, 20), worker.root, max_tokens=50)
    worker.turn(base.Submit(first, Mode.LOCAL))
    worker.turn(base.Submit(second, Mode.CLAIM))
    a, b = ask(worker, base.Inspect(1, walk=False)).sequences
    assert (a.id, a.mode, a.phase, a.prompt_tokens, a.blocks, a.slots) == ("a", "local", "running", 130, 3, 1)
    assert a.processed_tokens >= 130 and a.generated_tokens == a.processed_tokens - 129
    assert (b.id, b.mode, b.phase, b.processed_tokens, b.blocks, b.slots) == ("b", "claim", "matched", 0, 0, 0)
    assert a.age_s >= b.age_s > 0
    worker.turn(base.Cancel("a"), base.Cancel("b"))
    seen = ask(worker, base.Inspect(2))
    assert (seen.sequences, seen.problem) == ((), "")
    assert seen.stored == {name: c.cached for name, c in seen.counts.items()}
