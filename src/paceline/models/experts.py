"""Mixtures of experts of a checkpoint: experts one by one, as most are published, or stacked in one tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from paceline.layers.feed_forward import Mlp
from paceline.layers.gemm_types import Linear
from paceline.layers.linear import UnquantizedLinear
from paceline.layers.moe import (
    ExpertMlp,
    Experts,
    MixtureOfExperts,
    Router,
    RowByRowLinear,
    SharedExpert,
    StackedWeights,
    stacked_experts,
)
from paceline.layers.moe_layer import MoeMlp
from paceline.models.checkpoint import ModelCheckpoint
from paceline.models.config import ArchConfig, MoeConfig
from paceline.models.decoder import DecoderModel
from paceline.models.llama import read_layer, read_model


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What checkpoints call the parts of a mixture of experts. Of several names the first that is there counts."""

    blocks: tuple[str, ...] = ("mlp.",)
    routers: tuple[str, ...] = ("gate",)
    gate_up: tuple[str, str] = ("gate_proj", "up_proj")  # of an expert stored by itself
    down: str = "down_proj"
    stacked: tuple[tuple[str, str], ...] = (("experts.gate_up_proj", "experts.down_proj"),)


QWEN_NAMES = ExpertNames()


def unsupported_experts(config: Any) -> str | None:
    """The first field that asks for experts of another kind; None: there is none."""
    activation = getattr(config, "hidden_act", "silu")
    return None if activation in ("silu", "swish") else f"hidden_act is {activation!r}, and experts have silu"


def qwen_moe_config(config: Any, *, shared_intermediate_size: int = 0) -> MoeConfig:
    """The fields of Qwen's mixtures: some layers may have an MLP instead."""
    step, only = config.decoder_sparse_step, set(config.mlp_only_layers or ())
    layers = range(config.num_hidden_layers)
    return MoeConfig(
        num_experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        intermediate_size=config.moe_intermediate_size,
        renormalize=bool(config.norm_topk_prob),
        shared_intermediate_size=shared_intermediate_size,
        dense_layers=frozenset(index for index in layers if index in only or (index + 1) % step),
    )


def load_moe(checkpoint: ModelCheckpoint, config: ArchConfig, names: ExpertNames = QWEN_NAMES) -> DecoderModel:
    """A model with Llama's layers, and experts in place of their MLP where the config says so."""
    return read_model(
        checkpoint,
        config,
        [
            read_layer(checkpoint, config, index, mlp=read_experts(checkpoint, config, index, names))
            for index in range(config.num_layers)
        ],
    )


def read_experts(
    checkpoint: ModelCheckpoint, config: ArchConfig, index: int, names: ExpertNames = QWEN_NAMES
) -> Mlp | None:
    """The mixture of experts of one layer; None: this layer has an MLP."""
    moe = config.moe
    if moe is None or index in moe.dense_layers:
        return None
    return MoeMlp(_Reader(checkpoint, config, moe, names, f"model.layers.{index}.").mixture())


class _Reader:
    """Reads one layer's mixture."""

    def __init__(
        self, checkpoint: ModelCheckpoint, config: ArchConfig, moe: MoeConfig, names: ExpertNames, layer: str
    ) -> None:
        self._checkpoint, self._config, self._moe, self._names = checkpoint, config, moe, names
        candidates = [(layer + block, router) for block in names.blocks for router in names.routers]
        there = (pair for pair in candidates if f"{pair[0]}{pair[1]}.weight" in checkpoint)
        self._block, self._router = next(there, candidates[0])

    def mixture(self) -> MixtureOfExperts:
        experts = self._experts()
        steady = any(linear.quantizes_input for linear in experts.linears())
        logits = self._float_linear(self._router, self._moe.num_experts, steady)
        return MixtureOfExperts(
            Router(logits, self._moe.top_k, self._moe.renormalize),
            experts,
            self._shared(steady) if self._moe.shared_intermediate_size else None,
        )

    def _float_linear(self, name: str, out_features: int, steady: bool) -> Linear:
        """A small layer that decides what others do: it stays in floating point."""
        weight = self._checkpoint.tensor(f"{self._block}{name}.weight", out_features, self._config.hidden_size)
        return RowByRowLinear(weight) if steady else UnquantizedLinear(weight)

    def _experts(self) -> Experts:
        for names in self._names.stacked:
            if self._block + names[0] in self._checkpoint:
                return self._stacked(*names)
        mlps = tuple(self._expert(f"{self._block}experts.{index}.") for index in range(self._moe.num_experts))
        return _joined(mlps)

    def _stacked(self, gate_up_name: str, down_name: str) -> Experts:
        count, size, hidden_size = self._moe.num_experts, self._moe.intermediate_size, self._config.hidden_size
        gate_up = self._checkpoint.tensor(self._block + gate_up_name, count, 2 * size, hidden_size)
        down = self._checkpoint.tensor(self._block + down_name, count, hidden_size, size)
        if self._checkpoint.keeps_float:
            return stacked_experts(StackedWeights(gate_up, down))
        linear_of = self._checkpoint.linear_of
        return Experts(tuple(ExpertMlp(linear_of(first), linear_of(last)) for first, last in zip(gate_up, down)))

    def _expert(self, prefix: str) -> ExpertMlp:
        size, hidden_size = self._moe.intermediate_size, self._config.hidden_size
        gate_up = [prefix + name for name in self._names.gate_up]
        return ExpertMlp(
            self._checkpoint.linear(gate_up, [size, size], hidden_size),
            self._checkpoint.linear([prefix + self._names.down], [hidden_size], size),
        )

    def _shared(self, steady: bool) -> SharedExpert:
        size, hidden_size, prefix = self._moe.shared_intermediate_size, self._config.hidden_size, "shared_expert."
        gate_up = [self._block + prefix + name for name in self._names.gate_up]
        return SharedExpert(
            self._checkpoint.linear(gate_up, [size, size], hidden_size),
            self._checkpoint.linear([self._block + prefix + self._names.down], [hidden_size], size),
            self._float_linear("shared_expert_gate", 1, steady),
        )


def _joined(mlps: tuple[ExpertMlp, ...]) -> Experts:
    """Experts that were stored one by one: stacked for the kernels where they are in floating point."""
    gate_ups, downs = [mlp.gate_up.matrix for mlp in mlps], [mlp.down.matrix for mlp in mlps]
    matrices = [matrix for matrix in (*gate_ups, *downs) if matrix is not None]
    if len(matrices) < 2 * len(mlps):
        return Experts(mlps)
    return stacked_experts(StackedWeights(torch.stack(matrices[: len(mlps)]), torch.stack(matrices[len(mlps) :])))
