"""How the rows of a plain pass lie: where each text's keys are in the cache, its positions, and who sees whom."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.protocols import Row
from paceline.core.tree import ancestors, depths, path_to
from paceline.kv.pages import PagePool
from paceline.runners.native.plain import PlainBatch, PlainOps, TextPart
from paceline.runners.native.slots import PAGE, NativeSlot, own


def place_of(table: list[int], token: int) -> int:
    return table[token // PAGE] * PAGE + token % PAGE


class Layout:
    """Lays rows out for `PlainOps`. Knows pages and positions; reads nothing and writes nothing."""

    def __init__(self, pages: PagePool, ops: PlainOps, turns: Tensor, dtype: torch.dtype) -> None:
        self._pages, self._ops, self._turns, self._dtype = pages, ops, turns, dtype
        self._device = turns.device

    def batch(self, rows: list[Row], skips: list[int] | None = None, *, prompts: bool = False) -> PlainBatch:
        """skips: nodes at the start of each row that are in the cache already. prompts: only ends are asked for."""
        parts, positions, start = [], [], 0
        for row, skip in zip(rows, skips or [0] * len(rows)):
            slot = own(row.slot)
            positions.append(torch.tensor(depths(row.parents))[skip:] + slot.length)
            parts.append(self._text_part(row, slot, start, skip, prompts))
            start += parts[-1].count
        turn = self._turns[torch.cat(positions).to(self._device)].to(self._dtype)[:, None]
        cosines, sines = turn[:, :, 0], turn[:, :, 1]
        return PlainBatch(torch.cat([cosines, cosines], dim=-1), torch.cat([-sines, sines], dim=-1), parts)

    def _text_part(self, row: Row, slot: NativeSlot, start: int, skip: int, prompts: bool) -> TextPart:
        """What attention needs to know of one row. Where bits matter, keys come in whole pages with a mask."""
        count, exact, chain = len(row.parents) - skip, self._ops.node_by_node, row.is_chain
        length, end = slot.length + skip, slot.length + len(row.parents)
        keys = -(-end // PAGE) * PAGE if exact else end
        places, fresh = self.places(slot, 0, keys), self.places(slot, length, end)
        aside = mask = None
        if exact and not chain:
            aside, mask = self._asides(row, slot, keys)
        elif exact or (count > 1 and not (chain and length == 0)):
            mask = self._mask(row, slot.length, keys)[skip:]
        tiled = exact and prompts and chain and count > 1
        views = self._ops.views(places, fresh)
        return TextPart(start, count, length, places, fresh, mask, chain, aside, views, tiled)

    def places(self, slot: NativeSlot, start: int, end: int) -> Tensor | slice:
        """Tokens start to end of a slot in the flat cache: a slice where its pages are neighbours."""
        first, last = start // PAGE, -(-end // PAGE)
        table = self._pages.table(slot.number)[first:last]
        if table == list(range(table[0], table[0] + len(table))):
            offset = table[0] * PAGE - first * PAGE
            return slice(offset + start, offset + end)
        scattered = [table[token // PAGE - first] * PAGE + token % PAGE for token in range(start, end)]
        return torch.tensor(scattered, device=self._device)

    def _mask(self, row: Row, length: int, keys: int) -> Tensor:
        """Additive [nodes, keys]: all of the text, and of the row what stands before each node; nothing behind it."""
        count = len(row.parents)
        mask = torch.zeros(count, keys, dtype=self._dtype)
        mask[:, length : length + count].masked_fill_(~ancestors(row.parents), -torch.inf)
        mask[:, length + count :] = -torch.inf
        return mask.to(self._device)

    def _asides(self, row: Row, slot: NativeSlot, keys: int) -> tuple[Tensor, Tensor]:
        """Of a tree: the keys of each node off its first branch, ancestors in order; and the mask of all nodes."""
        length, count = slot.length, len(row.parents)
        straight = next(node for node, parent in enumerate(row.parents) if parent != node - 1)
        table = self._pages.table(slot.number)
        text = [place_of(table, token) for token in range(length)]
        fresh = [place_of(table, length + node) for node in range(count)]
        places: list[list[int]] = []
        for node in range(straight, count):
            path = [fresh[step] for step in path_to(row.parents, node)]
            places.append(text + path + [path[-1]] * (keys - length - len(path)))
        seen = torch.tensor(depths(row.parents))[:, None] + length
        hidden = torch.arange(keys)[None] > seen
        mask = torch.zeros(count, keys, dtype=self._dtype).masked_fill_(hidden, -torch.inf)
        return torch.tensor(places, device=self._device), mask.to(self._device)
