"""What clients get: through the `openai` package, sync, async and streaming, and in detail over plain HTTP."""

import asyncio
import json

import openai
import pytest

from tests.router.conftest import running, until
from tests.router.fake_worker import FakeWorker
from twinflow.contracts.hashing import root_hash, unpack_tokens
from twinflow.contracts.requests import RequestStats
from twinflow.contracts.workers import Role

HI = [{"role": "user", "content": "hi"}]


def events(body: str) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in body.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def text_of(chunks: list[dict]) -> str:
    return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])


async def test_sync_client(cluster):
    cluster.says(cluster.workers[0], "naïve 😀!")

    def calls():
        with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="x", max_retries=0) as client:
            assert client.models.list().data[0].id == "toy"
            whole = client.chat.completions.create(model="toy", messages=HI)
            stream = client.chat.completions.create(model="toy", messages=HI, stream=True)
            return whole, "".join(c.choices[0].delta.content or "" for c in stream)

    whole, streamed = await asyncio.to_thread(calls)
    assert whole.choices[0].message.content == streamed == "naïve 😀!"
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.prompt_tokens_details.cached_tokens == 3


async def test_async_client_with_stats_and_usage(cluster):
    cluster.says(cluster.workers[0], "hello there")
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="x", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="toy",
            messages=HI,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers={"x-twinflow-stats": "1"},
            extra_body={"top_k": 5, "min_p": 0.1, "cache_salt": "s", "ignore_eos": False},
        )
        chunks = [c async for c in stream]
        plain = await client.completions.create(model="toy", prompt="hello", max_tokens=50)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello there"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == len(cluster.encode("hello there")) + 1
    told = chunks[-1].model_extra["twinflow"]
    assert (told["route"], told["cached_tokens"], told["predicted"]["decode_worker"]) == ("local", 3, "d0")
    assert all("twinflow" not in c.model_extra for c in chunks[:-1])
    assert plain.choices[0].text == "hello there" and "twinflow" not in plain.model_extra


async def test_client_errors_are_typed(cluster):
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="x", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as e:
            await client.chat.completions.create(model="toy", messages=HI, extra_body={"best_of": 2})
        assert e.value.param == "best_of"
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=HI)


async def test_what_the_worker_is_asked(cluster):
    worker = cluster.workers[0]
    await cluster.chat("hi", seed=-1, temperature=0.5, top_p=0.25, top_k=-1, presence_penalty=1, logit_bias={"7": -100},
                       max_completion_tokens=9, min_tokens=2, stop_token_ids=[9], ignore_eos=True, cache_salt="salt",
                       logprobs=True, top_logprobs=2, user="me", n=1, response_format={"type": "text"}, tools=None)  # fmt: skip
    (submit,) = worker.submits
    s = submit.sampling
    assert unpack_tokens(submit.prompt) == cluster.encode(
        cluster.text.template.render([{"role": "user", "content": "hi"}])
    )
    assert submit.root == root_hash("f" * 32, "", "salt")
    assert (s.seed, s.temperature, s.top_p, s.top_k, s.presence_penalty) == (2**64 - 1, 0.5, 0.25, 0, 1)
    assert [(b.token_id, b.bias) for b in s.logit_bias] == [(7, -100)]
    assert (s.max_tokens, s.min_tokens, list(s.stop_token_ids), s.ignore_eos) == (9, 2, [9], True)
    assert (s.logprobs, list(s.eos_token_ids)) == (2, [2])
    assert (list(submit.candidates), submit.reason, submit.id) == (
        [],
        "no_prefill_worker",
        submit.idempotency_id + "-1",
    )


async def test_seeds_are_drawn_when_absent(cluster):
    for _ in range(3):
        await cluster.complete(max_tokens=1)
    assert len({s.sampling.seed for s in cluster.workers[0].submits}) == 3


async def test_default_lengths(cluster):
    worker = cluster.workers[0]
    await cluster.complete()
    await cluster.chat()
    await cluster.complete([5] * 2040)
    assert [s.sampling.max_tokens for s in worker.submits] == [16, 1024, 8]


async def test_remote_choices_carry_candidates(model_folder):
    async with running(model_folder, local_max_tokens=0) as c:
        decode = await c.add(FakeWorker("toy"))
        prefill = await c.add(FakeWorker("toy", "p0", Role.PREFILL))
        response = await c.http.post("/v1/completions", json={"model": "toy", "prompt": "hello there"},
                                     headers={"x-twinflow-stats": "1"})  # fmt: skip
        (submit,) = decode.submits
        assert [(x.worker_id, x.incarnation) for x in submit.candidates] == [("p0", prefill.record.incarnation)]
        assert list(submit.candidates[0].addresses) == list(prefill.record.addresses)
        assert submit.reason == "long_suffix" and not prefill.submits
        assert response.json()["twinflow"]["predicted"]["prefill_workers"] == ["p0"]
        metrics = (await c.http.get("/metrics")).text
        assert 'twinflow_router_decisions_total{kind="remote",reason="long_suffix"} 1.0' in metrics
        assert 'twinflow_router_workers{role="prefill"} 1.0' in metrics
        assert 'twinflow_router_requests_total{outcome="ok"} 1.0' in metrics


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("said", "stop", "shown"),
    [
        ("one STOP two", "STOP", "one "),
        ("größe 日本語 bitte", ["本語"], "größe 日"),
        ("a😀b", ["😀", "b"], "a"),
        ("no match ST", ["STOP"], "no match ST"),
    ],
    ids=["plain", "multi-byte", "emoji", "almost"],
)
async def test_stop_strings(cluster, said, stop, shown, stream):
    """Each token arrives on its own, so every stop string spans chunks."""
    worker = cluster.workers[0]
    ids = cluster.says(worker, said + " and more" * (shown != said))
    worker.delay_s = 0.005
    response = await cluster.chat(
        "x", stop=stop, stream=stream, **({"stream_options": {"include_usage": True}} if stream else {})
    )
    if stream:
        chunks = events(response.text)
        text, last, usage = text_of(chunks), chunks[-2]["choices"][0]["finish_reason"], chunks[-1]["usage"]
    else:
        body = response.json()
        text, last, usage = body["choices"][0]["message"]["content"], body["choices"][0]["finish_reason"], body["usage"]
    assert (text, last) == (shown, "stop")
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3
    if shown != said:
        assert usage["completion_tokens"] < len(ids)
        await until(lambda: worker.submits[0].id in worker.cancels)
    else:
        assert not worker.cancels


async def test_stop_token_text_is_not_shown_but_length_is(cluster):
    worker = cluster.workers[0]
    ids = cluster.says(worker, "hello there", eos=False)
    body = (await cluster.chat("x", stop_token_ids=[ids[-1]])).json()
    assert body["choices"][0]["message"]["content"] == cluster.text.texts.tokenizer.decode(ids[:-1])
    assert body["choices"][0]["finish_reason"] == "stop" and body["usage"]["completion_tokens"] == len(ids)
    body = (await cluster.chat("x")).json()
    assert body["choices"][0]["message"]["content"] == "hello there"
    assert body["choices"][0]["finish_reason"] == "length"


async def test_chat_logprobs(cluster):
    cluster.says(cluster.workers[0], "é there")
    whole = (await cluster.chat("x", logprobs=True, top_logprobs=2)).json()["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(t["bytes"]) for t in whole) == "é there".encode()
    assert all(t["logprob"] == -0.5 and len(t["top_logprobs"]) == 2 for t in whole)
    chunks = events((await cluster.chat("x", logprobs=True, top_logprobs=2, stream=True)).text)
    streamed = [t for c in chunks for t in c["choices"][0]["logprobs"]["content"]]
    assert streamed == whole


async def test_logprobs_end_with_the_text_at_a_stop_string(cluster):
    cluster.says(cluster.workers[0], "one two three")
    choice = (await cluster.chat("x", logprobs=True, stop=" two")).json()["choices"][0]
    assert choice["message"]["content"] == "one"
    assert b"".join(bytes(t["bytes"]) for t in choice["logprobs"]["content"]) == b"one"


async def test_completion_logprobs(cluster):
    cluster.says(cluster.workers[0], "one two")
    logprobs = (await cluster.complete(logprobs=1)).json()["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == "one two"
    offsets = [sum(map(len, logprobs["tokens"][:i])) for i in range(len(logprobs["tokens"]))]
    assert logprobs["text_offset"] == offsets and len(logprobs["top_logprobs"][0]) == 1


@pytest.mark.parametrize("kind", ["strings", "ids"])
async def test_many_prompts(cluster, kind):
    prompts = ["hello there", "one two three", "the lazy dog"]
    ids = [cluster.encode(p) for p in prompts]
    asked = prompts if kind == "strings" else ids
    body = (await cluster.complete(asked, max_tokens=2)).json()
    expected = [cluster.text.texts.tokenizer.decode(i[:2]) for i in ids]
    assert [(c["index"], c["text"]) for c in body["choices"]] == list(enumerate(expected))
    assert body["usage"]["prompt_tokens"] == sum(map(len, ids)) and body["usage"]["completion_tokens"] == 6
    cluster.workers[0].delay_s = 0.01
    texts = ["", "", ""]
    for chunk in events((await cluster.complete(asked, max_tokens=2, stream=True)).text):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == expected


async def test_messages_as_clients_write_them(cluster):
    """Text parts, a dumped earlier reply with its empty fields, tools that may not be called."""
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "annotations": [], "audio": None, "function_call": None,
         "tool_calls": None},
        {"role": "user", "content": "d", "name": "me"},
    ]  # fmt: skip
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert (await cluster.chat(messages=messages, tools=tools, tool_choice="none", max_tokens=1)).status_code == 200
    expected = cluster.text.template.render([{"role": r, "content": t} for r, t in
                                            (("user", "ab"), ("assistant", "c"), ("user", "d"))])  # fmt: skip
    assert unpack_tokens(cluster.workers[0].submits[0].prompt) == cluster.encode(expected)


@pytest.mark.parametrize("columns", [True, False], ids=["columns", "previous-release"])
async def test_cache_events_become_predictions(cluster, columns):
    """A prompt whose blocks and checkpoint the worker reports is predicted as a hit, and only under its own salt."""
    from twinflow.contracts.events import CacheEvent, EventKind
    from twinflow.contracts.hashing import TokenChain, pack_tokens

    cluster.workers[0].event_columns = columns
    ids = list(range(50, 70))
    chain = TokenChain(root_hash("f" * 32), 4, pack_tokens(ids))
    stored = [CacheEvent(i + 1, EventKind.BLOCK_STORED, h, 4 * i + 4) for i, h in enumerate(chain.block_hashes)]
    cluster.workers[0].emit(*stored, CacheEvent(6, EventKind.CHECKPOINT_STORED, chain.prefix_hash(14), 14))
    await until(lambda: cluster.router.view.index_entries()["d0"] == 6)

    async def predicted(**fields):
        response = await cluster.http.post("/v1/completions", json={"model": "toy", "prompt": ids} | fields,
                                           headers={"x-twinflow-stats": "1"})  # fmt: skip
        p = response.json()["twinflow"]["predicted"]
        return p["decode_attention_tokens"], p["decode_usable_tokens"]

    assert await predicted() == (20, 14)
    assert await predicted(cache_salt="x") == (0, 0)


@pytest.mark.parametrize("columns", [True, False], ids=["columns", "previous-release"])
async def test_event_gap_asks_for_a_snapshot(cluster, columns):
    from twinflow.contracts.events import CacheEvent, EventKind

    worker = cluster.workers[0]
    worker.event_columns = columns
    await until(lambda: worker.resyncs == 1)  # at the session's start
    assert worker.hello.columns and worker.hello.event_columns
    event = [CacheEvent(i, EventKind.BLOCK_STORED, bytes([i]) * 16, 4) for i in range(10)]
    worker.emit(event[1])
    await until(lambda: cluster.router.view.index_entries()["d0"] == 1)
    worker.snapshot = (4, event[1:5])
    worker.emit(event[5])  # 2, 3 and 4 were lost
    await until(lambda: cluster.router.view.index_entries()["d0"] == 5)
    assert worker.resyncs == 2


async def test_stats_of_the_worker_win(cluster):
    cluster.workers[0].stats = RequestStats(prompt_tokens=9, cached_tokens=4, route="remote", reason="own_match",
                                            blocks_moved=2, prefill_worker="p7", extra={"queue_s": 0.5})  # fmt: skip
    response = await cluster.http.post("/v1/chat/completions", json={"model": "toy", "messages": HI, "max_tokens": 2},
                                       headers={"x-twinflow-stats": "1"})  # fmt: skip
    told = response.json()["twinflow"]
    assert (told["route"], told["reason"], told["blocks_moved"]) == ("remote", "own_match", 2)
    assert (told["extra"], told["prefill_worker"], told["attempts"]) == ({"queue_s": 0.5}, "p7", 1)
    assert 0 < told["ttft_s"] <= told["total_s"] and 0 <= told["queued_s"] < told["ttft_s"]


async def test_tools_reach_the_template_as_sent(tmp_path):
    from tests.router.conftest import write_model

    folder = write_model(tmp_path / "toy", "{{ tools | tojson }}|{{ messages[0].content }}")
    tool = {"function": {"parameters": {"z": 1, "a": 2}, "name": "f"}, "type": "function"}
    async with running(folder, tool_parser="hermes") as c:
        worker = await c.add(FakeWorker("toy"))
        for choice, shown in (("auto", json.dumps([tool])), ("none", "null"), (None, json.dumps([tool]))):
            response = await c.chat("x", tools=[tool], tool_choice=choice, max_tokens=1)
            assert response.status_code == 200, response.text
            assert c.text.texts.tokenizer.decode(unpack_tokens(worker.submits[-1].prompt)) == f"{shown}|x"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_echo(cluster, stream):
    cluster.says(cluster.workers[0], "one two")
    ids = cluster.encode("hello")
    for prompts, texts in (("größe", ["größe"]), ([ids, ids], ["hello", "hello"])):
        response = await cluster.complete(prompts, echo=True, n=2, stream=stream)
        chunks = events(response.text) if stream else [response.json()]
        told = dict.fromkeys(range(2 * len(texts)), "")
        for choice in (c for chunk in chunks for c in chunk["choices"]):
            told[choice["index"]] += choice["text"]
        assert list(told.values()) == [f"{text}one two" for text in texts for _ in range(2)]
    plain = (await cluster.complete("hello")).json()
    echoing = (await cluster.complete("hello", echo=True)).json()
    assert plain["usage"] == echoing["usage"]
