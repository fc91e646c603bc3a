"""/v1/responses through the `openai` package and in detail: text, thoughts, calls, events, and what is refused."""

import json

import openai
import pytest
import pytest_asyncio

from services.router.http.responses import REFUSED
from tests.router.conftest import running, write_model
from tests.router.fake_worker import FakeWorker
from tests.router.http.test_tools import CALL, STOP, THINKS
from twinflow.contracts.errors import NoCapacity
from twinflow.contracts.hashing import unpack_tokens

TOOLS = [
    {"type": "function", "name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}},
    {"type": "function", "name": "stop"},
]


@pytest_asyncio.fixture
async def cluster(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("responses") / "toy", THINKS)
    async with running(folder) as c:
        await c.add(FakeWorker("toy"))
        yield c


@pytest_asyncio.fixture
async def client(cluster):
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="x", max_retries=0) as client:
        yield client


async def ask(cluster, **fields: object):
    return await cluster.http.post("/v1/responses", json={"model": "toy", "input": "hi"} | fields)


def events(body: str) -> list[dict]:
    found = []
    for block in body.split("\n\n"):
        if block.startswith("event: "):
            name, data = block.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    assert [e["sequence_number"] for e in found] == list(range(len(found)))
    return found


def shown(output: list[dict]) -> list[tuple[str, ...]]:
    """Items without their ids."""
    return [
        (i["type"], i["name"], i["arguments"]) if i["type"] == "function_call" else (i["type"], i["content"][0]["text"])
        for i in output
    ]


async def test_text(cluster, client):
    cluster.says(cluster.workers[0], "naïve 😀!")
    response = await client.responses.create(model="toy", input="hi", instructions="be brief", max_output_tokens=50)
    assert (response.output_text, response.status, response.store) == ("naïve 😀!", "completed", False)
    assert response.usage.input_tokens_details.cached_tokens == 3
    assert response.usage.output_tokens == len(cluster.encode("naïve 😀!")) + 1
    prompt = cluster.text.template.render(
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    )
    assert unpack_tokens(cluster.workers[0].submits[0].prompt) == cluster.encode(prompt)
    assert cluster.workers[0].submits[0].sampling.max_tokens == 50


async def test_a_reply_at_its_limit_is_incomplete(cluster, client):
    cluster.says(cluster.workers[0], "one two three")
    response = await client.responses.create(model="toy", input="hi", max_output_tokens=1)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    told = events((await ask(cluster, max_output_tokens=1, stream=True)).text)
    assert told[-1]["type"] == "response.incomplete" and told[-1]["response"]["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("said", "items"),
    [
        ("yes", [("message", "yes")]),
        ("<think>\nhm\n</think>\n\nyes", [("reasoning", "hm"), ("message", "yes")]),
        (f"Ok.\n{CALL}\n{STOP}", [
            ("message", "Ok."), ("function_call", "weather", '{"city": "São Paulo"}'), ("function_call", "stop", "{}")]),
        (f"{STOP} and more", [("function_call", "stop", "{}"), ("message", "and more")]),
    ],
    ids=["text", "thoughts", "calls", "text after"],
)  # fmt: skip
@pytest.mark.parametrize("step", [1, 500])
async def test_whole_and_streamed_items_agree(cluster, client, said, items, step):
    cluster.says(cluster.workers[0], said)
    cluster.workers[0].tokens_per_step = step
    body = (await ask(cluster, tools=TOOLS)).json()
    assert shown(body["output"]) == items and body["status"] == "completed"
    thoughts = body["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert thoughts == (len(cluster.encode("hm")) if "hm" in said else 0)
    told = events((await ask(cluster, tools=TOOLS, stream=True)).text)
    assert [e["type"] for e in told[:2]] == ["response.created", "response.in_progress"]
    assert told[-1]["type"] == "response.completed"
    assert shown(told[-1]["response"]["output"]) == items
    assert all(i["status"] == "completed" for i in told[-1]["response"]["output"])
    for i, item in enumerate(told[-1]["response"]["output"]):
        mine = [e for e in told if e.get("output_index") == i]
        assert mine[0]["type"] == "response.output_item.added" and mine[-1]["type"] == "response.output_item.done"
        assert mine[-1]["item"] == item and mine[0]["item"]["id"] == item["id"]
        deltas = "".join(e["delta"] for e in mine if e["type"].endswith(".delta"))
        assert deltas == shown([item])[0][-1]
        (done,) = [e for e in mine if e["type"].endswith(("text.done", "arguments.done"))]
        assert done.get("text", done.get("arguments")) == deltas


async def test_the_clients_own_gathering_of_a_stream(cluster, client):
    cluster.says(cluster.workers[0], f"<think>hm</think>Ok.\n{CALL}")
    async with client.responses.stream(model="toy", input="hi", tools=TOOLS) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert kinds.count("response.function_call_arguments.delta") > 5
    assert final.output_text == "Ok."
    (call,) = [i for i in final.output if i.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "São Paulo"})


async def test_a_turn_with_the_items_of_the_last_one(tmp_path):
    template = (
        "{% for m in messages %}[{{ m.role }} {{ m.reasoning_content or '-' }} {{ m.content or '-' }}"
        "{% for c in m.tool_calls or [] %} {{ c.id }} {{ c.function.name }} {{ c.function.arguments.city }}{% endfor %}"
        "{{ m.tool_call_id or '' }}]{% endfor %}{# <tool_call> </think> #}"
    )
    async with running(write_model(tmp_path / "toy", template)) as c:
        worker = await c.add(FakeWorker("toy"))
        c.says(worker, f"<think>hm</think>Ok.\n{CALL}")
        async with openai.AsyncOpenAI(base_url=f"{c.url}/v1", api_key="x", max_retries=0) as client:
            first = await client.responses.create(model="toy", input="hi", tools=TOOLS)
            call = first.output[-1]
            turn = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
            turn += [item.model_dump(exclude_none=True) for item in first.output]
            turn += [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
            await client.responses.create(model="toy", input=turn, tools=TOOLS, instructions="be brief")
    seen = c.text.decode(unpack_tokens(worker.submits[-1].prompt))
    assert (
        seen
        == f"[system - be brief][user - hi][assistant hm Ok. {call.call_id} weather São Paulo][tool - sunny{call.call_id}]"
    )


async def test_a_broken_call_is_text(cluster):
    ids = cluster.says(cluster.workers[0], CALL)
    body = (await ask(cluster, tools=TOOLS, max_output_tokens=len(ids) - 16)).json()
    cut = cluster.text.decode(ids[:-16])
    assert shown(body["output"]) == [("message", cut)]
    told = events((await ask(cluster, tools=TOOLS, max_output_tokens=len(ids) - 16, stream=True)).text)
    output = told[-1]["response"]["output"]
    assert [(i["type"], i["status"]) for i in output] == [("function_call", "incomplete"), ("message", "incomplete")]
    assert output[1]["content"][0]["text"] == cut


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_error_before_the_first_token_has_its_status(cluster, stream):
    cluster.workers[0].error = NoCapacity("full")
    response = await ask(cluster, stream=stream)
    assert response.status_code == 503 and response.json()["error"]["code"] == "no_capacity"
    assert "retry-after" in response.headers


async def test_an_error_after_it_is_an_event(cluster):
    worker = cluster.workers[0]
    worker.delay_s, worker.die_after = 0.02, 5
    told = events((await ask(cluster, stream=True)).text)
    assert told[-1]["type"] == "response.failed" and told[-1]["response"]["status"] == "failed"
    assert told[-1]["response"]["error"]["code"] == "worker_lost"


BAD_ITEM = "input[0]"


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"input": 5}, "input", "expected"),
        ({"input": []}, "input", "expected"),
        ({"input": ["x"]}, BAD_ITEM, "object"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, BAD_ITEM, "item_reference"),
        ({"input": [{"type": "web_search_call"}]}, BAD_ITEM, "web_search_call"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "assistant"),
        ({"input": [{"role": "user", "content": "x", "wat": 1}]}, "input[0].wat", "unknown"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "input_image"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]},
         "input[0].tool_calls[0].function.arguments", "JSON"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "function"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "missing"),
        ({"tools": [TOOLS[1], TOOLS[1]]}, "tools[1].name", "twice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "nobody"}}, "tool_choice", "nobody"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater"),
        ({"max_output_tokens": 5000}, "max_output_tokens", "2048"),
        ({"input": "hello " * 3000}, "input", "2048"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "missing"),
        ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format.schema", "json_object"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "medium"),
        ({"reasoning": {"effort": "low"}}, "reasoning", "not supported"),
        ({"frobnicate": 1}, "frobnicate", "unknown"),
    ],
)  # fmt: skip
async def test_refused_by_name(cluster, fields, param, text):
    response = await ask(cluster, **fields)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param and text in error["message"], error
    assert not cluster.workers[0].submits


@pytest.mark.parametrize("field", REFUSED)
async def test_fields_of_stored_or_other_requests_are_refused(cluster, field):
    response = await ask(cluster, **{field: {"some": "thing"}})
    assert response.status_code == 400 and response.json()["error"]["param"] == field


async def test_neutral_values_pass_and_stored_responses_are_refused(cluster):
    neutral = {name: values[0] for name, values in REFUSED.items() if values}
    assert (await ask(cluster, max_output_tokens=1, store=False, tool_choice="auto", **neutral)).status_code == 200
    gone = await cluster.http.get("/v1/responses/resp_1")
    assert gone.status_code == 400 and "stored responses" in gone.json()["error"]["message"]
