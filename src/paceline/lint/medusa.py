"""Readings of Medusa heads, and their drafts along a text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import torch
from torch.nn import functional

from paceline.errors import PairError
from paceline.heads.checkpoint import Checkpoint, plain_name
from paceline.heads.medusa import MedusaHeads
from paceline.lint.comparison import DraftedTokens, own_ids, probs_of
from paceline.lint.reading import HeadReading, tensor_reading
from paceline.lint.registry import HeadLint
from paceline.lint.target import Anchors, StatedText, TargetFacts

INDEX = re.compile(r"((?:model\.)?(?:blocks\.|lm_heads\.)?)(\d+)(\..*)")  # the number of the head a tensor is of
ROWS_AT_A_TIME = 1024


def readings(checkpoint: Checkpoint, facts: TargetFacts) -> list[HeadReading]:
    """Heads may be stored in the other order, count from the next token, or have a map of offsets."""
    last = max((int(match[2]) for match in map(INDEX.fullmatch, checkpoint.tensors) if match), default=0)
    numberings = [
        _renumbered("heads in the other order", "number the heads the other way round", lambda index: last - index),
        _renumbered("head 0 is the next token's", "leave out head 0, and count the others from 0", lambda i: i - 1),
    ]
    return [*(numberings if last else []), *_map_readings(checkpoint)]


def _renumbered(name: str, change: str, new_index: Callable[[int], int]) -> HeadReading:
    """Tensors under new numbers; those of numbers below 0 are left out."""

    def renamed(tensor: str) -> str | None:
        match = INDEX.fullmatch(tensor)
        if match is None:
            return tensor
        index = new_index(int(match[2]))
        return f"{match[1]}{index}{match[3]}" if index >= 0 else None

    def edit(files: Checkpoint) -> Checkpoint:
        names = {key: renamed(key) for key in files.tensors}
        return replace(files, tensors={new: files.tensors[key] for key, new in names.items() if new is not None})

    return HeadReading(name, f"the weights: {change}", edit)


def _map_readings(checkpoint: Checkpoint) -> list[HeadReading]:
    """token_map holds ids of the target; EAGLE's d2t holds offsets, and a converter may have copied those."""
    if not any(plain_name(name) == "token_map" for name in checkpoint.tensors):
        return []
    change = "token_map holds offsets; store ids of the target instead, token_map[i] = i + offset"
    return [tensor_reading("token_map as offsets", change, ("token_map",), lambda ids: ids + torch.arange(len(ids)))]


def draft(heads: MedusaHeads, text: StatedText, anchors: Anchors, k: int) -> DraftedTokens:
    """Head h predicts the token h + 1 places after an anchor from the state before the anchor."""
    teacher = text.teacher
    if heads.config.hidden_size != teacher.hidden_size:
        sizes = f"{heads.config.hidden_size} values; the target has {teacher.hidden_size}"
        raise PairError(f"these heads read states of {sizes}: they were trained for another model")
    states = anchors.pick(text.final, -1)
    count = min(k, heads.config.num_heads)
    target_ids = heads.to_target_ids(torch.arange(heads.config.draft_vocab_size, device=states.device))
    labels = own_ids(text.labels(anchors, count), target_ids, teacher.vocab_size)
    tokens, probs = [], []
    for part, own in zip(states.split(ROWS_AT_A_TIME), labels.split(ROWS_AT_A_TIME), strict=True):
        logits = heads(part, count).transpose(0, 1)
        tokens.append(heads.to_target_ids(logits.argmax(dim=-1)))
        probs.append(probs_of(logits, own))
    fewer = (0, k - count)
    return DraftedTokens(functional.pad(torch.cat(tokens), fewer, value=-1), functional.pad(torch.cat(probs), fewer))


LINT = HeadLint(("medusa",), readings, draft)
