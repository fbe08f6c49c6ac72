"""Drafts of an MTP head of several modules: each drafts one token.

Module m at position t reads what module m - 1 made at t (or, of some families, the target's state there) and token
t + m + 1. So with tokens up to T, the last m rows of module m need draft tokens: they are read again when the tokens
are known, and their keys are written over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from paceline.core.sequence import Sequence
from paceline.drafting.draft_sampling import SampledDraft
from paceline.drafting.eagle_state import HeadState
from paceline.heads.kv_cache import KeyBuffers, PlacedKeys
from paceline.heads.mtp import MtpHead

Choose = Callable[[list[Sequence], Tensor, list[SampledDraft]], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The pending rows of some sequences, padded at the end."""

    states: list[HeadState]
    counts: list[int]
    positions: Tensor  # int64 [sequences, rows]: of the first module
    mask: Tensor  # bool [sequences, 1, rows, columns]
    store: PlacedKeys

    def last(self, out: Tensor) -> Tensor:
        """Of each sequence its last row. [sequences, hidden_size]"""
        return out[torch.arange(len(self.counts)), torch.tensor(self.counts) - 1]

    def tokens(self, module: int, drafts: list[SampledDraft]) -> Tensor:
        """What the rows of a module read: tokens that are known, then draft tokens. int64 [sequences, rows]"""
        rows = [_tokens(*pair, module) for pair in zip(self.states, self.counts, drafts)]
        return pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(self.positions.device)


def _tokens(state: HeadState, count: int, draft: SampledDraft, module: int) -> list[int]:
    known = state.next_tokens(count + module)[module:]
    chosen = [int(token) for token in draft.tokens[max(0, module - count) : module]]
    return (known + chosen + [0] * module)[:count]  # rows whose token is not known yet are read again


class ModuleDrafting:
    """Passes of all modules over the rows that are not final yet."""

    def __init__(self, head: MtpHead, buffers: KeyBuffers, choose: Choose) -> None:
        """choose: the next draft token of each sequence from the head's output."""
        self._head, self._buffers, self._choose = head, buffers, choose
        self._heads = buffers.row(0).keys.shape[0] // head.num_modules

    def chains(self, states: list[HeadState], num_draft_tokens: list[int]) -> list[SampledDraft]:
        """One pass of every module over all pending rows; each chooses one token of the drafts that go so far.

        Afterwards only those rows are pending that later tokens change.
        """
        drafts, rows = [SampledDraft() for _ in states], self._rows(states)
        g = pad_sequence([self._head.fuse(state.all_pending()) for state in states], batch_first=True)
        chains = self._head.config.layout.chains
        for module in range(self._head.num_modules):
            embeddings = self._head.embed(rows.tokens(module, drafts))
            store = rows.store.part(slice(module * self._heads, (module + 1) * self._heads))
            out = self._head.module_pass(module, embeddings, g, rows.positions, rows.mask, store)
            g = out if chains else g
            active = [row for row, k in enumerate(num_draft_tokens) if module < k and not drafts[row].stopped]
            if active:
                seqs = [states[row].seq for row in active]
                self._choose(seqs, rows.last(out)[active], [drafts[row] for row in active])
        for state, count in zip(states, rows.counts):
            state.mark_read(max(0, count - self._head.num_modules + 1))
        return drafts

    def _rows(self, states: list[HeadState]) -> _Rows:
        counts, columns = [state.num_pending for state in states], [state.length for state in states]
        num_rows, device = max(counts), self._head.like.device
        first = torch.tensor([state.next_position for state in states], device=device)
        offsets = torch.arange(num_rows, device=device)
        seen = torch.tensor(columns, device=device)[:, None] + offsets
        mask = (torch.arange(max(columns) + num_rows, device=device) <= seen[..., None])[:, None]
        store = self._buffers.at([state.row for state in states], columns, num_rows)
        return _Rows(states, counts, first[:, None] + offsets, mask, store)
