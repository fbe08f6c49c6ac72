"""The frozen target as a teacher: its states for a batch of texts, and what it says at chosen places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.train.losses import TeacherTargets

ROWS_AT_A_TIME = 8192  # full-vocabulary logits are made for so many rows at once


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """States of the target for a batch. hidden [batch, width, size] after the final norm; entering: a layer's input."""

    hidden: Tensor
    entering: tuple[Tensor, ...]

    def features(self, layers: tuple[int, ...]) -> Tensor:
        """States entering these layers, joined low to high."""
        return torch.cat([self.entering[layer] for layer in layers], dim=-1)


def precision(device: str) -> torch.dtype:
    """What a target reads and writes in: bf16 on a GPU, fp32 on a CPU."""
    return torch.bfloat16 if device.startswith("cuda") else torch.float32


class Teacher:
    """Reads texts without gradients. The model is never changed."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval().requires_grad_(False)
        config = model.config.get_text_config()
        self.layers, self.width = int(config.num_hidden_layers), int(config.hidden_size)
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self.device = next(model.parameters()).device

    @torch.no_grad()
    def read(self, tokens: Tensor) -> Reading:
        """Texts are padded on the right, where no earlier token can see it: causal attention needs no other mask."""
        output = self.model.base_model(input_ids=tokens, use_cache=False, output_hidden_states=True)
        return Reading(output.last_hidden_state, output.hidden_states)

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        vectors: Tensor = self.model.get_input_embeddings()(tokens)
        return vectors

    def speak(self, hidden: Tensor) -> Tensor:
        """The target's own head. Gradients pass through to the states; its weights have none."""
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """What the head says of the target's own states."""
        return self.speak(hidden)

    @torch.no_grad()
    def lesson(self, hidden: Tensor, numbering: Tensor) -> TeacherTargets:
        """What the target says after states [rows, width]. numbering: drafter's number of each target token, or -1."""
        kept = (numbering >= 0).nonzero().flatten()
        probs, best = [], []
        for part in torch.split(hidden, ROWS_AT_A_TIME):
            logits = self.logits(part).float()
            weight = logits[:, kept] - logits.logsumexp(dim=-1, keepdim=True)
            probs.append(weight.exp_().to(self.model.dtype))
            best.append(numbering[logits.argmax(dim=-1)])
        return TeacherTargets(torch.cat(probs), torch.cat(best))


def numbering_of(target_ids: Tensor, vocab_size: int) -> Tensor:
    """The drafter's number of every target token, -1 for those it cannot say. target_ids must be rising."""
    out = torch.full((vocab_size,), -1, dtype=torch.int64, device=target_ids.device)
    out[target_ids] = torch.arange(target_ids.shape[0], device=target_ids.device)
    return out
