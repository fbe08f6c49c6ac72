"""Training of Medusa heads over a frozen target: head h learns what the target predicts h + 1 positions later."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import OptionError
from paceline.heads.checkpoint import Provenance
from paceline.heads.medusa import MedusaConfig, MedusaHeads
from paceline.heads.registry import load_head, save_head
from paceline.train.corpus import CorpusSplit, TrainingBatch
from paceline.train.losses import blend, in_slices, soft_loss
from paceline.train.options import setting
from paceline.train.task import Positions, TrainerSpec, TrainingTarget, in_parts
from paceline.train.teacher import Teacher, draft_ids_of


@dataclass(frozen=True, slots=True)
class MedusaOptions:
    """Sizes of the heads and weights of their loss."""

    num_medusa_heads: int = setting(4, "heads: tokens drafted ahead")
    num_layers: int = setting(1, "residual blocks of each head")
    draft_vocab_size: int = setting(0, "tokens the heads can draft (all; fewer only in vLLM's layout)")
    step_decay: float = setting(0.85, "loss weight of each head against the one before", "W")
    greedy_weight: float = setting(0.5, "share of the loss for the target's likeliest token alone, 0 to 1", "W")

    def __post_init__(self) -> None:
        if not 0 <= self.greedy_weight <= 1 or not 0 < self.step_decay <= 1:
            raise OptionError("--greedy-weight lies between 0 and 1, --step-decay above 0 and at most at 1")


class MedusaTask:
    """Medusa heads in training."""

    def __init__(self, teacher: Teacher, target_ids: Tensor, options: MedusaOptions, name: str = "") -> None:
        """target_ids: ascending ids of the tokens the heads can draft."""
        self.teacher, self.options, self._name = teacher, options, name
        sizes = (options.num_medusa_heads, options.num_layers, teacher.hidden_size, teacher.vocab_size)
        self.module = MedusaHeads(MedusaConfig(*sizes, int(target_ids.shape[0])))
        self.module.choose_vocabulary(target_ids)
        self.module.to(teacher.device)
        self._draft_ids = draft_ids_of(target_ids.to(teacher.device), teacher.vocab_size)

    def start(self, sample: TrainingBatch) -> None:
        """First weights: every head predicts what the target's own head predicts."""
        self.module.start_from(self.teacher.model.get_output_embeddings().weight)

    def start_from(self, folder: Path, sample: TrainingBatch) -> None:
        """First weights: those of trained heads of the same sizes; their tokens become these heads'."""
        trained = load_head(folder, MedusaHeads, device=str(self.teacher.device))
        if trained.config != self.module.config:
            raise OptionError(f"the heads in {folder} have other sizes: {trained.config}; train with the same")
        self.module.load_state_dict(trained.state_dict())
        every_id = torch.arange(trained.config.draft_vocab_size, device=self.teacher.device)
        self._draft_ids = draft_ids_of(self.module.to_target_ids(every_id), self.teacher.vocab_size)

    def loss(self, batch: TrainingBatch) -> Tensor:
        """Head h at position u - 1 - h is trained on what the target predicts at u."""
        final = self.teacher.states(batch.tokens).final
        num_heads = self.options.num_medusa_heads
        positions = Positions.of(batch, num_heads)
        inputs = torch.stack([positions.pick(final, back=1 + head) for head in range(num_heads)], dim=1)
        total = in_slices(self._slice_loss, positions.pick(final), inputs.float())
        return total / max(1, len(positions)) / sum(self._weights())

    def _weights(self) -> list[float]:
        return [self.options.step_decay**head for head in range(self.options.num_medusa_heads)]

    def _slice_loss(self, final: Tensor, inputs: Tensor) -> Tensor:
        """final [rows, hidden_size]: the states the target predicts from; inputs [rows, heads, hidden_size]."""
        labels = blend(self.teacher.targets(final, self._draft_ids), self.options.greedy_weight)
        heads = enumerate(zip(self._weights(), self._heads()))
        losses = [weight * soft_loss(module(inputs[:, head]), labels).sum() for head, (weight, module) in heads]
        return torch.stack(losses).sum()

    def _heads(self) -> Iterator[torch.nn.Sequential]:
        """One head after the other: the logits of all at once would not fit."""
        for block, lm_head in zip(self.module.blocks, self.module.lm_heads):
            yield torch.nn.Sequential(block, lm_head)

    @torch.no_grad()
    def draft_tokens(self, batch: TrainingBatch) -> Tensor:
        final = self.teacher.states(batch.tokens).final.float()
        drafts = []
        for head in self._heads():
            best = torch.cat([head(part).argmax(dim=-1) for part in in_parts(final)])
            drafts.append(self.module.to_target_ids(best).view(batch.tokens.shape))
        return torch.stack(drafts, dim=-1)

    def export(self, folder: Path) -> None:
        """vLLM's layout in `folder/vllm`; in `folder` the original one, or vLLM's where the vocabulary is reduced."""
        config = self.module.config
        main_layout = "original" if config.draft_vocab_size == config.vocab_size else "vllm"
        for place, layout in ((folder, main_layout), (folder / "vllm", "vllm")):
            save_head(self.module, place, layout=layout, provenance=Provenance(self._name), dtype=torch.bfloat16)


def _build(target: TrainingTarget, parts: CorpusSplit, options: MedusaOptions) -> MedusaTask:
    target_ids = target.frequent_ids(parts, options.draft_vocab_size or target.teacher.vocab_size)
    return MedusaTask(target.teacher, target_ids, options, target.name)


SPEC = TrainerSpec(
    name="medusa",
    summary="Medusa heads: several heads over the target's last state",
    usage="--method medusa --draft-model OUT",
    options=MedusaOptions,
    build=_build,
)
