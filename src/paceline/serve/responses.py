"""Engine outputs to OpenAI's responses, whole or as the chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from paceline.core.stats import SpecStats
from paceline.core.types import CacheUse, RequestOutput, TokenLogprob
from paceline.errors import OptionError
from paceline.serve.chat_response import ChatWriter, ChoiceWriter
from paceline.serve.logprob_format import TokenFormatter
from paceline.serve.requests import ChoiceRequest, CompletionTask
from paceline.serve.shown_tokens import ShownToken, TokenAligner, prompt_tokens
from paceline.serve.speculation_metrics import speculation_metrics

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """An engine output, and the index of the choice it belongs to."""

    index: int
    output: RequestOutput


@dataclass(slots=True)
class ChoiceState:
    """One choice while its output arrives.

    aligner  shows tokens as their characters arrive; None: the request asks for no log-probabilities
    shown    tokens of the response so far, those of an echoed prompt included; fresh: those of the last output
    fields   the text of the last output as fields of its chunk
    """

    choice: ChoiceRequest
    writer: ChoiceWriter
    aligner: TokenAligner | None = None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)  # of each token
    shown: list[ShownToken] = field(default_factory=list)
    fresh: list[ShownToken] = field(default_factory=list)
    fields: Json = field(default_factory=dict)
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cache_use: CacheUse = field(default_factory=CacheUse)
    stats: SpecStats = field(default_factory=SpecStats)

    @property
    def num_tokens(self) -> int:
        return len(self.from_draft)

    @property
    def has_logprobs(self) -> bool:
        return self.aligner is not None

    def add(self, output: RequestOutput) -> None:
        self.text += output.text
        self.token_ids += output.token_ids
        self.from_draft += [output.from_draft] * len(output.token_ids)
        self.fields = self.writer.add(output)
        self.finish_reason = self.writer.finish_reason(output.finish_reason) or self.finish_reason
        self.stats = output.stats or self.stats
        self._add_details(output)

    def _add_details(self, output: RequestOutput) -> None:
        self.cumulative_logprob += sum(entry.logprob for entry in output.logprobs or ())
        self.stop_reason = output.stop_reason if output.finish_reason else None
        if output.num_cached_tokens is not None or output.num_cache_write_tokens is not None:
            self.cache_use = CacheUse(output.num_cached_tokens or 0, output.num_cache_write_tokens or 0)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        elif self.prompt_logprobs is None and self.choice.request.prompt_logprobs is not None:
            raise OptionError("this engine gives no log-probabilities of prompts: leave out prompt_logprobs and echo")
        self.fresh = self.aligner.add(output) if self.aligner is not None else []
        self.shown += self.fresh

    def speculation(self) -> Json:
        """What x_paceline adds to a finished choice."""
        return {"from_draft_mask": [int(flag) for flag in self.from_draft], **self.stats.as_dict()}


class ResponseFormat(Protocol):
    """The shape of one of the two kinds of completion."""

    id_prefix: str
    object_name: str
    chunk_object_name: str
    formatter: TokenFormatter
    is_completion: bool  # each choice has a prompt of its own, and the last text comes with the finish reason

    def writer(self, choice: ChoiceRequest) -> ChoiceWriter: ...
    def logprobs(self, tokens: list[ShownToken], *, as_ids: bool, most: int | None) -> Json: ...


class ChatFormat:
    """Chat completions."""

    id_prefix, object_name, chunk_object_name = "chatcmpl", "chat.completion", "chat.completion.chunk"
    is_completion = False

    def __init__(self, formatter: TokenFormatter) -> None:
        self.formatter = formatter

    def writer(self, choice: ChoiceRequest) -> ChoiceWriter:
        return ChatWriter(choice.syntax, choice.echo)

    def logprobs(self, tokens: list[ShownToken], *, as_ids: bool, most: int | None) -> Json:
        return self.formatter.chat(tokens, as_ids=as_ids, most=most)


class CompletionWriter(ChoiceWriter):
    """The text of a completion's choice."""

    num_reasoning_tokens = 0

    def __init__(self, echo: str) -> None:
        self._echo, self._text = echo, ""
        self._is_opened = False

    def opening(self) -> Json:
        return {"text": ""}

    def add(self, output: RequestOutput) -> Json:
        echo, self._is_opened = "" if self._is_opened else self._echo, True
        self._text += output.text
        return {"text": echo + output.text}

    def closing(self) -> Json:
        return {"text": ""}

    def whole(self) -> Json:
        return {"text": self._echo + self._text}

    def finish_reason(self, reason: str | None) -> str | None:
        return reason


class CompletionFormat:
    """Completions of a prompt."""

    id_prefix, object_name, chunk_object_name = "cmpl", "text_completion", "text_completion"
    is_completion = True

    def __init__(self, formatter: TokenFormatter) -> None:
        self.formatter = formatter

    def writer(self, choice: ChoiceRequest) -> ChoiceWriter:
        return CompletionWriter(choice.echo)

    def logprobs(self, tokens: list[ShownToken], *, as_ids: bool, most: int | None) -> Json:
        return self.formatter.completion(tokens, as_ids=as_ids)  # one more than asked for, as OpenAI's API says


class ResponseBuilder:
    """Builds the response to one request from the engine's outputs."""

    def __init__(self, response_format: ResponseFormat, task: CompletionTask, model: str) -> None:
        self._format, self._task, self._model = response_format, task, model
        self.id = f"{response_format.id_prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._states = [
            ChoiceState(choice, response_format.writer(choice), self._aligner(choice)) for choice in task.choices
        ]
        self._opened: set[int] = set()
        self.first_token: float | None = None  # when it came, by the clock of time.perf_counter

    async def whole(self, deltas: AsyncGenerator[ChoiceDelta, None]) -> Json:
        """The whole response, once every choice has finished."""
        async with aclosing(deltas):
            async for delta in deltas:
                self._add(delta)
        choices = [self._whole_choice(index, state) for index, state in enumerate(self._best())]
        details = {} if self._format.is_completion else self._prompt_details(self._states[0])
        document = {**self._header(self._format.object_name), "choices": choices, "usage": self.usage(), **details}
        return {**document, **self._metrics()}

    async def chunks(self, deltas: AsyncGenerator[ChoiceDelta, None]) -> AsyncGenerator[Json, None]:
        """The chunks of a stream.

        The first chunk waits for the first output, so that an error before it is a response with its own status.
        """
        async with aclosing(deltas):
            first = await anext(deltas, None)
            for chunk in self._opening_chunks():
                yield chunk
            for chunk in self._delta_chunks(first) if first else ():
                yield chunk
            async for delta in deltas:
                for chunk in self._delta_chunks(delta):
                    yield chunk
        if self._task.include_usage:
            header = self._header(self._format.chunk_object_name)
            yield {**header, "choices": [], "usage": self.usage(), **self._metrics()}

    def usage(self) -> Json:
        """Token counts. The details count the draft tokens of a client's prediction."""
        completion_tokens = sum(state.num_tokens for state in self._states)
        predicted = [state.stats for state in self._states if state.choice.uses_prediction]
        accepted = sum(stats.accepted for stats in predicted)
        return {
            "prompt_tokens": self._task.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self._task.prompt_tokens + completion_tokens,
            "prompt_tokens_details": self._cache_usage(),
            "completion_tokens_details": {
                "reasoning_tokens": sum(state.writer.num_reasoning_tokens for state in self._states),
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(stats.drafted for stats in predicted) - accepted,
            },
        }

    def log_fields(self) -> Json:
        """Counts for the access log: neither prompt nor output."""
        all_stats = [state.stats for state in self._states]
        return {
            "new_tokens": sum(stats.new_tokens for stats in all_stats),
            "draft_tokens": sum(stats.drafted for stats in all_stats),
            "accepted_tokens": sum(stats.accepted for stats in all_stats),
        }

    # --- states -------------------------------------------------------------------------------------------------------

    def _aligner(self, choice: ChoiceRequest) -> TokenAligner | None:
        if choice.request.logprobs is None or not self._task.shows_logprobs:
            return None
        formatter = self._format.formatter
        return TokenAligner(formatter.token_text, choice.request, formatter.eos_token_ids, len(choice.echo))

    def _add(self, delta: ChoiceDelta) -> RequestOutput:
        """Take an output; returns it as the response shows it."""
        output, state = delta.output, self._states[delta.index]
        self.first_token = self.first_token or time.perf_counter()
        if self._task.prompt_only:  # a token was generated only so that the prompt was read
            reason = "length" if output.finish_reason else None
            output = replace(output, text="", token_ids=(), logprobs=None, finish_reason=reason, stop_reason=None)
        state.add(output)
        if output.prompt_logprobs is not None and self._task.echo_logprobs:
            request, echo = state.choice.request, state.choice.echo
            tokens = prompt_tokens(self._format.formatter.token_text, request, output.prompt_logprobs, len(echo))
            state.shown[:0], state.fresh[:0] = tokens, tokens
        return output

    def _best(self) -> list[ChoiceState]:
        """The choices of the response: of those for each prompt, the likeliest where best_of asks for it."""
        size, count = self._task.copies, self._task.choices_per_prompt or self._task.copies
        groups = [self._states[start : start + size] for start in range(0, len(self._states), size)]
        if count == size:
            return self._states
        return [state for group in groups for state in sorted(group, key=_unlikelihood)[:count]]

    def _cache_usage(self) -> Json:
        """Prompts count once: by the copy for which the fewest of its tokens were cached."""
        size = self._task.copies
        groups = [self._states[start : start + size] for start in range(0, len(self._states), size)]
        firsts = [min(group, key=lambda state: state.cache_use.found) for group in groups]
        return {
            "cached_tokens": sum(state.cache_use.found for state in firsts),
            "cache_write_tokens": sum(state.cache_use.written for state in firsts),
        }

    # --- choices ------------------------------------------------------------------------------------------------------

    def _whole_choice(self, index: int, state: ChoiceState) -> Json:
        choice = {
            "index": index,
            **state.writer.whole(),
            "logprobs": self._logprobs(state.shown) if state.has_logprobs else None,
            "finish_reason": state.finish_reason,
            "stop_reason": state.stop_reason,
            "token_ids": state.token_ids if self._task.return_token_ids else None,
        }
        if self._format.is_completion:
            choice |= self._prompt_details(state)
        return {**choice, "x_paceline": state.speculation()} if self._task.include_stats else choice

    def _logprobs(self, tokens: list[ShownToken]) -> Json:
        request = self._task.choices[0].request
        most = None if request.logprob_token_ids else request.logprobs
        return self._format.logprobs(tokens, as_ids=self._task.tokens_as_ids, most=most)

    def _prompt_details(self, state: ChoiceState) -> Json:
        top, entries = self._task.prompt_logprobs, state.prompt_logprobs or ()
        return {
            "prompt_token_ids": state.choice.request.prompt if self._task.return_token_ids else None,
            "prompt_logprobs": None if top is None else self._format.formatter.prompt(entries, top),
        }

    def _opening_chunks(self) -> Iterator[Json]:
        """A chat opens every choice with its role; a completion opens one with its first output."""
        for index, state in enumerate(() if self._format.is_completion else self._states):
            yield self._with_prompt_ids(self._chunk(index, state.writer.opening()), index)

    def _with_prompt_ids(self, chunk: Json, index: int) -> Json:
        """The first chunk of a choice with the token ids of its prompt, where the request asks for them."""
        if self._task.return_token_ids and index not in self._opened:
            holder = chunk["choices"][0] if self._format.is_completion else chunk
            holder["prompt_token_ids"] = self._states[index].choice.request.prompt
        self._opened.add(index)
        return chunk

    def _delta_chunks(self, delta: ChoiceDelta) -> Iterator[Json]:
        state, output = self._states[delta.index], self._add(delta)
        has_ids = self._task.return_token_ids and output.token_ids
        has_output = bool(any(state.fields.values()) or state.fresh or has_ids or self._task.include_stats)
        closes = has_output and not self._task.include_stats
        if has_output:
            chunk = self._output_chunk(delta.index, state, output)
            yield self._closed(chunk, state) if closes and output.finish_reason else chunk
        if output.finish_reason and not closes:
            stats = state.speculation() if self._task.include_stats else None
            yield self._closed(self._chunk(delta.index, state.writer.closing(), None, stats), state)

    def _output_chunk(self, index: int, state: ChoiceState, output: RequestOutput) -> Json:
        stats = None
        if self._task.include_stats:
            stats = {
                "from_draft": output.from_draft,
                "num_tokens": len(output.token_ids),
                "num_draft_tokens": output.num_drafted,
            }
        logprobs = self._logprobs(state.fresh) if state.has_logprobs else None
        chunk = self._chunk(index, state.fields, logprobs, stats)
        if self._task.return_token_ids:
            chunk["choices"][0]["token_ids"] = list(output.token_ids)
        return self._with_prompt_ids(chunk, index)

    def _closed(self, chunk: Json, state: ChoiceState) -> Json:
        """The chunk with why the output has ended."""
        chunk["choices"][0] |= {"finish_reason": state.finish_reason, "stop_reason": state.stop_reason}
        return chunk

    # --- documents ----------------------------------------------------------------------------------------------------

    def _header(self, object_name: str) -> Json:
        header = {"id": self.id, "object": object_name, "created": self._created, "model": self._model}
        fingerprint = self._task.system_fingerprint
        return {**header, "system_fingerprint": fingerprint} if fingerprint else header

    def _metrics(self) -> Json:
        """vLLM's figures of the speculation, for a response of one choice."""
        if not self._task.include_stats or len(self._states) > 1:
            return {}
        return {"metrics": {"speculative_decoding": speculation_metrics(self._states[0].stats)}}

    def _chunk(self, index: int, fields: Json, logprobs: Json | None = None, stats: Json | None = None) -> Json:
        choice = {"index": index, **fields, "logprobs": logprobs, "finish_reason": None}
        if stats is not None:
            choice["x_paceline"] = stats
        usage = {"usage": self.usage() if self._task.continuous_usage else None} if self._task.include_usage else {}
        return {**self._header(self._format.chunk_object_name), "choices": [choice], **usage}


def _unlikelihood(state: ChoiceState) -> float:
    return -state.cumulative_logprob
