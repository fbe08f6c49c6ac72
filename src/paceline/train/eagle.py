"""Training of an EAGLE-3 head: several drafting steps are unrolled, each taught what the target says there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import OptionError
from paceline.heads.checkpoint import Provenance
from paceline.heads.eagle3 import Eagle3Config, Eagle3Head, usual_feature_layers
from paceline.heads.registry import load_head, save_head
from paceline.train.corpus import Batch
from paceline.train.losses import blend, soft_loss
from paceline.train.task import Places, in_parts
from paceline.train.teacher import Teacher, numbering_of
from paceline.train.training_time_test import unroll


@dataclass(frozen=True, slots=True)
class EagleOptions:
    """Shape of the head and of its lessons.

    vocabulary    tokens the head can say
    intermediate  width of its feed-forward part; 0: the target's
    steps         drafting steps unrolled in training; fading: weight of each step against the one before
    greedy        share of the loss that looks only at the target's likeliest token
    """

    vocabulary: int = 8192
    intermediate: int = 0
    steps: int = 5
    fading: float = 0.85
    greedy: float = 0.5

    def __post_init__(self) -> None:
        if self.steps < 1 or self.vocabulary < 1:
            raise OptionError("an EAGLE head needs 1 step or more and a vocabulary of 1 token or more")
        if not 0 <= self.greedy <= 1 or not 0 < self.fading <= 1:
            raise OptionError("greedy lies between 0 and 1, fading above 0 and at most at 1")


def eagle_config(teacher: Teacher, options: EagleOptions) -> Eagle3Config:
    """A head in the shape of one of the target's own layers."""
    config = teacher.model.config.get_text_config()
    heads = config.num_attention_heads
    rope: dict[str, Any] = dict(getattr(config, "rope_parameters", None) or {})
    plain = rope.get("rope_type", "default") == "default"
    return Eagle3Config(
        teacher.width,
        options.intermediate or config.intermediate_size,
        heads,
        getattr(config, "num_key_value_heads", None) or heads,
        getattr(config, "head_dim", None) or teacher.width // heads,
        teacher.vocab_size,
        min(options.vocabulary, teacher.vocab_size),
        teacher.width,
        rope_theta=float(rope.get("rope_theta", getattr(config, "rope_theta", 10000.0))),
        rope_scaling=None if plain else rope,
        max_seq_len=int(getattr(config, "max_position_embeddings", 2048)),
        rms_norm_eps=float(getattr(config, "rms_norm_eps", 1e-5)),
        feature_layers=usual_feature_layers(teacher.layers),
    )


class _Trained(nn.Module):
    """The head together with the scale of its inputs, which is folded into `fc` when the head is written.

    States of a language model are a few dimensions hundreds of times larger than the rest: learning from them as they
    are is slow or unstable.
    """

    scale: Tensor

    def __init__(self, head: Eagle3Head) -> None:
        super().__init__()
        self.head = head
        self.register_buffer("scale", torch.ones(head.fc.in_features))

    def folded(self) -> Eagle3Head:
        """A head of its own that takes the target's states as they are."""
        twin = Eagle3Head(self.head.config)
        twin.load_state_dict(self.head.state_dict())
        with torch.no_grad():
            twin.fc.weight.copy_(self.head.fc.weight * self.scale)
        return twin


class EagleTask:
    """An EAGLE-3 head in training."""

    word = "eagle"

    def __init__(self, teacher: Teacher, vocabulary: Tensor, options: EagleOptions, name: str = "") -> None:
        self.teacher, self.options, self._name = teacher, options, name
        head = Eagle3Head(eagle_config(teacher, options))
        head.bind_target(teacher.embed, teacher.logits)
        head.choose_vocabulary(vocabulary)
        self.module = _Trained(head).to(teacher.device)
        self._numbering = numbering_of(vocabulary.to(teacher.device), teacher.vocab_size)

    @property
    def head(self) -> Eagle3Head:
        return self.module.head

    @torch.no_grad()
    def start(self, sample: Batch) -> None:
        """First weights: the target's own head and norm on top, its late state passed through, nothing added yet."""
        head, width = self.head, self.teacher.width
        self.measure_scale(sample)
        head.lm_head.weight.copy_(self.teacher.model.get_output_embeddings().weight[head.target_ids])
        norm = getattr(self.teacher.model.base_model, "norm", None)
        if norm is not None:
            head.norm.weight.copy_(norm.weight)
        head.fc.weight.zero_()
        late = slice(head.fc.in_features - width, head.fc.in_features)
        size = self.module.scale[late].reciprocal().square().mean().sqrt()
        head.fc.weight[:, late] = torch.diag(1.0 / (self.module.scale[late] * size))
        nn.init.zeros_(head.midlayer.self_attn.o_proj.weight)
        nn.init.zeros_(head.midlayer.mlp.down_proj.weight)

    @torch.no_grad()
    def start_from(self, folder: Path, sample: Batch) -> None:
        """First weights: those of a head written before, whose tokens become this one's."""
        former = load_head(folder, Eagle3Head, device=str(self.teacher.device))
        if former.config.draft_vocab_size != self.head.config.draft_vocab_size:
            raise OptionError(f"{folder} says {former.config.draft_vocab_size} tokens; ask for as many (--vocabulary)")
        self.measure_scale(sample)
        self.head.load_state_dict(former.state_dict())
        self.head.fc.weight.div_(self.module.scale)
        self._numbering = numbering_of(self.head.target_ids, self.teacher.vocab_size)

    def measure_scale(self, sample: Batch) -> None:
        """One over the usual size of each dimension of the features. The first token's states are no measure of any."""
        features = self.teacher.read(sample.tokens).features(self.head.config.feature_layers)
        inside = torch.arange(sample.tokens.shape[1], device=features.device)[None] < sample.lengths[:, None]
        inside[:, 0] = False
        usual = features[inside].float().square().mean(dim=0).sqrt()
        self.module.scale.copy_(1.0 / usual.clamp(min=1e-3))

    def _steps(self, batch: Batch, features: Tensor) -> Any:
        scaled = features.float() * self.module.scale
        return unroll(self.head, scaled, batch.tokens, self.options.steps)

    def loss(self, batch: Batch) -> Tensor:
        """Step j at place u - j is taught what the target says at u."""
        reading = self.teacher.read(batch.tokens)
        places = Places.of(batch, self.options.steps)
        wanted = blend(self.teacher.lesson(places.pick(reading.hidden), self._numbering), self.options.greedy)
        features = reading.features(self.head.config.feature_layers)
        del reading
        total, weight = torch.zeros((), device=batch.tokens.device), 0.0
        for step, out in enumerate(self._steps(batch, features), start=1):
            share = self.options.fading ** (step - 1)
            logits = self.head.logits(places.pick(out, back=step))
            total = total + share * soft_loss(logits, wanted).sum() / max(1, len(places))
            weight += share
        return total / weight

    @torch.no_grad()
    def draft_tokens(self, batch: Batch) -> Tensor:
        features = self.teacher.read(batch.tokens).features(self.head.config.feature_layers)
        found = []
        for out in self._steps(batch, features):
            best = torch.cat([self.head.logits(part).argmax(dim=-1) for part in in_parts(out)])
            found.append(self.head.to_target_ids(best).view(batch.tokens.shape))
        return torch.stack(found, dim=-1)

    def export(self, folder: Path) -> None:
        """The original layout in `folder`, speculators' in `folder/speculators`."""
        head = self.module.folded()
        architectures = tuple(self.teacher.model.config.architectures or ("LlamaForCausalLM",))
        about = Provenance(self._name, architectures, self.options.steps)
        save_head(head, folder, provenance=about, dtype=torch.bfloat16)
        save_head(head, folder / "speculators", layout="speculators", provenance=about, dtype=torch.bfloat16)
