"""Training of an exit adapter: the target's state after layer E learns to predict through the target's own head."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import CapabilityError, OptionError
from paceline.heads.checkpoint import Provenance
from paceline.heads.exit_adapter import ExitAdapter, ExitConfig
from paceline.heads.registry import load_head, save_head
from paceline.train.corpus import CorpusSplit, TrainingBatch
from paceline.train.losses import blend, in_slices, soft_loss
from paceline.train.options import setting
from paceline.train.task import (
    MEASURED_DRAFT_TOKENS,
    Positions,
    TrainerSpec,
    TrainingTarget,
    chained_drafts,
    in_parts,
)
from paceline.train.teacher import Teacher, draft_ids_of


@dataclass(frozen=True, slots=True)
class ExitAdapterOptions:
    """Where the target is left and how large the adapter is."""

    exit_layer: int = setting(0, "exit the target after this layer (a third of its layers)", "E")
    bottleneck_size: int = setting(0, "size of the adapter's hidden layer (twice the target's hidden size)")
    greedy_weight: float = setting(0.5, "share of the loss for the target's likeliest token alone, 0 to 1", "W")


class ExitAdapterTask:
    """An exit adapter in training."""

    def __init__(self, teacher: Teacher, options: ExitAdapterOptions, name: str = "") -> None:
        self.teacher, self.options, self._name = teacher, options, name
        self._norm = getattr(teacher.model.base_model, "norm", None)
        if self._norm is None:
            raise CapabilityError(f"{name or 'this model'} has no final norm before its head; it has no early exit")
        self.module = ExitAdapter(self._config()).to(teacher.device)
        every_id = torch.arange(teacher.vocab_size, device=teacher.device)
        self._draft_ids = draft_ids_of(every_id, teacher.vocab_size)

    def _config(self) -> ExitConfig:
        teacher, options = self.teacher, self.options
        layer = options.exit_layer or max(1, teacher.num_layers // 3)
        if not 0 < layer < teacher.num_layers:
            raise OptionError(f"an exit lies after layer 1 to {teacher.num_layers - 1}, not {layer} (--exit-layer)")
        eps = float(getattr(teacher.model.config.get_text_config(), "rms_norm_eps", 1e-5))
        return ExitConfig(layer, teacher.hidden_size, options.bottleneck_size or 2 * teacher.hidden_size, eps)

    @torch.no_grad()
    def start(self, sample: TrainingBatch) -> None:
        """First weights: the state after the layer goes to the head unchanged, like an exit without adapter."""
        states = self._exit_states(self.teacher.states(sample.tokens).inputs)[sample.answers(0)]
        size = states.square().mean().sqrt()
        self.module.start_from(torch.full_like(self.module.norm.weight, float(size)))

    def start_from(self, folder: Path, sample: TrainingBatch) -> None:
        """First weights: those of a trained adapter after the same layer."""
        trained = load_head(folder, ExitAdapter, device=str(self.teacher.device))
        if trained.config != self.module.config:
            raise OptionError(f"the adapter in {folder} has other sizes: {trained.config}; train with the same")
        self.module.load_state_dict(trained.state_dict())

    @torch.no_grad()
    def _exit_states(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """What the drafter will read: the state after the layer, under the target's final norm."""
        assert self._norm is not None
        normed: Tensor = self._norm(inputs[self.module.config.layer])
        return normed.float()

    def loss(self, batch: TrainingBatch) -> Tensor:
        """The exit is trained, at every position of an answer, on what the whole target predicts there."""
        states = self.teacher.states(batch.tokens)
        positions = Positions.of(batch, 0)
        exit_states = positions.pick(self._exit_states(states.inputs))
        return in_slices(self._slice_loss, positions.pick(states.final), exit_states) / max(1, len(positions))

    def _slice_loss(self, final: Tensor, exit_states: Tensor) -> Tensor:
        labels = blend(self.teacher.targets(final, self._draft_ids), self.options.greedy_weight)
        return soft_loss(self.teacher.lm_head(self.module(exit_states)), labels).sum()

    @torch.no_grad()
    def draft_tokens(self, batch: TrainingBatch) -> Tensor:
        """The lower layers have read every earlier draft token, so one pass over the sequence gives all drafts."""
        parts = in_parts(self._exit_states(self.teacher.states(batch.tokens).inputs))
        best = torch.cat([self.teacher.lm_head(self.module(part)).argmax(dim=-1) for part in parts])
        return chained_drafts(best.view(batch.tokens.shape), MEASURED_DRAFT_TOKENS)

    def export(self, folder: Path) -> None:
        save_head(self.module, folder, provenance=Provenance(self._name))


def _build(target: TrainingTarget, parts: CorpusSplit, options: ExitAdapterOptions) -> ExitAdapterTask:
    return ExitAdapterTask(target.teacher, options, target.name)


SPEC = TrainerSpec(
    name="exit-adapter",
    summary="an adapter to exit the target after a layer",
    usage="--method layerskip --draft-model OUT",
    options=ExitAdapterOptions,
    build=_build,
)
