"""All draft tokens of a step from one pass of a P-EAGLE head.

The pass reads the states of the target that came since the last step, and behind them a mask row for every draft token
but the first. Rows do not depend on draft tokens, so each token is drawn from its own row's distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from paceline.drafting.eagle_state import HeadState
from paceline.heads.eagle import ChainHead

ChainPass = Callable[[list[HeadState], int, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Rows of one sequence in the pass: `count` states of the target, then masks."""

    count: int
    tokens: Tensor  # int64 [rows]
    g: Tensor  # [rows, hidden_size]


class ParallelDrafting:
    """One pass for all draft tokens of all sequences."""

    def __init__(self, head: ChainHead, mask_token_id: int, chain_pass: ChainPass) -> None:
        """chain_pass: reads rows behind the entries of each sequence."""
        self._head, self._mask_token_id, self._pass = head, mask_token_id, chain_pass

    def outputs(self, states: list[HeadState], num_draft_tokens: list[int]) -> list[Tensor]:
        """For each sequence the head's output that each draft token is chosen from: [draft tokens, hidden_size].

        The states of the target that were pending are entries then; what lies behind them is overwritten.
        """
        rows = [self._rows(state, k - 1) for state, k in zip(states, num_draft_tokens)]
        if not any(row.tokens.shape[0] for row in rows):
            return [_first(state)[None] for state in states]
        tokens = pad_sequence([row.tokens for row in rows], batch_first=True)
        out = self._pass(states, 0, tokens, pad_sequence([row.g for row in rows], batch_first=True))
        outputs: list[Tensor] = []
        for index, (state, row, k) in enumerate(zip(states, rows, num_draft_tokens)):
            if row.count:
                state.out = out[index, row.count - 1]
                state.mark_read(row.count)
            outputs.append(torch.cat([_first(state)[None], out[index, row.count : row.count + k - 1]]))
        return outputs

    def _rows(self, state: HeadState, num_masks: int) -> _Rows:
        count, like = state.num_pending, self._head.like
        ids = [*state.next_tokens(count), *[self._mask_token_id] * num_masks]
        masks = self._head.mask_state().expand(num_masks, -1)
        g = torch.cat([self._head.fuse(state.all_pending()), masks]) if count else masks
        return _Rows(count, torch.tensor(ids, dtype=torch.int64, device=like.device), g)


def _first(state: HeadState) -> Tensor:
    """The output at the last position read, which the first draft token is chosen from."""
    assert state.out is not None, "a sequence that drafts has a state of the target"
    return state.out
