"""A router whose model says what the last user's message says, word for word: `python -m tests.clients.parrot PORT FOLDER`.

A client's test writes the reply that it wants to be given, with calls and thoughts as a model writes them.
"""

import asyncio
import sys
from pathlib import Path

from tests.router.conftest import running, write_model
from tests.router.fake_worker import FakeWorker
from twinflow.contracts.hashing import unpack_tokens
from twinflow.rpc.v1 import engine_pb2 as pb

START, END = "<|im_start|>user\n", "<|im_end|>"
TEMPLATE = """{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content -}}
{%- for c in m.tool_calls or [] %}{{ '<tool_call>' + (c.function | tojson) + '</tool_call>' }}{% endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""


async def main(port: int, folder: Path) -> None:
    write_model(folder, TEMPLATE)
    settings = {"http_port": port, "served_model": "parrot", "tool_parser": "hermes", "reasoning_parser": "think"}
    async with running(folder, **settings) as c:
        worker = FakeWorker("parrot", max_model_tokens=1 << 20, max_request_tokens=1 << 20)
        worker.tokens_per_step = 3

        def repeat(submit: pb.Submit) -> list[int]:
            text = c.text.texts.tokenizer.decode(unpack_tokens(submit.prompt), skip_special_tokens=False)
            said = text.rpartition(START)[2].partition(END)[0]
            return [*c.encode(said), c.text.eos_token_ids[0]]

        worker.script = repeat
        await c.add(worker)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), Path(sys.argv[2])))
