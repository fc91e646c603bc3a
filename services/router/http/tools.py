"""`tools`, `tool_choice` and `parallel_tool_calls` of a request: what the model is offered, and what it must do with it."""

from collections.abc import Mapping, Sequence
from typing import Any

from twinflow.contracts.errors import BadRequest, Unsupported
from twinflow.contracts.facts import fact

FORCED = "required"


@fact(frozen=True, slots=True)
class Chosen:
    """`tools` as templates expect them, all that were sent. `functions` are those that may be called, with their paths;
    `required`: the reply is calls and nothing else; `parallel`: there may be several."""

    tools: Sequence[dict[str, Any]]
    functions: Sequence[tuple[str, Mapping[str, Any]]]
    required: bool
    parallel: bool

    @property
    def strict(self) -> bool:
        return any(function.get("strict") for _, function in self.functions)


def choose_tools(
    tools: list[dict[str, Any]],
    choice: Any,
    parallel: bool | None,
    model_calls: bool,
    path: str = "tools[{}].function",
) -> Chosen | None:
    """None when there are none or the choice is "none". `path` of a tool's function in the request. Raises BadRequest or
    Unsupported."""
    functions: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for i, tool in enumerate(tools):
        where, function = path.format(i), tool["function"]
        if function["name"] in functions:
            raise BadRequest(f"{where}.name: {function['name']!r} comes twice", param=f"{where}.name")
        functions[function["name"]] = (where, function)
    name = forced_name(choice)
    required = choice == FORCED or name is not None
    if required and not tools:
        raise BadRequest(f"tool_choice={choice!r} needs tools", param="tool_choice")
    if name is not None and name not in functions:
        raise BadRequest(f"tool_choice: there is no tool {name!r} among tools", param="tool_choice")
    if not tools or choice == "none":
        return None
    if not model_calls:
        raise Unsupported(
            "tools: this model's chat template has no tool calls; send tool_choice=none, or start the router with a tool_parser",
            param="tools",
        )
    may = list(functions.values()) if name is None else [functions[name]]
    return Chosen(tools, may, required, parallel is not False and name is None)


def forced_name(choice: Any) -> str | None:
    """Of a choice of one function, in chat's or the responses' shape. Raises for what is no choice."""
    if choice in (None, "none", "auto", FORCED):
        return None
    if isinstance(choice, dict) and choice.get("type") == "function":
        inner = choice.get("function") if "function" in choice else {k: v for k, v in choice.items() if k != "type"}
        if isinstance(inner, dict) and set(inner) == {"name"} and isinstance(inner["name"], str):
            return inner["name"]
        raise BadRequest(f"tool_choice={choice!r} names no function", param="tool_choice")
    raise Unsupported(
        f"tool_choice={choice!r} is not supported, only none, auto, required and one function", param="tool_choice"
    )
