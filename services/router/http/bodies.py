"""What the generation endpoints take, for /openapi.json: the models of their bodies, and what those do not show because it is
checked by hand."""

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from services.router.http.chat import ChatFields
from services.router.http.completions import CompletionFields
from services.router.http.fields import NEUTRAL
from services.router.http.messages import FunctionCall, Message, Tool, ToolCall
from services.router.http.response_input import FunctionTool
from services.router.http.responses import REFUSED, ResponseFields
from services.router.http.tokens import ChatTokenizeFields, DetokenizeFields, PlainTokenizeFields

Schema = dict[str, Any]

BODIES: dict[str, tuple[type[BaseModel], ...]] = {
    "/v1/chat/completions": (ChatFields,),
    "/v1/completions": (CompletionFields,),
    "/v1/responses": (ResponseFields,),
    "/tokenize": (PlainTokenizeFields, ChatTokenizeFields),
    "/detokenize": (DetokenizeFields,),
}
EXAMPLES: dict[str, Schema] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 64},
    "/v1/completions": {"prompt": "The old man", "max_tokens": 64},
    "/v1/responses": {"input": "Tell me a story.", "max_output_tokens": 64},
    "/tokenize": {"prompt": "The old man"},
    "/detokenize": {"tokens": [70, 71, 72]},
}
# Fields that are checked by hand for the sake of their error messages.
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT_PART: Schema = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "additionalProperties": False,
}
_CONTENT: Schema = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}, {"type": "null"}]}
_TOOL_CHOICE: Schema = {"anyOf": [{"enum": ["auto", "none", "required"]}, {"type": "object"}]}
SHAPES: dict[tuple[type[BaseModel], str], Schema] = {
    (CompletionFields, "prompt"): {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}, "minItems": 1},
            _IDS,
            {"type": "array", "items": _IDS, "minItems": 1},
        ]
    },
    (ResponseFields, "input"): {
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}, "minItems": 1}]
    },
    (Message, "content"): _CONTENT,
    (FunctionCall, "arguments"): {"type": "string", "contentMediaType": "application/json", "default": "{}"},
    **{(kind, "tool_choice"): _TOOL_CHOICE for kind in (ChatFields, ChatTokenizeFields, ResponseFields)},
    **{
        (kind, "stop"): {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": 4},
            ]
        }
        for kind in (ChatFields, CompletionFields)
    },
}
TOOLS: dict[type[BaseModel], type[BaseModel]] = {
    ChatFields: Tool,
    ChatTokenizeFields: Tool,
    ResponseFields: FunctionTool,
}


def example(path: str, model_name: str) -> Schema:
    return {"model": model_name, **EXAMPLES[path]}


def ref(kind: type[BaseModel]) -> Schema:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def schemas_of(kinds: list[type[BaseModel]], model_name: str) -> Schema:
    """By name: `kinds`, all bodies, and what they are made of."""
    bodies = [kind for kinds_of_path in BODIES.values() for kind in kinds_of_path]
    every = dict.fromkeys([*bodies, *TOOLS.values(), *kinds])
    _, models = models_json_schema(
        [(kind, "validation") for kind in every], ref_template="#/components/schemas/{model}"
    )
    schemas: Schema = models["$defs"]
    for kind, tool in TOOLS.items():
        schemas[kind.__name__]["properties"]["tools"]["items"] = ref(tool)
    for (kind, name), shape in SHAPES.items():
        fields = schemas[kind.__name__]["properties"]
        fields[name] = {"title": fields[name]["title"]} | shape
    schemas["Message"] = message(schemas["Message"])
    for kind in bodies:
        describe_body(schemas[kind.__name__], kind, model_name)
    return schemas


def describe_body(schema: Schema, kind: type[BaseModel], model_name: str) -> None:
    """Null is "not given" wherever a field may be left out. Some fields are taken at values that change nothing."""
    fields = schema["properties"]
    refused = REFUSED if kind is ResponseFields else {}
    for name in refused:
        fields.pop(name, None)
    for name, values in (NEUTRAL | refused).items():
        if name not in fields:
            fields[name] = {"enum": list(values), "description": "changes nothing at this value, refused at others"}
    fields["model"] = {"title": "Model", "type": "string", "enum": [model_name]}
    for name in fields.keys() - set(schema["required"]):
        fields[name] = nullable(fields[name])
    schema["additionalProperties"] = {"type": "null"}


def message(schema: Schema) -> Schema:
    """Only the assistant calls tools, and with calls or thoughts may say nothing."""
    fields = schema["properties"]
    *spoken, _ = _CONTENT["anyOf"]
    others = [role for role in fields["role"]["enum"] if role != "assistant"]
    shapes: list[tuple[Schema, list[str]]] = [
        ({"role": {"enum": others}, "content": {"anyOf": spoken}, "tool_calls": {"type": "null"}}, ["content"]),
        ({"role": {"const": "assistant"}, "content": {"anyOf": spoken}}, ["content"]),
        (
            {"role": {"const": "assistant"}, "tool_calls": {"type": "array", "items": ref(ToolCall), "minItems": 1}},
            ["tool_calls"],
        ),
        (
            {"role": {"const": "assistant"}, "reasoning_content": {"type": "string", "minLength": 1}},
            ["reasoning_content"],
        ),
    ]
    return {
        "title": schema["title"],
        "description": schema["description"],
        "anyOf": [
            {"type": "object", "properties": fields | own, "required": ["role", *needed], "additionalProperties": False}
            for own, needed in shapes
        ],
    }


def nullable(schema: Schema) -> Schema:
    if {"type": "null"} in schema.get("anyOf", ()) or not schema.keys() & {"anyOf", "type", "enum", "$ref"}:
        return schema
    if "anyOf" in schema:
        return schema | {"anyOf": [*schema["anyOf"], {"type": "null"}]}
    kept = {name: schema[name] for name in ("title", "default", "description") if name in schema}
    return kept | {"anyOf": [{k: v for k, v in schema.items() if k not in kept}, {"type": "null"}]}
