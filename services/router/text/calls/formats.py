"""How models write tool calls: the markers and what is between them. A model's format is told by its chat template."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from services.router.text.calls.base import Body, Found, Tools
from services.router.text.calls.json_body import JsonBody
from services.router.text.calls.xml_body import XmlBody
from twinflow.contracts.errors import BadRequest

AUTO, NONE = "auto", "none"


class Shape(Enum):
    """Of what is between the markers."""

    TAGS = "tags"
    JSON = "json"  # one call; several calls are several pairs of markers
    JSON_LIST = "json_list"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """`close` "" = the calls end with their JSON. `sign`: text by which a template that teaches this format is known. `shape` is
    what a model is held to; parsers take more."""

    name: str
    open: str
    close: str
    make: Callable[[Tools, str, Found], Body]
    sign: str
    shape: Shape

    def body(self, tools: Tools, found: Found) -> Body:
        return self.make(tools, self.close, found)


# In the order in which templates are searched: those of the first format contain the sign of the last one, too.
FORMATS = (
    CallFormat("qwen_xml", "<tool_call>", "</tool_call>", XmlBody, "<function=", Shape.TAGS),
    CallFormat("nemotron", "<TOOLCALL>", "</TOOLCALL>", JsonBody, "<TOOLCALL>", Shape.JSON_LIST),
    CallFormat("granite", "<|tool_call|>", "", JsonBody, "<|tool_call|>", Shape.JSON_LIST),
    CallFormat("hermes", "<tool_call>", "</tool_call>", JsonBody, "<tool_call>", Shape.JSON),
)
NAMES = (AUTO, NONE, *(f.name for f in FORMATS))


def call_format(setting: str, templates: Iterable[str]) -> CallFormat | None:
    """The format of this name; with "auto" that of the model's templates. None = the model calls no tools. Raises BadRequest
    for an unknown name."""
    if setting not in NAMES:
        raise BadRequest(f"tool_parser={setting!r}: expected one of {', '.join(NAMES)}", param="tool_parser")
    text = "\n".join(templates)
    for form in FORMATS:
        if form.name == setting or (setting == AUTO and form.sign in text):
            return form
    return None
