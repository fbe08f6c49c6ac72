"""gpt-oss: windows in every other layer, a sink for each query head, and experts with biases and a clamped gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.layers.decoder_layer import DecoderLayer
from paceline.layers.linear import UnquantizedLinear
from paceline.layers.moe import (
    ClampedSwiGlu,
    ExpertMlp,
    Experts,
    Matrices,
    MixtureOfExperts,
    Router,
    RowByRowLinear,
    StackedWeights,
    has_expert_kernels,
    stacked_experts,
)
from paceline.layers.moe_layer import MoeMlp
from paceline.layers.mxfp4_experts import Mxfp4Matrices
from paceline.models.checkpoint import ModelCheckpoint
from paceline.models.config import ArchConfig, MoeConfig, arch_config, unsupported_field
from paceline.models.decoder import DecoderModel
from paceline.models.llama import read_layer, read_model
from paceline.quantization import mxfp4

MODEL_TYPES = ("gpt_oss",)
USUAL_ALPHA, USUAL_LIMIT = 1.702, 7.0  # of the gate; configs of transformers before 5.20 do not name them


def unsupported(config: Any) -> str | None:
    """Why a model with this Hugging Face config cannot run here; None: it can."""
    return unsupported_field(config, ("sliding_window",))


def config_from_hf(config: Any) -> ArchConfig:
    moe = MoeConfig(
        num_experts=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        intermediate_size=config.intermediate_size,
        activation=ClampedSwiGlu(
            getattr(config, "swiglu_alpha", USUAL_ALPHA), getattr(config, "swiglu_limit", USUAL_LIMIT)
        ),
    )
    bias = bool(config.attention_bias)
    return replace(arch_config(config, qkv_bias=bias, output_bias=bias), moe=moe)


def load(checkpoint: ModelCheckpoint, config: ArchConfig) -> DecoderModel:
    """Read a model. Raises WeightsError that names a tensor which is missing, of another shape, or not used."""
    return read_model(checkpoint, config, [_layer(checkpoint, config, index) for index in range(config.num_layers)])


def _layer(checkpoint: ModelCheckpoint, config: ArchConfig, index: int) -> DecoderLayer:
    prefix = f"model.layers.{index}."
    layer = read_layer(checkpoint, config, index, mlp=_mixture(checkpoint, config, f"{prefix}mlp."))
    sinks = checkpoint.tensor(f"{prefix}self_attn.sinks", config.num_heads)
    return replace(layer, attention=replace(layer.attention, sinks=sinks))


def _mixture(checkpoint: ModelCheckpoint, config: ArchConfig, prefix: str) -> MoeMlp:
    assert config.moe is not None
    experts = _experts(checkpoint, config, config.moe, f"{prefix}experts.")
    weight = checkpoint.tensor(f"{prefix}router.weight", config.moe.num_experts, config.hidden_size)
    bias = checkpoint.tensor(f"{prefix}router.bias", config.moe.num_experts)
    steady = any(linear.quantizes_input for linear in experts.linears())
    router = Router(RowByRowLinear(weight) if steady else UnquantizedLinear(weight), config.moe.top_k, bias=bias)
    return MoeMlp(MixtureOfExperts(router, experts))


def _experts(checkpoint: ModelCheckpoint, config: ArchConfig, moe: MoeConfig, prefix: str) -> Experts:
    """Of gate and up, outputs are stored in turns."""
    count, size, hidden_size = moe.num_experts, moe.intermediate_size, config.hidden_size
    weights = StackedWeights(
        _matrix_gates_first(_matrices(checkpoint, f"{prefix}gate_up_proj", count, 2 * size, hidden_size)),
        _matrices(checkpoint, f"{prefix}down_proj", count, hidden_size, size),
        _gates_first(checkpoint.tensor(f"{prefix}gate_up_proj_bias", count, 2 * size)),
        checkpoint.tensor(f"{prefix}down_proj_bias", count, hidden_size),
    )
    made = stacked_experts(weights, moe.activation)
    if checkpoint.keeps_float:
        return made
    return Experts(tuple(_converted(mlp, checkpoint) for mlp in made.mlps), activation=moe.activation)


def _matrices(checkpoint: ModelCheckpoint, name: str, experts: int, out_features: int, in_features: int) -> Matrices:
    """[experts, out_features, in_features]; in floating point they are stored with inputs before outputs."""
    if mxfp4.is_packed(checkpoint, name):
        packed = checkpoint.keeps_float and has_expert_kernels(checkpoint.device)
        return mxfp4.load_experts(checkpoint, name, packed=packed)
    return checkpoint.tensor(name, experts, in_features, out_features).transpose(1, 2).contiguous()


def _matrix_gates_first(matrices: Matrices) -> Matrices:
    if isinstance(matrices, Mxfp4Matrices):
        return replace(matrices, codes=_gates_first(matrices.codes), exponents=_gates_first(matrices.exponents))
    return _gates_first(matrices)


def _gates_first(rows: Tensor) -> Tensor:
    """[experts, 2 · size, …]: the rows of gate, then those of up."""
    return torch.cat([rows[:, ::2], rows[:, 1::2]], dim=1)


def _converted(mlp: ExpertMlp, checkpoint: ModelCheckpoint) -> ExpertMlp:
    """An expert in the weight format that is asked for."""
    assert mlp.gate_up.matrix is not None and mlp.down.matrix is not None
    gate_up, down = (checkpoint.linear_of(matrix) for matrix in (mlp.gate_up.matrix, mlp.down.matrix))
    return replace(mlp, gate_up=gate_up, down=down)
