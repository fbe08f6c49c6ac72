"""A request under way in the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.core.sequence import Sequence
from paceline.core.types import RequestOutput, RowOutput, StepResult, TokenLogprob
from paceline.errors import PacelineError

OnOutput = Callable[[RequestOutput | PacelineError], None]


def ignore_output(output: RequestOutput | PacelineError) -> None:
    """For callers that read the finished sequence instead."""


@dataclass(slots=True, eq=False)
class RequestState:
    """One sequence, where its outputs go, and what the scheduler keeps of it.

    error  why the sequence failed; nothing comes after an error or a finish_reason
    """

    seq: Sequence
    on_output: OnOutput = ignore_output
    arrival: int = 0  # its place in the order of all requests
    started: float | None = None  # when its prompt was first admitted
    prefilled: list[RowOutput] = field(default_factory=list)  # outputs of a prompt read in chunks
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # of prompt tokens from the second on
    error: PacelineError | None = None

    def fail(self, error: PacelineError) -> None:
        self.error = error
        self.on_output(error)

    def abort(self) -> None:
        self.seq.finish_reason = self.seq.finish_reason or "abort"
        self.on_output(RequestOutput("", finish_reason="abort", stats=self.seq.stats))

    def emit(self, result: StepResult) -> None:
        """Report a step as at most two outputs: the accepted draft tokens, and the target's own."""
        if self.on_output is ignore_output:
            return
        tokens, accepted = result.emitted, result.accepted
        runs = [slice(0, accepted), slice(accepted, len(tokens))]
        runs = [run for run in runs if run.start < run.stop] or [slice(0, 0)]
        for run in runs:
            self.on_output(self._output(result, run, last=run is runs[-1]))

    def _output(self, result: StepResult, run: slice, *, last: bool) -> RequestOutput:
        """Tokens without their characters: those are made by the reader, while the engine is in its next step."""
        seq = self.seq
        first = seq.num_new_tokens - len(result.emitted) + run.start  # of the generated tokens
        ended = last and seq.finished
        return RequestOutput(
            "",
            tuple(result.emitted[run]),
            run.start < result.accepted,
            None if seq.params.logprobs is None else tuple(seq.token_logprobs[first : first + run.stop - run.start]),
            seq.finish_reason if last else None,
            seq.stats if ended else None,
            result.tree.num_draft_tokens if last else None,
            seq.stop_reason if ended else None,
            min(seq.num_cached_tokens, seq.prompt_length) if ended else None,
            tuple(self.prompt_logprobs) if seq.params.prompt_logprobs is not None and not first else None,
            seq.cache_use.written if ended else None,
        )
