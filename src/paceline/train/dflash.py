"""Training of a DFlash head: one pass drafts the blocks of many random anchors, each against the target."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.errors import OptionError
from paceline.heads.checkpoint import Provenance
from paceline.heads.dflash import DFlashConfig, DFlashHead, usual_target_layers
from paceline.heads.registry import load_head, save_head
from paceline.runners.loading import eos_token_ids_of
from paceline.train.anchor_blocks import AnchorBlocks, block_states, possible_anchors, random_order
from paceline.train.block_loss import BlockLoss, TrainedRows, drafts_of, position_weights
from paceline.train.corpus import CorpusSplit, TrainingBatch
from paceline.train.options import setting
from paceline.train.task import Positions, TrainerSpec, TrainingTarget
from paceline.train.teacher import BatchStates, Teacher, draft_ids_of, rounded_teacher

BLOCK_ATTENTION = ("bidirectional", "causal")
INITIAL_SPREAD = 0.02
USUAL_BLOCK_SIZE = 8
CHUNKS_AT_A_TIME = 128  # whose logits exist at once while drafts are measured


@dataclass(frozen=True, slots=True)
class DFlashOptions:
    """Sizes of the head and weights of its loss."""

    num_layers: int = setting(4, "layers of the head")
    intermediate_size: int = setting(0, "size of the feed-forward part (the target's)")
    num_feature_layers: int = setting(5, "layers of the target whose states the head reads")
    block_size: int = setting(
        0, f"rows of a block; one less are drafted in one pass ({USUAL_BLOCK_SIZE}, or that of the head it continues)"
    )
    draft_vocab_size: int = setting(16384, "tokens the head can draft: the most frequent ones")
    mask_token_id: int = setting(0, "token that stands for what is not yet known (an unused special one)")
    block_attention: str = setting(
        "bidirectional", "what a row of a block sees of it; causal: a shorter block drafts the same tokens", "KIND"
    )
    anchors: int = setting(128, "random anchors of a sequence in a training step")
    gamma: float = setting(0.0, "draft positions over which the loss weight falls to 1/e (half a block)", "G")
    greedy_weight: float = setting(0.5, "share of the loss for the target's likeliest token alone, 0 to 1", "W")
    int4_share: float = setting(
        0.0, "share of the steps that read states of the target with int4 weights: a head for --dtype int4 too", "S"
    )

    def __post_init__(self) -> None:
        if min(self.num_layers, self.num_feature_layers, self.anchors, self.draft_vocab_size) < 1:
            raise OptionError("--num-layers, --num-feature-layers, --anchors and --draft-vocab-size are 1 or more")
        if self.block_attention not in BLOCK_ATTENTION:
            raise OptionError(f"--block-attention is {' or '.join(BLOCK_ATTENTION)}, not {self.block_attention}")
        if self.block_size < 0 or self.block_size == 1:
            raise OptionError("--block-size is 2 or more")
        if not 0 <= self.greedy_weight <= 1 or not 0 <= self.int4_share <= 1:
            raise OptionError("--greedy-weight and --int4-share lie between 0 and 1")

    def decay(self, block_size: int) -> float:
        return self.gamma or block_size / 2

    def variant(self) -> dict[str, Any]:
        """What the config of the head says beyond its sizes."""
        return {}


def dflash_config(teacher: Teacher, options: DFlashOptions, mask_token_id: int) -> DFlashConfig:
    """A head with the sizes of the target's own layers."""
    config, sizes = teacher.model.config.get_text_config(), teacher.sizes
    rope: dict[str, Any] = dict(getattr(config, "rope_parameters", None) or {})
    unscaled = rope.get("rope_type", "default") == "default"
    layers = sorted(set(usual_target_layers(options.num_feature_layers, sizes.num_layers)))
    return DFlashConfig(
        sizes.hidden_size,
        options.intermediate_size or sizes.intermediate_size,
        options.num_layers,
        sizes.num_heads,
        sizes.num_kv_heads,
        sizes.head_dim,
        teacher.vocab_size,
        min(options.draft_vocab_size, teacher.vocab_size),
        sizes.hidden_size,
        tuple(layer + 1 for layer in layers),
        options.block_size or USUAL_BLOCK_SIZE,
        mask_token_id,
        rope_theta=float(rope.get("rope_theta", getattr(config, "rope_theta", 10000.0))),
        rope_scaling=None if unscaled else rope,
        max_seq_len=sizes.max_seq_len,
        rms_norm_eps=float(getattr(config, "rms_norm_eps", 1e-5)),
        causal=options.block_attention == "causal" or None,
        **options.variant(),
    )


class _ScaledHead(nn.Module):
    """The head together with the scale of the target's states, which is folded into `fc` while it is written.

    A few dimensions of a language model's states are hundreds of times larger than the rest.
    """

    scale: Tensor

    def __init__(self, head: DFlashHead) -> None:
        super().__init__()
        self.head = head
        self.register_buffer("scale", torch.ones(head.fc.in_features))

    @contextmanager
    def folded(self) -> Iterator[DFlashHead]:
        """The head as it takes the target's states unscaled, inside the block."""
        trained = self.head.fc.weight.detach().clone()
        with torch.no_grad():
            self.head.fc.weight.mul_(self.scale)
        try:
            yield self.head
        finally:
            with torch.no_grad():
                self.head.fc.weight.copy_(trained)


class DFlashTask:
    """A DFlash or DFlash 2 head in training."""

    def __init__(self, teacher: Teacher, head: DFlashHead, options: DFlashOptions, name: str = "") -> None:
        self.teacher, self.options, self._name = teacher, options, name
        self._rounded = rounded_teacher(teacher) if options.int4_share else None
        self._take(head)

    def _take(self, head: DFlashHead) -> None:
        """Train this head."""
        dtype, teacher = self.teacher.model.dtype, self.teacher
        head.to(teacher.device)
        head.bind_target(teacher.embed, lambda hidden: teacher.lm_head(hidden.to(dtype)))
        self.module = _ScaledHead(head).to(teacher.device)
        self._draft_ids = draft_ids_of(head.target_ids, teacher.vocab_size)

    @property
    def head(self) -> DFlashHead:
        return self.module.head

    @torch.no_grad()
    def start(self, sample: TrainingBatch) -> None:
        """First weights: small random layers that add little, under the target's final norm and output head."""
        self.measure_scale(sample)
        norm = getattr(self.teacher.model.base_model, "norm", None)
        if norm is not None:
            self.head.norm.weight.copy_(norm.weight)
        depth = (2 * self.head.config.num_layers) ** 0.5
        for name, weight in self.head.layers.named_parameters():
            if name.endswith("_proj.weight"):
                outer = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=INITIAL_SPREAD / depth if outer else INITIAL_SPREAD)
        nn.init.normal_(self.head.fc.weight, std=self.head.fc.in_features**-0.5)

    @torch.no_grad()
    def start_from(self, folder: Path, sample: TrainingBatch) -> None:
        """First weights and all sizes: those of a trained head. No weight depends on the size of its blocks."""
        head = load_head(folder, DFlashHead, device=str(self.teacher.device))
        sizes = (head.config.vocab_size, head.config.target_hidden_size)
        if sizes != (self.teacher.vocab_size, self.teacher.hidden_size):
            raise OptionError(f"the head in {folder} was trained for a model of other sizes")
        self._take(self._resized(head).train().requires_grad_(True))
        self.measure_scale(sample)
        self.head.fc.weight.div_(self.module.scale)

    def _resized(self, head: DFlashHead) -> DFlashHead:
        """The same weights with blocks of the size that was asked for."""
        size = self.options.block_size or head.config.block_size
        if size == head.config.block_size:
            return head
        resized = DFlashHead(replace(head.config, block_size=size)).to(self.teacher.device)
        resized.load_state_dict(head.state_dict())
        return resized

    def measure_scale(self, sample: TrainingBatch) -> None:
        """One over the usual size of each feature dimension. The first token's states are outliers and left out."""
        features = self._read(self.teacher, sample).features
        inside = sample.inside(0)
        inside[:, 0] = False
        usual = features[inside].float().square().mean(dim=0).sqrt()
        self.module.scale.copy_(1.0 / usual.clamp(min=1e-3))

    def _read(self, teacher: Teacher, batch: TrainingBatch) -> BatchStates:
        return teacher.batch_states(batch, self.head.config.feature_layers)

    def _states(self, batch: TrainingBatch, states: BatchStates, blocks: AnchorBlocks) -> Tensor:
        """Of the drafting rows: [chunks, blocks, block_size - 1, hidden_size]."""
        scaled = states.features.float() * self.module.scale
        return block_states(self.head, scaled, batch.tokens, blocks)[:, :, 1:]

    def loss(self, batch: TrainingBatch) -> Tensor:
        """Row j of a block is trained on what the target predicts of the token j places after the anchor."""
        size, options = self.head.config.block_size, self.options
        blocks = AnchorBlocks.of(random_order(batch), possible_anchors(batch), options.anchors, size)
        states = self._read(self.teacher_of(batch), batch)
        answers = Positions.of(batch, 0)
        targets = self.teacher.targets(answers.pick(states.final), self._draft_ids)
        rows = self._rows(batch, blocks, answers, self._states(batch, states, blocks))
        del states
        return BlockLoss(self.head, targets, options.greedy_weight).mean(rows)

    def teacher_of(self, batch: TrainingBatch) -> Teacher:
        """The target, or in some steps its rounded copy. Decided by the batch's number, as its anchors are."""
        if self._rounded is None or random.Random(batch.number).random() >= self.options.int4_share:
            return self.teacher
        return self._rounded

    def _rows(self, batch: TrainingBatch, blocks: AnchorBlocks, answers: Positions, states: Tensor) -> TrainedRows:
        """The drafting rows whose token exists."""
        chosen = blocks.valid[..., None] & blocks.inside(batch.lengths)[..., 1:]
        chunk, block, row = chosen.nonzero(as_tuple=True)
        seq, before = blocks.seq[chunk], blocks.anchors[chunk, block] + row
        weights = position_weights(blocks.block_size, self.options.decay(blocks.block_size), states.device)
        label = answers.numbered(batch.tokens.shape)[seq, before]
        chosen_states = states.flatten(0, 2).index_select(0, chosen.flatten().nonzero().flatten())
        return TrainedRows(chosen_states, label, batch.tokens[seq, before], weights[row])

    @torch.no_grad()
    def draft_tokens(self, batch: TrainingBatch) -> Tensor:
        """Of every anchor in an answer; 0 elsewhere, where no step begins."""
        size, length = self.head.config.block_size, batch.tokens.shape[1]
        order = -torch.arange(length, device=batch.tokens.device).expand(batch.tokens.shape).float()
        drafts = torch.zeros(*batch.tokens.shape, size - 1, dtype=torch.int64, device=batch.tokens.device)
        blocks = AnchorBlocks.of(order, possible_anchors(batch), length, size)
        states = self._states(batch, self._read(self.teacher, batch), blocks)
        for first in range(0, len(blocks.seq), CHUNKS_AT_A_TIME):
            part = slice(first, first + CHUNKS_AT_A_TIME)
            seq, anchors, valid = blocks.seq[part, None], blocks.anchors[part], blocks.valid[part]
            before = blocks.at(batch.tokens)[part, :, :-1]
            best = drafts_of(self.head, states[part].flatten(0, 2), before.flatten()).view(before.shape)
            drafts[seq.expand_as(anchors)[valid], anchors[valid] - 1] = best[valid]
        return drafts

    def export(self, folder: Path) -> None:
        """z-lab's layout in `folder`, speculators' in `folder/speculators`."""
        architectures = tuple(self.teacher.model.config.architectures or ("LlamaForCausalLM",))
        about = Provenance(self._name, architectures, self.head.config.max_draft_tokens)
        with self.module.folded() as head:
            save_head(head, folder, provenance=about, dtype=torch.bfloat16)
            save_head(head, folder / "speculators", layout="speculators", provenance=about, dtype=torch.bfloat16)


def unused_token(target: TrainingTarget, parts: CorpusSplit) -> int:
    """A token that no text holds, to stand for what is not yet known: a special one where there is one."""
    vocab_size = target.teacher.vocab_size
    counts = np.bincount(parts.train.tokens, minlength=vocab_size)[:vocab_size]
    counts[[token for token in eos_token_ids_of(target.model) if token < vocab_size]] += 1
    special = [int(token) for token in target.tokenizer.added_tokens_decoder if int(token) < vocab_size]
    unused = [token for token in special if counts[token] == 0]
    return max(unused) if unused else int(vocab_size - 1 - np.argmin(counts[::-1]))


def build(target: TrainingTarget, parts: CorpusSplit, options: DFlashOptions) -> DFlashTask:
    mask_token_id = options.mask_token_id or unused_token(target, parts)
    head = DFlashHead(dflash_config(target.teacher, options, mask_token_id))
    if head.config.is_reduced:
        head.choose_vocabulary(target.frequent_ids(parts, options.draft_vocab_size))
    return DFlashTask(target.teacher, head, options, target.name)


SPEC = TrainerSpec(
    name="dflash",
    summary="a DFlash head: a few layers that draft a whole block in one pass",
    usage="--method dflash --draft-model OUT",
    options=DFlashOptions,
    build=build,
)
