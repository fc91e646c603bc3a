"""Every field and endpoint that other servers have and this one does not is refused by its name, and reaches no worker."""

import openai
import pytest
import pytest_asyncio

from services.router.http.fields import NEUTRAL, UNSUPPORTED
from services.router.http.refused import REFUSED
from tests.router.conftest import running
from tests.router.fake_worker import FakeWorker

HI = [{"role": "user", "content": "hi"}]
BODIES = {"chat/completions": {"model": "toy", "messages": HI}, "completions": {"model": "toy", "prompt": "hi"}}
FIELDS: dict[str, object] = {
    "guided_json": {},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": "x",
    "echo": True,
    "suffix": "end",
    "best_of": 2,
    "lora": "adapter",
    "lora_request": {"name": "adapter"},
    "audio": {"voice": "x", "format": "wav"},
    "modalities": ["text", "audio"],
    "images": ["x"],
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "prediction": {"type": "content", "content": "x"},
    "reasoning_effort": "high",
    "verbosity": "low",
    "web_search_options": {},
    "service_tier": "flex",
    "store": True,
    "metadata": {"a": "b"},
    "use_beam_search": True,
    "length_penalty": 1.0,
    "prompt_logprobs": 1,
    "prompt_cache_key": "k",
    "safety_identifier": "s",
    "mm_processor_kwargs": {},
    "frobnicate": 1,
}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(model_folder):
    async with running(model_folder) as c:
        worker = await c.add(FakeWorker("toy"))
        yield c, worker


@pytest.mark.parametrize(
    ("path", "field"), [(p, f) for f in FIELDS for p in BODIES if (p, f) != ("completions", "echo")]
)
async def test_fields(shared, path, field):
    c, worker = shared
    before = len(worker.submits)
    response = await c.http.post(f"/v1/{path}", json=BODIES[path] | {field: FIELDS[field]})
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == field and field in error["message"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "unsupported")
    assert len(worker.submits) == before


async def test_every_known_field_is_listed_or_neutral(shared):
    """A field that the code knows and nobody tries here would be a field that nobody has looked at."""
    untried = UNSUPPORTED - FIELDS.keys() - {"adapter", "input_audio", "lora_name", "lora_path"}
    elsewhere = {"response_format", "structured_outputs", "parallel_tool_calls"}  # served by some: test_structured.py
    assert untried == elsewhere and NEUTRAL.keys() <= FIELDS.keys() | elsewhere


@pytest.mark.parametrize("path", BODIES)
async def test_neutral_values_pass(shared, path):
    c, _ = shared
    neutral = {name: values[0] for name, values in NEUTRAL.items()} | {"user": "me", "n": 1, "max_tokens": 1}
    assert (await c.http.post(f"/v1/{path}", json=BODIES[path] | neutral)).status_code == 200


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url", "refusal"])
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
async def test_content_parts(shared, kind, role):
    c, _ = shared
    message = {"role": role, "content": [{"type": "text", "text": "a"}, {"type": kind, kind: {}}]}
    error = (await c.chat(messages=[*HI, message])).json()["error"]
    assert error["param"] == "messages[1].content[1]" and kind in error["message"]


@pytest.mark.parametrize("path", REFUSED)
async def test_endpoints(shared, path):
    c, _ = shared
    for method, url in (("GET" if path == "/v1/responses" else "POST", path), ("GET", f"{path}/x")):
        response = await c.http.request(method, url)
        if (method, url) == ("GET", "/v1/responses"):  # creating one is served
            assert (response.status_code, response.headers["allow"]) == (405, "POST")
            continue
        error = response.json()["error"]
        assert response.status_code == 400 and path in error["message"] and "not served" in error["message"]
        assert set(error) == {"message", "type", "param", "code"} and error["code"] == "unsupported"


async def test_adapters_by_model_name_and_embeddings_of_the_client(shared):
    c, _ = shared
    async with openai.AsyncOpenAI(base_url=f"{c.url}/v1", api_key="x", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="toy-adapter"):
            await client.chat.completions.create(model="toy-adapter", messages=HI)
        with pytest.raises(openai.BadRequestError, match="embeddings"):
            await client.embeddings.create(model="toy", input="x")
