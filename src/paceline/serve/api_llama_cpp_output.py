"""A completion as llama.cpp's routes show it: contents, probabilities, settings, timings, and its errors."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from paceline.serve.api_chat import finish_of
from paceline.serve.api_shape import ApiShape, Json
from paceline.serve.errors import ERROR_SHAPES, ApiError
from paceline.serve.timings import TimedChatShape, timings
from paceline.serve.token_text import TokenText

STOP_TYPES = {"length": "limit"}
SHOWN_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "seed", "stop")
ID_PREFIX = "token_id:"


def error_body(error: ApiError) -> Json:
    """The error on paths in llama.cpp's spelling: a prompt that is too long has a type of its own, with the counts."""
    body = error.body
    if error.counts:
        message = f"the request exceeds the available context size: {body['error']['message']}"
        body["error"] |= {"message": message, "type": "exceed_context_size_error", **error.counts}
    return body


for path in ("/chat/completions", "/completion", "/responses", "/infill"):
    ERROR_SHAPES[path] = error_body


@dataclass(frozen=True, slots=True)
class LlamaRequest:
    """What an answer repeats of its request, and what it is spelled with.

    prompts           as the model reads them, with its special tokens
    prompt_lengths    their tokens
    fields            those of the completion, and the server's defaults of those it leaves out
    response_fields   what the answer shows; empty: everything
    eos_token_ids     whose probability ignore_eos sets to nothing
    """

    model: str
    prompts: list[str]
    prompt_lengths: list[int]
    fields: Json
    response_fields: list[str]
    token_text: TokenText
    eos_token_ids: frozenset[int]
    max_model_len: int
    post_sampling: bool = False
    num_prompts: int | None = None  # of a list of prompts, whose answer is a list

    def settings(self) -> Json:
        shown = {name: self.fields[name] for name in SHOWN_SETTINGS if name in self.fields}
        limit, stream = self.fields.get("max_tokens", -1), bool(self.fields.get("stream"))
        biases = [{"token": int(token), "bias": bias} for token, bias in (self.fields.get("logit_bias") or {}).items()]
        if self.fields.get("ignore_eos"):
            biases += [{"token": token, "bias": None} for token in sorted(self.eos_token_ids)]  # minus infinity
        return {**shown, "n_predict": limit, "stream": stream, "logit_bias": biases}

    def prompt_of(self, index: int) -> str:
        """The prompt of choice `index`."""
        return self.prompts[index // (self.fields.get("n") or 1)]

    def usage_of(self, choice: Json) -> Json:
        """The token counts of one of several choices, whose document has their sums. Its tokens come with it."""
        length = self.prompt_lengths[choice["index"] // (self.fields.get("n") or 1)]
        return {"prompt_tokens": length, "completion_tokens": len(choice.get("token_ids") or [])}

    def selected(self, document: Json) -> Json:
        """Only the fields that were asked for; a slash goes into a field."""
        if not self.response_fields:
            return document
        selected: Json = {}
        for path in self.response_fields:
            value: Any = document
            for name in path.split("/"):
                value = value.get(name) if isinstance(value, dict) else None
            if value is not None:
                selected[path] = value
        return selected

    def content(self, choice: Json) -> Json:
        """The text of a choice, its token ids and their probabilities, where they were asked for."""
        tokens = choice.get("token_ids") or [] if self.fields.get("return_token_ids") else []
        content: Json = {"content": choice["text"], "tokens": tokens}
        logprobs = choice.get("logprobs")
        if logprobs:
            entries = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"])
            content["completion_probabilities"] = [self._probabilities(*entry) for entry in entries]
        return content

    def _probabilities(self, token: str, logprob: float, top: dict[str, float] | None) -> Json:
        name = "top_probs" if self.post_sampling else "top_logprobs"
        best = sorted((top or {}).items(), key=lambda item: -item[1])[: self.fields["logprobs"]]
        return self._probability(token, logprob) | {name: [self._probability(*other) for other in best]}

    def _probability(self, spelling: str, logprob: float) -> Json:
        token = int(spelling.removeprefix(ID_PREFIX))
        text, raw = self.token_text.spelling(token), self.token_text.token_bytes(token)
        value = {"prob": math.exp(logprob)} if self.post_sampling else {"logprob": logprob}
        return {"id": token, "token": text, "bytes": list(text.encode()) if raw is None else raw, **value}


class LlamaShape(ApiShape):
    """llama.cpp's completion. The last event of a stream has the counts and the timings."""

    def __init__(self, request: LlamaRequest) -> None:
        self._request, self._started = request, time.perf_counter()
        self._usage: Json = {}
        self._choice: Json = {}
        self._has_new_line = False
        self._lengths: dict[int, int] = {}  # characters of each choice that have been sent
        self._held: dict[int, str] = {}  # characters of each choice whose tokens are not shown yet

    def last_frame(self) -> str:
        return ""

    def whole(self, document: Json) -> Any:
        self._usage = document["usage"]
        answers = []
        for choice in document["choices"]:
            self._choice, self._has_new_line = choice, "\n" in choice["text"]
            if len(document["choices"]) > 1:
                self._usage = self._request.usage_of(choice)
                self.prompt_tokens = self._usage["prompt_tokens"]
            answer = {"index": choice["index"], **self._request.content(choice)} | self._closing(choice["index"])
            answers.append(self._request.selected(answer))
        return answers if self._request.num_prompts is not None else answers[0]

    async def chunks(self, chunks: AsyncGenerator[Json, None]) -> AsyncGenerator[Json, None]:
        async with aclosing(chunks):
            async for chunk in chunks:
                for event in self._events(chunk):
                    yield event
        yield {"index": 0, "content": "", "tokens": [], **self._closing(0)}

    def _events(self, chunk: Json) -> Iterator[Json]:
        self._usage = chunk.get("usage") or self._usage
        self._choice = finish_of(chunk) or self._choice
        for choice in chunk["choices"]:
            if choice.get("text") or choice.get("token_ids"):
                self.first_token = self.first_token or time.perf_counter()
                self._has_new_line = self._has_new_line or "\n" in choice["text"]
                for part in self._tokens(choice):
                    content = {"index": choice["index"], **self._request.content(part)}
                    yield {**content, "stop": False, "tokens_evaluated": self.prompt_tokens}

    def _tokens(self, choice: Json) -> Iterator[Json]:
        """A choice for each token where probabilities come with them: clients read one a time."""
        logprobs, index = choice.get("logprobs"), choice["index"]
        if logprobs is None:
            yield choice
            return
        text = self._held.pop(index, "") + choice["text"]
        if not logprobs["tokens"]:  # its token is shown once the text has the rest of its characters
            self._held[index] = text
            return
        start = self._lengths.get(index, 0)
        self._lengths[index] = start + len(text)
        inner = [min(max(offset - start, 0), len(text)) for offset in logprobs["text_offset"][1:]]
        borders = [0, *inner, len(text)]
        for place, token in enumerate(logprobs["tokens"]):
            own = {name: [values[place]] for name, values in logprobs.items()}
            piece = text[borders[place] : borders[place + 1]]
            yield {**choice, "text": piece, "token_ids": [int(token.removeprefix(ID_PREFIX))], "logprobs": own}

    def _closing(self, index: int) -> Json:
        """The last fields of choice `index`."""
        stop_string = self._choice.get("stop_reason")
        stop_type = STOP_TYPES.get(str(self._choice.get("finish_reason")), "word" if stop_string else "eos")
        num_tokens = self._usage.get("completion_tokens", 0)
        is_full = self.prompt_tokens + num_tokens >= self._request.max_model_len
        return {
            "id_slot": 0,
            "stop": True,
            "model": self._request.model,
            "tokens_predicted": num_tokens,
            "tokens_evaluated": self.prompt_tokens,
            "generation_settings": self._request.settings(),
            "prompt": self._request.prompt_of(index),
            "has_new_line": self._has_new_line,
            "truncated": stop_type == "limit" and is_full,
            "stop_type": stop_type,
            "stopping_word": stop_string if isinstance(stop_string, str) else "",
            "tokens_cached": self.prompt_tokens + num_tokens,
            "timings": timings(self, self._started, self._usage),
        }


class LlamaChatShape(TimedChatShape):
    """A chat completion in llama.cpp's spelling: a stream opens without content and closes with a chunk of its own."""

    async def chunks(self, chunks: AsyncGenerator[Json, None]) -> AsyncGenerator[Json, None]:
        async with aclosing(super().chunks(chunks)) as timed:
            async for chunk in timed:
                for part in _llama_chunks(chunk):
                    yield part


def _llama_chunks(chunk: Json) -> Iterator[Json]:
    choice = chunk["choices"][0] if chunk["choices"] else {"delta": {}}
    delta = choice["delta"]
    if delta.get("role") and not delta.get("content"):
        yield {**chunk, "choices": [{**choice, "delta": {**delta, "content": None}}]}
    elif choice.get("finish_reason") and delta:
        last = {name: choice[name] for name in ("finish_reason", "stop_reason") if name in choice}
        yield {**chunk, "choices": [{**choice, **dict.fromkeys(last)}]}
        yield {**chunk, "choices": [{"index": choice["index"], "delta": {}, "logprobs": None, **last}]}
    else:
        yield chunk
