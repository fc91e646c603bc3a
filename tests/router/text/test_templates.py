"""Templates render as transformers renders them, character for character."""

import json
import re
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from services.router.text.templates import _OF_LOOPS, _environment, load_chat_template
from services.router.text.tokenizer import load_model_text
from tests.router.conftest import TEMPLATE, write_model
from twinflow.contracts.errors import BadRequest, ModelError

SHIPPED = Path(__file__).parents[3] / "models" / "twinflow-tiny" / "chat_template.jinja"

TRICKY = """{# a comment #}
{%- macro show(x) %}[{{ x | tojson }}]{% endmacro %}
{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ not_there }}
    {% if tools %}
tools: {{ tools | tojson(indent=2) }}
    {% endif %}
{% for m in messages %}
    {% if m.role == 'system' %}{% continue %}{% endif %}
    {% if loop.index > 6 %}{% break %}{% endif %}
<{{ m['role'] }}> {{ m.content | trim }} {{ show(m.content) }}
    {% for c in m.tool_calls or [] %}
  call {{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }};{% endfor %})
    {% endfor %}
    {% generation %}{{ 'G' }}{{ m.role }}{% endgeneration %}
{% endfor %}
{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}
{{ strftime_now('%Y') | length }} {{ {'a': 1, 'ü': '<&>'} | tojson(sort_keys=true, separators=(',', ':')) }}
{% if enable_thinking is defined and enable_thinking %}think{% endif %}
{% if add_generation_prompt %}GO{% endif %}
"""

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": '  What\'s <b>up</b> & "why"? 日本 😀 '},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "look", "arguments": {"at": "Zürich", "n": [1, None]}},
            }
        ],
    },
    {"role": "tool", "content": '{"t": 3}', "tool_call_id": "c1", "name": "look"},
    {"role": "user", "content": "thanks\n"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Größe & <more>",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    }
]


@pytest.fixture(scope="module", params=["plain", "tricky", "shipped"])
def folder(request, tmp_path_factory):
    template = {"plain": TEMPLATE, "tricky": TRICKY, "shipped": SHIPPED.read_text()}[request.param]
    return write_model(tmp_path_factory.mktemp("t") / request.param, template, unk_token="<|endoftext|>")


@pytest.fixture(scope="module")
def theirs(folder):
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("prompt", [True, False], ids=["generate", "whole"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no-tools", "tools"])
@pytest.mark.parametrize("extra", [{}, {"enable_thinking": True}], ids=["", "extra"])
@pytest.mark.parametrize("messages", [CHAT[:2], CHAT[1:2], CHAT], ids=["system", "user", "calls"])
def test_equals_transformers(folder, theirs, messages, tools, extra, prompt):
    ours = load_chat_template(folder).render(messages, tools, add_generation_prompt=prompt, extra=extra)
    expected = theirs.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt, **extra)
    assert ours == expected


def test_token_ids_equal_transformers(folder, theirs):
    """Chat prompts get no special tokens besides the template's; plain prompts what the post-processor adds."""
    text = load_model_text(folder)
    rendered = text.template.render(CHAT)
    ids = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert text.encode_now(rendered, add_special_tokens=False) == list(ids)
    for prompt in ("hello <|im_end|> <tool_call>", " two  spaces\n\n", "日本😀"):
        assert text.encode_now(prompt, add_special_tokens=True) == theirs(prompt)["input_ids"]
    assert text.eos_token_ids == (theirs.eos_token_id,)


def test_post_processor_applies_to_plain_prompts_only(tmp_path):
    from tokenizers import processors

    from tests.router.conftest import build_tokenizer

    tokenizer = build_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    text = load_model_text(write_model(tmp_path, tokenizer=tokenizer))
    assert text.encode_now("hello", add_special_tokens=True) == [0, *text.encode_now("hello", add_special_tokens=False)]


def test_templates_by_name_in_the_tokenizer_config(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    folder = write_model(tmp_path, chat_template=named)
    (folder / "chat_template.jinja").unlink()
    template = load_chat_template(folder)
    assert (template.render(CHAT), template.render(CHAT, TOOLS)) == ("plain", "with tools")


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('roles must alternate') }}", "{{ messages[0].content.no.such }}", "{{ 1 / 0 }}"],
    ids=["raise", "undefined", "zero"],
)
def test_a_template_that_refuses_is_a_bad_request(tmp_path, template):
    with pytest.raises(BadRequest, match="template"):
        load_chat_template(write_model(tmp_path, template)).render(CHAT)


def test_templates_cannot_reach_out(tmp_path):
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(BadRequest):
        load_chat_template(write_model(tmp_path, escape)).render(CHAT)


OBJECTS = {
    "table": {"role": "user", "items": 1, "__class__": 2, "_a": 3, "keys": None},
    "own table": type("Table", (dict,), {"role": "its own"})(role="user"),
    "list": [1],
    "text": "{}",
    "none": None,
}
NAMES = ("role", "items", "keys", "get", "pop", "update", "append", "__class__", "_a", "format", "missing")


@pytest.mark.parametrize("kind", OBJECTS)
def test_what_a_template_sees_of_an_object_is_what_the_sandbox_shows(kind):
    plain = ImmutableSandboxedEnvironment()
    source = "{{ o.NAME }}|{{ o.NAME is defined }}|{{ o.NAME is callable }}"
    for name in NAMES:
        text = source.replace("NAME", name)
        told = []
        for env in (plain, _environment()):
            try:
                told.append(re.sub("0x[0-9a-f]+", "", env.from_string(text).render(o=OBJECTS[kind])))
            except SecurityError as e:
                told.append(str(e))
        assert told[0] == told[1], name


def test_places_in_a_loop(tmp_path):
    places = (
        "{% for m in messages %}" + "".join(f"{{{{ loop.{name} }}}} " for name in sorted(_OF_LOOPS)) + "{% endfor %}"
    )
    ours = load_chat_template(write_model(tmp_path, places)).render(CHAT)
    assert ours == ImmutableSandboxedEnvironment().from_string(places).render(messages=CHAT)
    assert ours.split()[:5] == ["True", "1", "0", "False", str(len(CHAT))]


def test_what_is_missing_or_broken_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_model_text(tmp_path)
    folder = write_model(tmp_path / "broken", "{% if %}")
    with pytest.raises(ModelError, match="does not parse"):
        load_model_text(folder)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(BadRequest, match="no chat template"):
        load_model_text(folder).template.render(CHAT)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config.json": {"eos_token_id": [1, 2]}, "config.json": {"eos_token_id": 5}}, (1, 2)),
        ({"config.json": {"eos_token_id": 5}}, (5,)),
        ({"config.json": {"text_config": {"eos_token_id": 7}}}, (7,)),
        ({}, (2,)),
    ],
    ids=["generation", "config", "text-config", "tokenizer"],
)
def test_eos_ids(tmp_path, files, expected):
    folder = write_model(tmp_path)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    assert load_model_text(folder).eos_token_ids == expected
