"""Gemma 4's assistant drafts from the keys and values that the target has stored: part of the method `mtp`."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from paceline.core import draft_tree
from paceline.core.draft_tree import DraftTree
from paceline.core.protocols import Drafter, Runner
from paceline.core.sequence import Sequence
from paceline.core.types import Capability, RowOutput, StepResult
from paceline.drafting.draft_sampling import SampledDraft, choose
from paceline.errors import PairError
from paceline.heads.gemma4_assistant import Gemma4Assistant


class AssistantDrafter(Drafter):
    """Chains of an assistant. Of a sequence it keeps the target's state before the last token, and nothing else."""

    needs = frozenset({Capability.HIDDEN_STATES, Capability.SHARED_KEYS})

    def __init__(self, assistant: Gemma4Assistant, target: Runner) -> None:
        info = target.info
        if assistant.hidden_size != info.hidden_size or assistant.vocab_size != info.vocab_size:
            raise PairError(
                f"this assistant is for a target of hidden size {assistant.hidden_size} and {assistant.vocab_size} "
                f"tokens; {info.name} has {info.hidden_size} and {info.vocab_size}"
            )
        target.expose(hidden=True)
        self._assistant, self._target = assistant, target
        self._states: dict[int, Tensor] = {}  # [hidden_size] each

    def begin(self, seq: Sequence, prompt: RowOutput | None) -> None:
        self.end(seq)
        if prompt is not None and prompt.hidden is not None and prompt.hidden.shape[0]:
            self._states[seq.seq_id] = prompt.hidden[-1].clone()

    def observe(self, seqs: list[Sequence], results: list[StepResult]) -> None:
        for seq, result in zip(seqs, results):
            if result.output.hidden is not None and result.emitted:
                self._states[seq.seq_id] = result.output.hidden[result.kept_rows[-1]].clone()

    def end(self, seq: Sequence) -> None:
        self._states.pop(seq.seq_id, None)

    @torch.inference_mode()
    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        trees = [draft_tree.empty() for _ in seqs]
        active = [index for index, seq in enumerate(seqs) if num_draft_tokens[index] and seq.seq_id in self._states]
        if active:
            drafts = self._drafts([seqs[index] for index in active], [num_draft_tokens[index] for index in active])
            for index, draft in zip(active, drafts):
                trees[index] = draft.chain(seqs[index])
        return trees

    def _drafts(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[SampledDraft]:
        device = torch.device(self._target.info.device)
        caches = [seq.seq_cache for seq in seqs]
        shared = self._assistant.shared([self._target.shared_keys(cache) for cache in caches if cache is not None])
        positions = torch.tensor([len(seq.ids) - 1 for seq in seqs], device=device)
        tokens = torch.tensor([seq.ids[-1] for seq in seqs], device=device)
        states, drafts = torch.stack([self._states[seq.seq_id] for seq in seqs]), [SampledDraft() for _ in seqs]
        for depth in range(max(num_draft_tokens)):
            output = self._assistant.step(self._target.embed(tokens), states, positions, shared)
            # A sequence draws as many tokens as it drafts, whatever its batch; its row stays in the batch.
            rows = [row for row, k in enumerate(num_draft_tokens) if depth < k]
            logits = output.logits[rows]
            best = logits.argmax(dim=-1, keepdim=True)
            choose([seqs[row] for row in rows], best, partial(_chosen, logits), [drafts[row] for row in rows])
            states, tokens = output.states, torch.cat([draft.tokens[-1] for draft in drafts]).to(device)
        return drafts


def _chosen(logits: Tensor, rows: list[int]) -> Tensor:
    return logits[rows].float()
