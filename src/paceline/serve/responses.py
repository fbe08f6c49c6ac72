"""Engine outputs to OpenAI's responses, whole or as the chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.core.stats import SpecStats
from paceline.core.types import RequestOutput, TokenLogprob
from paceline.serve.chat_response import ChatWriter, ChoiceWriter
from paceline.serve.requests import ChoiceRequest, CompletionTask
from paceline.serve.token_text import TokenText

Json = dict[str, Any]
MIN_LOGPROB = -9999.0  # JSON has no minus infinity


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """An engine output, and the index of the choice it belongs to."""

    index: int
    output: RequestOutput


@dataclass(slots=True)
class ChoiceState:
    """One choice while its output arrives."""

    choice: ChoiceRequest
    writer: ChoiceWriter
    text: str = ""
    from_draft: list[bool] = field(default_factory=list)  # of each token
    logprobs: list[TokenLogprob] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # of each token in the text
    finish_reason: str | None = None
    stats: SpecStats = field(default_factory=SpecStats)

    @property
    def num_tokens(self) -> int:
        return len(self.from_draft)

    @property
    def has_logprobs(self) -> bool:
        return self.choice.request.logprobs is not None

    def add(self, output: RequestOutput) -> Json:
        """Take an output; returns the fields of its chunk."""
        num_tokens = len(output.token_ids)
        self.offsets += [len(self.text)] * num_tokens
        self.text += output.text
        self.from_draft += [output.from_draft] * num_tokens
        self.logprobs += output.logprobs or ()
        self.stats = output.stats or self.stats
        fields = self.writer.add(output)
        self.finish_reason = self.writer.finish_reason(output.finish_reason) or self.finish_reason
        return fields

    def speculation(self) -> Json:
        """What x_paceline adds to a finished choice."""
        return {"from_draft_mask": [int(flag) for flag in self.from_draft], **self.stats.as_dict()}


class TokenFormatter:
    """Log-probabilities as the API shows them. End tokens are no part of an output."""

    def __init__(self, token_text: TokenText, eos_token_ids: frozenset[int]) -> None:
        self._token_text, self._eos_token_ids = token_text, eos_token_ids

    def prompt_text(self, token_ids: list[int]) -> str:
        return self._token_text.decode(token_ids)

    def chat(self, logprobs: list[TokenLogprob]) -> Json:
        """The logprobs of a chat completion's choice."""
        return {"content": [self._with_alternatives(entry) for entry in self._shown(logprobs)], "refusal": None}

    def completion(self, logprobs: list[TokenLogprob], offsets: list[int]) -> Json:
        """The logprobs of a completion's choice. offsets: where each token starts in the text."""
        shown = self._shown(logprobs)
        return {
            "tokens": [self._text(entry.token) for entry in shown],
            "token_logprobs": [max(entry.logprob, MIN_LOGPROB) for entry in shown],
            "top_logprobs": [
                {self._text(token): max(logprob, MIN_LOGPROB) for token, logprob in entry.top} for entry in shown
            ],
            "text_offset": offsets[: len(shown)],  # an end token can only be the last
        }

    def _shown(self, logprobs: list[TokenLogprob]) -> list[TokenLogprob]:
        return [entry for entry in logprobs if entry.token not in self._eos_token_ids]

    def _text(self, token: int) -> str:
        return self._token_text.decode([token])

    def _entry(self, token: int, logprob: float) -> Json:
        token_bytes = self._token_text.token_bytes(token)
        return {"token": self._text(token), "logprob": max(logprob, MIN_LOGPROB), "bytes": token_bytes}

    def _with_alternatives(self, entry: TokenLogprob) -> Json:
        alternatives = [self._entry(token, logprob) for token, logprob in entry.top]
        return {**self._entry(entry.token, entry.logprob), "top_logprobs": alternatives}


class ResponseFormat(Protocol):
    """The shape of one of the two kinds of completion."""

    id_prefix: str
    object_name: str
    chunk_object_name: str

    def writer(self, choice: ChoiceRequest) -> ChoiceWriter: ...
    def logprobs(self, logprobs: list[TokenLogprob], offsets: list[int]) -> Json: ...


class ChatFormat:
    """Chat completions."""

    id_prefix, object_name, chunk_object_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, formatter: TokenFormatter) -> None:
        self._formatter = formatter

    def writer(self, choice: ChoiceRequest) -> ChoiceWriter:
        return ChatWriter(choice.syntax)

    def logprobs(self, logprobs: list[TokenLogprob], offsets: list[int]) -> Json:
        return self._formatter.chat(logprobs)


class CompletionWriter(ChoiceWriter):
    """The text of a completion's choice."""

    num_reasoning_tokens = 0

    def __init__(self, echo: str) -> None:
        self._echo, self._text = echo, ""

    def opening(self) -> Json:
        return {"text": self._echo}

    def add(self, output: RequestOutput) -> Json:
        self._text += output.text
        return {"text": output.text}

    def closing(self) -> Json:
        return {"text": ""}

    def whole(self) -> Json:
        return {"text": self._echo + self._text}

    def finish_reason(self, reason: str | None) -> str | None:
        return reason


class CompletionFormat:
    """Completions of a prompt."""

    id_prefix, object_name, chunk_object_name = "cmpl", "text_completion", "text_completion"

    def __init__(self, formatter: TokenFormatter) -> None:
        self._formatter = formatter

    def writer(self, choice: ChoiceRequest) -> ChoiceWriter:
        return CompletionWriter(choice.echo)

    def logprobs(self, logprobs: list[TokenLogprob], offsets: list[int]) -> Json:
        return self._formatter.completion(logprobs, offsets)


class ResponseBuilder:
    """Builds the response to one request from the engine's outputs."""

    def __init__(self, response_format: ResponseFormat, task: CompletionTask, model: str) -> None:
        self._format, self._task, self._model = response_format, task, model
        self.id = f"{response_format.id_prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._states = [ChoiceState(choice, response_format.writer(choice)) for choice in task.choices]

    async def whole(self, deltas: AsyncGenerator[ChoiceDelta, None]) -> Json:
        """The whole response, once every choice has finished."""
        async with aclosing(deltas):
            async for delta in deltas:
                self._states[delta.index].add(delta.output)
        choices = [self._whole_choice(index, state) for index, state in enumerate(self._states)]
        return {**self._header(self._format.object_name), "choices": choices, "usage": self.usage()}

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
            yield {**self._header(self._format.chunk_object_name), "choices": [], "usage": self.usage()}

    def usage(self) -> Json:
        """Token counts. The details count the draft tokens of a client's prediction."""
        completion_tokens = sum(state.num_tokens for state in self._states)
        predicted = [state.stats for state in self._states if state.choice.uses_prediction]
        accepted = sum(stats.accepted for stats in predicted)
        return {
            "prompt_tokens": self._task.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self._task.prompt_tokens + completion_tokens,
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

    # --- choices ------------------------------------------------------------------------------------------------------

    def _whole_choice(self, index: int, state: ChoiceState) -> Json:
        logprobs = self._format.logprobs(state.logprobs, state.offsets) if state.has_logprobs else None
        choice = {"index": index, **state.writer.whole(), "logprobs": logprobs, "finish_reason": state.finish_reason}
        return {**choice, "x_paceline": state.speculation()} if self._task.include_stats else choice

    def _opening_chunks(self) -> Iterator[Json]:
        for index, state in enumerate(self._states):
            yield self._chunk(index, state.writer.opening())

    def _delta_chunks(self, delta: ChoiceDelta) -> Iterator[Json]:
        state, output = self._states[delta.index], delta.output
        fields = state.add(output)
        if any(fields.values()) or output.logprobs or self._task.include_stats:
            yield self._output_chunk(delta.index, state, output, fields)
        if output.finish_reason:
            stats = state.speculation() if self._task.include_stats else None
            yield self._chunk(delta.index, state.writer.closing(), None, stats, state.finish_reason)

    def _output_chunk(self, index: int, state: ChoiceState, output: RequestOutput, fields: Json) -> Json:
        logprobs = stats = None
        if output.logprobs is not None:
            offsets = state.offsets[len(state.offsets) - len(output.logprobs) :]
            logprobs = self._format.logprobs(list(output.logprobs), offsets)
        if self._task.include_stats:
            stats = {
                "from_draft": output.from_draft,
                "num_tokens": len(output.token_ids),
                "num_draft_tokens": output.num_drafted,
            }
        return self._chunk(index, fields, logprobs, stats)

    # --- documents ----------------------------------------------------------------------------------------------------

    def _header(self, object_name: str) -> Json:
        return {"id": self.id, "object": object_name, "created": self._created, "model": self._model}

    def _chunk(
        self,
        index: int,
        fields: Json,
        logprobs: Json | None = None,
        stats: Json | None = None,
        finish_reason: str | None = None,
    ) -> Json:
        choice = {"index": index, **fields, "logprobs": logprobs, "finish_reason": finish_reason}
        if stats is not None:
            choice["x_paceline"] = stats
        usage = {"usage": None} if self._task.include_usage else {}
        return {**self._header(self._format.chunk_object_name), "choices": [choice], **usage}
