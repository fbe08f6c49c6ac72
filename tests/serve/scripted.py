"""An engine that writes prepared outputs, so that a test can say what a model answers; and templates with tools."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from typing import Any

from paceline.core.protocols import Engine
from paceline.core.stats import EngineStats, SpecStats
from paceline.core.types import ModelInfo, Request, RequestOutput, TokenLogprob
from paceline.hub.tokenizer import Tokenizer
from tests.support.tiny import byte_tokenizer

# As much as the tests need of what the templates of a family do: tools, calls and results in the prompt.
TOOL_TEMPLATE = """{% if tools %}<s>tools: {{ tools | tojson }}</s>{% endif -%}
{% if documents %}<s>documents: {{ documents | tojson }}</s>{% endif -%}
{% for message in messages %}<s>{{ message.role }}: {{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant: {% endif %}"""
THINKING_TEMPLATE = (
    TOOL_TEMPLATE + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}<think>\n\n"
    "</think>\n\n{% endif %}"
)
OPEN_THINKING_TEMPLATE = (
    TOOL_TEMPLATE + "{% if add_generation_prompt %}{% if enable_thinking is not defined or enable_thinking %}<think>\n"
    "{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
INFO = ModelInfo("scripted", 320, frozenset({257}), 8192, 1, 1, "cpu", "fp32")


def tokenizer_with(template: str, *, tokens: tuple[str, ...] = (), special: tuple[str, ...] = ()) -> Any:
    """The byte tokenizer with a chat template and tokens of its own."""
    hf_tokenizer = byte_tokenizer()
    hf_tokenizer.chat_template = template
    hf_tokenizer.add_tokens(list(tokens))
    if special:
        hf_tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    return hf_tokenizer


class ScriptedEngine(Engine):
    """Answers each request with the next prepared output, in runs of random length.

    prompts  what it was asked, as text
    """

    def __init__(self, hf_tokenizer: Any) -> None:
        self.info, self.methods = INFO, ("script",)
        self._tokenizer = Tokenizer(hf_tokenizer)
        self.outputs: list[str] = []
        self.requests: list[Request] = []

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def prompts(self) -> list[str]:
        return [str(self.tokenizer.hf_tokenizer.decode(request.prompt)) for request in self.requests]

    def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        self.requests.append(request)
        return self._outputs(request, self.outputs.pop(0), random.Random(len(self.requests)))

    def stats(self) -> EngineStats:
        return EngineStats()

    async def close(self) -> None:
        return None

    async def _outputs(self, request: Request, text: str, rng: random.Random) -> AsyncIterator[RequestOutput]:
        tokens = self.tokenizer.hf_tokenizer(text, add_special_tokens=False).input_ids
        detokenizer = self.tokenizer.stream(skip_special_tokens=request.skip_special_tokens)
        while tokens:
            size = rng.randint(1, 9)
            run, tokens = tokens[:size], tokens[size:]
            logprobs = tuple(TokenLogprob(token, -0.1) for token in run) if request.logprobs is not None else None
            yield RequestOutput(detokenizer.feed(run), tuple(run), bool(size % 2), logprobs)
        yield RequestOutput(detokenizer.flush(), finish_reason="stop", stats=SpecStats())
