"""A second, smaller model drafts, one token after another, with a KV cache of its own.

One rule keeps its cache in step: before drafting, it reads every token of the sequence that its cache lacks. After full
acceptance these are the last draft token and the target's own token; after a rejection the cache has been truncated.

q is real: each draft token is drawn from the draft model's distribution under the sequence's own sampling settings, and
that distribution goes with the token. A greedy sequence gets greedy draft tokens, whose q is one-hot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from paceline.core import draft_tree
from paceline.core.draft_tree import DraftTree
from paceline.core.draft_value import ChainStop, DraftValue
from paceline.core.draft_vocabulary import WHOLE_VOCABULARY, draft_vocabulary
from paceline.core.looped_steps import LoopedSteps, LoopInput, loop_tokens
from paceline.core.protocols import Drafter, Preparation, Runner
from paceline.core.sequence import Sequence, loop_input
from paceline.core.types import DraftInput, Row, SequenceCache, StepResult, WarmupPlan
from paceline.device.argmax import argmax_rows
from paceline.device.properties import supports_graphs
from paceline.drafting.draft_kv import DraftKV, step_tokens
from paceline.drafting.draft_sampling import (
    SampledDraft,
    can_draft_on_device,
    choose,
    first_tokens,
    loop_uniforms,
    predrawn,
    state_confidences,
)
from paceline.drafting.registry import DrafterContext, DrafterSpec, WeightsNeeded
from paceline.errors import OutOfMemory, PairError
from paceline.kv.prefix_cache import PrefixCache

OWNER = "draft_model"  # in the prefix cache


class DraftModel(Drafter):
    """Drafts a chain with a runner of its own."""

    def __init__(self, runner: Runner, vocab_size: int, prefix_cache: PrefixCache | None = None) -> None:
        """vocab_size: the target's. Logits of a larger, padded head are cut to it, those of a smaller one padded."""
        self.runner = runner
        self.draft_runner = runner
        self._vocab_size = vocab_size
        self._kv = DraftKV(runner, OWNER, prefix_cache)
        self._seq_caches: dict[int, SequenceCache] = {}
        self._drafted_from: dict[int, int] = {}  # the length of each sequence when its draft tokens were made
        self._num_readable: dict[int, int] = {}  # first tokens of each sequence that this model has; see `_reads`
        self._stop: ChainStop | None = None  # asked by the host, …
        self._limits: ChainStop | None = None  # … or given to the device
        self._prepared_k: int | None = None

    def use_value(self, value: DraftValue, source: str = "") -> None:
        """Chains stop where they no longer pay: where the host waits for nothing, it asks; else a loop is told."""
        stop = ChainStop(value, source)
        self._stop, self._limits = (None, stop) if supports_graphs(self.runner.info.device) else (stop, None)

    def with_runner(self, wrap: Callable[[Runner], Runner]) -> DraftModel:
        """The same drafter without its sequences, over a wrapped runner, which may have another vocabulary."""
        runner = wrap(self.runner)
        renumbered = runner.info.vocab_size != self.runner.info.vocab_size
        return DraftModel(runner, runner.info.vocab_size if renumbered else self._vocab_size)

    def loops_trees(self, plan: WarmupPlan) -> bool:
        """A second choice may stand beside the last draft token where the policy decides how many there are."""
        return supports_graphs(self.runner.info.device) and len(plan.num_draft_tokens) > 1

    def preparations(self, plan: WarmupPlan) -> list[Preparation]:
        """The draft model reads one or two tokens at a time, and drafts."""
        self._prepared_k = max(plan.num_draft_tokens, default=None)
        return self.runner.preparations(replace(plan, widths=(1, 2)))

    # --- the protocol -------------------------------------------------------------------------------------------------

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        """The draft model reads a prompt on the first call with draft tokens: a sequence without any costs nothing."""
        num_draft_tokens = [self._prepared(seq, k) for seq, k in zip(seqs, num_draft_tokens)]
        active = [index for index, k in enumerate(num_draft_tokens) if k]
        try:
            return self._trees(seqs, num_draft_tokens, active)
        except OutOfMemory:  # the first that fit draft, the others do not
            return self._trees(seqs, num_draft_tokens, self._with_room(seqs, num_draft_tokens, active))

    def _prepared(self, seq: Sequence, k: int) -> int:
        """Not more than graphs were made ready for: making one takes longer than a long draft ever wins. A number that
        a request has chosen itself counts. Where a sequence is as long as the draft model can read, or holds a token
        that it does not have, none."""
        k = max(0, min(k, self.runner.info.max_seq_len - len(seq.ids))) if self._reads(seq) else 0
        chosen = seq.params.num_draft_tokens is not None
        return k if chosen or self._prepared_k is None else min(k, self._prepared_k)

    def _reads(self, seq: Sequence) -> bool:
        """Whether this model has all tokens of a sequence. Padded vocabularies of one family differ in size, and a
        prompt of ids may hold any: read past the last embedding, it would raise, on a GPU for the whole process."""
        size, ids = self.runner.info.vocab_size, seq.ids
        if size >= self._vocab_size:
            return True
        known = self._num_readable.get(seq.seq_id, 0)
        readable = next((place for place in range(known, len(ids)) if ids[place] >= size), len(ids))
        self._num_readable[seq.seq_id] = readable
        return readable == len(ids)

    def _trees(self, seqs: list[Sequence], num_draft_tokens: list[int], active: list[int]) -> list[DraftTree]:
        trees = [draft_tree.empty() for _ in seqs]
        if not active:
            return trees
        drafts = self._draft([seqs[index] for index in active], [num_draft_tokens[index] for index in active])
        for index, tree in zip(active, drafts):
            trees[index] = tree
        return trees

    def draft_loop(
        self, target: Runner, seqs: list[Sequence], num_draft_tokens: list[int], num_steps: int
    ) -> LoopedSteps | None:
        """The runner of the draft model drafts by itself, what it has not read of a sequence included."""
        limits = None if self._limits is None else self._limits.of_loop(seqs)
        source = self.runner.loop_source(limits) if self.runner.info.vocab_size == self._vocab_size else None
        if source is None:
            return None
        ks = [self._prepared(seq, k) for seq, k in zip(seqs, num_draft_tokens)]
        inputs = [self._loop_input(seq, k) for seq, k in zip(seqs, ks)]
        unread = [len(seq.ids) - self._seq_cache(seq).length for seq in seqs]
        further = loop_tokens(inputs, num_steps)
        self._kv.make_room(sum(map(step_tokens, unread, (further + k for k in ks))))
        return target.draft_loop(source, inputs, num_steps)

    def _loop_input(self, seq: Sequence, k: int) -> LoopInput:
        self._drop_unverified(seq, self._seq_cache(seq))
        return loop_input(seq, k, self._seq_cache(seq))

    def observe(self, seqs: list[Sequence], results: list[StepResult]) -> None:
        for seq, result in zip(seqs, results):
            seq_cache = self._seq_caches.get(seq.seq_id)
            if seq_cache is not None:
                self._drop_rejected(seq, seq_cache, len(result.verified.accepted))
                self.runner.truncate(seq_cache, len(seq.ids) - 1)  # an end token may have cut inside the accepted run

    def end(self, seq: Sequence) -> None:
        self._drafted_from.pop(seq.seq_id, None)
        self._num_readable.pop(seq.seq_id, None)
        seq_cache = self._seq_caches.pop(seq.seq_id, None)
        if seq_cache is None:
            return
        if seq.keep_cache:
            self.runner.truncate(seq_cache, len(seq.ids) - 1)
            self._kv.keep(seq.ids, seq_cache)
        else:
            self.runner.free(seq_cache)

    # --- drafting -----------------------------------------------------------------------------------------------------

    def _with_room(self, seqs: list[Sequence], num_draft_tokens: list[int], active: list[int]) -> list[int]:
        """Of these sequences the places of those that the draft's own cache has room for."""
        for index in active:
            self._drop_unverified(seqs[index], self._seq_cache(seqs[index]))
        unread = [len(seqs[index].ids) - self._seq_cache(seqs[index]).length for index in active]
        needs = [step_tokens(count, num_draft_tokens[index]) for count, index in zip(unread, active)]
        return [index for index, fits in zip(active, self._kv.fitting(needs)) if fits]

    def _draft(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        for seq in seqs:
            self._drop_unverified(seq, self._seq_cache(seq))
            self._drafted_from[seq.seq_id] = len(seq.ids)
        unread = [len(seq.ids) - self._seq_cache(seq).length for seq in seqs]
        self._kv.make_room(sum(map(step_tokens, unread, num_draft_tokens)))
        drafts = [SampledDraft(uniforms=predrawn(seq, k)) for seq, k in zip(seqs, num_draft_tokens)]
        trees = self._on_device(seqs, num_draft_tokens, drafts)
        if trees is not None:
            return trees
        parts = [draft_vocabulary(self._vocab_size, [seq.ids]) for seq in seqs]
        is_limited = self.runner.limit_logits(draft_vocabulary(self._vocab_size, [seq.ids for seq in seqs]))
        try:
            return self._step_by_step(seqs, num_draft_tokens, drafts, parts if is_limited else None)
        finally:
            self.runner.limit_logits(WHOLE_VOCABULARY)

    def _on_device(
        self, seqs: list[Sequence], num_draft_tokens: list[int], drafts: list[SampledDraft]
    ) -> list[DraftTree] | None:
        """All steps without returning to the host. None: the runner cannot, or not for these sequences."""
        if self.runner.info.vocab_size != self._vocab_size or not all(map(can_draft_on_device, seqs)):
            return None
        steps = max(num_draft_tokens)
        inputs = [
            DraftInput(self._seq_cache(seq), seq.ids, seq.sampling.temperature, loop_uniforms(draft.uniforms, steps))
            for seq, draft in zip(seqs, drafts)
        ]
        drafted = self.runner.draft(inputs, steps)
        if drafted is None:
            return None
        return [first_tokens(drafted, row, k) for row, k in enumerate(num_draft_tokens)]

    def _step_by_step(
        self, seqs: list[Sequence], num_draft_tokens: list[int], drafts: list[SampledDraft], parts: list[int] | None
    ) -> list[DraftTree]:
        """parts: of the vocabulary, that the tokens of each sequence are drawn from; None: from all that passes give"""
        for depth in range(max(num_draft_tokens)):
            active = [index for index, k in enumerate(num_draft_tokens) if depth < k and not drafts[index].stopped]
            if not active:
                break
            rows = [self._row(seqs[index], drafts[index]) for index in active]
            logits = self.runner.forward(rows, last_only=True).logits[..., : self._vocab_size]
            if self._stop is not None:
                state_confidences([seqs[i] for i in active], logits, [drafts[i] for i in active], self._stop)
            best = argmax_rows(logits)[:, None]
            drawn_from = partial(self._drawn_from, logits, None if parts is None else [parts[i] for i in active])
            choose([seqs[i] for i in active], best, drawn_from, [drafts[i] for i in active])
        return [draft.chain(seq) for draft, seq in zip(drafts, seqs)]

    def _row(self, seq: Sequence, draft: SampledDraft) -> Row:
        """What the draft model has not read yet: the last draft token, or first all that is new in the sequence."""
        seq_cache = self._seq_cache(seq)
        if draft.tokens:
            return Row(seq_cache, draft.tokens[-1], [-1])
        return Row.chain(seq_cache, seq.ids[seq_cache.length :])

    def _drop_rejected(self, seq: Sequence, seq_cache: SequenceCache, accepted: int) -> None:
        """Truncate a cache that holds draft tokens to the sequence they were made for and the accepted ones."""
        length = self._drafted_from.pop(seq.seq_id, None)
        if length is not None:
            self.runner.truncate(seq_cache, length + accepted)

    def _drop_unverified(self, seq: Sequence, seq_cache: SequenceCache) -> None:
        """Drop draft tokens of a step that failed before they were verified; the last token is read again."""
        self._drop_rejected(seq, seq_cache, 0)
        if seq_cache.length >= len(seq.ids):
            self.runner.truncate(seq_cache, len(seq.ids) - 1)

    def _seq_cache(self, seq: Sequence) -> SequenceCache:
        seq_cache = self._seq_caches.get(seq.seq_id)
        if seq_cache is None:
            seq_cache = self._seq_caches[seq.seq_id] = self._kv.open(seq.ids)
        return seq_cache

    def _drawn_from(self, logits: Tensor, parts: list[int] | None, places: list[int]) -> Tensor:
        """Logits of the sequences at these places over the target's vocabulary. What they lack is never drafted, nor
        what a sequence would not be drawn from alone: its draws do not depend on its batch."""
        whole = logits.new_full((len(places), self._vocab_size), -torch.inf)
        for row, place in enumerate(places):
            size = logits.shape[-1] if parts is None else parts[place] or logits.shape[-1]
            whole[row, :size] = logits[place, :size]
        return whole


# --- building ---------------------------------------------------------------------------------------------------------


def build(context: DrafterContext) -> DraftModel:
    """Raises PairError where target and draft model number their tokens differently."""
    runner = context.open_runner(context.draft_model)
    named = isinstance(context.draft_model, str | Path)  # a loaded model has no tokenizer to compare
    comparison = context.compare_tokenizers(context.draft_model) if named else None
    if comparison is not None and not comparison.same:
        raise PairError(comparison.explained(context.target.info.name, runner.info.name))
    return DraftModel(runner, context.target.info.vocab_size, context.prefix_cache)


SPEC = DrafterSpec(
    name="draft_model",
    summary="a smaller model of the same tokenizer drafts",
    weights=WeightsNeeded.MODEL,
    build=build,
    reference="Fast Inference from Transformers via Speculative Decoding, https://arxiv.org/abs/2211.17192",
)
