"""Chat templates without transformers: the same text, or none at all."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from paceline.hub.chat_template import NOTHING_GIVEN, PROBES, agrees, rendered
from tests.support.tiny import CHAT_TEMPLATE, byte_tokenizer

USER = {"role": "user", "content": "a < b & 'c' é"}
TOOLS = """{%- set ns = namespace(last=0, text='') %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- set ns.last = loop.index %}
    {{- bos_token + message.role }}: {{ message.content | trim }}
    {%- if message.tool_calls is defined and message.tool_calls %}
        {%- for call in message.tool_calls %} <call>{{ call.function | tojson }}</call>{% endfor %}
    {%- endif %}
    {%- if message.reasoning_content %} <think>{{ message.reasoning_content }}</think>{% endif %}
{% endfor %}
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- if documents %}{{ documents[0].title }}{% endif %}
{%- if add_generation_prompt %}{{ ns.last }}: assistant{% if enable_thinking is false %} quick{% endif %}{% endif %}"""
STRICT = """{% for message in messages %}
{% if message.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ message.content }}{% endfor %}"""
DATED = "{{ strftime_now('%Y') }} {{ dict(a=1).a }} {% for m in messages %}{{ m.role }}{% endfor %}"
THINKING = "{% for m in messages %}{{ m.thinking or '-' }}{{ m.content }}{% endfor %}"
TEMPLATES = {"plain": CHAT_TEMPLATE, "tools": TOOLS, "strict": STRICT, "dated": DATED, "thinking": THINKING}


def by_transformers(template: str, messages: list[dict[str, Any]], **given: Any) -> str | None:
    try:
        return str(byte_tokenizer().apply_chat_template(messages, chat_template=template, tokenize=False, **given))
    except Exception:
        return None


def here(template: str, **given: Any) -> str | None:
    return rendered(template, {**byte_tokenizer().special_tokens_map, **NOTHING_GIVEN, **given})


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_probe_renders_as_in_transformers(name: str) -> None:
    texts = [here(TEMPLATES[name], **probe) for probe in PROBES]
    assert texts == [by_transformers(TEMPLATES[name], **probe) for probe in PROBES] and any(texts)
    assert agrees(TEMPLATES[name], byte_tokenizer().special_tokens_map, partial(by_transformers, TEMPLATES[name]))


def test_a_template_that_renders_otherwise_does_not_agree() -> None:
    special = byte_tokenizer().special_tokens_map
    assert not agrees(CHAT_TEMPLATE, special, lambda **given: f"{by_transformers(CHAT_TEMPLATE, **given)} ")
    assert not agrees("{% generation %}{{ messages[0].content }}{% endgeneration %}", special, lambda **given: "x")


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ messages.__class__ }}",
        "{{ namespace(_x=1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{% if %}",
    ],
)
def test_what_fails_here_is_left_to_transformers(template: str) -> None:
    assert not here(template, messages=[USER]) and not by_transformers(template, [USER])


class Loud(str):
    """A string that can do more than others."""


@pytest.mark.parametrize("value", [Loud("x"), b"x", object(), ("x",), {1: "x"}, [{"x": Loud("y")}], len])
def test_what_is_not_json_is_left_to_transformers(value: object) -> None:
    assert here("{{ messages[0].content }}", messages=[{"role": "user", "content": value}]) is None
    assert here("{{ messages[0].content }}", messages=[USER], extra=value) is None
