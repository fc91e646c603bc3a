"""POST /tokenize and /detokenize: what the model sees of a text or a conversation, and back."""

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from services.router.http.api import Api
from services.router.http.conversation import ConversationFields, render_chat
from services.router.http.fields import as_ids
from services.router.http.parse import read_fields
from twinflow.contracts.hashing import unpack_tokens


class PlainTokenizeFields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: StrictStr | None = None
    prompt: StrictStr
    add_special_tokens: StrictBool = True  # as /v1/completions does
    return_token_strs: StrictBool = False


class ChatTokenizeFields(ConversationFields):
    model: StrictStr | None = None
    add_generation_prompt: StrictBool = True  # as /v1/chat/completions does
    return_token_strs: StrictBool = False


class DetokenizeFields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: StrictStr | None = None
    tokens: Annotated[list[StrictInt], Field(max_length=1 << 22)]


def token_routes(api: Api, longest_tokens: Callable[[], int | None]) -> APIRouter:
    """`longest_tokens`: of prompt and reply together, None while no worker is known."""
    routes = APIRouter()

    @routes.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        """With `messages` as a chat, else `prompt` as plain text."""

        def kind(body: dict[str, Any]) -> type[ChatTokenizeFields] | type[PlainTokenizeFields]:
            return ChatTokenizeFields if "messages" in body else PlainTokenizeFields

        fields = await read_fields(request, kind, api.config.model_name, api.config.max_body_bytes)
        if isinstance(fields, ChatTokenizeFields):
            packed = (await render_chat(api, fields, fields.add_generation_prompt)).prompt
        else:
            packed = await api.text.encode(fields.prompt, add_special_tokens=fields.add_special_tokens)
        ids = unpack_tokens(packed)
        strings = [api.text.texts.text_and_bytes(i)[0] for i in ids] if fields.return_token_strs else None
        return {"count": len(ids), "max_model_len": longest_tokens(), "tokens": ids, "token_strs": strings}

    @routes.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, str]:
        """Special tokens are shown."""
        fields = await read_fields(
            request, lambda _: DetokenizeFields, api.config.model_name, api.config.max_body_bytes
        )
        ids = as_ids(fields.tokens)
        if ids is not None:
            ids.known(api.text.vocab_size, "tokens", "tokens")
        return {"prompt": api.text.decode(fields.tokens)}

    return routes
