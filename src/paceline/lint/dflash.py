"""Readings of block drafters (DFlash, DFlash 2, DSpark, JetSpec), and their drafts along a text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from paceline.errors import PairError
from paceline.heads.checkpoint import Checkpoint
from paceline.heads.dflash import DFlashConfig, DFlashHead
from paceline.heads.dflash_files import config_of
from paceline.lint.reading import TOP, ConfigKey, HeadReading, choices, config_reading, section_of
from paceline.lint.registry import HeadLint
from paceline.lint.target import Anchors, StatedText, TargetFacts
from paceline.lint.transformer_readings import (
    layer_readings,
    norm_readings,
    rotary_order_readings,
    theta_readings,
    vocabulary_readings,
)

DFLASH_CONFIG, LAYER_CONFIG = "dflash_config", "transformer_layer_config"
NESTED = (DFLASH_CONFIG, TOP)
ROWS_AT_A_TIME = 1024  # of blocks, which attend to each other's columns under a mask


def readings(checkpoint: Checkpoint, facts: TargetFacts) -> list[HeadReading]:
    """Every other reading of a block drafter's checkpoint."""
    config = config_of(checkpoint)
    section = LAYER_CONFIG if section_of(checkpoint.config, LAYER_CONFIG) else TOP
    theta = ConfigKey("rope_theta", (section, f"{section}.rope_parameters" if section else "rope_parameters"))
    return [
        *_layers(checkpoint, config, facts),
        *_rows(checkpoint, config, facts),
        *theta_readings(checkpoint, theta, facts),
        *rotary_order_readings(checkpoint, config.head_dim),
        *norm_readings(checkpoint),
        *vocabulary_readings(checkpoint),
    ]


def _layers(checkpoint: Checkpoint, config: DFlashConfig, facts: TargetFacts) -> list[HeadReading]:
    """speculators' ids are layers whose input is read; z-lab's are layers whose output is read, smaller by one."""
    if "speculators_model_type" in checkpoint.config:
        key, offset = ConfigKey("aux_hidden_state_layer_ids", (TOP,)), 0
    else:
        key, offset = ConfigKey("target_layer_ids", NESTED), 1
    given = key.value(checkpoint.config)
    layers = tuple(int(layer) + offset for layer in given) if given else config.feature_layers
    return layer_readings(checkpoint, key, layers, facts, offset)


def _rows(checkpoint: Checkpoint, config: DFlashConfig, facts: TargetFacts) -> list[HeadReading]:
    """What the rows of a block hold, see and predict."""
    size, mask, scale = config.block_size, config.mask_token_id, round(config.hidden_size**0.5, 6)
    shifted = not config.sample_from_anchor
    name = "rows shifted by one" if shifted else "rows in place"
    masks = [token for token in (*facts.special_ids, mask - 1, mask + 1) if 0 <= token < config.vocab_size]
    sizes = [other for other in (size // 2, size - 1, size + 1, size * 2) if other >= 2]
    scales = [1.0, scale]
    return [
        config_reading(name, ConfigKey("sample_from_anchor", NESTED), shifted, checkpoint),
        *(_causal(checkpoint, causal) for causal in _other_causality(config)),
        *choices("mask token {}", ConfigKey("mask_token_id", NESTED), masks, checkpoint, mask),
        *choices("block size {}", ConfigKey("block_size", NESTED), sizes, checkpoint, size),
        *choices(
            "embedding times {:g}",
            ConfigKey("input_embedding_scale", NESTED), scales, checkpoint, config.input_embedding_scale,
        ),
    ]  # fmt: skip


def _other_causality(config: DFlashConfig) -> list[bool]:
    """The settings under which some layer sees other rows than now."""
    now = [config.visibility(layer).causal for layer in range(config.num_layers)]
    return [causal for causal in (True, False) if any(layer != causal for layer in now)]


def _causal(checkpoint: Checkpoint, causal: bool) -> HeadReading:
    """The top level is read before the nested section, and other programs read only that."""
    reading = config_reading(f"causal {'on' if causal else 'off'}", ConfigKey("is_causal"), causal, checkpoint)

    def edit(files: Checkpoint) -> Checkpoint:
        edited = reading.edit(files)
        nested: dict[str, Any] = section_of(edited.config, DFLASH_CONFIG)
        config = {**edited.config, DFLASH_CONFIG: {**nested, "causal": causal}} if nested else edited.config
        return replace(edited, config=config)

    return replace(reading, edit=edit)


# --- drafts -----------------------------------------------------------------------------------------------------------


def draft(head: DFlashHead, text: StatedText, anchors: Anchors, k: int) -> Tensor:
    """The block of every anchor; within it the text's own tokens come before each draft."""
    teacher, config = text.teacher, head.config
    if config.target_hidden_size != teacher.hidden_size:
        sizes = f"{config.target_hidden_size} values; the target has {teacher.hidden_size}"
        raise PairError(f"this head reads states of {sizes}: it was trained for another model")
    head.bind_target(teacher.embed, teacher.logits)
    context = head.context(text.features(config.feature_layers))
    count = min(k, config.max_draft_tokens)
    drafts, at_once = [], max(1, ROWS_AT_A_TIME // config.block_size)
    for row in range(text.tokens.shape[0]):
        for columns in torch.split(anchors.column[anchors.row == row], at_once):
            states = _block_states(head, context[row : row + 1], text.tokens[row], columns)
            drafts.append(_drafts(head, states, text.tokens[row], columns, count))
    return functional.pad(torch.cat(drafts), (0, k - count), value=-1)


def _block_states(head: DFlashHead, context: Tensor, tokens: Tensor, anchors: Tensor) -> Tensor:
    """States of the blocks of some anchors of one sequence. [anchors, block_size, hidden_size]"""
    size, device = head.config.block_size, tokens.device
    offsets = torch.arange(size, device=device)
    ids = torch.where(offsets[None] == 0, tokens[anchors][:, None], head.config.mask_token_id)
    positions = (anchors[:, None] + offsets).view(1, -1)
    before = torch.arange(context.shape[1], device=device)
    owner = torch.arange(len(anchors), device=device).repeat_interleave(size)
    seen = torch.cat([before[None] < anchors[owner][:, None], owner[:, None] == owner[None]], dim=1)[None, None]
    masks = head.layer_masks(seen, positions, torch.cat([before[None], positions], dim=1))
    stores = head.context_stores(context, before[None])
    states = head.forward_block(ids.view(1, -1), stores, positions, masks)
    return states.view(len(anchors), size, -1)


def _drafts(head: DFlashHead, states: Tensor, tokens: Tensor, anchors: Tensor, count: int) -> Tensor:
    """The likeliest token of each row by its logits, the Markov head and the selector. int64 [anchors, count]"""
    first = head.config.first_row
    chain = _Chain(head)
    last = tokens.shape[0] - 1
    drafts = [
        chain.best(states[:, first + place], tokens[(anchors + place).clamp(max=last)]) for place in range(count)
    ]
    return head.to_target_ids(torch.stack(drafts, dim=-1))


@dataclass(slots=True, eq=False)
class _Chain:
    """Choices along a block. memory: of a recurrent Markov head."""

    head: DFlashHead
    memory: Tensor | None = None

    def best(self, states: Tensor, previous: Tensor) -> Tensor:
        """states [anchors, hidden_size], previous: the tokens before. int64 [anchors], ids of the head's own."""
        logits = self.head.logits(states)
        if self.head.markov_head is not None:
            step = self.head.markov_head.step(states, self.head.markov_head.previous(previous), self.memory)
            logits, self.memory = logits + step.bias, step.memory
        selector = self.head.candidate_selector
        if selector is None:
            return logits.argmax(dim=-1)
        candidates = selector.candidates(logits)
        scores = selector.pair_scores(states, candidates, previous[:, None])[:, 0]
        return candidates.ids.gather(-1, scores.argmax(dim=-1, keepdim=True)).squeeze(-1)


LINT = HeadLint(("dflash",), readings, draft)
