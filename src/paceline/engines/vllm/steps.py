"""What vLLM reports, step by step: whose tokens they are, how many were drafted, and the sums over all of it.

Where a pass has one sequence, the draft tokens of every step are known as they are verified. Where it has several,
vLLM reports them together; each sequence then learns its own at its end. Nothing here imports vLLM.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.core.draft_tree import chain
from paceline.core.sequence import Sequence
from paceline.core.stats import EngineStats, SpecStats
from paceline.core.types import RequestOutput, TokenLogprob
from paceline.hub.tokenizer import StreamDetokenizer

ABORT = "abort"


@dataclass(slots=True)
class Step:
    """One step of one sequence.

    tokens         accepted draft tokens and the target's own; cut where the sequence ends
    finish_reason  vLLM's, on the last step
    metrics        vLLM's counts of the sequence's draft tokens, on the last step where there are any
    drafted        draft tokens verified in the step; None: the pass had other sequences too
    share          the mean of the pass, where it had other sequences too
    num_cached_tokens  of the prompt, that the prefix cache held; None: not known
    """

    tokens: list[int]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: str | None = None
    metrics: Any = None
    drafted: int | None = None
    share: float = 0.0
    num_cached_tokens: int | None = None


Deliver = Callable[[Step], None]


def step_of(completion: Any, num_logprobs: int | None) -> Step:
    """A step from the output of vLLM for one sequence, which holds the tokens of this step alone."""
    tokens = [int(token) for token in completion.token_ids]
    logprobs = None
    if num_logprobs is not None:
        rows = completion.logprobs or []
        logprobs = tuple(_logprob(token, row, num_logprobs) for token, row in zip(tokens, rows))
    return Step(tokens, logprobs, completion.finish_reason, getattr(completion, "spec_decode_metrics", None))


def _logprob(token: int, row: Any, count: int) -> TokenLogprob:
    """row: token ids -> entries with `logprob` and `rank`; the token itself is among them whatever its rank."""
    best = sorted(((entry.rank, other, entry.logprob) for other, entry in row.items()), key=lambda item: item[0])
    top = tuple((int(other), float(logprob)) for rank, other, logprob in best if rank <= count)
    return TokenLogprob(token, float(row[token].logprob), top)


# --- one sequence -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _StepRecord:
    """What a step brought: draft tokens verified (None: not known alone), accepted, and tokens of the sequence."""

    drafted: int | None
    share: float
    accepted: int
    received: int
    emitted: int


class SequenceReader:
    """Turns the steps of one sequence into outputs with text, and counts them."""

    def __init__(self, seq: Sequence, detokenizer: StreamDetokenizer) -> None:
        self._seq, self._detokenizer = seq, detokenizer
        self._records: list[_StepRecord] = []
        self._started = time.perf_counter()

    def outputs(self, step: Step) -> list[RequestOutput]:
        """At most two: the accepted draft tokens, and the target's own. The last one of a sequence has its stats."""
        seq = self._seq
        accepted = max(0, len(step.tokens) - 1) + self._num_cut(step)
        emitted = seq.extend(step.tokens, accepted) if step.tokens else []
        accepted = min(accepted, len(emitted))
        if step.tokens:
            self._records.append(_StepRecord(step.drafted, step.share, accepted, len(step.tokens), len(emitted)))
        if step.finish_reason is not None and not seq.finished:
            seq.finish_reason = step.finish_reason
        if seq.finished:
            self._count(step.metrics)
        return self._as_outputs(step, emitted, accepted)

    def _num_cut(self, step: Step) -> int:
        """Accepted draft tokens past the end, which vLLM has cut off: its last token was drafted, too."""
        if step.metrics is None or not step.tokens:
            return 0
        received = sum(record.received for record in self._records) + len(step.tokens)
        accepted = sum(int(count) for count in step.metrics.per_step_accepted)
        return max(0, accepted + len(self._records) + 1 - received)

    def _count(self, metrics: Any) -> None:
        stats = sequence_stats(self._records, metrics)
        stats.seconds = time.perf_counter() - self._started
        self._seq.stats = stats

    def _as_outputs(self, step: Step, emitted: list[int], accepted: int) -> list[RequestOutput]:
        runs = [slice(0, accepted), slice(accepted, len(emitted))]
        runs = [run for run in runs if run.start < run.stop] or [slice(0, 0)]
        return [self._output(step, emitted, run, run.start < accepted, last=run is runs[-1]) for run in runs]

    def _output(self, step: Step, emitted: list[int], run: slice, from_draft: bool, *, last: bool) -> RequestOutput:
        seq = self._seq
        finished = last and seq.finished
        reason = seq.finish_reason if last else None
        text = self._detokenizer.feed(seq.params.stopping.text_tokens(emitted[run], reason))
        return RequestOutput(
            text + self._detokenizer.flush() if finished else text,
            tuple(emitted[run]),
            from_draft,
            None if step.logprobs is None else step.logprobs[run],
            reason,
            seq.stats if finished else None,
            step.drafted if last else None,
            seq.stop_reason if finished else None,
            step.num_cached_tokens if finished else None,
        )


def sequence_stats(records: list[_StepRecord], metrics: Any) -> SpecStats:
    """The counts of a sequence that has ended.

    metrics: vLLM's own, which a sequence has unless a stop string or its reader ended it. Without them and with other
    sequences in its passes, what was drafted is the mean of those passes, and positions are not known.
    """
    if metrics is not None:
        return _from_metrics(records, metrics)
    stats = SpecStats()
    if any(record.drafted is None for record in records):
        stats.steps, stats.new_tokens = len(records), sum(record.emitted for record in records)
        stats.accepted = sum(record.accepted for record in records)
        stats.drafted = max(stats.accepted, round(sum(record.drafted or record.share for record in records)))
        return stats
    for record in records:
        _add_step(stats, record.drafted or 0, record.accepted, record.emitted, record.emitted < record.received)
    return stats


def _from_metrics(records: list[_StepRecord], metrics: Any) -> SpecStats:
    """vLLM lists the steps that had draft tokens; the others are plain. Only the last one can be cut by the end."""
    stats = SpecStats()
    pairs = list(zip(metrics.per_step_drafted, metrics.per_step_accepted))
    new_tokens = sum(record.emitted for record in records)
    cut = sum(metrics.per_step_accepted) + len(records) - new_tokens
    stats.add_plain(len(records) - len(pairs))
    for index, (drafted, accepted) in enumerate(pairs):
        emitted = accepted + 1 - (cut if index == len(pairs) - 1 else 0)
        _add_step(stats, drafted, min(accepted, emitted), emitted, emitted <= accepted)
    return stats


def _add_step(stats: SpecStats, drafted: int, accepted: int, emitted: int, cut: bool) -> None:
    if drafted:
        stats.add_step(chain([0] * drafted), accepted, emitted, cut)
    else:
        stats.add_plain(emitted)


# --- all sequences ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Totals:
    """What vLLM has done since it started; draft tokens past the end of a sequence are counted here."""

    spec: SpecStats = field(default_factory=SpecStats)
    prefix_hits: int = 0
    prefix_tokens: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    failures: int = 0
    waiting: int = 0
    kv_usage: float = 0.0


class StepRecorder:
    """A stat logger of vLLM: it is called after every pass, with the outputs of the pass already handed out.

    Steps wait for that call, because it brings the draft tokens of the pass.
    """

    def __init__(self) -> None:
        self._totals = _Totals()
        self._pass: list[tuple[Step, Deliver]] = []
        self._lock = threading.Lock()
        self._last = time.perf_counter()

    def add(self, step: Step, deliver: Deliver) -> None:
        """A step of the pass under way. Its reader gets it when the pass is complete."""
        self._pass.append((step, deliver))

    def began(self, prompt_tokens: int, *, first: bool) -> None:
        """A request is sent. first: none was running, and the time before it does not count."""
        with self._lock:
            self._totals.prompt_tokens += prompt_tokens
            if first:
                self._last = time.perf_counter()

    def failed(self) -> None:
        """A request ends with an error."""
        with self._lock:
            self._totals.failures += 1

    # --- what vLLM calls ----------------------------------------------------------------------------------------------

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        steps, self._pass = self._pass, []
        drafts = None if scheduler_stats is None else scheduler_stats.spec_decoding_stats
        drafted = 0 if drafts is None else drafts.num_draft_tokens
        for step, _ in steps:
            if len(steps) == 1 or not drafted:
                step.drafted = drafted
            step.share = drafted / len(steps)
        with self._lock:
            self._count(steps, drafts)
            self._observe(scheduler_stats, iteration_stats)
        for step, deliver in steps:
            deliver(step)

    def log_engine_initialized(self) -> None:
        """Nothing to say."""

    def log(self) -> None:
        """Nothing to say."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """The engine is never sent to sleep."""

    # --- counting -----------------------------------------------------------------------------------------------------

    def _count(self, steps: list[tuple[Step, Deliver]], drafts: Any) -> None:
        spec, now = self._totals.spec, time.perf_counter()
        spec.add_plain(len(steps))
        spec.new_tokens += sum(len(step.tokens) for step, _ in steps) - len(steps)
        spec.seconds, self._last = spec.seconds + now - self._last, now
        if drafts is not None:
            counts = SpecStats(drafted=drafts.num_draft_tokens, accepted=drafts.num_accepted_tokens)
            counts.offered_at = list(drafts.num_draft_tokens_per_pos)
            counts.accepted_at = list(drafts.num_accepted_tokens_per_pos)
            spec.add(counts)

    def _observe(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        totals = self._totals
        if scheduler_stats is not None:
            prefix = scheduler_stats.prefix_cache_stats
            totals.prefix_hits += prefix.hits > 0
            totals.prefix_tokens += prefix.hits
            totals.waiting = scheduler_stats.num_waiting_reqs
            totals.kv_usage = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            totals.preemptions += iteration_stats.num_preempted_reqs

    def snapshot(self, method: str, in_flight: int, num_blocks: int) -> EngineStats:
        """in_flight: requests that have not ended. Safe from any thread."""
        with self._lock:
            totals = replace(self._totals, spec=_copy(self._totals.spec))
        waiting = min(totals.waiting, in_flight)
        used = round(totals.kv_usage * num_blocks) if in_flight else 0
        return EngineStats(
            waiting=waiting,
            running=in_flight - waiting,
            blocks_used=used,
            blocks_free=num_blocks - used,
            spec=totals.spec,
            by_method={method: _copy(totals.spec)},
            prefix_hits=totals.prefix_hits,
            prefix_tokens=totals.prefix_tokens,
            preemptions=totals.preemptions,
            failures=totals.failures,
            prompt_tokens=totals.prompt_tokens,
            draft_lengths=draft_lengths(totals.spec),
        )


def draft_lengths(spec: SpecStats) -> dict[int, int]:
    """Steps by their number of draft tokens: position d is offered in every step that has more than d of them."""
    reached = [spec.steps, *spec.offered_at, 0]
    counts = {k: max(0, reached[k] - reached[k + 1]) for k in range(len(reached) - 1)}
    return {k: count for k, count in counts.items() if count}


def _copy(spec: SpecStats) -> SpecStats:
    return replace(spec, offered_at=list(spec.offered_at), accepted_at=list(spec.accepted_at))
