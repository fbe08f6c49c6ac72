"""Training of Medusa heads over a frozen target: head h is taught what the target says h + 1 places further on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import OptionError
from paceline.heads.checkpoint import Provenance
from paceline.heads.medusa import MedusaConfig, MedusaHeads
from paceline.heads.registry import save_head
from paceline.train.corpus import Batch
from paceline.train.losses import blend, in_slices, soft_loss
from paceline.train.task import Places, in_parts
from paceline.train.teacher import Teacher, numbering_of


@dataclass(frozen=True, slots=True)
class MedusaOptions:
    """Shape of the heads and of their lessons.

    heads   tokens guessed ahead; layers: residual parts of each head
    fading  weight of each head against the one before; greedy: share of the loss that looks only at the best token
    """

    heads: int = 4
    layers: int = 1
    fading: float = 0.85
    greedy: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.greedy <= 1 or not 0 < self.fading <= 1:
            raise OptionError("greedy lies between 0 and 1, fading above 0 and at most at 1")


class MedusaTask:
    """Medusa heads in training."""

    word = "medusa"

    def __init__(self, teacher: Teacher, vocabulary: Tensor, options: MedusaOptions, name: str = "") -> None:
        """vocabulary: rising ids of the tokens the heads can say."""
        self.teacher, self.options, self._name = teacher, options, name
        sizes = (options.heads, options.layers, teacher.width, teacher.vocab_size, int(vocabulary.shape[0]))
        self.module = MedusaHeads(MedusaConfig(*sizes))
        self.module.choose_vocabulary(vocabulary)
        self.module.to(teacher.device)
        self._numbering = numbering_of(vocabulary.to(teacher.device), teacher.vocab_size)

    def start(self, sample: Batch) -> None:
        """First weights: every head says what the target's own head says."""
        self.module.start_from(self.teacher.model.get_output_embeddings().weight)

    def loss(self, batch: Batch) -> Tensor:
        """Head h at place u - 1 - h is taught what the target says at u."""
        hidden = self.teacher.read(batch.tokens).hidden
        places = Places.of(batch, self.options.heads)
        read = torch.stack([places.pick(hidden, back=1 + head) for head in range(self.options.heads)], dim=1)
        total = in_slices(self._slice_loss, places.pick(hidden), read.float())
        return total / max(1, len(places)) / sum(self._weights())

    def _weights(self) -> list[float]:
        return [self.options.fading**head for head in range(self.options.heads)]

    def _slice_loss(self, told: Tensor, read: Tensor) -> Tensor:
        """told [rows, width]: the states in which the target says the token; read [rows, heads, width]: heads see."""
        wanted = blend(self.teacher.lesson(told, self._numbering), self.options.greedy)
        output = enumerate(zip(self._weights(), self._speakers()))
        losses = [share * soft_loss(speak(read[:, head]), wanted).sum() for head, (share, speak) in output]
        return torch.stack(losses).sum()

    def _speakers(self) -> Iterator[torch.nn.Sequential]:
        """One head after the other: all at once, their logits would not fit."""
        for block, head in zip(self.module.blocks, self.module.lm_heads):
            yield torch.nn.Sequential(block, head)

    @torch.no_grad()
    def draft_tokens(self, batch: Batch) -> Tensor:
        hidden = self.teacher.read(batch.tokens).hidden.float()
        found = []
        for speak in self._speakers():
            best = torch.cat([speak(part).argmax(dim=-1) for part in in_parts(hidden)])
            found.append(self.module.to_target_ids(best).view(batch.tokens.shape))
        return torch.stack(found, dim=-1)

    def export(self, folder: Path) -> None:
        """vLLM's layout in `folder/vllm`; in `folder` the original one, or vLLM's where the vocabulary is reduced."""
        config = self.module.config
        usual = "original" if config.draft_vocab_size == config.vocab_size else "vllm"
        for place, layout in ((folder, usual), (folder / "vllm", "vllm")):
            save_head(self.module, place, layout=layout, provenance=Provenance(self._name), dtype=torch.bfloat16)
