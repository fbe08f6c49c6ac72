"""Batches of token ids as torch or numpy arrays, in and out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.errors import PromptError


@dataclass(frozen=True, slots=True, eq=False)
class TokenArray:
    """Token ids [batch, length], and what they were given as."""

    ids: Tensor
    one_row: bool
    numpy: bool

    def like_input(self, ids: Tensor) -> Any:
        """Ids in the shape and kind of the input."""
        rows = ids[0] if self.one_row else ids
        return rows.numpy() if self.numpy else rows


def as_token_array(input_ids: Any) -> TokenArray:
    """Token ids of any array or nested list. Raises PromptError for anything that is not a batch of prompts."""
    wrong = PromptError("input_ids are whole numbers of shape [batch, length] or [length], and not empty")
    try:
        ids = input_ids if isinstance(input_ids, Tensor) else torch.as_tensor(input_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise wrong from error
    if ids.dim() not in (1, 2) or not ids.numel() or ids.is_floating_point() or ids.dtype == torch.bool:
        raise wrong
    is_numpy = not isinstance(input_ids, Tensor | list | tuple)
    return TokenArray(ids if ids.dim() == 2 else ids[None], ids.dim() == 1, is_numpy)


def prompts_of(ids: Tensor, attention_mask: Any) -> list[list[int]]:
    """The token ids of each row [batch, length] without its padding."""
    mask = torch.ones_like(ids) if attention_mask is None else torch.as_tensor(attention_mask)
    if mask.numel() != ids.numel():
        raise PromptError(f"attention_mask is {tuple(mask.shape)}; the ids are {tuple(ids.shape)}")
    rows = zip(ids.cpu(), mask.reshape(ids.shape).cpu())
    prompts = [row[visible.bool()].tolist() for row, visible in rows]
    if not all(prompts):
        raise PromptError("a prompt is empty; there is nothing to continue")
    return prompts


def append_generated(ids: Tensor, generated: list[list[int]], pad: int) -> Tensor:
    """Prompts [batch, length] with what was generated after them, shorter ones padded on the right."""
    longest = max(map(len, generated))
    rows = [row + [pad] * (longest - len(row)) for row in generated]
    added = torch.tensor(rows, dtype=ids.dtype).reshape(len(rows), longest)
    return torch.cat([ids, added.to(ids.device)], dim=-1)
