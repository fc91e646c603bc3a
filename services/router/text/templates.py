"""Chat templates, rendered character for character as `transformers` renders them, without importing it.

The environment (sandbox, whitespace rules, filters, globals) follows
`transformers.utils.chat_template_utils._compile_jinja_template`; where templates come from follows its tokenizer
loading.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from twinflow.contracts.errors import BadRequest, ModelError

NAMED_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# What a template may raise on a conversation that it was not written for.
_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
_OF_TABLES = frozenset(dir(dict))
_OF_LOOPS = frozenset({"first", "last", "index", "index0", "length"})
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class _Environment(ImmutableSandboxedEnvironment):
    """Nearly all that templates ask for are keys of plain tables, of which Python makes an error first, as none is an attribute,
    and places in a loop, which nothing has to be found out about."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute in obj and attribute not in _OF_TABLES:
            return obj[attribute]
        if type(obj) is LoopContext and attribute in _OF_LOOPS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` blocks mark the assistant's part for training; here they render as their content."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _environment() -> ImmutableSandboxedEnvironment:
    env = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = lambda fmt: datetime.now().strftime(fmt)
    return env


class ChatTemplate:
    """The template(s) of one model. `sources` maps names to jinja text; a single one is named `default`."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are visible to the template by name. Raises ModelError when a template does not parse."""
        env = _environment()
        self.sources = tuple(sources.values())
        try:
            self._templates = {name: env.from_string(text) for name, text in sources.items()}
        except jinja2.TemplateError as e:
            raise ModelError(f"the model's chat template does not parse: {e}") from e
        # A plain table: it is copied for each rendering, and the chain that it was takes much longer to copy.
        for template in self._templates.values():
            template.globals = dict(template.globals)
        self._special_tokens = dict(special_tokens)

    def __bool__(self) -> bool:
        return bool(self._templates)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """Raises BadRequest when the template refuses the conversation, or there is no template."""
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            raise BadRequest("this model has no chat template; use /v1/completions", param="messages")
        try:
            return template.render(
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self._special_tokens, **(extra or {})},
            )
        except _REFUSALS as e:
            raise BadRequest(f"the model's chat template refuses these messages: {e}", param="messages") from e


def load_chat_template(folder: Path) -> ChatTemplate:
    """From chat_template.jinja (wins), additional_chat_templates/ and tokenizer_config.json of a model folder."""
    config = read_json(folder / "tokenizer_config.json")
    stored = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    sources: dict[str, str] = {}
    if isinstance(stored, str):
        sources["default"] = stored
    elif isinstance(stored, list):
        sources = {t["name"]: t["template"] for t in stored}
    main = folder / "chat_template.jinja"
    if main.is_file():
        sources["default"] = main.read_text(encoding="utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = path.read_text(encoding="utf-8")
    return ChatTemplate(sources, special_tokens(folder))


def special_tokens(folder: Path) -> dict[str, str]:
    """`bos_token` … of a model folder, those that are set."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):  # the later one wins
        for key, value in read_json(folder / name).items():
            if key in NAMED_SPECIAL_TOKENS:
                text = value.get("content") if isinstance(value, dict) else value
                if isinstance(text, str):
                    found[key] = text
    return found


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, {} when the file is not there. Raises ModelError when it is no JSON object."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ModelError(f"{path} is not valid JSON: {e}") from e
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value
