"""Which sequences run next: admission, chunked prefill, draft lengths, blocks, preemption.

Fairness: sequences are admitted in the order they came, and all that run take part in every step. When blocks run out,
the prefix cache gives up finished sequences first, then draft tokens are dropped, then the youngest sequence is
preempted: it goes back to the front of the queue and is prefilled again later. So the oldest always gets on, and every
sequence becomes the oldest.

Nothing here knows of threads or models: the engine that owns a scheduler calls it between its passes.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.config import EngineConfig
from paceline.core.draft_length import DraftLengthPolicy
from paceline.core.protocols import Drafter
from paceline.core.sequence import Sequence
from paceline.core.stats import EngineStats, SpecStats
from paceline.core.types import Row, RowOutput, StepResult
from paceline.engines.local.kv_manager import KVManager
from paceline.engines.local.prefill import join_chunks, num_unread, prefill_row
from paceline.engines.local.request_state import RequestState
from paceline.errors import PacelineError
from paceline.kv.prefix_cache import common_prefix_length

WORTH_WAITING = 64  # shared prompt tokens for which a sequence waits until another one has read them
LOOP_STEPS = 8  # of draft tokens in a row after which the policy is asked again
PREFILL_ALONE = 2048  # prompt tokens a pass while no sequence is running
MAX_LOGPROB_ROWS = 512  # prompt tokens a pass that have a row of logits each: a large vocabulary fills memory


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The running sequences of one step, and how many draft tokens each may have.

    places: of a part of a batch, where its sequences are in the whole
    """

    requests: list[RequestState]
    num_draft_tokens: list[int]
    places: list[int] = field(default_factory=list)

    @property
    def seqs(self) -> list[Sequence]:
        return [request.seq for request in self.requests]

    @property
    def has_finished(self) -> bool:
        """Whether all its sequences are over."""
        return all(request.seq.finished for request in self.requests)

    @property
    def has_finished_one(self) -> bool:
        return any(request.seq.finished for request in self.requests)

    def unfinished(self) -> StepBatch:
        """The part whose sequences are not over."""
        places = [place for place, request in enumerate(self.requests) if not request.seq.finished]
        ks = [self.num_draft_tokens[place] for place in places]
        return StepBatch([self.requests[place] for place in places], ks, places)

    def plain(self) -> StepBatch:
        """The same step without drafts."""
        return StepBatch(self.requests, [0] * len(self.requests))


class StepOfBatch(NamedTuple):
    """What one step did to the sequences of a batch."""

    batch: StepBatch
    results: list[StepResult]


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """Prompts of which one pass reads the next tokens."""

    requests: list[RequestState]
    rows: list[Row]

    @property
    def is_scored(self) -> bool:
        """Whether the prompts report log-probabilities: the pass then has a row of logits for every token."""
        return _is_scored(self.requests[0])


class Scheduler:
    """All requests of one engine, from the queue to their end."""

    def __init__(self, kv: KVManager, drafter: Drafter, draft_length: DraftLengthPolicy, config: EngineConfig) -> None:
        self.kv = kv
        self._drafter, self._draft_length, self._config = drafter, draft_length, config
        self._waiting: deque[RequestState] = deque()
        self._prefilling: list[RequestState] = []
        self._running: list[RequestState] = []
        self._arrivals = 0
        self._totals = Totals()
        self._max_running: int | None = None  # after a pass ran out of memory: as many as fit, until one has ended
        self.is_called: Callable[[], bool] = lambda: False  # whether a caller waits for the end of this step

    # --- requests -----------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._prefilling or self._running)

    def add(self, request: RequestState) -> None:
        self._arrivals += 1
        request.arrival = self._arrivals
        self._waiting.append(request)

    def abort(self, request: RequestState) -> None:
        """Stop working on a request. Harmless for one that has ended."""
        for queue in (self._waiting, self._prefilling, self._running):
            if request in queue:
                queue.remove(request)
                self._release(request, keep=queue is self._running)

    def abort_all(self) -> None:
        """End every sequence where it is, and free everything."""
        for request in [*self._waiting, *self._prefilling, *self._running]:
            self.abort(request)
            request.abort()
        self.kv.clear()

    def fail(self, requests: list[RequestState], error: PacelineError) -> None:
        """A pass over these requests raised: they end with the error, also one that ended in it and has not reported
        that. What has reported its end is in no queue and stays as it is; all others go on."""
        self._totals.failures += 1
        for request in requests:
            queue = next((queue for queue in (self._prefilling, self._running) if request in queue), None)
            if queue is not None:
                queue.remove(request)
                self._release(request, keep=False)
                request.fail(error)

    def stats(self) -> EngineStats:
        """A snapshot. Safe from any thread: the numbers are copied one by one and may be a step apart."""
        running = [request.seq for request in [*self._prefilling, *self._running]]
        return self._totals.snapshot(self.kv, len(self._waiting), running)

    # --- before a step ------------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Give waiting requests their caches, in order, as long as there is room."""
        most = self._max_running or self._config.max_num_seqs
        while self._waiting and len(self._prefilling) + len(self._running) < most:
            request = self._waiting[0]
            if self._worth_waiting(request) or not self.kv.admit(request.seq):
                return  # the others wait their turn: short prompts never overtake a long one for good
            self._waiting.popleft()
            if request.started is None:
                request.started = time.perf_counter()
                self._totals.admitted(request.seq, self.kv)
            self._prefilling.append(request)

    def _worth_waiting(self, request: RequestState) -> bool:
        """Whether a prompt being read shares a long prefix: soon it can be shared instead of read twice."""
        if not self.kv.keeps_finished or not self._prefilling or _is_scored(request):
            return False
        enough = self.kv.cached_prefix(request.seq) + WORTH_WAITING
        lora = request.seq.params.lora
        alike = [other.seq for other in self._prefilling if other.seq.params.lora == lora]
        return any(common_prefix_length(seq.ids, request.seq.ids) >= enough for seq in alike)

    def prefill_batch(self) -> PrefillBatch | None:
        """The next tokens of prompts, about a chunk of them shared out evenly; None if no prompt is unread.

        Prompts that report log-probabilities are read in passes of their own, which are smaller.
        """
        unread = [request for request in self._prefilling if num_unread(request.seq)]
        if not unread:
            return None
        chunk = self._config.prefill_chunk if self._running else PREFILL_ALONE
        if _is_scored(unread[0]):
            chunk = min(chunk, MAX_LOGPROB_ROWS)
        unread = [request for request in unread if _is_scored(request) == _is_scored(unread[0])]
        requests = unread[: max(1, chunk // self.kv.blocks.block_size)]
        share = max(1, chunk // len(requests))
        return PrefillBatch(requests, [prefill_row(request.seq, share) for request in requests])

    def prefilled(self, batch: PrefillBatch | None, outputs: list[RowOutput]) -> None:
        """Take the outputs of a prefill pass; sequences whose prompt is read are running from now on."""
        for request, output in zip(batch.requests if batch is not None else [], outputs):
            request.prefilled.append(output)
        for request in [request for request in self._prefilling if not num_unread(request.seq)]:
            prompt, request.prefilled = join_chunks(request.prefilled), []
            self._drafter.begin(request.seq, prompt)
            self.kv.publish(request.seq)
            self._prefilling.remove(request)
            self._running.append(request)

    def schedule(self) -> StepBatch:
        """Draft lengths and blocks for every running sequence. May preempt some."""
        counts = self._draft_length.plan([request.seq for request in self._running])
        num_draft_tokens = dict(zip(self._running, counts))
        for request in sorted(self._running, key=_arrival):
            while request in self._running and not self._reserve(request, num_draft_tokens[request]):
                if num_draft_tokens[request]:
                    num_draft_tokens[request] = 0  # draft tokens matter less than a running sequence
                else:
                    self.preempt()
        return StepBatch(list(self._running), [num_draft_tokens[request] for request in self._running])

    def _reserve(self, request: RequestState, num_draft_tokens: int) -> bool:
        seq = request.seq
        assert seq.seq_cache is not None
        return self.kv.reserve(seq.seq_cache, len(seq.ids) + num_draft_tokens)

    def ends_loop(self, batch: StepBatch, num_draft_steps: int = 0) -> bool:
        """Whether several steps in a row of this batch should end: for a caller, for a place that has become free and
        that somebody waits for, or, now and then, because the next steps would be others."""
        if self.is_called() or (self._waiting and batch.has_finished_one):
            return True
        if not num_draft_steps or num_draft_steps % LOOP_STEPS or self._draft_length.is_probing:
            return False
        if self._prefilling or batch.has_finished_one or self._plans_otherwise(batch):
            return True
        return self._draft_length.is_probing  # the plan is a probe of as many draft tokens: it takes few steps

    def _plans_otherwise(self, batch: StepBatch) -> bool:
        """Whether the policy would draft another number of tokens now. Near the end of a sequence there is room for
        fewer, which a loop need not know."""
        rooms = [seq.remaining_tokens - 1 for seq in batch.seqs]
        asked = zip(self._draft_length.plan(batch.seqs), batch.num_draft_tokens, rooms)
        return any(k != min(own, room) for k, own, room in asked)

    def make_room(self) -> bool:
        """After a pass ran out of memory: evict, or preempt the youngest; False if only one sequence is left."""
        if self.kv.evict():
            return True
        count = len(self._prefilling) + len(self._running)
        if count < 2:
            return False
        self.preempt()
        self._max_running = count - 1  # admitted again at once, it would make the same pass fail again
        return True

    def preempt(self) -> None:
        """Send the youngest sequence back to the front of the queue. Its tokens stay; its cache is rebuilt later."""
        request = max([*self._prefilling, *self._running], key=_arrival)
        (self._prefilling if request in self._prefilling else self._running).remove(request)
        self._totals.preemptions += 1
        request.prefilled = []
        self._drafter.end(request.seq)
        self.kv.release(request.seq, keep=False)
        self._waiting.appendleft(request)  # all that wait are younger: they came later, or were preempted before

    # --- after a step -------------------------------------------------------------------------------------------------

    def postprocess(self, batch: StepBatch, results: list[StepResult]) -> list[RequestState]:
        """Count, report, and release what has ended; returns the requests of the step."""
        now = time.perf_counter()
        for request, result in zip(batch.requests, results):
            seq = request.seq
            seq.stats.seconds = now - (request.started or now)
            self._totals.add_step(result)
            if seq.finished:
                self._running.remove(request)
                self._release(request, keep=True)
            request.emit(result)
        return batch.requests

    def add_seconds(self, seconds: float) -> None:
        self._totals.seconds += seconds

    def _release(self, request: RequestState, *, keep: bool) -> None:
        self._max_running = None
        request.prefilled, request.seq.keep_cache = [], keep and self.kv.keeps_finished
        self._totals.add(request.seq)
        self._drafter.end(request.seq)
        self._draft_length.forget(request.seq)
        self.kv.release(request.seq, keep=keep)


class Totals:
    """What an engine has done since it started."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.failures = 0
        self.preemptions = 0
        self.draft_lengths: Counter[int] = Counter()
        self._ended: dict[str, SpecStats] = {}  # by method, of sequences that have ended
        self._prompt_tokens = self._prefix_hits = self._prefix_tokens = 0

    def admitted(self, seq: Sequence, kv: KVManager) -> None:
        self._prompt_tokens += seq.prompt_length
        self._prefix_hits += seq.num_cached_tokens > 0
        self._prefix_tokens += seq.num_cached_tokens

    def add_step(self, result: StepResult) -> None:
        """Of one sequence. Several plain steps that were taken as one count as several."""
        self.draft_lengths[result.tree.num_draft_tokens] += 1 if len(result.tree) else len(result.emitted)

    def add(self, seq: Sequence) -> None:
        """A sequence has ended. Those that run are counted when someone asks: a step has no time for it."""
        _add_to(self._ended, seq)

    def snapshot(self, kv: KVManager, waiting: int, running: list[Sequence]) -> EngineStats:
        by_method: dict[str, SpecStats] = {}
        for method, ended in list(self._ended.items()):  # the worker may add a method meanwhile
            by_method.setdefault(method, SpecStats()).add(ended)
        for seq in running:
            _add_to(by_method, seq)
        spec = SpecStats()
        for stats in by_method.values():
            spec.add(stats)
        spec.seconds = self.seconds
        return EngineStats(
            waiting=waiting,
            running=len(running),
            blocks_used=kv.used_blocks,
            blocks_cached=kv.cached_blocks,
            blocks_free=kv.blocks.free,
            spec=spec,
            by_method=by_method,
            prefix_hits=self._prefix_hits,
            prefix_tokens=self._prefix_tokens,
            preemptions=self.preemptions,
            failures=self.failures,
            prompt_tokens=self._prompt_tokens,
            draft_lengths=dict(self.draft_lengths),
        )


def _add_to(by_method: dict[str, SpecStats], seq: Sequence) -> None:
    by_method.setdefault(seq.params.method or "default", SpecStats()).add(seq.stats)


def _is_scored(request: RequestState) -> bool:
    return request.seq.params.prompt_logprobs is not None


def _arrival(request: RequestState) -> int:
    return request.arrival
