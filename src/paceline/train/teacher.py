"""The frozen target as a teacher: its hidden states for a batch, and what it predicts at chosen positions."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.hub.model_config import decoder_sizes
from paceline.quantization.int4 import GROUP_SIZE
from paceline.quantization.packed import round_weight
from paceline.quantization.packed_layout import Kind
from paceline.train.corpus import TrainingBatch
from paceline.train.losses import TeacherTargets

ROWS_AT_A_TIME = 8192  # full-vocabulary logits are computed for this many rows at once


@dataclass(frozen=True, slots=True, eq=False)
class TargetStates:
    """Hidden states of the target for a batch.

    final   [batch, length, hidden_size]: after the final norm
    inputs  [batch, length, hidden_size] of each layer: the states that enter it
    """

    final: Tensor
    inputs: tuple[Tensor, ...]

    def features(self, layers: tuple[int, ...]) -> Tensor:
        """States that enter these layers, concatenated from low to high."""
        return torch.cat([self.inputs[layer] for layer in layers], dim=-1)


@dataclass(frozen=True, slots=True, eq=False)
class BatchStates:
    """What a head in training reads of the target for a batch; of padding it may be anything.

    final     [batch, length, hidden_size]: after the final norm
    features  [batch, length, layers * hidden_size]: the states that enter the layers asked for, from low to high
    """

    final: Tensor
    features: Tensor


class Teacher:
    """Runs the target without gradients. The model is never changed."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval().requires_grad_(False)
        self.sizes = decoder_sizes(model.config)
        self.num_layers, self.hidden_size = self.sizes.num_layers, self.sizes.hidden_size
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self.device = next(model.parameters()).device

    @torch.no_grad()
    def states(self, tokens: Tensor) -> TargetStates:
        """Sequences are padded on the right, which no earlier token attends to: causal attention needs no mask."""
        output = self.model.base_model(input_ids=tokens, use_cache=False, output_hidden_states=True)
        return TargetStates(output.last_hidden_state, output.hidden_states)

    def batch_states(self, batch: TrainingBatch, layers: tuple[int, ...]) -> BatchStates:
        states = self.states(batch.tokens)
        return BatchStates(states.final, states.features(layers))

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        vectors: Tensor = self.model.get_input_embeddings()(tokens)
        return vectors

    def lm_head(self, hidden: Tensor) -> Tensor:
        """The target's own head. Gradients reach the states; its weights have none."""
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the target's own states."""
        return self.lm_head(hidden)

    @torch.no_grad()
    def targets(self, hidden: Tensor, draft_ids: Tensor) -> TeacherTargets:
        """What the target predicts after states [rows, hidden_size]. draft_ids: see draft_ids_of."""
        kept = (draft_ids >= 0).nonzero().flatten()
        probs, best = [], []
        for rows in torch.split(hidden, ROWS_AT_A_TIME):
            logits = self.logits(rows).float()
            log_probs = logits[:, kept] - logits.logsumexp(dim=-1, keepdim=True)
            probs.append(log_probs.exp_().to(self.model.dtype))
            best.append(draft_ids[logits.argmax(dim=-1)])
        return TeacherTargets(torch.cat(probs), torch.cat(best))


@torch.no_grad()
def rounded_teacher(teacher: Teacher) -> Teacher:
    """A copy of the teacher whose weights are rounded as `--dtype int4` rounds them on a CPU.

    States of a rounded target are not those of the whole one: a head that never met them drafts worse beside it.
    """
    model = copy.deepcopy(teacher.model)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.in_features % GROUP_SIZE == 0:
            rounded = round_weight(module.weight, Kind.INT4, GROUP_SIZE).dequantize(module.weight.dtype)
            module.weight = nn.Parameter(rounded, requires_grad=False)
    return Teacher(model)


def draft_ids_of(target_ids: Tensor, vocab_size: int) -> Tensor:
    """The drafter's id of every target token, -1 for tokens it does not have. target_ids must be ascending."""
    out = torch.full((vocab_size,), -1, dtype=torch.int64, device=target_ids.device)
    out[target_ids] = torch.arange(target_ids.shape[0], device=target_ids.device)
    return out
