"""Request bodies to engine requests: chat template, tokens, limits, sampling parameters, structured output."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeVar

from paceline import __version__
from paceline.core.protocols import Engine
from paceline.core.sampling import SamplingParams
from paceline.core.types import Request
from paceline.errors import ContextLengthExceeded, OptionError, PromptError
from paceline.serve.chat_messages import content_text
from paceline.serve.chat_requests import ChatPlanner
from paceline.serve.chat_template import chat_template
from paceline.serve.config import ServerConfig
from paceline.serve.errors import ApiError
from paceline.serve.fill_in_middle import FillInMiddle
from paceline.serve.output_syntax import PLAIN, OutputSyntax
from paceline.serve.schema import SEED_LIMIT, ChatRequest, CommonParams, CompletionRequest
from paceline.serve.structured_fields import structured_output
from paceline.serve.token_text import TokenText
from paceline.serve.vocabulary import vocabulary

COMPLETION_MAX_TOKENS = 16  # OpenAI's max_tokens of a completion that gives none

LEAST_TOP_P = 1e-9  # top_p 0: the likeliest token alone
MAX_BEAMS = 16
Params = TypeVar("Params", bound=CommonParams)


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """Token ids of a prompt. echo: what the response shows before the output."""

    token_ids: list[int]
    echo: str = ""


@dataclass(frozen=True, slots=True)
class ChoiceRequest:
    """One choice of a response: the engine request, what is shown before its output, and how that is read."""

    request: Request
    echo: str = ""
    syntax: OutputSyntax = PLAIN

    @property
    def uses_prediction(self) -> bool:
        """Whether the draft tokens come from the client's prediction."""
        return bool(self.request.prediction) and not self.request.method

    def with_a_token(self) -> ChoiceRequest:
        """The choice with one token at least: an engine reads the prompt only of a sequence that generates."""
        return replace(self, request=replace(self.request, max_new_tokens=max(1, self.request.max_new_tokens)))


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Of a beam search. length_penalty: 1 compares means of log-probabilities, 0 their sums."""

    width: int
    length_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class CompletionTask:
    """All that one HTTP request asks for."""

    choices: list[ChoiceRequest]
    prompt_tokens: int
    stream: bool = False
    include_usage: bool = False
    include_stats: bool = False  # x_paceline
    copies: int = 1  # choices that follow one another and have the same prompt
    choices_per_prompt: int | None = None  # how many of the copies the response shows; None: all
    model: str | None = None  # as the request names it
    system_fingerprint: str | None = None
    continuous_usage: bool = False
    shows_logprobs: bool = True
    prompt_logprobs: int | None = None  # alternatives of vLLM's prompt_logprobs
    echo_logprobs: bool = False
    prompt_only: bool = False  # the response shows nothing that was generated
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    beams: BeamParams | None = None  # the choices of a prompt are its likeliest continuations


class RequestBuilder:
    """Builds engine requests from request bodies. Raises ApiError, OptionError or PromptError."""

    def __init__(self, engine: Engine, token_text: TokenText, config: ServerConfig) -> None:
        self._tokenizer, self._info = engine.tokenizer, engine.info
        self._token_text, self._config = token_text, config
        self.vocabulary = vocabulary(engine.tokenizer)
        self._chat = ChatPlanner(engine.tokenizer, token_text, chat_template(token_text.chat_template, config))
        seed = {} if config.seed is None else {"seed": config.seed}
        self.sampling_defaults = {**config.sampling_defaults, **seed}
        self.max_model_len = min(engine.info.max_seq_len, config.max_model_len or engine.info.max_seq_len)
        self._fingerprint = system_fingerprint(engine)

    def chat(self, body: ChatRequest) -> CompletionTask:
        """The engine requests of a chat completion."""
        body = self._counted(body, "top_logprobs", "prompt_logprobs")
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        if body.asked_tokens == 0:
            raise ApiError(400, "max_tokens must be 1 or more; 0 is for a completion with echo", param="max_tokens")
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        plan = self._chat.plan(body)
        echoed = body.echoed_message
        prompt = EncodedPrompt(plan.token_ids, content_text(echoed.content or "") if echoed else "")
        task = self._task(body, [prompt], self._config.limits.chat_max_tokens, logprobs)
        choices = [
            replace(choice, request=plan.applied(choice.request), syntax=plan.syntax) for choice in task.choices
        ]
        return replace(task, choices=choices)

    def chat_prompt(self, body: ChatRequest) -> list[int]:
        """Token ids of a chat's messages through the model's template."""
        return self._chat.token_ids(body)

    @cached_property
    def middle(self) -> FillInMiddle:
        """Prompts for the text between a prompt and a suffix."""
        return FillInMiddle(self.vocabulary)

    def completion(
        self, body: CompletionRequest, default_tokens: int = COMPLETION_MAX_TOKENS, *, reads_prompt: bool = False
    ) -> CompletionTask:
        """The engine requests of a completion.

        default_tokens  max_tokens of a body that gives none
        reads_prompt    max_tokens 0 reads the prompt into the prefix cache; else it is for an echo
        """
        body = self._counted(body, "logprobs", "prompt_logprobs")
        self._check_best_of(body)
        if body.asked_tokens == 0 and not body.echo and not reads_prompt:
            raise ApiError(400, "max_tokens 0 generates nothing: it needs echo: true", param="max_tokens")
        if body.suffix:
            body = body.model_copy(update={"stop_token_ids": [*(body.stop_token_ids or ()), *self.middle.end_ids]})
        is_single = isinstance(body.prompt, str) or isinstance(body.prompt[0], int)
        inputs = [body.prompt] if is_single else body.prompt
        encode = self._middle_prompt if body.suffix else self._prompt
        prompts = [encode(prompt, body) for prompt in inputs]  # type: ignore[arg-type]
        task = self._task(body, prompts, default_tokens, body.logprobs, body.best_of)
        if body.asked_tokens == 0 and not body.echo:
            return replace(task, choices=[choice.with_a_token() for choice in task.choices], prompt_only=True)
        return self._with_echo(task, body) if body.echo else task

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 for a model that is not served."""
        names = self._config.served_model_names
        if name is not None and name not in names:
            message = f"there is no model {name[:80]!r} here; there is {', '.join(names)}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def check_num_choices(self, count: int) -> None:
        """Raise ApiError for more choices than one request may have."""
        limit = self._config.limits.max_choices
        if count > limit:
            raise ApiError(400, f"a request may have {limit} choices, not {count}", param="n")

    def sampling(self, body: CommonParams) -> SamplingParams:
        """How the tokens of a request are chosen."""
        return sampling_params(body, self._info.vocab_size, self.sampling_defaults)

    # --- prompts ------------------------------------------------------------------------------------------------------

    def _prompt(self, prompt: str | list[int], body: CompletionRequest) -> EncodedPrompt:
        if isinstance(prompt, str) and body.add_special_tokens is False:
            token_ids = self._token_text.encode(prompt)
        else:
            token_ids = self._tokenizer.encode(prompt)
        if not body.echo:
            return EncodedPrompt(token_ids)
        return EncodedPrompt(token_ids, prompt if isinstance(prompt, str) else self._token_text.decode(token_ids))

    def _middle_prompt(self, prompt: Any, body: CompletionRequest) -> EncodedPrompt:
        if not isinstance(prompt, str):
            raise ApiError(400, "a prompt with a suffix must be a string", param="prompt")
        return EncodedPrompt(self.middle.prompt(prompt, body.suffix or ""), prompt if body.echo else "")

    def _truncated(self, prompt: EncodedPrompt, body: CommonParams) -> EncodedPrompt:
        """The prompt, cut to its last tokens (or its first) as truncate_prompt_tokens says; -1: as many as fit."""
        limit = body.truncate_prompt_tokens
        if limit is None:
            return prompt
        if limit == -1:
            limit = self.max_model_len - (1 if body.asked_tokens is None else body.asked_tokens)
        return self._shortened(prompt, max(1, limit), from_right=body.truncation_side == "right")

    def _shortened(self, prompt: EncodedPrompt, limit: int, *, from_right: bool) -> EncodedPrompt:
        if len(prompt.token_ids) <= limit:
            return prompt
        token_ids = prompt.token_ids[:limit] if from_right else prompt.token_ids[-limit:]
        return EncodedPrompt(token_ids, self._token_text.decode(token_ids) if prompt.echo else "")

    def _with_echo(self, task: CompletionTask, body: CompletionRequest) -> CompletionTask:
        """Log-probabilities are those of the echoed prompt too. One token is generated so that a prompt is read."""
        if body.logprobs is None and body.prompt_logprobs is None:
            return task
        most = max(body.logprobs or 0, body.prompt_logprobs or 0)
        read = [choice.with_a_token() for choice in task.choices]
        choices = [replace(choice, request=replace(choice.request, prompt_logprobs=most)) for choice in read]
        is_only = body.asked_tokens == 0
        return replace(task, choices=choices, echo_logprobs=body.logprobs is not None, prompt_only=is_only)

    # --- checks -------------------------------------------------------------------------------------------------------

    def _counted(self, body: Params, *names: str) -> Params:
        """The body with its numbers of alternatives checked; -1 is the size of the vocabulary."""
        vocab_size, limit = self._info.vocab_size, self._config.limits.max_logprobs
        asked = {name: getattr(body, name) for name in names if getattr(body, name) is not None}
        counts = {name: vocab_size if count == -1 else count for name, count in asked.items()}
        for name, count in counts.items():
            if count > min(vocab_size, vocab_size if limit == -1 else limit):
                message = f"{name} may be {limit} at most; --max-logprobs sets it (-1: the whole vocabulary)"
                raise ApiError(400, message, param=name)
        return body.model_copy(update=counts) if counts != asked else body

    def _logprob_token_ids(self, body: CommonParams, logprobs: int | None) -> tuple[int, ...]:
        token_ids, vocab_size = tuple(body.logprob_token_ids or ()), self._info.vocab_size
        if token_ids and logprobs is None:
            raise ApiError(400, "logprob_token_ids needs logprobs", param="logprob_token_ids")
        if any(token >= vocab_size for token in token_ids):
            raise ApiError(400, f"token ids are from 0 to {vocab_size - 1}", param="logprob_token_ids")
        return token_ids

    def _check_best_of(self, body: CompletionRequest) -> None:
        if body.best_of is None:
            return
        if body.best_of < (body.n or 1):
            raise ApiError(400, "best_of must not be less than n", param="best_of")
        if body.best_of > (body.n or 1) and body.stream:
            message = "best_of chooses at the end, so it cannot be streamed; leave out stream"
            raise ApiError(400, message, param="best_of")

    def _check(self, body: CommonParams, prompts: list[EncodedPrompt], max_tokens: int, copies: int) -> None:
        limits = self._config.limits
        self.check_model(body.model)
        if body.min_tokens and body.asked_tokens is not None and body.min_tokens > body.asked_tokens:
            message = f"min_tokens is {body.min_tokens}, more than max_tokens, which is {body.asked_tokens}"
            raise ApiError(400, message, param="min_tokens")
        if body.prompt_logprobs is not None and body.stream:
            raise ApiError(400, "prompt_logprobs cannot be streamed; leave out stream", param="prompt_logprobs")
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")
        self.check_num_choices(len(prompts) * copies)
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
            message = f"the prompt has {num_tokens} tokens; this server takes at most {limit}"
            raise ContextLengthExceeded(message, num_tokens, limit)
        if num_tokens >= self.max_model_len:
            longest = self.max_model_len - 1
            message = f"the prompt has {num_tokens} tokens; {self._info.name} reads at most {longest}"
            raise ContextLengthExceeded(message, num_tokens, self.max_model_len)

    def _check_length(self, num_tokens: int, asked_tokens: int) -> None:
        """What a request asks for must fit after its prompt; only a default is cut to what fits."""
        space = self.max_model_len - num_tokens
        if asked_tokens > space:
            raise ContextLengthExceeded(
                f"the prompt has {num_tokens} tokens and max_tokens is {asked_tokens}, together more than the "
                f"{self.max_model_len} of {self._info.name}; ask for {space} or fewer, or set truncate_prompt_tokens",
                num_tokens,
                self.max_model_len,
                asked_tokens=asked_tokens,
            )

    # --- engine requests ----------------------------------------------------------------------------------------------

    def _task(
        self,
        body: CommonParams,
        prompts: list[EncodedPrompt],
        default_tokens: int,
        logprobs: int | None,
        best_of: int | None = None,
    ) -> CompletionTask:
        max_tokens = default_tokens if body.asked_tokens is None else body.asked_tokens
        prompts = [self._truncated(prompt, body) for prompt in prompts]
        num_shown = body.n or 1
        copies = best_of or num_shown
        self._check(body, prompts, max_tokens, copies)
        if logprobs is not None or body.prompt_logprobs is not None:
            self._token_text.spelling(0)  # reads the vocabulary, here in the tokenizer's thread
        template = self._template(body, max_tokens, 0 if logprobs is None and copies > num_shown else logprobs)
        repeated = [prompt for prompt in prompts for _ in range(copies)]
        choices = [
            ChoiceRequest(self._request(template, prompt, index), prompt.echo) for index, prompt in enumerate(repeated)
        ]
        prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        return CompletionTask(
            choices,
            prompt_tokens,
            bool(body.stream),
            body.include_usage or self._config.enable_force_include_usage,
            bool(body.x_paceline),
            copies,
            num_shown,
            body.model,
            self._fingerprint,
            body.continuous_usage or self._config.enable_force_include_usage,
            shows_logprobs=logprobs is not None,
            prompt_logprobs=body.prompt_logprobs,
            return_token_ids=bool(body.return_token_ids),
            tokens_as_ids=bool(body.return_tokens_as_token_ids) or self._config.return_tokens_as_token_ids,
            beams=beam_params(body, template, copies),
        )

    def _request(self, template: Request, prompt: EncodedPrompt, index: int) -> Request:
        max_new_tokens = min(template.max_new_tokens, self.max_model_len - len(prompt.token_ids))
        sampling = seeded_for_choice(template.sampling, index)
        return replace(template, prompt=prompt.token_ids, sampling=sampling, max_new_tokens=max_new_tokens)

    def _template(self, body: CommonParams, max_tokens: int, logprobs: int | None) -> Request:
        """The request of every choice, but for its prompt and its seed."""
        return Request(
            [],
            self.sampling(body),
            max_tokens,
            stop=body.stop_strings,
            ignore_eos=bool(body.ignore_eos),
            method=body.speculative.method if body.speculative else None,
            num_draft_tokens=self._num_draft_tokens(body),
            prediction=self._prediction(body),
            logprobs=logprobs,
            logprob_token_ids=self._logprob_token_ids(body, logprobs),
            structured_output=structured_output(body.response_format, body),
            prompt_logprobs=body.prompt_logprobs,
            min_new_tokens=body.min_tokens or 0,
            stop_token_ids=tuple(body.stop_token_ids or ()),
            include_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            bad_words=tuple(body.bad_words or ()),
            allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
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
    wrong = [
        key for key in biases if not key.isascii() or not key.isdigit() or len(key) > 12 or int(key) >= vocab_size
    ]
    if wrong:
        names = ", ".join(repr(key[:40]) for key in wrong[:8])
        raise OptionError(
            f"logit_bias is keyed by token ids from 0 to {vocab_size - 1}, of a vocabulary of {vocab_size}; not {names}"
        )
    return {int(key): bias for key, bias in biases.items()}


def beam_params(body: CommonParams, request: Request, width: int) -> BeamParams | None:
    """The beam search that a request asks for. Raises ApiError for what depends on where an output began."""
    if not body.use_beam_search:
        return None
    begins = request.stop or request.bad_words or request.min_new_tokens or request.structured_output
    if body.stream or begins or request.logprobs is not None or request.sampling.penalised or width > MAX_BEAMS:
        message = (
            f"use_beam_search takes up to {MAX_BEAMS} beams, and neither stream, stop, logprobs, penalties, bad_words, "
            "min_tokens nor structured output"
        )
        raise ApiError(400, message, param="use_beam_search")
    return BeamParams(width, 1.0 if body.length_penalty is None else body.length_penalty)


def seeded_for_choice(sampling: SamplingParams, index: int) -> SamplingParams:
    """Sampling with the seed of choice `index`: choices differ, and a repeated request gives the same ones."""
    if sampling.seed is None or not index:
        return sampling
    return replace(sampling, seed=(sampling.seed + index) % SEED_LIMIT)


def system_fingerprint(engine: Engine) -> str:
    """Changes with whatever may change the output of a seed: this version, the model, its number format, its device."""
    info = engine.info
    parts = (__version__, info.name, info.vocab_size, info.num_layers, info.device, info.dtype, engine.methods)
    return "fp_" + hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
