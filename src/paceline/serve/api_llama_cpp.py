"""llama.cpp's own routes: /completion, /infill, /props and /slots."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from paceline import __version__
from paceline.serve.api_chat import checked, finish_of
from paceline.serve.api_shape import ApiShape, Json
from paceline.serve.context import ServerContext
from paceline.serve.errors import ApiError
from paceline.serve.fill_in_middle import OtherFile
from paceline.serve.routes import ERROR_RESPONSES, completion_response
from paceline.serve.schema import CompletionRequest, LenientModel, StrictModel

# llama.cpp's names for fields of ours.
RENAMED_FIELDS = {
    "n_predict": "max_tokens", "repeat_penalty": "repetition_penalty", "n_probs": "logprobs",
    "return_tokens": "return_token_ids",
}  # fmt: skip
# What says how the server works, not what it writes.
OWN_FIELDS = frozenset(
    {
        "cache_prompt", "id_slot", "n_keep", "n_indent", "t_max_predict_ms", "timings_per_token", "return_progress",
        "post_sampling_probs", "response_fields", "repeat_last_n", "min_keep", "n_cmpl", "prompt", "model",
        "input_prefix", "input_suffix", "input_extra", "samplers", "penalty_last_n", "mirostat_tau", "mirostat_eta",
        "n_discard",
    }
)  # fmt: skip
STOP_TYPES = {"length": "limit"}
SHOWN_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "seed", "stop")


class LlamaParams(LenientModel):
    """What llama.cpp's two completion routes have in common."""

    n_predict: Annotated[int, Field(ge=-2, le=1 << 31)] | None = None
    stream: bool | None = None
    response_fields: list[str] | None = None

    @property
    def fields(self) -> Json:
        """Fields of a completion, but for its prompt."""
        body = self.model_dump(exclude_unset=True, exclude_none=True)
        fields = {RENAMED_FIELDS.get(name, name): value for name, value in body.items() if name not in OWN_FIELDS}
        if fields.get("max_tokens", 0) < 0:
            del fields["max_tokens"]  # no limit
        if isinstance(fields.get("seed"), int) and fields["seed"] < 0:
            del fields["seed"]  # any
        if not fields.get("logprobs"):
            fields.pop("logprobs", None)
        if self.stream:
            fields |= {"stream_options": {"include_usage": True}, "return_token_ids": True}
        return fields


class LlamaCompletionRequest(LlamaParams):
    """Body of /completion. A prompt is a string, token ids, a list that mixes both, or a list of prompts."""

    prompt: str | Annotated[list[Any], Field(min_length=1, max_length=1 << 20)]


class ExtraFile(StrictModel):
    """A file that the gap may refer to."""

    filename: str
    text: str


class InfillRequest(LlamaParams):
    """Body of /infill. prompt: the start of what is written."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[ExtraFile], Field(max_length=256)] | None = None
    prompt: str | None = None


class LlamaShape(ApiShape):
    """llama.cpp's completion. The last event of a stream has the counts and the timings."""

    def __init__(self, body: LlamaParams, model: str, prompt: Any, num_prompts: int | None = None) -> None:
        """num_prompts: of a list of prompts, whose answer is a list."""
        self._body, self._model, self._prompt, self._num_prompts = body, model, prompt, num_prompts
        self._started = time.perf_counter()
        self._first_token: float | None = None
        self._usage: Json = {}
        self._choice: Json = {}
        self._has_new_line = False

    def last_frame(self) -> str:
        return ""

    def whole(self, document: Json) -> Any:
        self._usage = document["usage"]
        answers = []
        for choice in document["choices"]:
            self._choice, self._has_new_line = choice, "\n" in choice["text"]
            answers.append(self._selected({"index": choice["index"], **_content(choice), **self._closing()}))
        return answers if self._num_prompts is not None else answers[0]

    async def chunks(self, chunks: AsyncGenerator[Json, None]) -> AsyncGenerator[Json, None]:
        async with aclosing(chunks):
            async for chunk in chunks:
                for event in self._events(chunk):
                    yield event
        yield {"index": 0, "content": "", "tokens": [], **self._closing()}

    def _events(self, chunk: Json) -> Iterator[Json]:
        self._usage = chunk.get("usage") or self._usage
        self._choice = finish_of(chunk) or self._choice
        for choice in chunk["choices"]:
            if choice.get("text") or choice.get("token_ids"):
                self._first_token = self._first_token or time.perf_counter()
                self._has_new_line = self._has_new_line or "\n" in choice["text"]
                content = {"index": choice["index"], **_content(choice)}
                yield {**content, "stop": False, "tokens_evaluated": self.prompt_tokens}

    def _closing(self) -> Json:
        stop_string = self._choice.get("stop_reason")
        stop_type = STOP_TYPES.get(str(self._choice.get("finish_reason")), "word" if stop_string else "eos")
        num_tokens = self._usage.get("completion_tokens", 0)
        return {
            "id_slot": 0,
            "stop": True,
            "model": self._model,
            "tokens_predicted": num_tokens,
            "tokens_evaluated": self.prompt_tokens,
            "generation_settings": self._settings(),
            "prompt": self._prompt,
            "has_new_line": self._has_new_line,
            "truncated": False,
            "stop_type": stop_type,
            "stopping_word": stop_string if isinstance(stop_string, str) else "",
            "tokens_cached": self.prompt_tokens + num_tokens,
            "timings": self._timings(num_tokens),
        }

    def _settings(self) -> Json:
        fields = self._body.fields
        shown = {name: fields[name] for name in SHOWN_SETTINGS if name in fields}
        return {**shown, "n_predict": fields.get("max_tokens", -1), "stream": bool(self._body.stream)}

    def _timings(self, num_tokens: int) -> Json:
        end = time.perf_counter()
        first = self._first_token or self._started  # a whole answer does not tell them apart
        prompt_seconds, seconds = first - self._started, end - first
        return {
            "prompt_n": self.prompt_tokens,
            "prompt_ms": prompt_seconds * 1000,
            "prompt_per_second": self.prompt_tokens / max(prompt_seconds, 1e-9),
            "predicted_n": num_tokens,
            "predicted_ms": seconds * 1000,
            "predicted_per_second": num_tokens / max(seconds, 1e-9),
        }

    def _selected(self, document: Json) -> Json:
        """Only the fields that were asked for; a slash goes into a field."""
        if not self._body.response_fields:
            return document
        selected: Json = {}
        for path in self._body.response_fields:
            value: Any = document
            for name in path.split("/"):
                value = value.get(name) if isinstance(value, dict) else None
            if value is not None:
                selected[path] = value
        return selected


def _content(choice: Json) -> Json:
    content: Json = {"content": choice["text"], "tokens": choice.get("token_ids") or []}
    logprobs = choice.get("logprobs")
    if logprobs:
        content["completion_probabilities"] = [
            _probability(token, logprob, top)
            for token, logprob, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"])
        ]
    return content


def _probability(token: str, logprob: float, top: dict[str, float] | None) -> Json:
    alternatives = [{"token": text, "logprob": value, "bytes": _bytes(text)} for text, value in (top or {}).items()]
    return {"token": token, "logprob": logprob, "bytes": _bytes(token), "top_logprobs": alternatives}


def _bytes(text: str) -> list[int]:
    return list(text.encode("utf-8", "replace"))


def add_llama_cpp_routes(routes: APIRouter, context: ServerContext) -> None:
    model, limits = context.config.served_model_names[0], context.config.limits

    @routes.post("/completion", responses=ERROR_RESPONSES, response_model=None)
    async def llama_completion(request: Request, body: LlamaCompletionRequest) -> Response:
        """The continuation of a prompt in llama.cpp's spelling. The model's name is not read: there is one."""
        prompts = await context.tokenized(partial(prompt_ids, context), body.prompt)
        num_prompts = len(prompts) if is_several(body.prompt) else None
        completion = checked(CompletionRequest, {**body.fields, "prompt": prompts})
        shape = LlamaShape(body, model, body.prompt, num_prompts)
        return await completion_response(context, request, completion, shape, limits.chat_max_tokens)

    @routes.post("/infill", responses=ERROR_RESPONSES, response_model=None)
    async def infill(request: Request, body: InfillRequest) -> Response:
        """The text between a prefix and a suffix, where the model has fill-in-the-middle tokens."""
        files = tuple(OtherFile(file.filename, file.text) for file in body.input_extra or ())
        prefix = body.input_prefix + (body.prompt or "")
        fill = partial(context.requests.middle.prompt, suffix=body.input_suffix, files=files)
        token_ids = await context.tokenized(fill, prefix)
        completion = checked(CompletionRequest, {**body.fields, "prompt": token_ids})
        return await completion_response(
            context, request, completion, LlamaShape(body, model, prefix), limits.chat_max_tokens
        )

    _add_status_routes(routes, context)


def is_several(prompt: Any) -> bool:
    """Whether a list holds prompts. A list with a number in it is one prompt."""
    return isinstance(prompt, list) and not any(isinstance(part, int) for part in prompt)


def prompt_ids(context: ServerContext, prompt: Any) -> list[list[int]]:
    """Token ids of every prompt."""
    return [_ids(context, part) for part in (prompt if is_several(prompt) else [prompt])]


def _ids(context: ServerContext, prompt: Any) -> list[int]:
    if isinstance(prompt, dict):
        prompt = prompt.get("prompt_string")
    if isinstance(prompt, str):
        return context.engine.tokenizer.encode(prompt)
    if not isinstance(prompt, list):
        raise ApiError(400, "a prompt is a string, or a list of token ids and strings", param="prompt")
    ids: list[int] = []
    for part in prompt:
        if isinstance(part, str):
            ids += context.requests.vocabulary.encode(part, special=False)
        elif isinstance(part, int) and not isinstance(part, bool):
            ids.append(part)
        else:
            raise ApiError(400, "a prompt is a string, or a list of token ids and strings", param="prompt")
    return ids


def _add_status_routes(routes: APIRouter, context: ServerContext) -> None:
    limit, num_seqs = context.requests.max_model_len, context.config.max_num_seqs

    @routes.get("/props")
    async def props() -> Json:
        """What llama.cpp's clients ask about the server."""
        vocabulary = context.requests.vocabulary
        special = vocabulary.special_tokens
        return {
            "default_generation_settings": {"n_ctx": limit, "params": context.config.sampling_defaults},
            "total_slots": num_seqs,
            "model_alias": context.config.served_model_names[0],
            "model_path": context.engine.info.name,
            "modalities": {"vision": False, "audio": False},
            "chat_template": vocabulary.chat_template,
            "bos_token": special.get("bos_token", ""),
            "eos_token": special.get("eos_token", ""),
            "build_info": f"paceline-{__version__}",
        }

    @routes.get("/slots", response_model=None)
    async def running_sequences() -> list[Json]:
        """One entry for each sequence that can run at a time; sequences have no fixed place."""
        num_running = context.engine.stats().running
        return [{"id": index, "n_ctx": limit, "is_processing": index < num_running} for index in range(num_seqs)]
