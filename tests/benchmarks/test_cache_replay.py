"""The replay's own arithmetic: what its traces, its ceiling and its numbers mean. The cache in it is the real one."""

import itertools
import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import cache_replay
from benchmarks.cache_picture import draw
from benchmarks.cache_replay import GIB, VARIANTS, Point, replay
from benchmarks.traces import Request, Service, ceiling, load

REQUESTS = 300
NO_TIME, LONG = Service(hold=0.0), Service(hold=20.0)


def mooncake(path: Path, requests: int = REQUESTS) -> Path:
    """Conversations that grow, some of which share a first part; in each the last block of a prompt is cut."""
    rng = random.Random(5)
    ids = iter(range(1_000_000))
    shared = [[next(ids) for _ in range(6)] for _ in range(4)]
    conversations: list[list[int]] = []
    rows = []
    for k in range(requests):
        if not conversations or rng.random() < 0.3:
            conversations.append(list(rng.choice(shared)))
        blocks = rng.choice(conversations[-12:])
        blocks += [next(ids) for _ in range(rng.randint(1, 12))]
        prompt = [*blocks, next(ids)]
        length = 512 * len(blocks) + rng.randint(1, 512)
        rows.append(
            {"timestamp": 400 * k, "input_length": length, "output_length": rng.randint(1, 900), "hash_ids": prompt}
        )
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def agents(path: Path, sessions: int = 20) -> Path:
    rng = random.Random(6)
    ids = iter(range(100, 1_000_000))
    rows = []
    for s in range(sessions):
        for turn in range(rng.randint(2, 20)):
            tokens = rng.randint(1, 3_000)
            blocks = [0, 1, 2, 3] if turn == 0 else []
            new = [next(ids) for _ in range(-(-tokens // 512))]
            rows.append(
                {
                    "session_id": f"s{s}",
                    "input_length": 512 * len(blocks) + tokens,
                    "output_length": rng.randint(1, 600),
                    "hash_ids": blocks + new,
                    **({"delay": 1_500.0} if turn else {"timestamp": 0.0}),
                }
            )
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


TRACES = {"mooncake": mooncake, "agents": agents}


@pytest.fixture(params=TRACES)
def requests_(request: pytest.FixtureRequest, tmp_path: Path) -> list[Request]:
    return load(TRACES[request.param](tmp_path / "trace.jsonl"))


@pytest.mark.parametrize("service", [NO_TIME, LONG], ids=["one at a time", "overlapping"])
@pytest.mark.parametrize("variant", ["ours", "lru", "prompt", "fixed 0.25", "unified"])
def test_no_variant_passes_the_ceiling_and_tokens_add_up(
    requests_: list[Request], variant: str, service: Service
) -> None:
    outcome = replay(cache_replay.qwen35_4b(), requests_, 6 * GIB, VARIANTS[variant], service)
    most = ceiling(requests_).tokens
    if service is NO_TIME:
        assert all(got <= limit for got, limit in zip(outcome.resumed, most, strict=True))
        assert (outcome.most_running, outcome.waited, outcome.yields) == (1, 0, 0)
    else:
        assert outcome.most_running > 8
    assert all(least <= got for least, got in zip(outcome.minimum, outcome.resumed, strict=True))
    assert 0 < sum(outcome.resumed) < sum(most)
    assert not outcome.refused
    assert sum(outcome.resumed) + outcome.computed_tokens == sum(r.prompt_tokens for r in requests_)


def test_more_memory_comes_near_the_ceiling(requests_: list[Request]) -> None:
    small, large = (
        sum(replay(cache_replay.qwen35_4b(), requests_, gib * GIB, VARIANTS["ours"], NO_TIME).resumed)
        for gib in (4, 256)
    )
    most = sum(ceiling(requests_).tokens)
    assert small < large
    assert 0.9 * most < large <= most


def test_short_memory_makes_requests_wait_and_yield_and_loses_none(tmp_path: Path) -> None:
    """Replies of 20,000 tokens do not fit beside each other: the youngest gives way, comes back and ends."""
    requests = [replace(r, reply=(r.reply[0], 20_000)) for r in load(mooncake(tmp_path / "trace.jsonl", 60))]
    outcome = replay(cache_replay.qwen35_4b(), requests, 5 * GIB, VARIANTS["ours"], Service())
    assert outcome.yields > 0
    assert outcome.waited > 0
    assert sum(outcome.resumed) + outcome.computed_tokens == sum(r.prompt_tokens for r in requests)


def test_a_request_that_never_fits_is_refused_and_counts_as_nothing_saved(tmp_path: Path) -> None:
    requests = load(mooncake(tmp_path / "trace.jsonl", 40))
    giant = replace(requests[5], reply=(requests[5].reply[0], 1_000_000))
    outcome = replay(cache_replay.qwen35_4b(), [*requests, giant], 4 * GIB, VARIANTS["ours"], NO_TIME)
    assert outcome.refused == [40]
    assert outcome.resumed[40] == 0


def request_of(*ids: int, last: int = 512, reply: tuple[int, int] = (9_000, 10)) -> Request:
    spans = (*((id, 512) for id in ids[:-1]), (ids[-1], last))
    return Request(0.0, spans, 512 * (len(ids) - 1) + last, reply)


def test_ceiling_by_hand() -> None:
    first = request_of(1, 2, 3, last=100)
    turn = Request(0.0, (*first.spans, first.reply, (4, 300)), first.prompt_tokens + 310, (9_001, 10))
    requests = [
        first,
        request_of(1, 2, 3, last=60),  # ends inside a block that is known: all but the last token
        request_of(1, 5, 3),  # the third block is known only behind others
        turn,  # the first prompt and its reply
        first,
    ]
    most = ceiling(requests)
    assert most.tokens == (0, 1_083, 512, 1_134, 1_123)
    assert most.block_ratio == (0 + 2 + 1 + 4 + 3) / (3 + 3 + 3 + 5 + 3)
    assert most.distinct_tokens == 1_124 + 10 + 10 + 1_024 + 10 + 300 + 10


def test_a_turn_begins_with_all_of_its_session(tmp_path: Path) -> None:
    requests = load(agents(tmp_path / "trace.jsonl", sessions=1))
    assert len(requests) > 1
    for before, after in itertools.pairwise(requests):
        assert after.spans[: len(before.spans) + 1] == (*before.spans, before.reply)
        assert after.arrival_s > before.arrival_s + Service().decode_s(before.reply[1])
    assert all(len(r.prompt) == 4 * r.prompt_tokens for r in requests)


def test_a_file_without_blocks_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text('{"prompt": "hello"}\n')
    with pytest.raises(ValueError, match=r"other\.jsonl is no trace"):
        load(path)


def test_the_command_writes_a_row_per_point_and_the_picture_a_panel_per_held_out_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, out = mooncake(tmp_path / "mooncake_made_trace.jsonl", 80), tmp_path / "points.json"
    monkeypatch.setattr(cache_replay, "ALL_GIB", 64)
    monkeypatch.setattr(cache_replay, "TUNED_ON", {"mooncake_made_trace": 30})
    monkeypatch.setattr(sys, "argv", ["x", str(trace), "--gib", "4", "8", "--jobs", "1", "--json", str(out)])
    cache_replay.main()
    points = [Point(**p) for p in json.loads(out.read_text())]
    printed = capsys.readouterr().out
    rows = [(m, g) for m in ("one at a time", "overlapping") for g in (4, 8, 64)]
    assert [(p.part, p.tuned) for p in points] == 6 * [("made 1–30", True)] + 6 * [("made 31–80", False)]
    assert [(p.mode, p.gib) for p in points] == 2 * rows
    assert [p.holds for p in points] == 4 * [False, False, True]
    for p in points:
        assert f"| {p.part} | {p.mode} | {p.gib} | {p.shares['ours']:.2f} |" in printed
        assert all(0 <= share <= p.ceiling for share in p.shares.values())
        assert ("unified" in p.shares) == (p.mode == "overlapping" and p.gib == 4)
    svg = ElementTree.fromstring(draw(json.loads(out.read_text())))
    titles = [e.text for e in svg.iter("{http://www.w3.org/2000/svg}text") if e.get("class") == "title"]
    assert titles == ["made 31–80"]


def point(part: str, *, tuned: bool = False, **shares: float) -> Point:
    return Point(part, tuned, "overlapping", 32, False, 60.0, shares)


def test_a_rival_that_saves_more_is_named_unless_it_is_by_half_a_per_cent_of_what_it_saves() -> None:
    points = [
        point("tuned", tuned=True, ours=1.0, lru=9.0, prompt=9.0, min=9.0),
        point("close", ours=9.96, lru=10.0, prompt=9.0, min=9.96),
        point("far", ours=9.94, lru=9.0, prompt=10.0, min=9.94),
        point("large", ours=40.0, min=40.0),
    ]
    said, *missed = cache_replay.misses(points)
    assert said.endswith("6 of 7 comparisons")
    assert missed == ["  MISSED far, overlapping, 32 GiB: 9.94 against 10.00 of prompt, -0.6%"]


def test_a_picture_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="held out"):
        draw([])
