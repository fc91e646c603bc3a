"""What a reply is to be: `response_format`, `structured_outputs`, and the tools' share in it → one grammar, or none.

Grammars themselves are read by the workers, which answer for what is none; here only the fields are checked.
"""

import dataclasses
import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr

from services.router.http.tools import Chosen
from services.router.text.calls.formats import CallFormat
from services.router.text.calls.grammar import CallGrammar, schema_text
from services.router.text.reasoning import CLOSE, OPEN, opened_by
from services.router.text.tokenizer import ModelText
from twinflow.contracts.errors import BadRequest, Unsupported
from twinflow.contracts.requests import Grammar, GrammarKind

MAX_CHOICES = 1024

_OBJECT: dict[str, Any] = {"type": "object"}


class JsonSchema(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: StrictStr | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: StrictBool | None = None


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def grammar(self) -> Grammar | None:
        if (self.type == "json_schema") != (self.json_schema is not None):
            path = "response_format.json_schema"
            told = "is missing" if self.json_schema is None else f"does not go with type {self.type!r}"
            raise BadRequest(f"{path} {told}", param=path)
        if self.json_schema is not None:
            path = "response_format.json_schema.schema"
            return json_grammar(self.json_schema.schema_, path, strict=bool(self.json_schema.strict))
        return json_grammar(_OBJECT, "response_format", strict=True) if self.type == "json_object" else None


class TextFormat(BaseModel):
    """`response_format` as /v1/responses has it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] | None = None
    description: StrictStr | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: StrictBool | None = None


class TextOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    format: TextFormat = TextFormat()
    verbosity: Literal["medium"] | None = None

    def grammar(self) -> Grammar | None:
        f, path = self.format, "text.format"
        if f.type == "json_schema":
            if f.name is None or f.schema_ is None:
                path = f"{path}.{'name' if f.name is None else 'schema'}"
                raise BadRequest(f"{path} is missing", param=path)
            return json_grammar(f.schema_, f"{path}.schema", strict=bool(f.strict))
        if f.schema_ is not None:
            raise BadRequest(f"{path}.schema does not go with type {f.type!r}", param=f"{path}.schema")
        return json_grammar(_OBJECT, path, strict=True) if f.type == "json_object" else None

    def told(self) -> dict[str, Any]:
        """As it comes back with the response."""
        return self.format.model_dump(by_alias=True, exclude_none=True)


class StructuredOutputs(BaseModel):
    """One of them, as vLLM has it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    json_object: Literal[True] | None = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES)] | None = (
        None
    )
    grammar: Annotated[str, Field(min_length=1)] | None = None

    def as_grammar(self) -> Grammar:
        found = {name: value for name, value in self.model_dump(by_alias=True).items() if value is not None}
        if len(found) != 1:
            told = ", ".join(found) or "none"
            raise BadRequest(
                f"structured_outputs: expected one of json, json_object, regex, choice, grammar; got {told}",
                param="structured_outputs",
            )
        ((name, value),) = found.items()
        path = f"structured_outputs.{name}"
        match name:
            case "json":
                return json_grammar(_loaded(value, path), path, strict=True)
            case "json_object":
                return json_grammar(_OBJECT, path, strict=True)
            case "regex":
                return Grammar(GrammarKind.REGEX, value, field=path)
            case "choice":
                return Grammar(GrammarKind.CHOICE, json.dumps(value), field=path)
            case _:
                return Grammar(GrammarKind.GRAMMAR, value, field=path)


def answer_grammar(format: ResponseFormat | None, outputs: StructuredOutputs | None) -> Grammar | None:
    grammar = format.grammar() if format is not None else None
    if outputs is None:
        return grammar
    if grammar is not None:
        raise BadRequest("structured_outputs does not go with response_format: give one", param="structured_outputs")
    return outputs.as_grammar()


def json_grammar(schema: dict[str, Any], path: str, *, strict: bool) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), lenient=not strict, field=path)


def reply_grammar(text: ModelText, prompt: str, chosen: Chosen | None, answer: Grammar | None) -> Grammar | None:
    """Of a chat's reply. `prompt`: as rendered; `chosen`: the tools that may or must be called; `answer`: what an answer without
    calls must be. Raises BadRequest or Unsupported."""
    grammar = answer
    if chosen is not None and text.calls is not None:
        grammar = _with_calls(text, text.calls, chosen, answer)
    if grammar is None or not text.thinks or prompt.rstrip().endswith(CLOSE):
        return grammar
    opened = opened_by(prompt)
    start, end = text.token_id(OPEN), text.token_id(CLOSE)
    if end is None:
        if opened:
            told = f"{grammar.field}: this model's thoughts do not end with a token of their own, after which it would hold"
            raise Unsupported(told, param=grammar.field)
        return grammar
    if not opened and start is None:
        return grammar
    return dataclasses.replace(grammar, think_end=end, think_start=None if opened else start)


def _with_calls(text: ModelText, form: CallFormat, chosen: Chosen, answer: Grammar | None) -> Grammar | None:
    if answer is None and not chosen.required and not chosen.strict and chosen.parallel:
        return None
    if answer is not None and answer.kind is not GrammarKind.JSON_SCHEMA:
        raise BadRequest(f"{answer.field} does not go with tools: send tool_choice=none", param=answer.field)
    calls = CallGrammar(form, chosen.functions, text.marker_id, chosen.parallel)
    field = f"{chosen.functions[0][0]}.parameters" if len(chosen.functions) == 1 else "tools"
    if chosen.required:
        return Grammar(GrammarKind.GRAMMAR, calls.required(), field=field)
    if answer is None:
        return Grammar(GrammarKind.GRAMMAR, calls.free(), field=field)
    schema = schema_text(json.loads(answer.text), lenient=answer.lenient)
    return Grammar(GrammarKind.GRAMMAR, calls.or_answer(schema), field=answer.field)


def _loaded(schema: Any, path: str) -> dict[str, Any]:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as e:
            raise BadRequest(f"{path} is not valid JSON: {e}", param=path) from None
    if not isinstance(schema, dict):
        raise BadRequest(f"{path}: expected a JSON schema, an object", param=path)
    return schema
