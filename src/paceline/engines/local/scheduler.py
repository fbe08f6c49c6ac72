"""Which sequences are read and written next. One step is: admit, read a chunk of the prompts, write.

Fairness: sequences are admitted in the order they came and all of them are written in every step. When blocks run out,
first finished sequences are forgotten, then draft tokens are given up, then the youngest sequence is sent back to the front of the
queue and later reads its own tokens again; so the oldest always gets on, and everyone becomes the oldest.

NoDraft here knows of threads or event loops: one thread owns a scheduler and calls `round` as long as it is busy.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

from paceline.core.stats import EngineStats, SpecStats
from paceline.core.types import StepResult
from paceline.engines.local.kv_manager import KVManager
from paceline.engines.local.request_state import RequestState, StepOutput
from paceline.engines.local.settings import EngineSettings
from paceline.engines.local.step import EngineParts, begin, num_unread, read_some, step
from paceline.errors import OutOfMemory, PacelineError, StepFailed
from paceline.kv.prefix_cache import common_prefix_length

WORTH_WAITING = 64  # tokens that need not be read twice


class Scheduler:
    """All sequences of one engine, from the queue to their end."""

    def __init__(self, parts: EngineParts, settings: EngineSettings) -> None:
        self._with = parts
        self._settings = settings
        self.memory = KVManager(parts.target, settings.kv_cache_tokens, settings.block, settings.residents, settings.spare)
        self._waiting: deque[RequestState] = deque()
        self._reading: list[RequestState] = []
        self._writing: list[RequestState] = []
        self._arrivals = 0
        self.stats = SpecStats()
        self._by_method: dict[str, SpecStats] = {}
        self._ks: Counter[int] = Counter()
        self._preemptions = self._failures = self._prompt_tokens = 0

    # --- from outside -------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._reading or self._writing)

    def add(self, request_state: RequestState) -> None:
        self._arrivals += 1
        request_state.arrival = self._arrivals
        self._waiting.append(request_state)

    def drop(self, request_state: RequestState) -> None:
        """Nobody wants this sequence any more. Dropping one that is over is harmless."""
        for queue in (self._waiting, self._reading, self._writing):
            if request_state in queue:
                queue.remove(request_state)
                self._let_go(request_state, keep=queue is self._writing)

    def abort_all(self) -> None:
        """End every sequence as it stands, and give everything back."""
        for request_state in [*self._waiting, *self._reading, *self._writing]:
            self.drop(request_state)
            request_state.tell(StepOutput(finish_reason="abort"))
        self.memory.drop_residents()

    def round(self) -> None:
        """Admit, read, write. A sequence that cannot go on is told so; the others do not notice."""
        started = time.perf_counter()
        self._admit()
        if self._reading:
            self._guarded(self._reading, self._read)
        if self._writing:
            self._guarded(self._writing, self._write)
        self.stats.seconds += time.perf_counter() - started

    def load(self) -> EngineStats:
        """The numbers of this moment. Safe from any thread: they are copied one by one and may be a step apart."""
        pool, cached = self.memory.pool, self.memory.cached_blocks
        return EngineStats(
            waiting=len(self._waiting),
            running=len(self._reading) + len(self._writing),
            blocks_used=pool.used - cached,
            blocks_cached=cached,
            blocks_free=pool.free,
            prefix_hits=self.memory.hits,
            prefix_tokens=self.memory.hit_tokens,
            preemptions=self._preemptions,
            failures=self._failures,
            prompt_tokens=self._prompt_tokens,
            spec=self.stats,
            draft_lengths=dict(self._ks),
            by_method=dict(self._by_method),
        )

    # --- admitting ----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self._waiting and len(self._reading) + len(self._writing) < self._settings.max_num_seqs:
            request_state = self._waiting[0]
            if self._worth_waiting(request_state) or not self.memory.admit(request_state.seq):
                return  # the others wait behind it: a long sequence is not overtaken for ever by short ones
            self._waiting.popleft()
            if request_state.started is None:
                request_state.started = time.perf_counter()
                self._prompt_tokens += request_state.seq.prompt_length
            self._reading.append(request_state)

    def _worth_waiting(self, request_state: RequestState) -> bool:
        """Whether someone is just now reading the same beginning; soon it can be shared instead of read twice."""
        if not self._settings.residents or not self._reading:
            return False
        enough = self.memory.known(request_state.seq) + WORTH_WAITING
        return any(common_prefix_length(other.seq.ids, request_state.seq.ids) >= enough for other in self._reading)

    # --- reading ------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """One pass over the next tokens of the prompts; sequences whose prompt is read go on to be written."""
        pending = [request_state for request_state in self._reading if num_unread(request_state.seq)]
        if pending:
            seqs = [request_state.seq for request_state in pending]
            for request_state, output in zip(pending, read_some(seqs, self._with, self._settings.prefill_chunk)):
                request_state.chunks.append(output)
        for request_state in [request_state for request_state in self._reading if not num_unread(request_state.seq)]:
            begin(request_state.seq, request_state.chunks, self._with)
            request_state.chunks = []
            self.memory.publish(request_state.seq)
            self._reading.remove(request_state)
            self._writing.append(request_state)

    # --- writing ------------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        ks = self._make_room()
        batch = list(self._writing)
        if not batch:
            return
        results = step([request_state.seq for request_state in batch], self._with, ks)
        now = time.perf_counter()
        for request_state, k, result in zip(batch, ks, results):
            self._ks[k] += 1
            self._count(request_state, result)
            request_state.seq.stats.seconds = now - (request_state.started or now)
            if request_state.seq.finished:
                self._writing.remove(request_state)
                self._let_go(request_state, keep=True)
            request_state.tell(_growth(request_state, result))

    def _make_room(self) -> list[int]:
        """Pages for what every sequence may write in this step; returns each one's k. May send sequences back."""
        ks = dict(zip(self._writing, self._with.budget.plan([request_state.seq for request_state in self._writing])))
        for request_state in sorted(self._writing, key=_arrival):
            while request_state in self._writing and not self.memory.reserve(request_state.seq, len(request_state.seq.ids) + ks[request_state]):
                if ks[request_state]:
                    ks[request_state] = 0  # draft tokens are worth less than a neighbour's place
                else:
                    self._preempt()
        while len(self._writing) > 1 and not self.memory.fits(sum(1 + ks[request_state] for request_state in self._writing)):
            if any(ks.values()):
                ks = dict.fromkeys(ks, 0)
            else:
                self._preempt()
        return [ks[request_state] for request_state in self._writing]

    def _preempt(self) -> None:
        """Send the youngest sequence back to the front of the queue. Its tokens stay; its cache is made anew later."""
        request_state = max([*self._reading, *self._writing], key=_arrival)
        (self._reading if request_state in self._reading else self._writing).remove(request_state)
        self._preemptions += 1
        request_state.chunks = []
        self._with.drafter.end(request_state.seq)
        self.memory.release(request_state.seq, keep=False)
        self._waiting.appendleft(request_state)  # all that wait are younger: they were admitted in order, or sent back before

    def _count(self, request_state: RequestState, result: StepResult) -> None:
        cut = len(result.emitted) < len(result.verified.accepted) + 1
        method = self._by_method.setdefault(request_state.seq.method or "default", SpecStats())
        for stats in (self.stats, method):
            stats.add_step(result.tree, result.accepted, len(result.emitted), cut)

    # --- endings ------------------------------------------------------------------------------------------------------

    def _let_go(self, request_state: RequestState, *, keep: bool) -> None:
        request_state.chunks, request_state.seq.keep_cache = [], keep and self.memory.keeps
        self._with.drafter.end(request_state.seq)
        self._with.budget.forget(request_state.seq)
        self.memory.release(request_state.seq, keep=keep)

    def _guarded(self, batch: list[RequestState], work: Callable[[], None]) -> None:
        """Run one half of a step. Whatever breaks in it costs the sequences of that half, and nobody else."""
        try:
            work()
        except Exception as error:  # a model, a driver or a drafter may raise anything at all
            self._failures += 1
            lost = _explained(error)
            for request_state in list(batch):
                batch.remove(request_state)
                self._let_go(request_state, keep=False)
                request_state.tell(StepOutput(error=lost))
            if isinstance(error, OutOfMemory):
                self.memory.drop_residents()


def _arrival(request_state: RequestState) -> int:
    return request_state.arrival


def _explained(error: Exception) -> PacelineError:
    if isinstance(error, PacelineError):
        return error
    failure = StepFailed(f"the model failed while writing ({type(error).__name__}: {error})")
    failure.__cause__ = error
    return failure


def _growth(request_state: RequestState, result: StepResult) -> StepOutput:
    seq, count = request_state.seq, len(result.emitted)
    logprobs = tuple(seq.token_logprobs[seq.new_tokens - count :]) if seq.logprobs is not None else None
    return StepOutput(tuple(result.emitted), result.accepted, result.tree.num_draft_tokens, logprobs, seq.finish_reason)
