"""Readings of block drafters (DFlash, DFlash 2, DSpark, JetSpec), and their drafts along a text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.errors import PairError
from paceline.heads.block_convolution import BlockConvolution
from paceline.heads.checkpoint import Checkpoint, plain_name
from paceline.heads.dflash import DFlashConfig, DFlashHead
from paceline.heads.dflash_files import config_of
from paceline.lint.comparison import DraftedTokens, own_ids, probs_of
from paceline.lint.reading import TOP, ConfigKey, HeadReading, choices, config_reading, section_of, tensor_reading
from paceline.lint.registry import HeadLint
from paceline.lint.target import Anchors, StatedText, TargetFacts
from paceline.lint.transformer_readings import (
    layer_readings,
    norm_readings,
    rotary_order_readings,
    theta_readings,
    vocabulary_readings,
)
from paceline.train.teacher import Teacher

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
        *_exchanged_norms(checkpoint),
        *_convolutions(config),
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


def _exchanged_norms(checkpoint: Checkpoint) -> list[HeadReading]:
    """The norm of the context and the final one have names that converters take for each other."""
    names = {plain_name(name): name for name in checkpoint.tensors}
    pair = (names.get("hidden_norm.weight", ""), names.get("norm.weight", ""))
    if not all(pair):
        return []

    def edit(files: Checkpoint) -> Checkpoint:
        exchanged = {pair[0]: files.tensors[pair[1]], pair[1]: files.tensors[pair[0]]}
        return replace(files, tensors={**files.tensors, **exchanged})

    change = f"model.safetensors: exchange {pair[0]} and {pair[1]}"
    return [HeadReading("hidden_norm and norm exchanged", change, edit)]


def _convolutions(config: DFlashConfig) -> list[HeadReading]:
    """The weights of a convolution by tap (this row, the row before, …) and by side (input, output)."""
    if not config.conv_kernel_size:
        return []

    def reversed_along(axis: int, name: str) -> HeadReading:
        return tensor_reading(
            f"convolution {name} reversed",
            f"put the {name} of base_kernel and kernel_projection of every convolution in the other order",
            ("_conv.base_kernel", "_conv.kernel_projection.weight"),
            lambda weight: weight.view(2, config.conv_kernel_size, -1).flip(axis).reshape(weight.shape),
        )

    return [reversed_along(1, "taps"), reversed_along(0, "sides")]


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


def draft(head: DFlashHead, text: StatedText, anchors: Anchors, k: int) -> DraftedTokens:
    """The block of every anchor; within it the text's own tokens come before each draft."""
    teacher, config = text.teacher, head.config
    if config.target_hidden_size != teacher.hidden_size:
        sizes = f"{config.target_hidden_size} values; the target has {teacher.hidden_size}"
        raise PairError(f"this head reads states of {sizes}: it was trained for another model")
    _take_output_rows(head, teacher)
    head.bind_target(teacher.embed, teacher.logits)
    context = head.context(text.features(config.feature_layers))
    count = min(k, config.max_draft_tokens)
    size = min(config.block_size, config.first_row + count) if config.is_causal else config.block_size
    _cut_blocks(head, size)  # rows that no draft token sees need not be computed
    labels = own_ids(text.labels(anchors, count), head.target_ids, teacher.vocab_size)
    drafts, at_once = list[DraftedTokens](), max(1, ROWS_AT_A_TIME // size)
    for row in range(text.tokens.shape[0]):
        own = anchors.row == row
        for columns, part in zip(anchors.column[own].split(at_once), labels[own].split(at_once), strict=True):
            states = _block_states(head, context[row : row + 1], text.tokens[row], columns, size)
            drafts.append(_drafts(head, states, text.tokens[row], columns, part))
    fewer = (0, k - count)
    return DraftedTokens(
        functional.pad(torch.cat([part.tokens for part in drafts]), fewer, value=-1),
        functional.pad(torch.cat([part.probs for part in drafts]), fewer),
    )


_output_rows: WeakKeyDictionary[Teacher, Tensor] = WeakKeyDictionary()  # [vocab_size, hidden_size] of each target


def _take_output_rows(head: DFlashHead, teacher: Teacher) -> None:
    """Give a head of a reduced vocabulary its rows of the target's output head, which are computed once for all."""
    if head.lm_head is not None or not head.config.is_reduced:
        return
    if teacher not in _output_rows:
        each = torch.eye(teacher.hidden_size, dtype=head.like.dtype, device=head.like.device)
        _output_rows[teacher] = teacher.logits(each).T
    rows = _output_rows[teacher][head.target_ids].to(head.like.dtype)
    head.lm_head = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
    head.lm_head.weight = nn.Parameter(rows, requires_grad=False)


def _cut_blocks(head: DFlashHead, size: int) -> None:
    """Several blocks in a row are of this size from now on."""
    for module in head.modules():
        if isinstance(module, BlockConvolution):
            module.block_size = size


def _block_states(head: DFlashHead, context: Tensor, tokens: Tensor, anchors: Tensor, size: int) -> Tensor:
    """States of the blocks of some anchors of one sequence. [anchors, size, hidden_size]"""
    device = tokens.device
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


def _drafts(head: DFlashHead, states: Tensor, tokens: Tensor, anchors: Tensor, labels: Tensor) -> DraftedTokens:
    """The draft of each row by its logits, the Markov head and the selector. labels: of the head's own vocabulary"""
    first, last = head.config.first_row, tokens.shape[0] - 1
    chain = _Chain(head)
    choices_of_rows = [
        chain.choice(states[:, first + place], tokens[(anchors + place).clamp(max=last)]).drafted(labels[:, place])
        for place in range(labels.shape[1])
    ]
    ids = torch.stack([choice.tokens for choice in choices_of_rows], dim=-1)
    return DraftedTokens(head.to_target_ids(ids), torch.stack([choice.probs for choice in choices_of_rows], dim=-1))


@dataclass(frozen=True, slots=True, eq=False)
class _Choice:
    """Scores of the tokens that a row chooses from. ids [anchors, candidates]; None: the whole vocabulary"""

    scores: Tensor  # [anchors, candidates]
    ids: Tensor | None = None

    def drafted(self, labels: Tensor) -> DraftedTokens:
        """The likeliest token, and the probability of the target's. labels [anchors], ids of the head's own"""
        best = self.scores.argmax(dim=-1)
        if self.ids is None:
            return DraftedTokens(best, probs_of(self.scores, labels))
        matches = self.ids == labels[:, None]
        column = torch.where(matches.any(dim=-1), matches.long().argmax(dim=-1), -1)
        return DraftedTokens(self.ids.gather(-1, best[:, None]).squeeze(-1), probs_of(self.scores, column))


@dataclass(slots=True, eq=False)
class _Chain:
    """Choices along a block. memory: of a recurrent Markov head."""

    head: DFlashHead
    memory: Tensor | None = None

    def choice(self, states: Tensor, previous: Tensor) -> _Choice:
        """states [anchors, hidden_size], previous: the tokens before."""
        logits = self.head.logits(states)
        if self.head.markov_head is not None:
            step = self.head.markov_head.step(states, self.head.markov_head.previous(previous), self.memory)
            logits, self.memory = logits + step.bias, step.memory
        selector = self.head.candidate_selector
        if selector is None:
            return _Choice(logits)
        candidates = selector.candidates(logits)
        return _Choice(selector.pair_scores(states, candidates, previous[:, None])[:, 0], candidates.ids)


LINT = HeadLint(("dflash",), readings, draft)
