"""Which texts are read and written next. One round is: admit, read a chunk of the prompts, write.

Fairness: texts are admitted in the order they came and all of them are written in every round. When pages run out,
first finished texts are forgotten, then guesses are given up, then the youngest text is sent back to the front of the
queue and later reads its own tokens again; so the oldest always gets on, and everyone becomes the oldest.

Nothing here knows of threads or event loops: one thread owns a scheduler and calls `round` as long as it is busy.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

from paceline.core.protocols import Round
from paceline.core.tally import Tally
from paceline.decode.step import Machinery, begin, read_some, step, unread
from paceline.engines.load import Load
from paceline.engines.memory import Memory
from paceline.engines.settings import EngineSettings
from paceline.engines.ticket import Growth, Ticket
from paceline.errors import OutOfMemory, PacelineError, RoundFailed
from paceline.kv.prefixes import shared_beginning

WORTH_WAITING = 64  # tokens that need not be read twice


class Scheduler:
    """All texts of one engine, from the queue to their end."""

    def __init__(self, with_: Machinery, settings: EngineSettings) -> None:
        self._with = with_
        self._settings = settings
        self.memory = Memory(with_.target, settings.cache_tokens, settings.page, settings.residents, settings.spare)
        self._waiting: deque[Ticket] = deque()
        self._reading: list[Ticket] = []
        self._writing: list[Ticket] = []
        self._arrivals = 0
        self.tally = Tally()
        self._by_method: dict[str, Tally] = {}
        self._ks: Counter[int] = Counter()
        self._preemptions = self._failures = self._prompt_tokens = 0

    # --- from outside -------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._reading or self._writing)

    def add(self, ticket: Ticket) -> None:
        self._arrivals += 1
        ticket.arrival = self._arrivals
        self._waiting.append(ticket)

    def drop(self, ticket: Ticket) -> None:
        """Nobody wants this text any more. Dropping one that is over is harmless."""
        for queue in (self._waiting, self._reading, self._writing):
            if ticket in queue:
                queue.remove(ticket)
                self._let_go(ticket, keep=queue is self._writing)

    def abort_all(self) -> None:
        """End every text as it stands, and give everything back."""
        for ticket in [*self._waiting, *self._reading, *self._writing]:
            self.drop(ticket)
            ticket.tell(Growth(finish_reason="abort"))
        self.memory.drop_residents()

    def round(self) -> None:
        """Admit, read, write. A text that cannot go on is told so; the others do not notice."""
        started = time.perf_counter()
        self._admit()
        if self._reading:
            self._guarded(self._reading, self._read)
        if self._writing:
            self._guarded(self._writing, self._write)
        self.tally.seconds += time.perf_counter() - started

    def load(self) -> Load:
        """The numbers of this moment. Safe from any thread: they are copied one by one and may be a round apart."""
        pool, cached = self.memory.pool, self.memory.cached_pages
        return Load(
            waiting=len(self._waiting),
            running=len(self._reading) + len(self._writing),
            pages_used=pool.used - cached,
            pages_cached=cached,
            pages_free=pool.free,
            prefix_hits=self.memory.hits,
            prefix_tokens=self.memory.hit_tokens,
            preemptions=self._preemptions,
            failures=self._failures,
            prompt_tokens=self._prompt_tokens,
            ks=dict(self._ks),
            by_method=dict(self._by_method),
        )

    # --- admitting ----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self._waiting and len(self._reading) + len(self._writing) < self._settings.largest_batch:
            ticket = self._waiting[0]
            if self._worth_waiting(ticket) or not self.memory.admit(ticket.text):
                return  # the others wait behind it: a long text is not overtaken for ever by short ones
            self._waiting.popleft()
            if ticket.started is None:
                ticket.started = time.perf_counter()
                self._prompt_tokens += ticket.text.prompt_length
            self._reading.append(ticket)

    def _worth_waiting(self, ticket: Ticket) -> bool:
        """Whether someone is just now reading the same beginning; soon it can be shared instead of read twice."""
        if not self._settings.residents or not self._reading:
            return False
        enough = self.memory.known(ticket.text) + WORTH_WAITING
        return any(shared_beginning(other.text.ids, ticket.text.ids) >= enough for other in self._reading)

    # --- reading ------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """One pass over the next tokens of the prompts; texts whose prompt is read go on to be written."""
        pending = [ticket for ticket in self._reading if unread(ticket.text)]
        if pending:
            texts = [ticket.text for ticket in pending]
            for ticket, output in zip(pending, read_some(texts, self._with, self._settings.prefill_chunk)):
                ticket.parts.append(output)
        for ticket in [ticket for ticket in self._reading if not unread(ticket.text)]:
            begin(ticket.text, ticket.parts, self._with)
            ticket.parts = []
            self.memory.publish(ticket.text)
            self._reading.remove(ticket)
            self._writing.append(ticket)

    # --- writing ------------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        ks = self._make_room()
        batch = list(self._writing)
        if not batch:
            return
        rounds = step([ticket.text for ticket in batch], self._with, ks)
        now = time.perf_counter()
        for ticket, k, done in zip(batch, ks, rounds):
            self._ks[k] += 1
            self._count(ticket, done)
            ticket.text.tally.seconds = now - (ticket.started or now)
            if ticket.text.finished:
                self._writing.remove(ticket)
                self._let_go(ticket, keep=True)
            ticket.tell(_growth(ticket, done))

    def _make_room(self) -> list[int]:
        """Pages for what every text may write in this round; returns each one's k. May send texts back."""
        ks = dict(zip(self._writing, self._with.budget.plan([ticket.text for ticket in self._writing])))
        for ticket in sorted(self._writing, key=_arrival):
            while ticket in self._writing and not self.memory.reserve(ticket.text, len(ticket.text.ids) + ks[ticket]):
                if ks[ticket]:
                    ks[ticket] = 0  # guesses are worth less than a neighbour's place
                else:
                    self._preempt()
        while len(self._writing) > 1 and not self.memory.fits(sum(1 + ks[ticket] for ticket in self._writing)):
            if any(ks.values()):
                ks = dict.fromkeys(ks, 0)
            else:
                self._preempt()
        return [ks[ticket] for ticket in self._writing]

    def _preempt(self) -> None:
        """Send the youngest text back to the front of the queue. Its tokens stay; its cache is made anew later."""
        ticket = max([*self._reading, *self._writing], key=_arrival)
        (self._reading if ticket in self._reading else self._writing).remove(ticket)
        self._preemptions += 1
        ticket.parts = []
        self._with.drafter.end(ticket.text)
        self.memory.release(ticket.text, keep=False)
        self._waiting.appendleft(ticket)  # all that wait are younger: they were admitted in order, or sent back before

    def _count(self, ticket: Ticket, done: Round) -> None:
        cut = len(done.emitted) < len(done.verdict.path) + 1
        method = self._by_method.setdefault(ticket.text.method or "default", Tally())
        for tally in (self.tally, method):
            tally.add_round(done.tree, done.accepted, len(done.emitted), cut)

    # --- endings ------------------------------------------------------------------------------------------------------

    def _let_go(self, ticket: Ticket, *, keep: bool) -> None:
        ticket.parts, ticket.text.stays = [], keep and self.memory.keeps
        self._with.drafter.end(ticket.text)
        self._with.budget.forget(ticket.text)
        self.memory.release(ticket.text, keep=keep)

    def _guarded(self, batch: list[Ticket], work: Callable[[], None]) -> None:
        """Run one half of a round. Whatever breaks in it costs the texts of that half, and nobody else."""
        try:
            work()
        except Exception as error:  # a model, a driver or a drafter may raise anything at all
            self._failures += 1
            lost = _explained(error)
            for ticket in list(batch):
                batch.remove(ticket)
                self._let_go(ticket, keep=False)
                ticket.tell(Growth(error=lost))
            if isinstance(error, OutOfMemory):
                self.memory.drop_residents()


def _arrival(ticket: Ticket) -> int:
    return ticket.arrival


def _explained(error: Exception) -> PacelineError:
    if isinstance(error, PacelineError):
        return error
    failure = RoundFailed(f"the model failed while writing ({type(error).__name__}: {error})")
    failure.__cause__ = error
    return failure


def _growth(ticket: Ticket, done: Round) -> Growth:
    text, count = ticket.text, len(done.emitted)
    logprobs = tuple(text.token_logprobs[text.new_tokens - count :]) if text.logprobs is not None else None
    return Growth(tuple(done.emitted), done.accepted, done.tree.guesses, logprobs, text.finish_reason)
