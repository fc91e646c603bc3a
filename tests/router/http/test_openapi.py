"""The description tells what is really served, and arbitrary bodies never get an answer that it does not have."""

import json
import random
import re
from typing import Any

import pytest

from services.router.http.bodies import BODIES
from services.router.http.openapi import ERRORS_OF
from services.router.http.responses import REFUSED
from tests.router.conftest import running
from tests.router.fake_worker import FakeWorker

BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/completions": {"model": "toy", "prompt": "hi", "max_tokens": 2},
    "/v1/responses": {"model": "toy", "input": "hi", "max_output_tokens": 2},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [70]},
}


async def test_every_body_field_and_answer_is_described(cluster):
    spec = (await cluster.http.get("/openapi.json")).json()
    for path, kinds in BODIES.items():
        post = spec["paths"][path]["post"]
        assert {*ERRORS_OF[path], "200"} == post["responses"].keys()
        for kind in kinds:
            fields = spec["components"]["schemas"][kind.__name__]["properties"]
            assert kind.model_fields.keys() - REFUSED.keys() <= fields.keys()
            assert all("enum" in str(fields[name]) for name in fields.keys() - kind.model_fields.keys())
    text = json.dumps(spec)
    refs = {part.split('"')[0] for part in text.split('"$ref": "#/components/schemas/')[1:]}
    assert refs <= spec["components"]["schemas"].keys() and "#/$defs/" not in text
    assert not any("embeddings" in path or "audio" in path for path in spec["paths"])


def anything(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value, small ones and borders more often."""
    kinds = 8 if depth > 2 else 10
    match rng.randrange(kinds):
        case 0:
            return None
        case 1:
            return rng.choice([True, False])
        case 2:
            return rng.choice([-1, 0, 1, 2, 5, 63, 64, 2**31, 2**63, 2**64, -(2**63), 10**30])
        case 3:
            return rng.choice([0.0, -0.5, 0.5, 1.0, 1.5, 2.0, 1e308])
        case 4 | 5:
            return rng.choice(
                ["", "x", "toy", "hi there", "ü\n\u0000😀", "user", "text", "function", "1", "auto", "none"]
            )
        case 6:
            return [70, 71]
        case 7:
            return {"type": rng.choice(["text", "function", "function_call", "message", "image_url", ""])}
        case 8:
            return [anything(rng, depth + 1) for _ in range(rng.randrange(4))]
        case _:
            keys = [
                "role",
                "content",
                "type",
                "text",
                "name",
                "function",
                "parameters",
                "tool_calls",
                "arguments",
                "id",
                "a",
            ]
            return {rng.choice(keys): anything(rng, depth + 1) for _ in range(rng.randrange(5))}


@pytest.mark.parametrize("path", BODIES)
async def test_arbitrary_values_get_described_answers(model_folder, path):
    """One to three fields of a good body replaced by anything; a third of them streamed."""
    rng = random.Random(path)
    names = [name for kind in BODIES[path] for name in kind.model_fields] + ["echo", "wat", "response_format"]
    async with running(model_folder) as c:
        await c.add(FakeWorker("toy"))
        for _ in range(100):
            body = BASES[path] | {rng.choice(names): anything(rng) for _ in range(rng.randint(1, 3))}
            response = await c.http.post(path, content=json.dumps(body))
            assert response.status_code in (200, 400, 404), (body, response.text)
            if response.status_code != 200:
                error = response.json()["error"]
                assert set(error) == {"message", "type", "param", "code"} and error["message"], body
            elif response.headers["content-type"].startswith("text/event-stream"):
                assert '"error":{' not in response.text, (body, response.text)
        assert not c.router.generator.running


async def test_the_page_loads_nothing_from_elsewhere(cluster):
    """Its policy forbids it, and what it asks for are paths of the router."""
    answer = await cluster.http.get("/docs")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    assert not re.search(r"https?:|//[a-z]|@import|url\(", re.sub(r"(?m)^ *// .*$", "", answer.text))
    assert set(re.findall(r'(?:src|href)="([^"#]*)"|fetch\("([^"]*)"', answer.text)) == {
        ("openapi.json", ""),
        ("", "openapi.json"),
    }


async def test_examples_are_served(cluster):
    spec = (await cluster.http.get("/openapi.json")).json()
    for path in BODIES:
        body = spec["paths"][path]["post"]["requestBody"]["content"]["application/json"]["example"]
        assert (await cluster.http.post(path, json=body)).status_code == 200, path
