"""Training of an exit adapter: the target's state after layer E learns to speak through the target's own head."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import CapabilityError, OptionError
from paceline.heads.checkpoint import Provenance
from paceline.heads.exit_adapter import ExitAdapter, ExitConfig
from paceline.heads.registry import save_head
from paceline.train.corpus import Batch
from paceline.train.losses import blend, in_slices, soft_loss
from paceline.train.task import MEASURED_GUESSES, Places, following, in_parts
from paceline.train.teacher import Teacher, numbering_of


@dataclass(frozen=True, slots=True)
class ExitOptions:
    """Where the target is left and how large the adapter is.

    layer   the exit lies after it; 0: after a third of the layers
    width   of the adapter's bottleneck; 0: twice the target's
    greedy  share of the loss that looks only at the target's likeliest token
    """

    layer: int = 0
    width: int = 0
    greedy: float = 0.5


class ExitTask:
    """An exit adapter in training."""

    word = "exit"

    def __init__(self, teacher: Teacher, options: ExitOptions, name: str = "") -> None:
        self.teacher, self.options, self._name = teacher, options, name
        layer = options.layer or max(1, teacher.layers // 3)
        if not 0 < layer < teacher.layers:
            raise OptionError(f"an exit lies after layer 1 to {teacher.layers - 1}, not {layer} (--layer)")
        self._norm = getattr(teacher.model.base_model, "norm", None)
        if self._norm is None:
            raise CapabilityError(f"{name or 'this model'} has no final norm to speak through; it cannot be left early")
        eps = float(getattr(teacher.model.config.get_text_config(), "rms_norm_eps", 1e-5))
        config = ExitConfig(layer, teacher.width, options.width or 2 * teacher.width, eps)
        self.module = ExitAdapter(config).to(teacher.device)
        self._numbering = numbering_of(torch.arange(teacher.vocab_size, device=teacher.device), teacher.vocab_size)

    @torch.no_grad()
    def start(self, sample: Batch) -> None:
        """First weights: what leaves the layer goes to the head as it is, like an exit without adapter."""
        states = self._states(sample)[sample.answers(0)]
        size = states.square().mean().sqrt()
        self.module.start_from(torch.full_like(self.module.norm.weight, float(size)))

    def _states(self, batch: Batch) -> Tensor:
        """What the drafter will see: the state that leaves the layer, under the target's final norm."""
        return self._leaving(self.teacher.read(batch.tokens).entering)

    @torch.no_grad()
    def _leaving(self, entering: tuple[Tensor, ...]) -> Tensor:
        assert self._norm is not None
        normed: Tensor = self._norm(entering[self.module.config.layer])
        return normed.float()

    def loss(self, batch: Batch) -> Tensor:
        """The exit is taught, at every place of an answer, what the whole target says there."""
        reading = self.teacher.read(batch.tokens)
        places = Places.of(batch, 0)
        states = places.pick(self._leaving(reading.entering))
        return in_slices(self._slice_loss, places.pick(reading.hidden), states) / max(1, len(places))

    def _slice_loss(self, told: Tensor, states: Tensor) -> Tensor:
        wanted = blend(self.teacher.lesson(told, self._numbering), self.options.greedy)
        return soft_loss(self.teacher.speak(self.module(states)), wanted).sum()

    @torch.no_grad()
    def draft_tokens(self, batch: Batch) -> Tensor:
        """Lower layers have read every earlier guess, so the exit at a place is the same whoever wrote the text."""
        parts = in_parts(self._states(batch))
        best = torch.cat([self.teacher.speak(self.module(part)).argmax(dim=-1) for part in parts])
        return following(best.view(batch.tokens.shape), MEASURED_GUESSES)

    def export(self, folder: Path) -> None:
        save_head(self.module, folder, provenance=Provenance(self._name))
