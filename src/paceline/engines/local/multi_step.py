"""Several steps in a row, which the device takes without waiting for the host between them. Greedy sequences only.

with draft tokens   the drafter drafts on the device too; every step is handed out by itself
plain               a few steps are read together; watched, the steps end as soon as lookups have something to draft
at once             plain steps taken as one: for targets that cannot go on while results are read
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from paceline.core.cost_model import StepTiming
from paceline.core.draft_length import DraftLengthPolicy
from paceline.core.draft_tree import DraftTree, empty
from paceline.core.looped_steps import LoopedStep, PlainSteps, loop_tokens
from paceline.core.probing import PROBE_STEPS
from paceline.core.protocols import Drafter, Runner
from paceline.core.sequence import Sequence, loop_input
from paceline.core.types import Capability, RowOutput, StepResult, VerifyResult
from paceline.device.graphs import num_one_off_works
from paceline.engines.local.prefill import step_row
from paceline.engines.local.scheduler import Scheduler, StepBatch, StepOfBatch
from paceline.engines.local.step_timing import Pauses, StepBegun, TimedLoop

LONGEST_LOOP = 64  # steps of draft tokens in a row at most; a new request ends them
PLAIN_LOOP = 4  # times as many plain steps in a row as otherwise, where nothing but plain steps can come
NO_OUTPUT = RowOutput(torch.empty(0, 0))  # several plain steps in a row return tokens only


class MultiStep:
    """Takes several steps of a batch where the target and the drafter can."""

    def __init__(
        self, target: Runner, drafter: Drafter, draft_length: DraftLengthPolicy, scheduler: Scheduler, pauses: Pauses
    ) -> None:
        self._target, self._drafter, self._draft_length = target, drafter, draft_length
        self._scheduler, self._pauses = scheduler, pauses

    # --- with draft tokens --------------------------------------------------------------------------------------------

    def drafted(self, batch: StepBatch) -> Iterator[StepOfBatch] | None:
        """Steps with draft tokens. None: not possible for this batch."""
        seqs, ks = batch.seqs, batch.num_draft_tokens
        most = PROBE_STEPS if self._draft_length.is_probing else LONGEST_LOOP
        steps = min(most, max(seq.remaining_tokens for seq in seqs))
        if steps < 2 or not all(ks) or not all(map(is_argmax_alone, seqs)):
            return None
        started, one_off_works = time.perf_counter(), num_one_off_works()
        self._make_room(seqs, ks, steps)
        results = self._drafter.draft_loop(self._target, seqs, ks, steps)
        return None if results is None else self._drafted(batch, TimedLoop(results, started, one_off_works))

    def _make_room(self, seqs: list[Sequence], ks: list[int], num_steps: int) -> None:
        """A target that takes several steps reserves blocks for all of them: finished sequences give theirs up."""
        if self._target.decode_steps > 1:
            inputs = [loop_input(seq, k) for seq, k in zip(seqs, ks)]
            self._scheduler.kv.make_room(seqs, loop_tokens(inputs, num_steps))

    def _give_back_blocks(self, batch: StepBatch) -> None:
        """Those that were reserved for more steps than were taken."""
        for seq in batch.unfinished().seqs:
            self._scheduler.kv.trim(seq)

    def _drafted(self, batch: StepBatch, loop: TimedLoop[LoopedStep]) -> Iterator[StepOfBatch]:
        """The steps of a loop one by one; a sequence that has ended takes part in no further one."""
        num_steps, ends = 0, False
        while (steps := loop.next(last=ends)) is not None:
            part = batch.unfinished()
            trees = [_looped_tree(steps[place]) for place in part.places]
            self._draft_length.sent(part.seqs, trees)
            results = [
                self._settle_looped(seq, tree, steps[place].verified)
                for seq, tree, place in zip(part.seqs, trees, part.places)
            ]
            sizes = [tree.num_made for tree in trees]
            self._pauses.end(part.seqs)
            self._draft_length.observe(part.seqs, results, loop.timing(sizes))
            yield StepOfBatch(part, results)
            if batch.has_finished:
                return
            num_steps += 1
            ends = ends or self._scheduler.ends_loop(batch, num_steps)
        self._give_back_blocks(batch)

    def _settle_looped(self, seq: Sequence, tree: DraftTree, verified: VerifyResult) -> StepResult:
        assert seq.seq_cache is not None
        run = [*verified.tokens, verified.next_token]
        emitted = seq.extend(run, len(verified.accepted))
        if len(emitted) < len(run):
            self._target.truncate(seq.seq_cache, len(seq.ids) - 1)
        accepted = min(len(verified.accepted), len(emitted))
        result = StepResult(tree, verified, NO_OUTPUT, emitted, accepted)
        result.add_to(seq.stats)
        return result

    # --- plain --------------------------------------------------------------------------------------------------------

    def plain(self, batch: StepBatch) -> Iterator[StepOfBatch] | None:
        """Steps without draft tokens. None: not possible for this batch."""
        if not all(map(is_argmax_alone, batch.seqs)):
            return None
        loop = self._plain_loop(batch)
        return None if loop is None else self._plain(batch, loop)

    def watched(self, batch: StepBatch) -> Iterator[StepOfBatch] | None:
        """The same although there might be draft tokens: lookups have found none, and go on looking."""
        if self._target.decode_steps < 2 or not all(map(is_argmax_alone, batch.seqs)):
            return None
        if self._drafter.look_up(batch.seqs, [0] * len(batch.seqs)) is None:  # asked for nothing, it only says whether
            return None
        loop = self._plain_loop(batch, watched=True)
        return None if loop is None else self._plain(batch, loop, watched=True)

    def _plain_loop(self, batch: StepBatch, *, watched: bool = False) -> TimedLoop[PlainSteps] | None:
        """A policy that may draft again is asked sooner.

        watched: the loop ends when there is something to draft.
        """
        seqs, steps = batch.seqs, self._target.decode_steps
        if watched or self._draft_length.stays_plain(seqs):
            steps *= PLAIN_LOOP
        steps = min(steps, max(seq.remaining_tokens for seq in seqs))
        if steps < 2:
            return None
        started, one_off_works = time.perf_counter(), num_one_off_works()
        self._make_room(seqs, [0] * len(seqs), steps)
        groups = self._target.plain_loop([loop_input(seq) for seq in seqs], steps)
        return None if groups is None else TimedLoop(groups, started, one_off_works)

    def _plain(
        self, batch: StepBatch, loop: TimedLoop[PlainSteps], *, watched: bool = False
    ) -> Iterator[StepOfBatch]:
        ends = False
        while (group := loop.next(last=ends)) is not None:
            part = batch.unfinished()
            steps = [group[place] for place in part.places]
            tokens = [own.tokens for own in steps]
            results = [self._settle_plain(seq, own.tokens, own.output) for seq, own in zip(part.seqs, steps)]
            timing = loop.timing([0] * len(tokens), len(tokens[0]))
            self._pauses.end(part.seqs)
            self._observe_plain(part.seqs, tokens, results, timing)
            self._drafter.observe(part.seqs, results)
            yield StepOfBatch(part, results)
            if batch.has_finished:
                return
            ends = ends or self._scheduler.ends_loop(batch) or (watched and self._has_drafts(batch.unfinished()))
        self._give_back_blocks(batch)

    def _has_drafts(self, batch: StepBatch) -> bool:
        """Whether lookups now have draft tokens that pay."""
        seqs, value = batch.seqs, self._draft_length.draft_value()
        limits = [min(k, max(0, seq.remaining_tokens - 1)) for seq, k in zip(seqs, batch.num_draft_tokens)]
        trees = self._drafter.look_up(seqs, limits) or []
        drafts = [(seq, tree) for seq, tree in zip(seqs, trees) if len(tree)]
        return any(value is None or value.gain(seq, tree) > 0 for seq, tree in drafts)

    def at_once(self, batch: StepBatch, begun: StepBegun) -> list[StepResult] | None:
        """Plain steps taken as one, where only the argmax is needed. None: not for this batch.

        The target goes on without waiting for the host; what it generates past the end of a sequence is dropped.
        """
        seqs = batch.seqs
        steps = min(self._target.decode_steps, max(seq.remaining_tokens for seq in seqs))
        if steps < 2 or not all(map(self._needs_tokens_only, seqs)):
            return None
        tokens = self._target.decode([step_row(seq, empty()) for seq in seqs], steps)
        if tokens is None:
            return None
        rows = tokens.tolist()
        seconds = (time.perf_counter() - begun.at + begun.pause) / steps
        self._pauses.end(seqs)
        timing = StepTiming(0.0, seconds, len(seqs), 0, len(seqs), clean=begun.is_clean)
        results = [self._settle_plain(seq, row) for seq, row in zip(seqs, rows)]
        self._observe_plain(seqs, rows, results, timing)
        return results

    def _needs_tokens_only(self, seq: Sequence) -> bool:
        """Whether nothing but the argmax is needed of the passes: a drafter that reads hidden states needs those."""
        drafts_later = seq.params.num_draft_tokens != 0 and Capability.HIDDEN_STATES in self._drafter.needs
        return is_argmax_alone(seq) and not drafts_later

    def _observe_plain(
        self, seqs: list[Sequence], rows: list[list[int]], results: list[StepResult], timing: StepTiming
    ) -> None:
        """Plain steps that were taken as one, each for itself: a token a sequence. timing: of one of them."""
        for place in range(len(rows[0])):
            singles = [
                StepResult(result.tree, VerifyResult([], row[place]), NO_OUTPUT, result.emitted[place : place + 1])
                for row, result in zip(rows, results)
            ]
            self._draft_length.observe(seqs, singles, timing)

    def _settle_plain(self, seq: Sequence, tokens: list[int], output: RowOutput = NO_OUTPUT) -> StepResult:
        assert seq.seq_cache is not None
        emitted = seq.extend(tokens, 0)
        if len(emitted) < len(tokens):
            self._target.truncate(seq.seq_cache, len(seq.ids) - 1)
        result = StepResult(empty(), VerifyResult([], emitted[-1]), output, emitted)
        result.add_to(seq.stats)
        return result


def is_argmax_alone(seq: Sequence) -> bool:
    """Whether the argmax decides, draft tokens included."""
    return seq.is_greedy_argmax and seq.params.rule.lossless


def _looped_tree(step: LoopedStep) -> DraftTree:
    parents = step.parents or list(range(-1, len(step.draft_tokens) - 1))
    tokens, leaves = torch.tensor(step.draft_tokens), step.num_leaves
    return DraftTree(tokens, parents, confidence=step.confidence, source=step.source, leaves=leaves)
