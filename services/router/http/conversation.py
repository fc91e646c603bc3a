"""A conversation with its tools, checked and rendered by the model's template; what chat and tokenising share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from services.router.http.api import Api
from services.router.http.messages import Message, SentTool
from services.router.text.calls.base import Tools
from services.router.text.templates import RESERVED
from twinflow.contracts.errors import BadRequest, Unsupported


class ConversationFields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[SentTool] = Field(default_factory=list)
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)  # variables of the model's template

    def template_messages(self) -> list[dict[str, Any]]:
        return [m.for_template(f"messages[{i}]") for i, m in enumerate(self.messages)]


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation as the model sees it."""

    text: str
    prompt: list[int]
    tools: Tools | None  # that may be called


async def render_chat(api: Api, fields: ConversationFields, add_generation_prompt: bool = True) -> Chat:
    tools = offered_tools(fields.tools, fields.tool_choice, api.text.calls is not None)
    return await render(
        api, fields.template_messages(), tools, fields.chat_template_kwargs, "messages", add_generation_prompt
    )


async def render(
    api: Api,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
    param: str,
    add_generation_prompt: bool = True,
) -> Chat:
    """`messages` and `tools` as templates expect them. `param`: the field that an empty prompt is blamed on."""
    for name in RESERVED & variables.keys():
        raise BadRequest(f"chat_template_kwargs may not set {name!r}", param="chat_template_kwargs")
    try:
        text = api.text.template.render(messages, tools, add_generation_prompt=add_generation_prompt, extra=variables)
    except BadRequest as e:
        raise BadRequest(e.message, param=param) from None
    prompt = await api.text.encode(text, add_special_tokens=False)
    if not prompt:
        raise BadRequest(f"{param} makes an empty prompt", param=param)
    return Chat(text, prompt, Tools(tools) if tools else None)


def offered_tools(
    tools: list[dict[str, Any]], choice: Any, model_calls: bool, path: str = "tools[{}].function"
) -> list[dict[str, Any]] | None:
    """None when there are none or the choice is "none". A forced choice is refused: nothing would hold the model to it. `path` of
    a tool's function in the request."""
    if choice not in (None, "none", "auto"):
        raise Unsupported(f"tool_choice={choice!r} is not supported, only none and auto", param="tool_choice")
    names: set[str] = set()
    for i, tool in enumerate(tools):
        where, function = path.format(i), tool["function"]
        if function.get("strict"):
            told = f"{where}.strict=True is not supported: nothing would hold the model to the schema"
            raise Unsupported(told, param=f"{where}.strict")
        if function["name"] in names:
            raise BadRequest(f"{where}.name: {function['name']!r} comes twice", param=f"{where}.name")
        names.add(function["name"])
    if not tools or choice == "none":
        return None
    if not model_calls:
        raise Unsupported(
            "tools: this model's chat template has no tool calls; send tool_choice=none, or start the router with a tool_parser",
            param="tools",
        )
    return tools
