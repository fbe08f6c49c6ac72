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
from paceline.runners.loading import load_model
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

HEAD_DIMS = (64, 32, 16, 8)
HIDDEN_SIZE_STEP = 8


@dataclass(frozen=True, slots=True)
class DraftModelOptions:
    """Sizes of the draft model and weights of its loss.

    With a reduced vocabulary the target's tokens 0 to draft_vocab_size - 1 are kept, and every other token is read as
    the last of them: vocabularies made by merging are sorted by frequency.
    """

    num_layers: int = setting(4, "layers")
    hidden_size: int = setting(256, "hidden size")
    draft_vocab_size: int = setting(0, "tokens it can draft: the first ids of the vocabulary (all)")
    greedy_weight: float = setting(0.5, "share of the loss for the target's likeliest token alone, 0 to 1", "W")

    def __post_init__(self) -> None:
        smallest, step = 2 * HIDDEN_SIZE_STEP, HIDDEN_SIZE_STEP
        if self.num_layers < 1 or self.hidden_size < smallest or self.hidden_size % step:
            raise OptionError(
                f"a draft model needs 1 layer or more and a hidden size of {smallest} or more that {step} divides, "
                f"not {self.num_layers} and {self.hidden_size}"
            )


def draft_config(teacher: Teacher, options: DraftModelOptions) -> LlamaConfig:
    """A small Llama with the target's positions and special tokens."""
    config, hidden_size = teacher.model.config.get_text_config(), options.hidden_size
    num_heads = hidden_size // next(dim for dim in HEAD_DIMS if hidden_size % dim == 0 and hidden_size > dim)
    vocab_size = min(options.draft_vocab_size or teacher.vocab_size, teacher.vocab_size)
    rope: dict[str, Any] = dict(getattr(config, "rope_parameters", None) or {})
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=-(-hidden_size * 8 // 3 // 32) * 32,
        num_hidden_layers=options.num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // 2 if num_heads % 2 == 0 else num_heads,
        rope_parameters={"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)},
        max_position_embeddings=teacher.sizes.max_seq_len,
        tie_word_embeddings=True,
        **{name: _token(config, name, vocab_size) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )


def _token(config: Any, name: str, vocab_size: int) -> Any:
    """A special token of the target, unless it is outside a reduced vocabulary."""
    value = getattr(config, name, None)
    ids = value if isinstance(value, list) else [value]
    return value if all(id_ is not None and id_ < vocab_size for id_ in ids) else None


class DraftModelTask:
    """A draft model in training. Its token ids are the target's: the tokenizer is copied beside it."""

    def __init__(self, teacher: Teacher, tokenizer: Any, options: DraftModelOptions) -> None:
        self.teacher, self.options, self._tokenizer = teacher, options, tokenizer
        self.module = LlamaForCausalLM(draft_config(teacher, options)).to(teacher.device)
        self.module.generation_config.eos_token_id = teacher.model.generation_config.eos_token_id
        self._vocab_size = int(self.module.config.vocab_size)
        self._draft_ids = draft_ids_of(torch.arange(self._vocab_size, device=teacher.device), teacher.vocab_size)

    @torch.no_grad()
    def start(self, sample: TrainingBatch) -> None:
        """First weights: the target's embedding, projected on the directions in which its tokens differ most."""
        embedding = self.teacher.model.get_input_embeddings().weight[: self._vocab_size].float()
        _, directions = torch.linalg.eigh(embedding.T @ embedding)
        projected = embedding @ directions.flip(-1)[:, : self.options.hidden_size]
        weight = self.module.get_input_embeddings().weight
        weight[:, : projected.shape[1]] = projected * (self.module.config.initializer_range / projected.std())

    def start_from(self, folder: Path, sample: TrainingBatch) -> None:
        """First weights: those of a trained draft model of the same sizes."""
        trained = load_model(folder, str(folder), torch.float32, str(self.teacher.device))
        try:
            self.module.load_state_dict(trained.state_dict())
        except RuntimeError:
            raise OptionError(
                f"the draft model in {folder} has other sizes; give its --num-layers, --hidden-size and vocabulary"
            ) from None

    def _states(self, batch: TrainingBatch) -> Tensor:
        tokens = batch.tokens.clamp(max=self._vocab_size - 1)
        states: Tensor = self.module.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        return states

    def loss(self, batch: TrainingBatch) -> Tensor:
        """The draft is trained on every position, questions too: it has to learn the language, not only answers."""
        final = self.teacher.states(batch.tokens).final
        positions = Positions.of(batch, 0, everywhere=True)
        total = in_slices(self._slice_loss, positions.pick(final), positions.pick(self._states(batch)))
        return total / max(1, len(positions))

    def _slice_loss(self, final: Tensor, states: Tensor) -> Tensor:
        labels = blend(self.teacher.targets(final, self._draft_ids), self.options.greedy_weight)
        return soft_loss(self.module.lm_head(states), labels).sum()

    @torch.no_grad()
    def draft_tokens(self, batch: TrainingBatch) -> Tensor:
        parts = in_parts(self._states(batch))
        best = torch.cat([self.module.lm_head(part).argmax(dim=-1) for part in parts])
        return chained_drafts(best.view(batch.tokens.shape), MEASURED_DRAFT_TOKENS)

    def export(self, folder: Path) -> None:
        """A directory that transformers loads, with the target's tokenizer. The config is written last."""
        folder.mkdir(parents=True, exist_ok=True)
        self._tokenizer.save_pretrained(folder)
        self.module.generation_config.save_pretrained(folder)
        weights = {name: value.to(torch.bfloat16) for name, value in self.module.state_dict().items()}
        del weights["lm_head.weight"]  # tied: the embedding itself
        config = {**self.module.config.to_dict(), "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
        write_checkpoint(folder, config, weights)


def _build(target: TrainingTarget, parts: CorpusSplit, options: DraftModelOptions) -> DraftModelTask:
    return DraftModelTask(target.teacher, target.tokenizer, options)


SPEC = TrainerSpec(
    name="draft-model",
    summary="a small Llama, distilled from the target's logits",
    usage="--draft-model OUT",
    options=DraftModelOptions,
    build=_build,
)
