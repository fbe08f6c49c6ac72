"""A second, smaller model draft tokens, one token after another, with a cache of its own.

Its cache is kept in step by one rule: before drafting, read whatever the sequence has and the cache has not. After a full
acceptance that is the last draft token and the target's own token; after a rejection the cache has first been cut back.

q is real: each draft token is drawn from the draft's distribution under the sequence's own sampling settings, and that
distribution travels with the draft token. A greedy sequence gets greedy draft tokens, whose q is one-hot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core import draft_tree
from paceline.core.draft_tree import DraftTree
from paceline.core.protocols import Drafter, Runner
from paceline.core.sequence import Sequence
from paceline.core.types import Capability, DraftInput, Row, RowOutput, SequenceCache, StepResult
from paceline.drafting.draft_prefix_cache import DraftPrefixCache
from paceline.drafting.draft_sampling import SampledDraft, can_draft_on_device, choose, cut, device_uniforms
from paceline.kv.block_manager import BLOCK_SIZE as TILE


class DraftModel(Drafter):
    """Drafts a chain with a runner of its own."""

    needs: frozenset[Capability] = frozenset()

    def __init__(self, runner: Runner, vocab_size: int) -> None:
        """vocab_size: the target's. A draft with a larger, padded head is cut to it, a smaller one padded."""
        self.runner = runner
        self._vocab = vocab_size
        self._seq_caches: dict[int, SequenceCache] = {}
        self._residents = DraftPrefixCache(runner)
        self._before: dict[int, int] = {}  # length of each sequence when its draft tokens were made

    def begin(self, seq: Sequence, prompt: RowOutput | None) -> None:
        """The draft reads the prompt when it is first asked; a sequence never guessed for costs it nothing."""

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        for seq in seqs:
            self._before[seq.seq_id] = len(seq.ids)
        self._make_room(seqs, num_draft_tokens)
        from_draft = self._in_one_loop(seqs, num_draft_tokens)
        return self._step_by_step(seqs, num_draft_tokens) if from_draft is None else from_draft

    def _in_one_loop(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree] | None:
        """All steps without returning to the host, where the runner can. None: it cannot, or not for these sequences."""
        asked = [seq for seq, budget in zip(seqs, num_draft_tokens) if budget]
        if not asked or not all(map(can_draft_on_device, asked)):
            return None
        if self.runner.info.vocab_size != self._vocab:
            return None
        steps = max(num_draft_tokens)
        inputs = [
            DraftInput(self._seq_cache(seq), seq.ids, seq.sampling.temperature, device_uniforms(seq, steps)) for seq in asked
        ]
        drafted = self.runner.draft(inputs, steps)
        if drafted is None:
            return None
        rows = {seq.seq_id: row for row, seq in enumerate(asked)}
        return [
            cut(drafted, rows[seq.seq_id], budget) if budget else draft_tree.empty() for seq, budget in zip(seqs, num_draft_tokens)
        ]

    def _step_by_step(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        drawn = {seq.seq_id: SampledDraft() for seq in seqs}
        for depth in range(max(num_draft_tokens, default=0)):
            active = [seq for seq, budget in zip(seqs, num_draft_tokens) if depth < budget]
            rows = [self._row(seq, drawn[seq.seq_id]) for seq in active]
            logits = self._as_targets(self.runner.forward(rows, last_only=True).logits)
            best = logits.argmax(dim=-1, keepdim=True)
            choose(active, best, logits.__getitem__, [drawn[seq.seq_id] for seq in active])
        return [drawn[seq.seq_id].chain(seq) for seq in seqs]

    def observe(self, seqs: list[Sequence], results: list[StepResult]) -> None:
        for seq, result in zip(seqs, results):
            seq_cache = self._seq_caches.get(seq.seq_id)
            if seq_cache is not None:
                self.runner.truncate(seq_cache, self._before[seq.seq_id] + len(result.verified.accepted))
                self.runner.truncate(seq_cache, len(seq.ids) - 1)  # the end may have cut inside the run

    def end(self, seq: Sequence) -> None:
        self._before.pop(seq.seq_id, None)
        seq_cache = self._seq_caches.pop(seq.seq_id, None)
        if seq_cache is None:
            return
        if seq.keep_cache:
            self.runner.truncate(seq_cache, len(seq.ids) - 1)
            self._residents.keep(seq.ids, seq_cache)
        else:
            self.runner.free(seq_cache)

    def _row(self, seq: Sequence, drawn: SampledDraft) -> Row:
        """What the draft has not read yet: the last draft token, or at first all that is new in the sequence."""
        if drawn.tokens:
            return Row(self._seq_caches[seq.seq_id], drawn.tokens[-1], [-1])
        seq_cache = self._seq_cache(seq)
        return Row.chain(seq_cache, seq.ids[seq_cache.length :])

    def _seq_cache(self, seq: Sequence) -> SequenceCache:
        seq_cache = self._seq_caches.get(seq.seq_id)
        if seq_cache is None:
            seq_cache = self._seq_caches[seq.seq_id] = self._residents.open(seq.ids)
        return seq_cache

    def _make_room(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> None:
        """For all that this step may write, rounded up to blocks; what earlier sequences left behind goes first."""
        asked = [(seq, budget) for seq, budget in zip(seqs, num_draft_tokens) if budget]
        num_unread = [len(seq.ids) - self._seq_cache(seq).length for seq, _ in asked]
        self._residents.make_room(sum(num_unread) + sum(budget + TILE for _, budget in asked))

    def _as_targets(self, logits: Tensor) -> Tensor:
        """Logits over the target's vocabulary: padding beyond it cannot be guessed."""
        size = logits.shape[-1]
        if size >= self._vocab:
            return logits[..., : self._vocab]
        return torch.nn.functional.pad(logits, (0, self._vocab - size), value=-torch.inf)
