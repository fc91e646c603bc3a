"""Bodies whose ids never become objects: the same as the ordinary parser's in every case, errors included."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from services.router.http.completions import CompletionFields
from services.router.http.fields import Ids, drop_neutral
from services.router.http.id_arrays import MAX_BYTES, PLACE, IdArrays
from services.router.http.parse import parse_json
from tests.router.conftest import running
from tests.router.fake_worker import FakeWorker
from twinflow.contracts.errors import BadRequest
from twinflow.contracts.hashing import pack_tokens

VOCAB = 100_000
LONG = list(range(300, 500))
ARRAYS = IdArrays("prompt")


def told(parse: Any, data: bytes) -> str:
    """What comes of a body, up to the packed ids, with types."""
    try:
        body = parse(data)
        if not isinstance(body, dict):
            return repr(body)
        rest = {name: value for name, value in body.items() if name != "prompt"}
        prompt = body.get("prompt")
        plain = list(prompt.tokens) if isinstance(prompt, Ids) else prompt
        fields = CompletionFields.model_validate(drop_neutral({"model": "m", "prompt": prompt}, frozenset({"prompt"})))
        packed = [p if isinstance(p, str) else p.known(VOCAB, "prompt", "prompt") for p in fields.prompts(4)]
        return repr((list(body), rest, plain, packed))
    except BadRequest as e:
        return repr((e.message, e.param))
    except ValidationError as e:
        return repr(e.errors(include_input=False))


def same(data: bytes) -> bool:
    """Whether the array was read by itself; in any case the same comes of it."""
    assert told(ARRAYS.parse, data) == told(parse_json, data)
    try:
        body = ARRAYS.parse(data)
    except BadRequest:
        return False
    return isinstance(body, dict) and isinstance(body.get("prompt"), Ids)


NUMBERS = st.sampled_from(["0", "1", "7", "99999", "4000"])
ODD = st.sampled_from(
    ["-1", "-0", "4294967295", "4294967296", "18446744073709551615", "18446744073709551616", "1" + "0" * 40, "1.0", "1.5",
     "1e2", "1E999", "-1e999", "1e-7", "true", "false", "null", "[1]", "[]", "{}", '"1"', '"]"', "01", "00", "+1", ".5",
     "1.", "0x1", "1_0", "NaN", "Infinity", "", " ", "1 2", "1,", "\\u0031", "\x00", "é", "]", "[", "]]", "100000",
     str(PLACE), "7.406313860158249e15", "/**/1", "\x0b1"]
)  # fmt: skip
COMMAS = st.sampled_from([", ", ",", " ,\n", "\t,\r"])
KEYS = st.sampled_from(
    ['"prompt"', '"prompt" ', '"pr\\u006fmpt"', '"Prompt"', '"prompt\\u0000"', '"suffix"', "prompt", '"a": 1, "prompt"',
     '"prompt": "x", "prompt"', f'"n": {PLACE}, "prompt"', '"x": "\\"prompt\\": [", "prompt"', '"x": {"prompt"',
     '"x": "\\ud800", "prompt"', '"prompt": [1, 2], "prompt"', '"x": {"y": [1]}, "prompt"', "'prompt'", "\x0b\"prompt\""]
)  # fmt: skip
ENDS = st.sampled_from(
    ["}", ' , "n": 1}', ', "prompt": "y"}', ', "prompt": [5]}', ', "pr\\u006fmpt": [6]}', f', "prompt": [{PLACE}]}}',
     ', "prompt": [7.406313860158249e15]}', "}}", ', "x": NaN}', ', "x": 1e999}', "} ", "}x", ",}", ', "x": "\\udc00"}', "",
     ', "prompt": null}', "]}", ', "x": [[' + "[" * 300 + "]" * 302 + "}", f', "s": "{PLACE}"}}', "}, \"prompt\": [9]}"]
)  # fmt: skip
PAD = st.sampled_from(["", " ", "\n\t", " " * 600])


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """JSON as somebody might write it who wants to be taken for another: a long array, with oddities in it and around it."""
    numbers = [draw(NUMBERS)] * draw(st.sampled_from([300, 300, 300, 20, 0]))
    for at in draw(st.just([]) | st.lists(st.integers(0, len(numbers)), max_size=2)):
        numbers.insert(at, draw(ODD))
    array = "[" + draw(PAD) + draw(COMMAS).join(numbers) + draw(PAD) + "]"
    return ("{" + draw(st.just('"prompt"') | KEYS) + ":" + draw(PAD) + array + draw(st.just("}") | ENDS)).encode()


@settings(max_examples=500, deadline=None)
@given(bodies())
@example(b'{"prompt": [' + b" " * 600 + b"]}")
@example(f'{{"x": {{"prompt": {LONG}}}, "prompt": [7.406313860158249e15]}}'.encode())
@example(f'{{"x": {{"prompt": {LONG}}}, "prompt": [{PLACE}]}}'.encode())
@example(f'{{"x": {{"prompt": {LONG}}}, "prompt": [{PLACE}.0]}}'.encode())
def test_whatever_is_written(data: bytes) -> None:
    same(data)


@settings(max_examples=500, deadline=None)
@given(
    st.sampled_from([json.dumps({"model": "m", "prompt": LONG, "n": 1}), json.dumps({"prompt": LONG}, indent=1)]),
    st.lists(
        st.tuples(st.floats(0, 1), st.integers(0, 2), st.sampled_from([*b'0-.,eE[]{}":\\ \n\x00\xff\xc3\xa9tn', None])),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
)
def test_broken_anywhere(text: str, changes: list[tuple[float, int, int | None]], near: bool) -> None:
    """`near` the ends of the array, where most of what matters is."""
    data = bytearray(text.encode())
    for where, cut, put in changes:
        at = int(where * len(data))
        if near:
            at = min(len(data), max(0, data.find(b"[" if where < 0.5 else b"]") + int(where * 16) - 8))
        data[at : at + cut] = b"" if put is None else bytes([put])
    same(bytes(data))


@pytest.mark.parametrize("ids", [LONG, [0] * 300, [2**32 - 1] * 60, [99_999, 0] * 500], ids=lambda ids: str(ids[:2]))
@pytest.mark.parametrize(
    "shape",
    ['{"prompt":%s}', '{"model": "m", "prompt" :\n%s , "n": 1}', '{"prompt": "x", "prompt": %s}', '{"n": [{}], "prompt": %s}'],
)  # fmt: skip
@pytest.mark.parametrize("comma", [",", ", ", " ,\r\n"], ids=repr)
def test_long_arrays_are_read_by_themselves(ids: list[int], shape: str, comma: str) -> None:
    data = (shape % f"[{comma.join(map(str, ids))}]").encode()
    assert same(data)
    assert ARRAYS.parse(data)["prompt"].packed == pack_tokens(ids)


@pytest.mark.parametrize(
    "data",
    [
        {"prompt": LONG[:50]}, {"prompt": [LONG, LONG]}, {"prompt": [*LONG, -1]}, {"prompt": [*LONG, 2**32]},
        {"prompt": [*LONG, True]}, {"prompt": [*LONG, 1.0]}, {"prompt": str(LONG)}, {"x": {"prompt": LONG}}, {"tokens": LONG},
        [{"prompt": LONG}], {"prompt": LONG, "user": str(PLACE)}, {"prompt": [5] * MAX_BYTES},
    ],
    ids=lambda data: repr(data)[:12] + repr(data)[-12:],
)  # fmt: skip
def test_what_the_ordinary_parser_gets(data: Any) -> None:
    assert not same(json.dumps(data).encode())


@pytest.mark.parametrize("between", ["1.5", "-1", "x", "1" + "0" * 30, '"7"'])
def test_one_after_the_other(between: str) -> None:
    """What was read stays what it is when the next body comes, also after one that could not be read."""
    first = ARRAYS.parse(json.dumps({"prompt": LONG}).encode())["prompt"]
    assert not same(json.dumps({"prompt": LONG}).replace("499", between).encode())
    second = ARRAYS.parse(json.dumps({"prompt": [7] * 300}).encode())["prompt"]
    assert list(first.tokens) == LONG and first.packed == pack_tokens(LONG) and list(second.tokens) == [7] * 300


async def test_on_the_wire(model_folder) -> None:
    """Hundreds of ids through the router: to the worker as they are, back as text with `echo`, and refused by name."""
    async with running(model_folder) as c:
        worker = await c.add(FakeWorker("toy", "d0"))
        ids = [5 + i % 200 for i in range(400)]
        body = {"model": "toy", "prompt": ids, "max_tokens": 2, "echo": True}
        answer = await c.http.post("/v1/completions", json=body)
        assert answer.status_code == 200 and answer.json()["usage"]["prompt_tokens"] == 400
        assert worker.submits[-1].prompt == pack_tokens(ids)
        assert answer.json()["choices"][0]["text"].startswith(c.text.decode(ids))
        for bad in (99_999, -1, 2**40):
            answer = await c.http.post("/v1/completions", json=body | {"prompt": [*ids, bad]})
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["param"] == "prompt" and f"token id {bad} " in error["message"]
