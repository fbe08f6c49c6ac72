"""Training of an MTP head: one decoder layer of the target's own family, unrolled over several drafting steps.

It starts from the head in the target's own checkpoint where there is one, and reads the target's states after the final
norm; embedding and output head are the target's and stay as they are. FastMTP, https://arxiv.org/abs/2509.18362
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline.errors import OptionError
from paceline.heads.checkpoint import Provenance
from paceline.heads.mtp import MtpHead, fresh_mtp, load_mtp, stored_mtp
from paceline.heads.mtp_merge import write_merged
from paceline.heads.registry import save_head
from paceline.hub.convert import unpacked_folder
from paceline.train.corpus import CorpusSplit, TrainingBatch
from paceline.train.losses import blend, in_slices, soft_loss
from paceline.train.options import setting
from paceline.train.task import Positions, TrainerSpec, TrainingTarget, in_parts
from paceline.train.training_time_test import reference

VALUES_AT_A_TIME = 2**28  # logits over the whole vocabulary that exist at once
INITIAL_SPREAD = 0.02
OUTER = ("o_proj.weight", "down_proj.weight", "down_proj")  # products whose output is added to the states


@dataclass(frozen=True, slots=True)
class MtpOptions:
    """Weights of the loss, and where else the head is written."""

    ttt_steps: int = setting(3, "drafting steps that one training step unrolls (training-time test)")
    step_decay: float = setting(0.6, "loss weight of each unrolled step against the one before", "W")
    greedy_weight: float = setting(0.5, "share of the loss for the target's likeliest token alone, 0 to 1", "W")
    merged: str | None = setting(None, "also write the target's checkpoint with the head inside (no)", "DIR")

    def __post_init__(self) -> None:
        if self.ttt_steps < 1:
            raise OptionError("an MTP head needs --ttt-steps of 1 or more")
        if not 0 <= self.greedy_weight <= 1 or not 0 < self.step_decay <= 1:
            raise OptionError("--greedy-weight lies between 0 and 1, --step-decay above 0 and at most at 1")


class MtpTask:
    """An MTP head in training."""

    module: MtpHead

    def __init__(self, target: TrainingTarget, head: MtpHead, options: MtpOptions, folder: Path, *, own: bool) -> None:
        """folder: of the target. own: the head comes from the target's checkpoint, so its weights are the first."""
        self.teacher, self.options, self._name = target.teacher, options, target.name
        self._folder, self._own = folder, own
        self._draft_ids = torch.arange(self.teacher.vocab_size, device=self.teacher.device)
        self._take(head)

    def _take(self, head: MtpHead) -> None:
        """Train this head. Raises OptionError for one that reads what a teacher does not give."""
        teacher, dtype = self.teacher, self.teacher.model.dtype
        if head.config.before_final_norm:
            raise OptionError("this MTP head reads states before the target's final norm; it cannot be trained further")
        if head.num_modules > 1:
            raise OptionError(f"this MTP head has {head.num_modules} modules; only heads of one are trained further")
        head.bind_target(teacher.embed, lambda hidden: teacher.lm_head(hidden.to(dtype)))
        self.module = head.float().to(teacher.device).train().requires_grad_(True)

    @property
    def _steps(self) -> int:
        return min(self.options.ttt_steps, self.module.max_draft_tokens or self.options.ttt_steps)

    @torch.no_grad()
    def start(self, sample: TrainingBatch) -> None:
        """First weights: the target's own head, or a layer that passes its states on and adds nothing yet."""
        if self._own:
            return
        head, size = self.module, self.teacher.hidden_size
        for name, weight in head.midlayer.block.named_parameters():
            if weight.ndim > 1:
                nn.init.zeros_(weight) if name.endswith(OUTER) else nn.init.normal_(weight, std=INITIAL_SPREAD)
        head.fc.weight.zero_()
        states = slice(0, size) if head.config.layout.states_first else slice(size, 2 * size)
        head.fc.weight[:, states] = torch.eye(size, device=head.fc.weight.device)
        inside = sample.inside(0)
        inside[:, 0] = False  # the first token's states are outliers
        usual = self.teacher.states(sample.tokens).final[inside].float().square().mean().sqrt()
        head.norm.get_parameter("weight").add_(usual - 1.0)  # a new norm multiplies by one, however it is stored

    @torch.no_grad()
    def start_from(self, folder: Path, sample: TrainingBatch) -> None:
        """First weights and all sizes: those of a trained head."""
        head = load_mtp(folder, str(folder))
        if (head.config.vocab_size, head.config.hidden_size) != (self.teacher.vocab_size, self.teacher.hidden_size):
            raise OptionError(f"the head in {folder} was trained for a model of other sizes")
        self._take(head)

    def _unrolled(self, batch: TrainingBatch, states: Tensor) -> Iterator[Tensor]:
        return reference(self.module, states, batch.tokens, self._steps)

    def loss(self, batch: TrainingBatch) -> Tensor:
        """Step j at position u - j is trained on what the target predicts at u."""
        final, steps = self.teacher.states(batch.tokens).final, self._steps
        positions = Positions.of(batch, steps)
        predicting = positions.pick(final)
        rows = max(1, VALUES_AT_A_TIME // self.teacher.vocab_size)
        total, weight = torch.zeros((), device=batch.tokens.device), 0.0
        for step, hidden in enumerate(self._unrolled(batch, final), start=1):
            share = self.options.step_decay ** (step - 1)
            picked = positions.pick(hidden, back=step)
            total = total + share * in_slices(self._sum, picked, predicting, rows=rows) / max(1, len(positions))
            weight += share
        return total / weight

    def _sum(self, hidden: Tensor, predicting: Tensor) -> Tensor:
        """Of rows of the head against the target's prediction after `predicting`."""
        labels = blend(self.teacher.targets(predicting, self._draft_ids), self.options.greedy_weight)
        return soft_loss(self.module.logits(hidden), labels).sum()

    @torch.no_grad()
    def draft_tokens(self, batch: TrainingBatch) -> Tensor:
        final = self.teacher.states(batch.tokens).final
        drafts = []
        for hidden in self._unrolled(batch, final):
            best = torch.cat([self.module.logits(part).argmax(dim=-1) for part in in_parts(hidden)])
            drafts.append(best.view(batch.tokens.shape))
        return torch.stack(drafts, dim=-1)

    def export(self, folder: Path) -> None:
        """The names of the target's family in `folder`, speculators' in `folder/speculators` where they can say it, and
        the whole target with the head inside where that is asked."""
        architectures = tuple(self.teacher.model.config.architectures or ("LlamaForCausalLM",))
        about = Provenance(self._name, architectures, self._steps)
        save_head(self.module, folder, provenance=about, dtype=torch.bfloat16)
        if not self.module.config.layout.zeroes_first:
            save_head(self.module, folder / "speculators", layout="speculators", provenance=about, dtype=torch.bfloat16)
        if self.options.merged is not None:
            write_merged(self.module, self._folder, Path(self.options.merged).expanduser(), dtype=torch.bfloat16)


def _build(target: TrainingTarget, parts: CorpusSplit, options: MtpOptions) -> MtpTask:
    return _task(target, options)


def _check_target(target: TrainingTarget, options: MtpOptions) -> None:
    """A head without data already shows whether the family has one."""
    _task(target, options)


def _task(target: TrainingTarget, options: MtpOptions) -> MtpTask:
    if target.folder is None:
        raise OptionError("an MTP head is trained for a model with files: name a directory, a Hub id or a .gguf file")
    folder = unpacked_folder(target.folder)
    if options.merged is not None and Path(options.merged).expanduser().resolve() == folder.resolve():
        raise OptionError("--merged writes a copy of the target: choose another directory than the target's own")
    own = stored_mtp(folder, target.name)
    head = fresh_mtp(folder, target.name) if own is None else own
    return MtpTask(target, head, options, folder, own=own is not None)


SPEC = TrainerSpec(
    name="mtp",
    summary="an MTP head: one further layer of the target's own family over its last states",
    usage="--method mtp --draft-model OUT",
    options=MtpOptions,
    build=_build,
    check_target=_check_target,
)
