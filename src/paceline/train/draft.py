"""Training of a small Llama that drafts: distilled from the target's logits, written as a plain checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.errors import OptionError
from paceline.heads.checkpoint import write_checkpoint
from paceline.train.corpus import Batch
from paceline.train.losses import blend, in_slices, soft_loss
from paceline.train.task import MEASURED_GUESSES, Places, following, in_parts
from paceline.train.teacher import Teacher, numbering_of

HEAD_SIZES = (64, 32, 16, 8)
WIDTH_STEP = 8


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """Shape of the draft and of its lessons.

    vocabulary  the target's tokens 0 to vocabulary - 1 are kept, and every other one is read as the last of them;
                0: all. Vocabularies made by merging are sorted by use, so the low numbers are the common tokens
    greedy      share of the loss that looks only at the target's likeliest token
    """

    layers: int = 4
    width: int = 256
    vocabulary: int = 0
    greedy: float = 0.5

    def __post_init__(self) -> None:
        if self.layers < 1 or self.width < 2 * WIDTH_STEP or self.width % WIDTH_STEP:
            raise OptionError(
                f"a draft needs 1 layer or more and a width of {2 * WIDTH_STEP} or more that {WIDTH_STEP} divides, "
                f"not {self.layers} and {self.width}"
            )


def draft_config(teacher: Teacher, options: DraftOptions) -> LlamaConfig:
    """A slim Llama with the target's positions and special tokens."""
    config = teacher.model.config.get_text_config()
    heads = options.width // next(size for size in HEAD_SIZES if options.width % size == 0 and options.width > size)
    size = min(options.vocabulary or teacher.vocab_size, teacher.vocab_size)
    rope: dict[str, Any] = dict(getattr(config, "rope_parameters", None) or {})
    return LlamaConfig(
        vocab_size=size,
        hidden_size=options.width,
        intermediate_size=-(-options.width * 8 // 3 // 32) * 32,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % 2 == 0 else heads,
        rope_parameters={"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)},
        max_position_embeddings=int(getattr(config, "max_position_embeddings", None) or 2048),
        tie_word_embeddings=True,
        **{name: _token(config, name, size) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )


def _token(config: Any, name: str, size: int) -> Any:
    """A special token of the target, unless a reduced vocabulary has left it out."""
    output = getattr(config, name, None)
    ids = output if isinstance(output, list) else [output]
    return output if all(id_ is not None and id_ < size for id_ in ids) else None


class DraftTask:
    """A draft model in training. Its own tokens are the target's: the tokenizer is copied beside it."""

    word = "draft"

    def __init__(self, teacher: Teacher, tokenizer: Any, options: DraftOptions) -> None:
        self.teacher, self.options, self._tokenizer = teacher, options, tokenizer
        self.module = LlamaForCausalLM(draft_config(teacher, options)).to(teacher.device)
        self.module.generation_config.eos_token_id = teacher.model.generation_config.eos_token_id
        self._size = int(self.module.config.vocab_size)
        self._numbering = numbering_of(torch.arange(self._size, device=teacher.device), teacher.vocab_size)

    @torch.no_grad()
    def start(self, sample: Batch) -> None:
        """First weights: the target's embedding, seen from the directions in which its tokens differ most."""
        whole = self.teacher.model.get_input_embeddings().weight[: self._size].float()
        _, directions = torch.linalg.eigh(whole.T @ whole)
        narrow = whole @ directions.flip(-1)[:, : self.options.width]
        weight = self.module.get_input_embeddings().weight
        weight[:, : narrow.shape[1]] = narrow * (self.module.config.initializer_range / narrow.std())

    def _states(self, batch: Batch) -> Tensor:
        tokens = batch.tokens.clamp(max=self._size - 1)
        states: Tensor = self.module.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        return states

    def loss(self, batch: Batch) -> Tensor:
        """The draft is taught what the target says at every place: it has to learn the language, not only answers."""
        told = self.teacher.read(batch.tokens).hidden
        places = Places.of(batch, 0, everywhere=True)
        total = in_slices(self._slice_loss, places.pick(told), places.pick(self._states(batch)))
        return total / max(1, len(places))

    def _slice_loss(self, told: Tensor, states: Tensor) -> Tensor:
        wanted = blend(self.teacher.lesson(told, self._numbering), self.options.greedy)
        return soft_loss(self.module.lm_head(states), wanted).sum()

    @torch.no_grad()
    def draft_tokens(self, batch: Batch) -> Tensor:
        parts = in_parts(self._states(batch))
        best = torch.cat([self.module.lm_head(part).argmax(dim=-1) for part in parts])
        return following(best.view(batch.tokens.shape), MEASURED_GUESSES)

    def export(self, folder: Path) -> None:
        """A directory that transformers loads, the target's tokenizer beside it. The config comes last."""
        folder.mkdir(parents=True, exist_ok=True)
        self._tokenizer.save_pretrained(folder)
        self.module.generation_config.save_pretrained(folder)
        weights = {name: value.to(torch.bfloat16) for name, value in self.module.state_dict().items()}
        del weights["lm_head.weight"]  # tied: the embedding itself
        config = {**self.module.config.to_dict(), "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
        write_checkpoint(folder, config, weights)
