"""The expected speed-up of speculation, before anything has run.

First the theory, exact under its assumptions: tokens per step from an acceptance rate, or from one rate per position
(acceptance is not the same at each), and the speed-up that follows from the draft's cost. Then the time of a pass from
a data sheet: reading weights and cache against the bandwidth, multiplying against the arithmetic, and a fixed cost per
layer. Everything that rests on data sheets is a `SpeedEstimate`, and is printed as one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.errors import OptionError
from paceline.plan.hardware import Accelerator, AcceleratorKind
from paceline.plan.memory import Deployment
from paceline.plan.model_sizes import ModelSizes
from paceline.plan.precision import Precision, weight_bytes

# Shares of the data sheet that good kernels reach: 7B in bf16 on an A100 was reported at 1,400 of 2,039 GB/s.
BANDWIDTH_SHARE = 0.70
ARITHMETIC_SHARE = 0.50
# Kernel launches per layer, with CUDA graphs; small drafts spend most of their time on them.
SECONDS_PER_LAYER_GPU = 20e-6
SECONDS_PER_LAYER_CPU = 50e-6
# GPUs that share a layer add up their parts twice in it; over NVLink a small sum takes about this long.
SECONDS_PER_ALL_REDUCE = 15e-6
FLOAT_BYTES = 4


def tokens_per_step(rate: float, num_draft_tokens: int) -> float:
    """(1 - a^(k+1)) / (1 - a): expected tokens of one step when each draft token is accepted with probability a."""
    _check_rate(rate)
    _check_count(num_draft_tokens)
    return float(num_draft_tokens + 1) if rate == 1.0 else (1.0 - rate ** (num_draft_tokens + 1)) / (1.0 - rate)


def tokens_per_step_by_position(rates: Sequence[float]) -> float:
    """The same from measured rates, one for each position: the share accepted of the draft tokens reached there."""
    reached, expected = 1.0, 1.0
    for rate in rates:
        _check_rate(rate)
        reached *= rate
        expected += reached
    return expected


def speedup(rate: float, num_draft_tokens: int, draft_cost: float, verify_cost: float = 1.0) -> float:
    """Speed-up over plain decoding. The costs of a draft step and of verification are in target passes."""
    for cost in (draft_cost, verify_cost):
        if not math.isfinite(cost) or cost < 0:
            raise OptionError(f"a cost is a share of a target pass and cannot be {cost:g}")
    return tokens_per_step(rate, num_draft_tokens) / (num_draft_tokens * draft_cost + verify_cost)


@dataclass(frozen=True, slots=True)
class Expectation:
    """Published tokens per step, from a bad workload to a good one, and their source."""

    low: float
    high: float
    source: str


@dataclass(frozen=True, slots=True)
class SpeedEstimate:
    """Predicted from data sheets and published acceptance. Never a measurement: `paceline tune` measures."""

    plain_tokens_per_second: float
    target_pass_seconds: float
    verify_pass_seconds: float
    draft_seconds: float
    tokens_per_step_low: float
    tokens_per_step_high: float
    basis: str

    @property
    def step_seconds(self) -> float:
        return self.draft_seconds + self.verify_pass_seconds

    @property
    def speedup_low(self) -> float:
        return self.tokens_per_step_low * self.target_pass_seconds / self.step_seconds

    @property
    def speedup_high(self) -> float:
        return self.tokens_per_step_high * self.target_pass_seconds / self.step_seconds


def estimate_speed(deployment: Deployment, accelerator: Accelerator, expectation: Expectation) -> SpeedEstimate | None:
    """The expected gain of a deployment; None for an accelerator of unknown speed."""
    if accelerator.bandwidth_gbs <= 0 or accelerator.tflops <= 0:
        return None
    clock = PassClock(deployment, accelerator)
    plain = clock.target_seconds(width=1)
    return SpeedEstimate(
        plain_tokens_per_second=deployment.max_num_seqs / plain,
        target_pass_seconds=plain,
        verify_pass_seconds=clock.target_seconds(width=deployment.num_nodes + 1),
        draft_seconds=clock.draft_seconds(),
        tokens_per_step_low=expectation.low,
        tokens_per_step_high=expectation.high,
        basis=expectation.source,
    )


@dataclass(frozen=True, slots=True)
class PassClock:
    """The predicted time of passes of one deployment on one accelerator."""

    deployment: Deployment
    accelerator: Accelerator

    def target_seconds(self, *, width: int) -> float:
        """One target pass over `width` tokens of each sequence."""
        gpus = self.deployment.tensor_parallel_size
        return self.pass_seconds(self.deployment.target, self.deployment.precision, width=width, gpus=gpus)

    def pass_seconds(self, sizes: ModelSizes, precision: Precision, *, width: int, gpus: int = 1) -> float:
        """One pass of a model. gpus: that share each layer. Stages work one after another: they make nothing faster."""
        deployment, accelerator = self.deployment, self.accelerator
        tokens = width * deployment.max_num_seqs
        # On average over an answer the cache is half full.
        cached = sizes.kv_values(deployment.max_seq_len // 2, bounded=deployment.bounded_windows)
        states = deployment.max_num_seqs * sizes.state_values * FLOAT_BYTES
        cache_bytes = cached * deployment.max_num_seqs * deployment.kv_bits / 8 + states
        bytes_read = _weight_bytes_read(sizes, precision, tokens) + cache_bytes
        multiplying = 2 * sizes.parameters_per_token * tokens / (accelerator.tflops * 1e12 * ARITHMETIC_SHARE)
        per_layer = self._layer_seconds + (2 * SECONDS_PER_ALL_REDUCE if gpus > 1 else 0.0)
        return max(self._read_seconds(bytes_read), multiplying) / gpus + sizes.num_layers * per_layer

    def draft_seconds(self) -> float:
        """All drafting of one step."""
        deployment = self.deployment
        if deployment.method.target_layer_share:
            return deployment.num_draft_tokens * self._early_exit_seconds()
        if deployment.drafter is None:
            return 0.0
        if deployment.draft is None:
            return self._head_seconds(deployment.drafter)
        gpus = deployment.draft_gpus
        seconds = self.pass_seconds(deployment.drafter, deployment.drafter_precision, width=1, gpus=gpus)
        return deployment.num_draft_tokens * seconds

    def _early_exit_seconds(self) -> float:
        target = self.deployment.target
        num_layers = max(int(target.num_layers * self.deployment.method.target_layer_share), 1)
        lower_layers = replace(target, num_layers=num_layers, layers=target.layers[:num_layers], stored_bytes=None)
        gpus = self.deployment.tensor_parallel_size
        return self.pass_seconds(lower_layers, self.deployment.precision, width=1, gpus=gpus)

    def _head_seconds(self, head: ModelSizes) -> float:
        """A head reads all its weights at each step and, without output matrices of its own, also the target's."""
        deployment, method, target = self.deployment, self.deployment.method, self.deployment.target
        shared = 0 if method.head_vocab_blocks else target.vocab_size * target.hidden_size
        bytes_read = weight_bytes(head, deployment.drafter_precision) + shared * deployment.precision.compute_bits / 8
        seconds = self._read_seconds(bytes_read) + self._layer_seconds
        return seconds if method.parallel else seconds * deployment.num_draft_tokens

    def _read_seconds(self, bytes_read: float) -> float:
        return bytes_read / (self.accelerator.bandwidth_gbs * 1e9 * BANDWIDTH_SHARE)

    @property
    def _layer_seconds(self) -> float:
        return SECONDS_PER_LAYER_CPU if self.accelerator.kind is AcceleratorKind.CPU else SECONDS_PER_LAYER_GPU


def _weight_bytes_read(sizes: ModelSizes, precision: Precision, tokens: int) -> float:
    """Bytes of weights a pass reads: all but an untied table, and of the experts those that any token activates."""
    per_weight = weight_bytes(sizes, precision) / max(sizes.parameters, 1)
    if not sizes.num_experts:
        return per_weight * sizes.parameters_per_token
    rest = sizes.parameters_per_token - sum(group.used for group in sizes.groups if group.routed)
    share = sizes.expected_experts(tokens) / sizes.num_experts  # each further token has experts of its own
    return per_weight * (rest + sizes.expert_parameters * share)


def _check_rate(rate: float) -> None:
    if not 0.0 <= rate <= 1.0:  # also refuses NaN
        raise OptionError(f"an acceptance rate lies between 0 and 1, not {rate:g}")


def _check_count(num_draft_tokens: int) -> None:
    if num_draft_tokens < 0:
        raise OptionError(f"the number of draft tokens cannot be negative ({num_draft_tokens})")
