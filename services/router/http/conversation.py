"""A conversation with its tools, checked and rendered by the model's template; what chat and tokenising share."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from services.router.http.api import Api
from services.router.http.messages import Message, SentTool
from services.router.http.tools import Chosen, choose_tools
from services.router.text.calls.base import Tools
from services.router.text.templates import RESERVED
from twinflow.contracts.errors import BadRequest
from twinflow.contracts.facts import fact
from twinflow.contracts.hashing import TOKEN_BYTES


class ConversationFields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[SentTool] = Field(default_factory=list)
    tool_choice: Any = None
    parallel_tool_calls: StrictBool | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)  # variables of the model's template

    def template_messages(self) -> list[dict[str, Any]]:
        return [m.for_template(f"messages[{i}]") for i, m in enumerate(self.messages)]


@fact(frozen=True, slots=True)
class Chat:
    """A conversation as the model sees it."""

    text: str
    prompt: bytes  # packed token ids
    chosen: Chosen | None  # tools that may be called

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // TOKEN_BYTES

    @property
    def tools(self) -> Tools | None:
        return None if self.chosen is None else Tools(self.chosen.tools)


async def render_chat(api: Api, fields: ConversationFields, add_generation_prompt: bool = True) -> Chat:
    chosen = choose_tools(fields.tools, fields.tool_choice, fields.parallel_tool_calls, api.text.calls is not None)
    return await render(
        api, fields.template_messages(), chosen, fields.chat_template_kwargs, "messages", add_generation_prompt
    )


async def render(
    api: Api,
    messages: Sequence[Mapping[str, Any]],
    chosen: Chosen | None,
    variables: Mapping[str, Any],
    param: str,
    add_generation_prompt: bool = True,
) -> Chat:
    """`messages` as templates expect them. `param`: the field that an empty prompt is blamed on."""
    for name in RESERVED & variables.keys():
        raise BadRequest(f"chat_template_kwargs may not set {name!r}", param="chat_template_kwargs")
    tools = None if chosen is None else chosen.tools
    try:
        text = api.text.template.render(messages, tools, add_generation_prompt=add_generation_prompt, extra=variables)
    except BadRequest as e:
        raise BadRequest(e.message, param=param) from None
    prompt = await api.text.encode(text, add_special_tokens=False)
    if not prompt:
        raise BadRequest(f"{param} makes an empty prompt", param=param)
    return Chat(text, prompt, chosen)
