"""Engine outputs to OpenAI's responses, whole or as the chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from paceline.core.stats import SpecStats
from paceline.core.types import RequestOutput, TokenLogprob
from paceline.errors import OptionError
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
    """

    choice: ChoiceRequest
    aligner: TokenAligner | None = None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)  # of each token
    shown: list[ShownToken] = field(default_factory=list)
    fresh: list[ShownToken] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
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
        self.finish_reason = output.finish_reason or self.finish_reason
        self.stats = output.stats or self.stats
        self._add_details(output)

    def _add_details(self, output: RequestOutput) -> None:
        self.cumulative_logprob += sum(entry.logprob for entry in output.logprobs or ())
        self.stop_reason = output.stop_reason if output.finish_reason else None
        self.num_cached_tokens = output.num_cached_tokens or self.num_cached_tokens
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
    """The shape of one of the two kinds of completion. Each method gives fields of a choice."""

    id_prefix: str
    object_name: str
    chunk_object_name: str
    formatter: TokenFormatter
    details_in_choice: bool  # where prompt_token_ids and prompt_logprobs stand: in each choice, or beside the choices

    def opening(self, echo: str) -> Json: ...
    def delta(self, text: str) -> Json: ...
    def closing(self) -> Json: ...
    def whole(self, echo: str, text: str) -> Json: ...
    def logprobs(self, tokens: list[ShownToken], *, as_ids: bool) -> Json: ...


class ChatFormat:
    """Chat completions."""

    id_prefix, object_name, chunk_object_name = "chatcmpl", "chat.completion", "chat.completion.chunk"
    details_in_choice = False

    def __init__(self, formatter: TokenFormatter) -> None:
        self.formatter = formatter

    def opening(self, echo: str) -> Json:
        return {"delta": {"role": "assistant", "content": ""}}

    def delta(self, text: str) -> Json:
        return {"delta": {"content": text}}

    def closing(self) -> Json:
        return {"delta": {}}

    def whole(self, echo: str, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def logprobs(self, tokens: list[ShownToken], *, as_ids: bool) -> Json:
        return self.formatter.chat(tokens, as_ids=as_ids)


class CompletionFormat:
    """Completions of a prompt."""

    id_prefix, object_name, chunk_object_name = "cmpl", "text_completion", "text_completion"
    details_in_choice = True

    def __init__(self, formatter: TokenFormatter) -> None:
        self.formatter = formatter

    def opening(self, echo: str) -> Json:
        return {"text": echo}

    def delta(self, text: str) -> Json:
        return {"text": text}

    def closing(self) -> Json:
        return {"text": ""}

    def whole(self, echo: str, text: str) -> Json:
        return {"text": echo + text}

    def logprobs(self, tokens: list[ShownToken], *, as_ids: bool) -> Json:
        return self.formatter.completion(tokens, as_ids=as_ids)


class ResponseBuilder:
    """Builds the response to one request from the engine's outputs."""

    def __init__(self, response_format: ResponseFormat, task: CompletionTask, model: str) -> None:
        self._format, self._task, self._model = response_format, task, model
        self.id = f"{response_format.id_prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._states = [ChoiceState(choice, self._aligner(choice)) for choice in task.choices]
        self._opened: set[int] = set()

    async def whole(self, deltas: AsyncGenerator[ChoiceDelta, None]) -> Json:
        """The whole response, once every choice has finished."""
        async with aclosing(deltas):
            async for delta in deltas:
                self._add(delta)
        choices = [self._whole_choice(index, state) for index, state in enumerate(self._best())]
        details = {} if self._format.details_in_choice else self._prompt_details(self._states[0])
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
            "prompt_tokens_details": {"cached_tokens": self._num_cached_tokens()},
            "completion_tokens_details": {
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
        if self._task.echo_only:  # a token was generated only so that the prompt was read
            reason = "length" if output.finish_reason else None
            output = replace(output, text="", token_ids=(), logprobs=None, finish_reason=reason, stop_reason=None)
        state.add(output)
        if output.prompt_logprobs is not None and self._task.echo_logprobs:
            request, echo = state.choice.request, state.choice.echo
            state.shown[:0] = prompt_tokens(
                self._format.formatter.token_text, request, output.prompt_logprobs, len(echo)
            )
        return output

    def _best(self) -> list[ChoiceState]:
        """The choices of the response: of those for each prompt, the likeliest where best_of asks for it."""
        size, count = self._task.copies, self._task.choices_per_prompt or self._task.copies
        groups = [self._states[start : start + size] for start in range(0, len(self._states), size)]
        if count == size:
            return self._states
        return [state for group in groups for state in sorted(group, key=_unlikelihood)[:count]]

    def _num_cached_tokens(self) -> int:
        """Prompts count once, and so do their cached tokens: those of the copy that found the fewest."""
        size = self._task.copies
        groups = [self._states[start : start + size] for start in range(0, len(self._states), size)]
        return sum(min(state.num_cached_tokens for state in group) for group in groups)

    # --- choices ------------------------------------------------------------------------------------------------------

    def _whole_choice(self, index: int, state: ChoiceState) -> Json:
        fields = self._format.whole(state.choice.echo, state.text)
        choice = {
            "index": index,
            **fields,
            "logprobs": self._logprobs(state.shown) if state.has_logprobs else None,
            "finish_reason": state.finish_reason,
            "stop_reason": state.stop_reason,
        }
        if self._format.details_in_choice:
            choice |= self._prompt_details(state)
        if self._task.return_token_ids:
            choice["token_ids"] = state.token_ids
        return {**choice, "x_paceline": state.speculation()} if self._task.include_stats else choice

    def _logprobs(self, tokens: list[ShownToken]) -> Json:
        return self._format.logprobs(tokens, as_ids=self._task.tokens_as_ids)

    def _prompt_details(self, state: ChoiceState) -> Json:
        details: Json = {}
        if self._task.return_token_ids:
            details["prompt_token_ids"] = state.choice.request.prompt
        if self._task.prompt_logprobs is not None:
            entries = state.prompt_logprobs or ()
            details["prompt_logprobs"] = self._format.formatter.prompt(entries, self._task.prompt_logprobs)
        return details

    def _opening_chunks(self) -> Iterator[Json]:
        """The first chunk of every choice, but of those that echo log-probabilities: they come with an output."""
        for index, _ in enumerate(self._states if not self._task.echo_logprobs else ()):
            yield self._opening_chunk(index)

    def _opening_chunk(self, index: int) -> Json:
        state = self._states[index]
        self._opened.add(index)
        num_echoed = len(state.choice.request.prompt)
        logprobs = self._logprobs(state.shown[:num_echoed]) if self._task.echo_logprobs else None
        chunk = self._chunk(index, self._format.opening(state.choice.echo), logprobs)
        details = {"prompt_token_ids": state.choice.request.prompt} if self._task.return_token_ids else {}
        (chunk["choices"][0] if self._format.details_in_choice else chunk).update(details)
        return chunk

    def _delta_chunks(self, delta: ChoiceDelta) -> Iterator[Json]:
        state, output = self._states[delta.index], self._add(delta)
        if delta.index not in self._opened:
            yield self._opening_chunk(delta.index)
        has_ids = self._task.return_token_ids and output.token_ids
        if output.text or state.fresh or has_ids or self._task.include_stats:
            yield self._output_chunk(delta.index, state, output)
        if output.finish_reason:
            yield self._closing_chunk(delta.index, state)

    def _output_chunk(self, index: int, state: ChoiceState, output: RequestOutput) -> Json:
        stats = None
        if self._task.include_stats:
            stats = {
                "from_draft": output.from_draft,
                "num_tokens": len(output.token_ids),
                "num_draft_tokens": output.num_drafted,
            }
        logprobs = self._logprobs(state.fresh) if state.has_logprobs else None
        chunk = self._chunk(index, self._format.delta(output.text), logprobs, stats)
        if self._task.return_token_ids:
            chunk["choices"][0]["token_ids"] = list(output.token_ids)
        return chunk

    def _closing_chunk(self, index: int, state: ChoiceState) -> Json:
        stats = state.speculation() if self._task.include_stats else None
        chunk = self._chunk(index, self._format.closing(), None, stats, state.finish_reason)
        chunk["choices"][0]["stop_reason"] = state.stop_reason
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
        usage = {"usage": self.usage() if self._task.continuous_usage else None} if self._task.include_usage else {}
        return {**self._header(self._format.chunk_object_name), "choices": [choice], **usage}


def _unlikelihood(state: ChoiceState) -> float:
    return -state.cumulative_logprob
