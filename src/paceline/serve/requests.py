"""From what a client sent to what the engine takes."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from paceline.core.sampling import SamplingParams
from paceline.core.types import ModelInfo, Request, StructuredOutput
from paceline.errors import OptionError
from paceline.hub.tokenizer import Message, Tokenizer
from paceline.serve.errors import ApiError
from paceline.serve.schema import ChatMessage, ChatRequest, CommonParams, CompletionRequest, Content, TokenizeRequest
from paceline.serve.settings import ServerConfig

COMPLETION_TOKENS = 16  # what OpenAI writes if a plain completion does not say how much
SEEDS = 1 << 63


@dataclass(frozen=True, slots=True)
class Choice:
    """One text asked for. echo: what is shown before it."""

    request: Request
    echo: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """All that one HTTP request asks for."""

    choices: list[Choice]
    prompt_tokens: int
    stream: bool
    include_usage: bool
    figures: bool  # x_paceline


class Desk:
    """Reads requests: templates, tokens, limits, grammars."""

    def __init__(self, tokenizer: Tokenizer, info: ModelInfo, settings: ServerConfig) -> None:
        self._tokenizer, self._card, self._settings = tokenizer, info, settings

    def chat(self, body: ChatRequest) -> Job:
        """Raises ApiError, OptionError or PromptError."""
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        wanted = body.max_completion_tokens or body.max_tokens or self._settings.limits.default_new_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        prompt = self._tokenizer.encode([as_message(message) for message in body.messages])
        return self._job(body, [prompt], [""], wanted, logprobs)

    def completion(self, body: CompletionRequest) -> Job:
        """Raises ApiError, OptionError or PromptError."""
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise ApiError(400, "best_of is supported only where it equals n", param="best_of")
        if body.echo and body.logprobs is not None:
            raise ApiError(400, "echo together with logprobs is not supported", param="echo")
        texts = [body.prompt] if isinstance(body.prompt, str) or isinstance(body.prompt[0], int) else body.prompt
        prompts = [self._tokenizer.encode(text) for text in texts]
        echoes = [""] * len(texts)
        if body.echo:
            echoes = [text if isinstance(text, str) else self._tokenizer.decode(ids) for text, ids in zip(texts, prompts)]
        return self._job(body, prompts, echoes, body.max_tokens or COMPLETION_TOKENS, body.logprobs)

    def tokens(self, body: TokenizeRequest) -> list[int]:
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages")
        if body.messages is not None:
            return self._tokenizer.encode([as_message(message) for message in body.messages])
        return self._tokenizer.encode(body.prompt or "")

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self._settings.names:
            words = f"there is no model {name[:80]!r} here; there is {', '.join(self._settings.names)}"
            raise ApiError(404, words, param="model", code="model_not_found")

    # --- inside -------------------------------------------------------------------------------------------------------

    def _job(
        self, body: CommonParams, prompts: list[list[int]], echoes: list[str], wanted: int, logprobs: int | None
    ) -> Job:
        self._check(body, prompts, wanted)
        sampling = sampling_of(body, self._card.vocab_size)
        choices: list[Choice] = []
        for prompt, echo in zip(prompts, echoes):
            for _ in range(body.n or 1):
                request = self._request(body, prompt, _reseeded(sampling, len(choices)), wanted, logprobs)
                choices.append(Choice(request, echo))
        counted = sum(len(prompt) for prompt in prompts)
        usage = bool(body.stream_options and body.stream_options.include_usage)
        return Job(choices, counted, bool(body.stream), usage, bool(body.x_paceline))

    def _request(
        self, body: CommonParams, prompt: list[int], sampling: SamplingParams, wanted: int, logprobs: int | None
    ) -> Request:
        chosen = body.speculative
        k = chosen.num_draft_tokens if chosen is not None else None
        k = self._settings.num_draft_tokens if k is None else k
        return Request(
            prompt,
            sampling,
            wanted,
            stop=body.stops,
            ignore_eos=bool(body.ignore_eos),
            method=chosen.method if chosen else None,
            num_draft_tokens=k if isinstance(k, int) else None,
            prediction=self._prediction(body),
            logprobs=logprobs,
            structured_output=self._structured_output(body),
        )

    def _check(self, body: CommonParams, prompts: list[list[int]], wanted: int) -> None:
        limits, count = self._settings.limits, len(prompts) * (body.n or 1)
        self.check_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")
        if count > limits.choices:
            raise ApiError(400, f"one request may ask for {limits.choices} texts at most, not {count}", param="n")
        if wanted > limits.new_tokens:
            raise ApiError(400, f"one text may have {limits.new_tokens} new tokens at most", param="max_tokens")
        longest = max(len(prompt) for prompt in prompts)
        if longest > limits.prompt_tokens:
            raise ApiError(
                400,
                f"the prompt has {longest} tokens; {limits.prompt_tokens} are allowed",
                code="context_length_exceeded",
            )

    def _prediction(self, body: CommonParams) -> list[int] | None:
        if body.prediction is None:
            return None
        words = joined_content(body.prediction.content)
        return [int(token) for token in self._tokenizer.hf_tokenizer(words, add_special_tokens=False).input_ids] or None

    def _structured_output(self, body: CommonParams) -> StructuredOutput | None:
        response_format = body.response_format
        if response_format is None or response_format.type == "text":
            return None
        if response_format.type == "json_object":
            return StructuredOutput("json_object")
        if response_format.json_schema is None:
            raise ApiError(400, "response_format json_schema needs its json_schema", param="response_format")
        schema = response_format.json_schema.schema_
        try:
            return StructuredOutput("json_schema", json.dumps(schema) if schema else "")
        except (ValueError, RecursionError) as error:
            raise OptionError(f"the JSON schema cannot be read: {error}") from error


def as_message(message: ChatMessage) -> Message:
    """As chat templates know it: they have no developers, and content is one text."""
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": joined_content(message.content or "")}


def joined_content(content: Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def sampling_of(body: CommonParams, vocab_size: int) -> SamplingParams:
    """OpenAI's defaults where the client is silent: temperature 1."""
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=max(0, body.top_k or 0),
        top_p=body.top_p or 1.0,
        min_p=body.min_p or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_bias(body.logit_bias or {}, vocab_size),
        seed=body.seed,
    )


def _bias(given: dict[str, float], vocab_size: int) -> dict[int, float]:
    found: dict[int, float] = {}
    for word, value in given.items():
        if not word.isascii() or not word.isdigit() or len(word) > 12 or int(word) >= vocab_size:
            raise OptionError(f"logit_bias is keyed by token ids from 0 to {vocab_size - 1}")
        found[int(word)] = value
    return found


def _reseeded(sampling: SamplingParams, number: int) -> SamplingParams:
    """Each of several texts has a seed of its own, and the same one every time."""
    if sampling.seed is None or not number:
        return sampling
    return replace(sampling, seed=(sampling.seed + number) % SEEDS)
