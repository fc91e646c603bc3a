"""A tiny model folder, and a router with fake workers on real sockets."""

import asyncio
import contextlib
import json
from pathlib import Path

import httpx
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from services.router.config import RouterConfig
from services.router.main import Router
from services.router.text.tokenizer import load_model_text
from tests.router.fake_worker import FakeWorker

CORPUS = ["the quick brown fox jumps over the lazy dog", "hello there, how are you?", "one two three four five six"]
TEMPLATE = """{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""


def build_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("é̂€", special=False)])
    return tokenizer


def write_model(folder: Path, template: str = TEMPLATE, tokenizer: Tokenizer | None = None, **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (tokenizer or build_tokenizer()).save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | config))
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "toy")


@pytest.fixture(scope="session")
def text(model_folder):
    return load_model_text(model_folder)


class Cluster:
    """`http` talks to the router; `encode` is the model's tokenizer."""

    def __init__(self, router: Router, text) -> None:
        self.router = router
        self.text = text
        self.url = f"http://{router.http_address}"
        self.http = httpx.AsyncClient(base_url=self.url, timeout=20)
        self.workers: list[FakeWorker] = []

    def encode(self, text: str) -> list[int]:
        return self.text.encode_now(text, add_special_tokens=False)

    async def add(self, worker: FakeWorker) -> FakeWorker:
        await worker.start(self.router.grpc_address)
        self.workers.append(worker)
        await until(lambda: self.router.view.is_connected(worker.record.key))
        return worker

    async def dial(self, worker: FakeWorker) -> FakeWorker:
        """One that runs already registers here, too; whoever added it stops it."""
        worker.register(self.router.grpc_address)
        await until(lambda: self.router.view.is_connected(worker.record.key))
        return worker

    async def complete(self, prompt: object = "hello there", **fields: object) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": "toy", "prompt": prompt} | fields)

    async def chat(self, content: str = "hello", **fields: object) -> httpx.Response:
        body = {"model": "toy", "messages": [{"role": "user", "content": content}]} | fields
        return await self.http.post("/v1/chat/completions", json=body)

    def says(self, worker: FakeWorker, text: str, eos: bool = True) -> list[int]:
        """The worker answers everything with this text; returns the token ids."""
        ids = self.encode(text) + ([self.text.eos_token_ids[0]] if eos else [])
        worker.script = lambda submit: ids
        return ids


async def until(condition, within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running(model_folder: Path, **config: object):
    defaults = {"http_port": 0, "grpc_port": 0, "shutdown_s": 1.0, "served_model": "toy"}
    router = Router(RouterConfig(model=str(model_folder), **(defaults | config)))
    await router.start()
    cluster = Cluster(router, load_model_text(model_folder))
    try:
        yield cluster
    finally:
        await cluster.http.aclose()
        for worker in cluster.workers:
            await worker.stop()
        await router.stop()


@pytest.fixture
async def cluster(model_folder):
    """A router with one decode worker, which echoes the prompt."""
    async with running(model_folder) as c:
        await c.add(FakeWorker("toy"))
        yield c
