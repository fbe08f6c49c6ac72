"""OpenAI's completion routes: text comes from the server, token ids where it returns them.

A server that returns no ids leaves them to the tokenizer that the user names. Without one there are none: outputs are
text alone, tokens are counted from the server's usage, and log-probabilities are refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any

from paceline.core.request_fields import text_list
from paceline.core.sampling import SamplingParams
from paceline.core.stats import SpecStats
from paceline.core.types import Request, RequestOutput, StructuredOutput
from paceline.engines.http.acceptance import DraftCounts, counts_in_event
from paceline.engines.http.client import Json
from paceline.engines.http.openai_logprobs import TokenIds, logprobs_of
from paceline.engines.http.server_kinds import REQUEST_FIELDS, ServerKind
from paceline.engines.http.step_marks import StepMarks
from paceline.engines.http.text_tokenizer import messages_of, text_of
from paceline.engines.http.wire import Call
from paceline.errors import OptionError
from paceline.hub.tokenizer import Tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NEUTRAL = SamplingParams()
MORE_FIELDS = ("top_k", "min_p", "repetition_penalty")  # of SamplingParams; few servers know them
OPENAI_FIELDS = ("presence_penalty", "frequency_penalty", "seed")


@dataclass(frozen=True, slots=True)
class OpenAIWire:
    """Requests to one server.

    knows_tokens              the ids of requests are tokens of the model; else they are the bytes of the prompt
    method, num_draft_tokens  sent with requests that name none themselves; None: the server's own
    """

    kind: ServerKind
    model: str
    tokenizer: Tokenizer
    knows_tokens: bool = True
    method: str | None = None
    num_draft_tokens: int | None = None

    def check(self, request: Request) -> None:
        names = {name for name in MORE_FIELDS if getattr(request.sampling, name) != getattr(NEUTRAL, name)}
        names |= {"ignore_eos"} if request.ignore_eos else set()
        names |= {"min_tokens"} if request.min_new_tokens else set()
        if unknown := sorted(names - self.kind.fields):
            raise OptionError(f"a server of kind {self.kind.name} does not take {unknown[0]}; leave it out")
        if not self.kind.takes_method and (request.method or request.num_draft_tokens is not None):
            raise OptionError("this server decides itself how it drafts; set that where it is started")
        if request.logprobs is not None and not self.knows_tokens:
            raise OptionError("log-probabilities need the model's tokenizer: --engine-option tokenizer=MODEL")
        if request.sampling.logit_bias and not self.knows_tokens:
            raise OptionError("logit_bias needs the model's tokenizer: --engine-option tokenizer=MODEL")
        self._structured_output(request.structured_output)

    def call(self, request: Request) -> Call:
        messages = None if self.knows_tokens else messages_of(request.prompt)
        body: Json = {
            "model": self.model,
            "max_tokens": request.max_new_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._sampling(request),
            **self._structured_output(request.structured_output),
            **self._speculation(request),
            **self._more_fields(request),
            **self.kind.always,
        }
        if stop := list(text_list("stop", request.stop)):
            body["stop"] = stop
        if request.logprobs is not None:
            body |= {"logprobs": request.logprobs, **self.kind.with_logprobs}
        if messages is not None:
            return Call(CHAT, {**body, "messages": messages})
        return Call(COMPLETIONS, {**body, "prompt": self._prompt(request.prompt)})

    def reader(self, request: Request) -> OpenAIReader:
        ids = TokenIds(self.tokenizer) if self.knows_tokens else None
        return OpenAIReader(ids, request.logprobs)

    def _prompt(self, prompt: list[int]) -> str | list[int]:
        if not self.knows_tokens:
            return text_of(prompt)
        return prompt if self.kind.takes_token_ids else str(self.tokenizer.hf_tokenizer.decode(prompt))

    def _sampling(self, request: Request) -> Json:
        sampling = request.sampling
        body: Json = {"temperature": sampling.temperature, "top_p": sampling.top_p}
        for name in (*MORE_FIELDS, *OPENAI_FIELDS):
            if getattr(sampling, name) != getattr(NEUTRAL, name):
                body[name] = getattr(sampling, name)
        if sampling.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
        if request.ignore_eos:
            body["ignore_eos"] = True
        if request.min_new_tokens:
            body["min_tokens"] = request.min_new_tokens
        return body

    def _speculation(self, request: Request) -> Json:
        chosen = {
            "method": request.method or self.method,
            "num_draft_tokens": self.num_draft_tokens if request.num_draft_tokens is None else request.num_draft_tokens,
        }
        chosen = {name: value for name, value in chosen.items() if value is not None}
        return {"speculative": chosen} if chosen and self.kind.takes_method else {}

    def _more_fields(self, request: Request) -> Json:
        """Fields that few servers have, where a request uses them; others are refused before."""
        own = {item.name: item.default for item in fields(request) if item.name in self.kind.request_fields}
        values = {name: getattr(request, name) for name in own if getattr(request, name) != own[name]}
        return {REQUEST_FIELDS[name]: value for name, value in values.items()}

    def _structured_output(self, output: StructuredOutput | None) -> Json:
        if output is None:
            return {}
        if output.kind == "json_object" or (output.kind == "json_schema" and not output.value):
            return {"response_format": {"type": "json_object"}}
        if output.kind == "json_schema":
            schema = {"name": "output", "schema": json.loads(output.value)}
            return {"response_format": {"type": "json_schema", "json_schema": schema}}
        if output.kind == "regex" and self.kind.regex_field is not None:
            value: Any = output.value
            for name in reversed(self.kind.regex_field):
                value = {name: value}
            return dict(value)
        raise OptionError(f"a server of kind {self.kind.name} does not take a {output.kind}; use a JSON schema")


@dataclass(slots=True)
class OpenAIReader:
    """One answer. ids: makes token ids of text, where the tokenizer is known."""

    ids: TokenIds | None
    logprobs: int | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    marks: StepMarks = field(default_factory=StepMarks)
    counts: DraftCounts | None = None
    _stats: SpecStats = field(default_factory=SpecStats)
    _usage: int | None = None  # tokens of the answer, as the server counts them
    _num_tokens: int = 0

    @property
    def stats(self) -> SpecStats:
        return self._stats

    @property
    def draft_lengths(self) -> dict[int, int]:
        return self.marks.draft_lengths

    @property
    def knows_drafts(self) -> bool:
        return self.counts is not None or self.marks.seen

    def feed(self, event: Json) -> list[RequestOutput]:
        self.counts = counts_in_event(event) or self.counts
        if isinstance(usage := event.get("usage"), dict):
            self._usage, self.prompt_tokens = usage.get("completion_tokens"), usage.get("prompt_tokens")
            self.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        return [output for choice in event.get("choices") or () for output in self._choice(choice)]

    def end(self) -> str:
        """Counts: the server's own where it has told them, else those of the tokens that came."""
        new_tokens = self._num_tokens if self._usage is None else self._usage
        if self.marks.seen:
            self._stats = self.marks.stats(new_tokens)
        elif self.counts is not None:
            self._stats = self.counts.stats(new_tokens)
        else:
            self._stats = SpecStats(new_tokens)
        return ""

    def _choice(self, choice: Json) -> list[RequestOutput]:
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.stop_reason = choice.get("stop_reason", self.stop_reason)
        text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        mark = self.marks.read(choice.get("x_paceline"))
        tokens = self._tokens(choice, text)
        self._num_tokens += len(tokens) or bool(text)
        if not text and not tokens:
            return []
        logprobs = None
        if self.logprobs is not None and self.ids is not None:
            logprobs = logprobs_of(choice.get("logprobs"), tokens, self.ids, self.logprobs)
        return [RequestOutput(text, tuple(tokens), mark.from_draft, logprobs, num_drafted=mark.num_drafted)]

    def _tokens(self, choice: Json, text: str) -> list[int]:
        returned = choice.get("token_ids")
        if isinstance(returned, list):
            return [int(token) for token in returned]
        return [] if self.ids is None else self.ids.of_text(text)
