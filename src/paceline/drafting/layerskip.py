"""Self-speculation: the target's own lower layers draft, and all its layers verify.

The exit works on the target's own sequence caches: the lower layers have already read the tokens before the draft, so a
sequence needs no second cache. What the exit stores lies past the length of the sequence cache, where verification
writes again, unless the runner continues from it (`Runner.rollback_draft`).

An exit adapter (heads/exit_adapter.py) maps the inner layer's state to the target's head; without one the head reads it
as it is, which works well only for models trained for early exits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from paceline.core.draft_tree import DraftTree
from paceline.core.protocols import Drafter, Runner
from paceline.core.sequence import Sequence
from paceline.core.types import Capability, Row, SequenceCache
from paceline.device.argmax import argmax_rows
from paceline.drafting.draft_sampling import SampledDraft, choose
from paceline.drafting.head_folder import checked_target, optional_head_folder
from paceline.drafting.registry import DrafterContext, DrafterOption, DrafterSpec, WeightsNeeded, options_of
from paceline.errors import PairError
from paceline.heads.exit_adapter import ExitAdapter
from paceline.heads.registry import load_head


class LayerSkip(Drafter):
    """Drafts a chain with the lower layers of the target."""

    needs = frozenset({Capability.EARLY_EXIT})

    def __init__(self, target: Runner, layer: int | None = None, adapter: ExitAdapter | None = None) -> None:
        """layer: the exit lies after it; by default the adapter's, or a quarter of the model's layers."""
        if adapter is not None:
            _check_pair(adapter, target, layer)
            layer = adapter.config.layer
        self.layer = layer if layer is not None else max(1, target.info.num_layers // 4)
        self.exit: Runner = target.early_exit(self.layer, adapter)

    def with_runner(self, wrap: Callable[[Runner], Runner]) -> LayerSkip:
        """The same drafter over a wrapped runner of its exit."""
        twin = copy.copy(self)
        twin.exit = wrap(self.exit)
        return twin

    @torch.inference_mode()
    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        drafts = [SampledDraft() for _ in seqs]
        lengths = [_seq_cache(seq).length for seq in seqs]
        restore = self.exit.truncate  # after a failure; verification may use what a finished draft has computed
        try:
            for depth in range(max(num_draft_tokens, default=0)):
                self._step([(seq, draft) for seq, draft, k in zip(seqs, drafts, num_draft_tokens) if depth < k])
            restore = self.exit.rollback_draft
        finally:
            for seq, length, k in zip(seqs, lengths, num_draft_tokens):
                if k:
                    restore(_seq_cache(seq), length)
        return [draft.chain(seq) for draft, seq in zip(drafts, seqs)]

    def _step(self, active: list[tuple[Sequence, SampledDraft]]) -> None:
        """The next draft token of these sequences."""
        logits = self._logits([_row(seq, draft) for seq, draft in active])
        best = argmax_rows(logits)[:, None]
        choose([seq for seq, _ in active], best, logits.__getitem__, [draft for _, draft in active])

    def _logits(self, rows: list[Row]) -> Tensor:
        """One pass of the exit over one token per sequence. [sequences, vocab]"""
        output = self.exit.forward(rows, last_only=True)
        for row in rows:
            self.exit.commit(row.seq_cache, [0])
        return output.logits


def _seq_cache(seq: Sequence) -> SequenceCache:
    assert seq.seq_cache is not None, "prefill opens the sequence cache"
    return seq.seq_cache


def _row(seq: Sequence, draft: SampledDraft) -> Row:
    """The last draft token, or first the last token of the sequence."""
    if draft.tokens:
        return Row(_seq_cache(seq), draft.tokens[-1], [-1])
    return Row.chain(_seq_cache(seq), seq.ids[-1:])


def _check_pair(adapter: ExitAdapter, target: Runner, layer: int | None) -> None:
    """Raise PairError where an adapter was trained for another target or another layer."""
    config, info = adapter.config, target.info
    if config.hidden_size != info.hidden_size:
        raise PairError(f"this adapter reads states of {config.hidden_size} values; {info.name} has {info.hidden_size}")
    if layer not in (None, config.layer):
        raise PairError(f"this adapter was trained for an exit after layer {config.layer}, not {layer}")


# --- building ---------------------------------------------------------------------------------------------------------


def build(context: DrafterContext) -> LayerSkip:
    """The adapter is the draft model or the option `adapter`; without one the head reads the inner layer as it is."""
    target = checked_target(SPEC.name, context.target, Capability.EARLY_EXIT)
    options = dict(context.options)
    folder = optional_head_folder(options.pop("adapter", None) or context.draft_model)
    adapter = None
    if folder is not None:
        adapter = load_head(folder, ExitAdapter, dtype=context.head_dtype, device=context.device)
    return LayerSkip(target, adapter=adapter, **options)


SPEC = DrafterSpec(
    name="layerskip",
    summary="the target's own lower layers draft, through a trained exit adapter where there is one",
    weights=WeightsNeeded.NONE,
    build=build,
    options=(*options_of(LayerSkip), DrafterOption("adapter", str | None, None)),
    reference="LayerSkip, https://arxiv.org/abs/2404.16710",
    per_request=False,
    head_kind="exit_adapter",
)
