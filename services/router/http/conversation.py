"""A conversation with its tools, checked and rendered by the model's template; what chat and tokenising share."""

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
    tools: list[SentTool] | None = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)  # variables of the model's template

    def offered_tools(self, model_calls: bool) -> list[Any] | None:
        """None when there are none or tool_choice is "none". A forced choice is refused: nothing would hold the model to it."""
        if self.tool_choice not in (None, "none", "auto"):
            raise Unsupported(
                f"tool_choice={self.tool_choice!r} is not supported, only none and auto", param="tool_choice"
            )
        if not self.tools or self.tool_choice == "none":
            return None
        if not model_calls:
            raise Unsupported(
                "tools: this model's chat template has no tool calls; send tool_choice=none, or start the router with a "
                "tool_parser",
                param="tools",
            )
        names = [t["function"]["name"] for t in self.tools]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise BadRequest(f"tools[{i}].function.name: {name!r} comes twice", param=f"tools[{i}].function.name")
        return self.tools

    def template_messages(self) -> list[dict[str, Any]]:
        return [m.for_template(f"messages[{i}]") for i, m in enumerate(self.messages)]


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation as the model sees it."""

    text: str
    prompt: list[int]
    tools: Tools | None  # that may be called


async def render_chat(api: Api, fields: ConversationFields, add_generation_prompt: bool = True) -> Chat:
    variables = fields.chat_template_kwargs
    for name in RESERVED & variables.keys():
        raise BadRequest(f"chat_template_kwargs may not set {name!r}", param="chat_template_kwargs")
    tools = fields.offered_tools(api.text.calls is not None)
    text = api.text.template.render(
        fields.template_messages(), tools, add_generation_prompt=add_generation_prompt, extra=variables
    )
    prompt = await api.text.encode(text, add_special_tokens=False)
    if not prompt:
        raise BadRequest("the messages make an empty prompt", param="messages")
    return Chat(text, prompt, Tools(tools) if tools else None)
