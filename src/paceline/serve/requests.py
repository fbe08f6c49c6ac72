"""Request bodies to engine requests: chat template, tokens, limits, sampling parameters, structured output."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from paceline.core.protocols import Engine
from paceline.core.sampling import SamplingParams
from paceline.core.types import Request, StructuredOutput
from paceline.errors import ContextLengthExceeded, OptionError, PromptError
from paceline.serve.config import ServerConfig
from paceline.serve.errors import ApiError
from paceline.serve.schema import (
    SEED_LIMIT,
    ChatMessage,
    ChatRequest,
    CommonParams,
    CompletionRequest,
    Content,
    ResponseFormatParam,
    TokenizeRequest,
)
from paceline.serve.token_text import TokenText

COMPLETION_MAX_TOKENS = 16  # OpenAI's max_tokens of a completion that gives none

LEAST_TOP_P = 1e-9  # top_p 0: the likeliest token alone


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """Token ids of a prompt. echo: what the response shows before the output."""

    token_ids: list[int]
    echo: str = ""


@dataclass(frozen=True, slots=True)
class ChoiceRequest:
    """One choice of a response: the engine request, and what is shown before its output."""

    request: Request
    echo: str = ""

    @property
    def uses_prediction(self) -> bool:
        """Whether the draft tokens come from the client's prediction."""
        return bool(self.request.prediction) and not self.request.method


@dataclass(frozen=True, slots=True)
class CompletionTask:
    """All that one HTTP request asks for."""

    choices: list[ChoiceRequest]
    prompt_tokens: int
    stream: bool = False
    include_usage: bool = False
    include_stats: bool = False  # x_paceline


class RequestBuilder:
    """Builds engine requests from request bodies. Raises ApiError, OptionError or PromptError."""

    def __init__(self, engine: Engine, token_text: TokenText, config: ServerConfig) -> None:
        self._tokenizer, self._info = engine.tokenizer, engine.info
        self._token_text, self._config = token_text, config
        self.max_model_len = min(engine.info.max_seq_len, config.max_model_len or engine.info.max_seq_len)

    def chat(self, body: ChatRequest) -> CompletionTask:
        """The engine requests of a chat completion."""
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        if body.asked_tokens == 0:
            raise ApiError(400, "max_tokens must be 1 or more; 0 is for a completion with echo", param="max_tokens")
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        prompts = [EncodedPrompt(self._encode_messages(body.messages))]
        return self._task(body, prompts, self._config.limits.chat_max_tokens, logprobs)

    def completion(self, body: CompletionRequest) -> CompletionTask:
        """The engine requests of a completion."""
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise ApiError(400, "best_of is supported only where it equals n", param="best_of")
        if body.echo and body.logprobs is not None:
            raise ApiError(400, "echo together with logprobs is not supported", param="echo")
        if body.max_tokens == 0 and not body.echo:
            raise ApiError(400, "max_tokens 0 generates nothing: it needs echo: true", param="max_tokens")
        is_single = isinstance(body.prompt, str) or isinstance(body.prompt[0], int)
        inputs = [body.prompt] if is_single else body.prompt
        prompts = [self._prompt(prompt, bool(body.echo)) for prompt in inputs]  # type: ignore[arg-type]
        return self._task(body, prompts, COMPLETION_MAX_TOKENS, body.logprobs)

    def tokenize(self, body: TokenizeRequest) -> list[int]:
        """Token ids of a prompt or of messages."""
        if body.messages is not None and body.prompt is None:
            return self._encode_messages(body.messages)
        if body.prompt is not None and body.messages is None:
            return self._tokenizer.encode(body.prompt)
        raise ApiError(400, "give either prompt or messages")

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 for a model that is not served."""
        names = self._config.served_model_names
        if name is not None and name not in names:
            message = f"there is no model {name[:80]!r} here; there is {', '.join(names)}"
            raise ApiError(404, message, param="model", code="model_not_found")

    # --- prompts ------------------------------------------------------------------------------------------------------

    def _encode_messages(self, messages: list[ChatMessage]) -> list[int]:
        return self._tokenizer.encode([template_message(message) for message in messages])

    def _prompt(self, prompt: str | list[int], echo: bool) -> EncodedPrompt:
        token_ids = self._tokenizer.encode(prompt)
        if not echo:
            return EncodedPrompt(token_ids)
        return EncodedPrompt(token_ids, prompt if isinstance(prompt, str) else self._tokenizer.decode(token_ids))

    def _truncated(self, prompt: EncodedPrompt, body: CommonParams) -> EncodedPrompt:
        """The prompt, cut to its last tokens as truncate_prompt_tokens says; -1: as many as fit."""
        limit = body.truncate_prompt_tokens
        if limit is None:
            return prompt
        if limit == -1:
            limit = self.max_model_len - (1 if body.asked_tokens is None else body.asked_tokens)
        return self._last_tokens(prompt, max(1, limit))

    def _last_tokens(self, prompt: EncodedPrompt, limit: int) -> EncodedPrompt:
        if len(prompt.token_ids) <= limit:
            return prompt
        token_ids = prompt.token_ids[-limit:]
        return EncodedPrompt(token_ids, self._tokenizer.decode(token_ids) if prompt.echo else "")

    # --- checks -------------------------------------------------------------------------------------------------------

    def _check(self, body: CommonParams, prompts: list[EncodedPrompt], max_tokens: int) -> None:
        limits, num_choices = self._config.limits, len(prompts) * (body.n or 1)
        self.check_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")
        if num_choices > limits.max_choices:
            raise ApiError(400, f"a request may have {limits.max_choices} choices, not {num_choices}", param="n")
        if max_tokens > limits.max_new_tokens:
            raise ApiError(400, f"max_tokens may be {limits.max_new_tokens} at most", param="max_tokens")
        for prompt in prompts:
            self._check_prompt(prompt.token_ids)
            self._check_length(len(prompt.token_ids), body.asked_tokens or 0)

    def _check_prompt(self, token_ids: list[int]) -> None:
        num_tokens, limit = len(token_ids), self._config.limits.max_prompt_tokens
        if not token_ids:
            raise PromptError("the prompt is empty; there is nothing to continue")
        if num_tokens > limit:
            raise ContextLengthExceeded(f"the prompt has {num_tokens} tokens; this server takes at most {limit}")
        if num_tokens >= self.max_model_len:
            longest = self.max_model_len - 1
            raise ContextLengthExceeded(
                f"the prompt has {num_tokens} tokens; {self._info.name} reads at most {longest}"
            )

    def _check_length(self, num_tokens: int, asked_tokens: int) -> None:
        """What a request asks for must fit after its prompt; only a default is cut to what fits."""
        space = self.max_model_len - num_tokens
        if asked_tokens > space:
            raise ContextLengthExceeded(
                f"the prompt has {num_tokens} tokens and max_tokens is {asked_tokens}, together more than the "
                f"{self.max_model_len} of {self._info.name}; ask for {space} or fewer, or set truncate_prompt_tokens"
            )

    # --- engine requests ----------------------------------------------------------------------------------------------

    def _task(
        self, body: CommonParams, prompts: list[EncodedPrompt], default_tokens: int, logprobs: int | None
    ) -> CompletionTask:
        max_tokens = default_tokens if body.asked_tokens is None else body.asked_tokens
        prompts = [self._truncated(prompt, body) for prompt in prompts]
        self._check(body, prompts, max_tokens)
        template = self._template(body, max_tokens, logprobs)
        copies = [prompt for prompt in prompts for _ in range(body.n or 1)]
        choices = [
            ChoiceRequest(self._request(template, prompt, index), prompt.echo) for index, prompt in enumerate(copies)
        ]
        prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        return CompletionTask(choices, prompt_tokens, bool(body.stream), body.include_usage, bool(body.x_paceline))

    def _request(self, template: Request, prompt: EncodedPrompt, index: int) -> Request:
        max_new_tokens = min(template.max_new_tokens, self.max_model_len - len(prompt.token_ids))
        sampling = seeded_for_choice(template.sampling, index)
        return replace(template, prompt=prompt.token_ids, sampling=sampling, max_new_tokens=max_new_tokens)

    def _template(self, body: CommonParams, max_tokens: int, logprobs: int | None) -> Request:
        """The request of every choice, but for its prompt and its seed."""
        return Request(
            [],
            sampling_params(body, self._info.vocab_size, self._config.sampling_defaults),
            max_tokens,
            stop=body.stop_strings,
            ignore_eos=bool(body.ignore_eos),
            method=body.speculative.method if body.speculative else None,
            num_draft_tokens=self._num_draft_tokens(body),
            prediction=self._prediction(body),
            logprobs=logprobs,
            structured_output=structured_output(body.response_format),
            priority=body.priority or 0,
            lora=self._config.lora_of(body.model),
        )

    def _num_draft_tokens(self, body: CommonParams) -> int | None:
        k = body.speculative.num_draft_tokens if body.speculative else None
        k = self._config.num_draft_tokens if k is None else k
        return k if isinstance(k, int) else None

    def _prediction(self, body: CommonParams) -> list[int] | None:
        if body.prediction is None:
            return None
        return self._token_text.encode(content_text(body.prediction.content)) or None


def template_message(message: ChatMessage) -> dict[str, str]:
    """A message as chat templates expect it: no role "developer", and content as one string."""
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": content_text(message.content or "")}


def content_text(content: Content) -> str:
    """The text of a message's content."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def sampling_params(
    body: CommonParams, vocab_size: int, defaults: Mapping[str, Any] = MappingProxyType({})
) -> SamplingParams:
    """Sampling parameters of a request. What it leaves open is the model's default, else OpenAI's: temperature 1."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    chosen = {name: getattr(body, name) for name in (*names, "seed") if getattr(body, name) is not None}
    if "top_k" in chosen:
        chosen["top_k"] = max(0, chosen["top_k"])
    if "top_p" in chosen:
        chosen["top_p"] = max(LEAST_TOP_P, chosen["top_p"])
    bias = logit_bias(body.logit_bias or {}, vocab_size)
    return SamplingParams(**{"temperature": 1.0, **defaults, **chosen, "logit_bias": bias})


def logit_bias(biases: dict[str, float], vocab_size: int) -> dict[int, float]:
    """Biases by token id; JSON has only strings as keys. Raises OptionError for keys that are no token ids."""
    for key in biases:
        if not key.isascii() or not key.isdigit() or len(key) > 12 or int(key) >= vocab_size:
            raise OptionError(f"logit_bias is keyed by token ids from 0 to {vocab_size - 1}")
    return {int(key): bias for key, bias in biases.items()}


def seeded_for_choice(sampling: SamplingParams, index: int) -> SamplingParams:
    """Sampling with the seed of choice `index`: choices differ, and a repeated request gives the same ones."""
    if sampling.seed is None or not index:
        return sampling
    return replace(sampling, seed=(sampling.seed + index) % SEED_LIMIT)


def structured_output(response_format: ResponseFormatParam | None) -> StructuredOutput | None:
    """What the output must match. Raises ApiError or OptionError."""
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
