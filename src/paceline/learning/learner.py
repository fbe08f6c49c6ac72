"""Beside a running server: writes the ring, swaps proposed heads in between two steps, rolls them back.

What is decided is written down before the proposal is deleted, so a server killed at any moment goes on from there.
Learning is optional: whatever fails here is logged, and the server goes on serving.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.core.protocols import Engine
from paceline.core.stats import LearningStats
from paceline.errors import EngineClosed, EngineFailed, ModelError, OptionError, PacelineError
from paceline.learning.decision import FirstTokens, first_token_rate, is_lower, is_settled
from paceline.learning.engine import Activity, LearningEngine
from paceline.learning.files import LearnerOptions, LearnerState, LearningFolder, Proposal
from paceline.learning.ring import TrafficRing
from paceline.learning.trainer_process import TrainerProcess

LOG = logging.getLogger("paceline.serve")
POLL_SECONDS = 1.0
FLUSH_SECONDS = 30.0  # between two writes of the ring while requests run
PATIENCE = 30.0  # seconds that a proposed head waits for a moment without requests
MEGABYTE = 10**6


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """How a server learns. pauses: the trainer waits while requests run."""

    folder: LearningFolder
    options: LearnerOptions
    ring_mb: int
    pauses: bool


@dataclass(frozen=True, slots=True)
class RingSizes:
    """What the folder held when it was last looked at."""

    num_bytes: int
    num_seqs: int
    attempts: int


class Learner:
    """Lets the head of one engine learn. `engine` is the one to serve; `watch` runs beside the server."""

    def __init__(self, engine: Engine, settings: LearnerSettings) -> None:
        self._folder, self._options = settings.folder, settings.options
        self._ring = TrafficRing(self._folder.ring, settings.ring_mb * MEGABYTE)
        self._trainer = TrainerProcess(self._folder.path)
        pause, go_on = (self._trainer.pause, self._trainer.go_on) if settings.pauses else (_nothing, _nothing)
        self.engine = LearningEngine(engine, self._ring, Activity(pause, go_on), self.stats)
        self._state = self._folder.state
        self._before = [FirstTokens(*pair) for pair in self._state.before]
        self._num_compared = 0  # live sequences after the swap at the last comparison
        self._flushed = 0.0
        self._proposed: float | None = None  # when a proposal was first seen
        self._drop_decided_proposal()
        self._sizes = RingSizes(self._ring.num_bytes, self._ring.num_seqs, self._folder.trainer.attempts)

    async def watch(self) -> None:
        """Until cancelled."""
        try:
            while True:
                await self._turn()
                await asyncio.sleep(POLL_SECONDS)
        finally:
            self._trainer.stop()
            self._ring.flush()

    async def _turn(self) -> None:
        try:
            self._trainer.keep_alive()
            await self._flush()
            if self._state.on_trial:
                await self._compare_live()
            elif (proposal := self._folder.proposal) is not None and self._is_time_to_swap():
                await self._swap(proposal)
        except (EngineFailed, EngineClosed):  # it is being restarted; the next turn tries again
            LOG.debug("the engine is not there to take a head")
        except (OSError, PacelineError) as error:
            LOG.warning("learning from traffic has failed", extra={"fields": {"reason": str(error)}})

    async def _flush(self) -> None:
        """Write the ring while nothing runs, and now and then where something always does."""
        now = time.monotonic()
        if self.engine.is_idle or now - self._flushed >= FLUSH_SECONDS:
            self._flushed = now
            await asyncio.to_thread(self._ring.flush)
            self._sizes = RingSizes(self._ring.num_bytes, self._ring.num_seqs, self._folder.trainer.attempts)

    def stats(self) -> LearningStats:
        state, sizes = self._state, self._sizes
        rate = first_token_rate(tuple(self.engine.live))
        return LearningStats(
            sizes.num_bytes, sizes.num_seqs, rate, state.head, sizes.attempts, state.swaps, state.rollbacks
        )

    # --- swap ---------------------------------------------------------------------------------------------------------

    def _is_time_to_swap(self) -> bool:
        """Loading a head takes processor time from requests: it waits for a pause, up to a limit."""
        now = time.monotonic()
        self._proposed = now if self._proposed is None else self._proposed
        if not self.engine.is_idle and now - self._proposed < PATIENCE:
            return False
        self._proposed = None
        return True

    async def _swap(self, proposal: Proposal) -> None:
        state = self._state
        try:
            await self.engine.update_head(str(self._folder.head(proposal.head, self._options)))
        except (ModelError, OptionError) as error:
            self._folder.note("refused", head=proposal.head, reason=str(error))
            self._folder.drop_proposal()
            raise
        self._before = list(self.engine.live)
        before = [[seq.accepted, seq.offered] for seq in self._before]
        self._enter(
            replace(
                state, head=proposal.head, previous=state.head, swaps=state.swaps + 1, before=before, on_trial=True
            )
        )
        self._folder.note("swap", **_figures(proposal), live=round(first_token_rate(self._before), 4))
        self._folder.drop_proposal()
        self._folder.drop_heads(proposal.head, state.head)

    def _drop_decided_proposal(self) -> None:
        """An earlier process may have been killed after it decided and before it deleted the proposal."""
        proposal = self._folder.proposal
        if proposal is not None and (proposal.head == self._state.head or proposal.start != self._state.head):
            self._folder.drop_proposal()

    def _enter(self, state: LearnerState) -> None:
        """Write the new state down; live sequences are counted from here on."""
        self._folder.write("state", state)
        self._state = state
        self.engine.live.clear()
        self._num_compared = 0

    # --- rollback -----------------------------------------------------------------------------------------------------

    async def _compare_live(self) -> None:
        """Compare at each look that the live sequences have passed since the last turn."""
        live = list(self.engine.live)
        for count in range(self._num_compared + 1, len(live) + 1):
            if is_lower(self._before, live[:count]):
                await self._roll_back(live[:count])
                return
        self._num_compared = len(live)
        if is_settled(len(live)):
            self._state = replace(self._state, on_trial=False, before=[])
            self._folder.write("state", self._state)
            self._folder.note("kept", head=self._state.head, live=round(first_token_rate(live), 4))

    async def _roll_back(self, live: list[FirstTokens]) -> None:
        state = self._state
        await self.engine.update_head(str(self._folder.head(state.previous, self._options)))
        rates = {"live_before": first_token_rate(self._before), "live": first_token_rate(live)}
        self._enter(
            replace(state, head=state.previous, rollbacks=state.rollbacks + 1, before=[], on_trial=False)
        )
        self._folder.note("rollback", head=state.head, **{name: round(rate, 4) for name, rate in rates.items()})
        self._folder.drop_heads(state.previous)


def _figures(proposal: Proposal) -> dict[str, float]:
    return {
        "head": proposal.head,
        "old_acceptance": proposal.old_acceptance,
        "new_acceptance": proposal.new_acceptance,
        "p_value": proposal.p_value,
    }


def _nothing() -> None:
    """For a trainer on a device of its own."""


def head_in_use(settings: LearnerSettings) -> Path:
    """The head that an engine is to be opened with: the latest one that was swapped in."""
    return settings.folder.head(settings.folder.state.head, settings.options)
