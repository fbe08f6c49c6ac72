"""Training of an EAGLE-3 head: several drafting steps are unrolled (training-time test), each against the target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import OptionError
from paceline.heads.checkpoint import Provenance
from paceline.heads.eagle3 import Eagle3Config, Eagle3Head, usual_feature_layers
from paceline.heads.registry import load_head, save_head
from paceline.runners.loading import eos_token_ids_of
from paceline.train.corpus import CorpusSplit, TrainingBatch, adapted_tokens
from paceline.train.losses import blend, soft_loss
from paceline.train.options import setting
from paceline.train.task import HeadAdaptation, Positions, TrainerSpec, TrainingTarget, in_parts
from paceline.train.teacher import BatchStates, Teacher, draft_ids_of
from paceline.train.training_time_test import unroll


@dataclass(frozen=True, slots=True)
class EagleOptions:
    """Sizes of the head and weights of its loss."""

    draft_vocab_size: int = setting(8192, "tokens the head can draft: the most frequent ones")
    intermediate_size: int = setting(0, "size of the feed-forward part (the target's)")
    ttt_steps: int = setting(5, "drafting steps that one training step unrolls (training-time test)")
    step_decay: float = setting(0.85, "loss weight of each unrolled step against the one before", "W")
    greedy_weight: float = setting(0.5, "share of the loss for the target's likeliest token alone, 0 to 1", "W")

    def __post_init__(self) -> None:
        if self.ttt_steps < 1 or self.draft_vocab_size < 1:
            raise OptionError("an EAGLE head needs --ttt-steps and --draft-vocab-size of 1 or more")
        if not 0 <= self.greedy_weight <= 1 or not 0 < self.step_decay <= 1:
            raise OptionError("--greedy-weight lies between 0 and 1, --step-decay above 0 and at most at 1")


def eagle_config(teacher: Teacher, options: EagleOptions) -> Eagle3Config:
    """A head with the sizes of one of the target's own layers."""
    config, sizes = teacher.model.config.get_text_config(), teacher.sizes
    rope: dict[str, Any] = dict(getattr(config, "rope_parameters", None) or {})
    unscaled = rope.get("rope_type", "default") == "default"
    return Eagle3Config(
        sizes.hidden_size,
        options.intermediate_size or sizes.intermediate_size,
        sizes.num_heads,
        sizes.num_kv_heads,
        sizes.head_dim,
        teacher.vocab_size,
        min(options.draft_vocab_size, teacher.vocab_size),
        sizes.hidden_size,
        rope_theta=float(rope.get("rope_theta", getattr(config, "rope_theta", 10000.0))),
        rope_scaling=None if unscaled else rope,
        max_seq_len=sizes.max_seq_len,
        rms_norm_eps=float(getattr(config, "rms_norm_eps", 1e-5)),
        feature_layers=usual_feature_layers(sizes.num_layers),
    )


class _ScaledHead(nn.Module):
    """The head together with the scale of its inputs, which is folded into `fc` on export.

    A few dimensions of a language model's states are hundreds of times larger than the rest: training on them
    unscaled is slow or unstable.
    """

    scale: Tensor

    def __init__(self, head: Eagle3Head) -> None:
        super().__init__()
        self.head = head
        self.register_buffer("scale", torch.ones(head.fc.in_features))

    def folded(self) -> Eagle3Head:
        """A copy of the head that takes the target's states unscaled."""
        copy = Eagle3Head(self.head.config)
        copy.load_state_dict(self.head.state_dict())
        with torch.no_grad():
            copy.fc.weight.copy_(self.head.fc.weight * self.scale)
        return copy


class EagleTask:
    """An EAGLE-3 head in training."""

    def __init__(
        self,
        teacher: Teacher,
        target_ids: Tensor,
        options: EagleOptions,
        name: str = "",
        config: Eagle3Config | None = None,
    ) -> None:
        """target_ids: ascending ids of the tokens the head can draft. config: of a trained head; None: by options."""
        self.teacher, self.options, self._name = teacher, options, name
        head = Eagle3Head(config or eagle_config(teacher, options))
        head.bind_target(teacher.embed, teacher.logits)
        head.choose_vocabulary(target_ids)
        self.module = _ScaledHead(head).to(teacher.device)
        self._draft_ids = draft_ids_of(target_ids.to(teacher.device), teacher.vocab_size)

    @property
    def head(self) -> Eagle3Head:
        return self.module.head

    def _states(self, batch: TrainingBatch) -> BatchStates:
        return self.teacher.batch_states(batch, self.head.feature_layers(self.teacher.num_layers))

    @torch.no_grad()
    def start(self, sample: TrainingBatch) -> None:
        """First weights: the target's head and norm on top, its last states passed through, nothing added yet."""
        head, hidden_size = self.head, self.teacher.hidden_size
        self.measure_scale(sample)
        head.lm_head.weight.copy_(self.teacher.model.get_output_embeddings().weight[head.target_ids])
        norm = getattr(self.teacher.model.base_model, "norm", None)
        if norm is not None:
            head.norm.weight.copy_(norm.weight)
        head.fc.weight.zero_()
        last = slice(head.fc.in_features - hidden_size, head.fc.in_features)
        size = self.module.scale[last].reciprocal().square().mean().sqrt()
        head.fc.weight[:, last] = torch.diag(1.0 / (self.module.scale[last] * size))
        nn.init.zeros_(head.midlayer.self_attn.o_proj.weight)
        nn.init.zeros_(head.midlayer.mlp.down_proj.weight)

    @torch.no_grad()
    def start_from(self, folder: Path, sample: TrainingBatch) -> None:
        """First weights: those of a trained head, whose tokens become this one's."""
        trained = load_head(folder, Eagle3Head, device=str(self.teacher.device))
        size = trained.config.draft_vocab_size
        if size != self.head.config.draft_vocab_size:
            raise OptionError(f"the head in {folder} drafts {size} tokens; train with --draft-vocab-size {size}")
        self.measure_scale(sample)
        self.head.load_state_dict(trained.state_dict())
        self.head.fc.weight.div_(self.module.scale)
        self._draft_ids = draft_ids_of(self.head.target_ids, self.teacher.vocab_size)

    @torch.no_grad()
    def go_on_from(self, trained: Eagle3Head, sample: TrainingBatch) -> None:
        """First weights: those of a trained head; tokens that it cannot draft yet get the target's own output rows."""
        head, own_ids = self.head, self.head.target_ids
        rows = self.teacher.model.get_output_embeddings().weight[own_ids].to(trained.lm_head.weight.dtype).clone()
        trained_rows = draft_ids_of(trained.target_ids, self.teacher.vocab_size)[own_ids]  # -1: not in its vocabulary
        known = trained_rows >= 0
        rows[known] = trained.lm_head.weight[trained_rows[known]]
        vocabulary = {"d2t": head.d2t.clone(), "t2d": head.t2d.clone(), "lm_head.weight": rows}
        head.load_state_dict({**trained.state_dict(), **vocabulary})
        self.measure_scale(sample)
        head.fc.weight.div_(self.module.scale)

    def measure_scale(self, sample: TrainingBatch) -> None:
        """One over the usual size of each feature dimension. The first token's states are outliers and left out."""
        features = self._states(sample).features
        inside = torch.arange(sample.tokens.shape[1], device=features.device)[None] < sample.lengths[:, None]
        inside[:, 0] = False
        usual = features[inside].float().square().mean(dim=0).sqrt()
        self.module.scale.copy_(1.0 / usual.clamp(min=1e-3))

    def _unrolled(self, batch: TrainingBatch, features: Tensor) -> Iterator[Tensor]:
        scaled = features.float() * self.module.scale
        return unroll(self.head, scaled, batch.tokens, self.options.ttt_steps)

    def loss(self, batch: TrainingBatch) -> Tensor:
        """Step j at position u - j is trained on what the target predicts at u."""
        states = self._states(batch)
        positions = Positions.of(batch, self.options.ttt_steps)
        targets = self.teacher.targets(positions.pick(states.final), self._draft_ids)
        labels = blend(targets, self.options.greedy_weight)
        features = states.features
        del states
        total, weight = torch.zeros((), device=batch.tokens.device), 0.0
        for step, hidden in enumerate(self._unrolled(batch, features), start=1):
            share = self.options.step_decay ** (step - 1)
            logits = self.head.logits(positions.pick(hidden, back=step))
            total = total + share * soft_loss(logits, labels).sum() / max(1, len(positions))
            weight += share
        return total / weight

    @torch.no_grad()
    def draft_tokens(self, batch: TrainingBatch) -> Tensor:
        features = self._states(batch).features
        drafts = []
        for hidden in self._unrolled(batch, features):
            best = torch.cat([self.head.logits(part).argmax(dim=-1) for part in in_parts(hidden)])
            drafts.append(self.head.to_target_ids(best).view(batch.tokens.shape))
        return torch.stack(drafts, dim=-1)

    def export(self, folder: Path) -> None:
        """The original layout in `folder`, speculators' in `folder/speculators`."""
        head = self.module.folded()
        architectures = tuple(self.teacher.model.config.architectures or ("LlamaForCausalLM",))
        about = Provenance(self._name, architectures, self.options.ttt_steps)
        save_head(head, folder, provenance=about, dtype=torch.bfloat16)
        save_head(head, folder / "speculators", layout="speculators", provenance=about, dtype=torch.bfloat16)


def _build(target: TrainingTarget, parts: CorpusSplit, options: EagleOptions) -> EagleTask:
    target_ids = target.frequent_ids(parts, options.draft_vocab_size)
    return EagleTask(target.teacher, target_ids, options, target.name)


def _adaptable(folder: Path, device: str = "cpu") -> Eagle3Head:
    """The head in a directory. Raises OptionError where the scaled features of this training do not fit it."""
    trained = load_head(folder, Eagle3Head, device=device)
    config = trained.config
    if type(trained) is not Eagle3Head:  # P-EAGLE: all draft tokens in one pass
        raise OptionError(f"the head in {folder} does not draft token by token as EAGLE-3 does; it cannot be adapted")
    if config.norm_before_fc or config.fc_norm or config.norm_output:
        raise OptionError(f"the head in {folder} has norms around fc or its output; it cannot be adapted")
    return trained


def _adapt(target: TrainingTarget, adaptation: HeadAdaptation) -> EagleTask:
    teacher = target.teacher
    trained = _adaptable(adaptation.folder, str(teacher.device))
    config, ids, eos_ids = trained.config, trained.target_ids, eos_token_ids_of(target.model)
    if adaptation.corpus is not None:
        ids = adapted_tokens(adaptation.corpus, ids, teacher.vocab_size, eos_ids)
    steps = adaptation.num_draft_tokens
    options = EagleOptions(config.draft_vocab_size, config.intermediate_size, ttt_steps=steps)
    task = EagleTask(teacher, ids, options, target.name, config)
    task.go_on_from(trained, adaptation.sample)
    return task


def _check_adaptable(folder: Path) -> None:
    _adaptable(folder)


SPEC = TrainerSpec(
    name="eagle",
    summary="an EAGLE-3 head: one layer over states of three of the target's layers",
    usage="--method eagle --draft-model OUT",
    options=EagleOptions,
    build=_build,
    adapt=_adapt,
    check_adaptable=_check_adaptable,
)
