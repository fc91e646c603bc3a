"""Tool calls, thoughts and several samples as clients get them."""

import asyncio
import json

import openai
import pytest
import pytest_asyncio

from tests.router.conftest import TEMPLATE, running, until, write_model
from tests.router.fake_worker import FakeWorker
from tests.router.http.test_answers import HI, events
from twinflow.contracts.hashing import unpack_tokens

TEACHES = "{% if tools %}{{ tools | tojson }} <tool_call></tool_call>{% endif %}" + TEMPLATE
THINKS = TEACHES + "{{ '<think>\\n' if open is defined }}{# </think> #}"
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}},
    {"type": "function", "function": {"name": "stop"}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "São Paulo"}}\n</tool_call>'
STOP = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'


@pytest_asyncio.fixture
async def cluster(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("tools") / "toy", THINKS)
    async with running(folder) as c:
        await c.add(FakeWorker("toy"))
        yield c


def put_together(chunks: list[dict], index: int = 0) -> tuple[dict, str]:
    """The message that a client builds from its deltas, and the finish reason."""
    message: dict = {"content": "", "reasoning_content": "", "tool_calls": []}
    finish = ""
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta, finish = choice["delta"], choice["finish_reason"] or finish
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name, "")
            for call in delta.get("tool_calls", []):
                if call["index"] == len(message["tool_calls"]):
                    assert call["id"] and call["type"] == "function" and call["function"]["name"]
                    message["tool_calls"].append(
                        {"id": call["id"], "type": "function", "function": {**call["function"]}}
                    )
                else:
                    assert call["index"] == len(message["tool_calls"]) - 1 and set(call["function"]) == {"arguments"}
                    message["tool_calls"][-1]["function"]["arguments"] += call["function"]["arguments"]
    return message, finish


def functions(message: dict) -> list[tuple[str, str]]:
    return [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or []]


@pytest.mark.parametrize("step", [1, 5, 500], ids=["a token a step", "five", "all at once"])
@pytest.mark.parametrize(
    ("said", "content", "reasoning", "calls", "finish"),
    [
        (CALL, None, None, [("weather", '{"city": "São Paulo"}')], "tool_calls"),
        (f"Ok.\n{CALL}\n{STOP}", "Ok.", None, [("weather", '{"city": "São Paulo"}'), ("stop", "{}")], "tool_calls"),
        (f"<think>\nhm\n</think>\n\n{STOP}", None, "hm", [("stop", "{}")], "tool_calls"),
        ("<think>\nhm\n</think>\n\nyes", "yes", "hm", [], "stop"),
        ("just text <tool_c", "just text <tool_c", None, [], "stop"),
        ('<tool_call>{"name": "rm"}</tool_call>', '<tool_call>{"name": "rm"}</tool_call>', None, [], "stop"),
    ],
    ids=["call", "two", "thoughts", "thoughts only", "text", "unknown"],
)
async def test_whole_and_streamed_answers_agree(cluster, said, content, reasoning, calls, finish, step):
    cluster.says(cluster.workers[0], said)
    cluster.workers[0].tokens_per_step = step
    choice = (await cluster.chat(tools=TOOLS)).json()["choices"][0]
    assert choice["finish_reason"] == finish
    assert choice["message"]["content"] == content and choice["message"].get("reasoning_content") == reasoning
    assert functions(choice["message"]) == calls and ("tool_calls" in choice["message"]) == bool(calls)
    message, streamed_finish = put_together(events((await cluster.chat(tools=TOOLS, stream=True)).text))
    assert (message["content"], message["reasoning_content"]) == (content or "", reasoning or "")
    assert functions(message) == calls and streamed_finish == finish
    ids = [c["id"] for c in message["tool_calls"]]
    assert len(set(ids)) == len(ids)


async def test_arguments_come_in_pieces_after_the_name(cluster):
    cluster.says(cluster.workers[0], CALL)
    deltas = [c["choices"][0]["delta"] for c in events((await cluster.chat(tools=TOOLS, stream=True)).text)]
    calls = [d["tool_calls"][0] for d in deltas if "tool_calls" in d]
    assert calls[0]["function"] == {"name": "weather", "arguments": ""}
    assert len(calls) > 5 and all(c["index"] == 0 for c in calls)
    assert all("content" not in d for d in deltas[1:])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_call_cut_off_is_text(cluster, stream):
    ids = cluster.says(cluster.workers[0], CALL)
    response = await cluster.chat(tools=TOOLS, stream=stream, max_tokens=len(ids) - 16)
    cut = cluster.text.texts.tokenizer.decode(ids[:-16])
    if stream:
        message, finish = put_together(events(response.text))
    else:
        choice = response.json()["choices"][0]
        message, finish = choice["message"], choice["finish_reason"]
        assert "tool_calls" not in message
    assert (message["content"], finish) == (cut, "length")


async def test_without_tools_to_call_the_text_is_the_answer(cluster):
    cluster.says(cluster.workers[0], STOP)
    for fields in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = (await cluster.chat(**fields)).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (STOP, "stop")


async def test_thoughts_that_the_prompt_opened(cluster):
    cluster.says(cluster.workers[0], "hm\n</think>\n\nyes")
    fields = {"chat_template_kwargs": {"open": True}}
    message = (await cluster.chat(**fields)).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("yes", "hm")
    streamed, _ = put_together(events((await cluster.chat(stream=True, **fields)).text))
    assert (streamed["content"], streamed["reasoning_content"]) == ("yes", "hm")


async def test_logprobs_of_held_tokens_are_not_lost(cluster):
    cluster.says(cluster.workers[0], f"Ok.\n{CALL}")
    whole = (await cluster.chat(tools=TOOLS, logprobs=True)).json()["choices"][0]["logprobs"]["content"]
    chunks = events((await cluster.chat(tools=TOOLS, logprobs=True, stream=True)).text)
    assert [t for c in chunks for t in c["choices"][0]["logprobs"]["content"]] == whole
    assert b"".join(bytes(t["bytes"]) for t in whole).decode().startswith("Ok.\n<tool_call>")


async def test_a_conversation_with_calls_reaches_the_template(tmp_path):
    template = (
        "{% for m in messages %}[{{ m.role }} {{ m.content }}"
        "{% for c in m.tool_calls or [] %} {{ c.id }} {{ c.function.name }} {{ c.function.arguments.city }}{% endfor %}"
        " {{ m.tool_call_id or '' }}]{% endfor %}{# <tool_call> #}"
    )
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rom"}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sunny"}]},
    ]  # fmt: skip
    async with running(write_model(tmp_path / "toy", template)) as c:
        worker = await c.add(FakeWorker("toy"))
        assert (await c.chat(messages=messages, tools=TOOLS, max_tokens=1)).status_code == 200
        shown = c.text.texts.tokenizer.decode(unpack_tokens(worker.submits[0].prompt), skip_special_tokens=False)
    assert shown == "[developer be brief ][user weather? ][assistant  c1 weather Rom ][tool sunny c1]"


async def test_the_parser_may_be_set(tmp_path):
    said = "<tool_call><function=stop></function></tool_call>"
    async with running(write_model(tmp_path / "toy", TEACHES), tool_parser="qwen_xml") as c:
        c.says(await c.add(FakeWorker("toy")), said)
        assert functions((await c.chat(tools=TOOLS)).json()["choices"][0]["message"]) == [("stop", "{}")]


async def test_openai_client_calls_tools(cluster):
    """Sync and async, whole, streamed, and the client's own gathering of a stream."""
    cluster.says(cluster.workers[0], f"<think>hm</think>Ok.\n{CALL}\n{STOP}")

    def sync_calls():
        with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="x", max_retries=0) as client:
            whole = client.chat.completions.create(model="toy", messages=HI, tools=TOOLS, tool_choice="auto")
            with client.chat.completions.stream(model="toy", messages=HI, tools=TOOLS) as stream:
                for _ in stream:
                    pass
                return whole, stream.get_final_completion()

    whole, gathered = await asyncio.to_thread(sync_calls)
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="x", max_retries=0) as client:
        again = await client.chat.completions.create(model="toy", messages=HI, tools=TOOLS)
        follow = [*HI, again.choices[0].message.model_dump(exclude_none=True)]
        follow += [{"role": "tool", "tool_call_id": c.id, "content": "1"} for c in again.choices[0].message.tool_calls]
        cluster.says(cluster.workers[0], "Done.")
        last = await client.chat.completions.create(model="toy", messages=follow, tools=TOOLS)
    for completion in (whole, gathered, again):
        choice = completion.choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content == "Ok."
        called = [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls]
        assert called == [("weather", {"city": "São Paulo"}), ("stop", {})]
        assert choice.message.model_extra["reasoning_content"] == "hm"
    assert last.choices[0].message.content == "Done." and last.choices[0].finish_reason == "stop"


# ---- several samples ----


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", ["chat", "completions"])
async def test_n_samples_of_one_prompt(cluster, path, stream):
    """Each choice has its own sample index under one seed; the prompt counts once."""
    worker = cluster.workers[0]
    said = [cluster.encode(t) for t in ("one", "two three", "the lazy dog")]
    worker.script = lambda submit: [*said[submit.sampling.sample_index], 2]
    ask = cluster.chat if path == "chat" else cluster.complete
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = await ask(n=3, max_tokens=50, **more)
    if stream:
        chunks = events(response.text)
        told, texts = chunks[-1]["usage"], ["", "", ""]
        for choice in (c for chunk in chunks for c in chunk["choices"]):
            texts[choice["index"]] += choice["text"] if path == "completions" else choice["delta"].get("content", "")
    else:
        body = response.json()
        told = body["usage"]
        texts = [c["text"] if path == "completions" else c["message"]["content"] for c in body["choices"]]
        assert [c["index"] for c in body["choices"]] == [0, 1, 2]
    assert texts == ["one", "two three", "the lazy dog"]
    assert told["prompt_tokens"] == len(unpack_tokens(worker.submits[0].prompt))
    assert told["completion_tokens"] == sum(len(s) + 1 for s in said)
    assert told["prompt_tokens_details"]["cached_tokens"] == 3
    assert sorted(s.sampling.sample_index for s in worker.submits) == [0, 1, 2]
    assert len({s.sampling.seed for s in worker.submits}) == len({s.prompt for s in worker.submits}) == 1
    assert len({s.id for s in worker.submits}) == len({s.idempotency_id for s in worker.submits}) == 3


async def test_n_samples_of_several_prompts(cluster):
    cluster.workers[0].script = lambda s: [unpack_tokens(s.prompt)[0]] * (1 + s.sampling.sample_index)
    body = (await cluster.complete([[70], [71]], n=2, seed=5)).json()
    letter = [cluster.text.decode([i]) for i in (70, 71)]
    assert [c["text"] for c in body["choices"]] == [letter[0], letter[0] * 2, letter[1], letter[1] * 2]
    assert body["usage"]["prompt_tokens"] == 2 and body["usage"]["completion_tokens"] == 6
    assert {s.sampling.seed for s in cluster.workers[0].submits} == {5}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_samples_are_cancelled_together(cluster, stream):
    worker = cluster.workers[0]
    worker.gate = asyncio.Event()
    request = asyncio.create_task(cluster.chat(n=3, stream=stream))
    await until(lambda: len(worker.submits) == 3)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await until(lambda: len(worker.cancels) == 3)
    await until(lambda: not cluster.router.generator.running)
