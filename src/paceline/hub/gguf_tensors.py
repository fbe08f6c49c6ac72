"""Tensors of a GGUF file under their Hugging Face names: all that the architecture has, and no others.

An architecture of Llama's wiring is one entry of ARCHITECTURES.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.errors import WeightsError
from paceline.hub.gguf_index import FLOAT_DTYPES, StoredTensor
from paceline.hub.gguf_rope import FREQUENCY_FACTORS
from paceline.hub.progress import track

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
WEIGHTS = tuple(f"{name}.weight" for name in LAYER_NAMES if not name.endswith(("q_norm", "k_norm")))
QKV_BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
OUTPUT_BIAS = "attn_output.bias"
OPTIONAL_TOP_NAMES = {"output.weight", FREQUENCY_FACTORS}
LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+\.(?:weight|bias))")


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """What a layer of an architecture has, and how its rotary pairs lie."""

    class_name: str
    layer_tensors: tuple[str, ...]
    optional_bias: bool = False  # attention may have biases, in every layer or in none
    interleaved_rope: bool = False  # the two values of a rotary pair lie side by side


ARCHITECTURES = {
    "llama": GgufArchitecture("LlamaForCausalLM", WEIGHTS, optional_bias=True, interleaved_rope=True),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM", WEIGHTS + QKV_BIASES),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM", (*WEIGHTS, "attn_q_norm.weight", "attn_k_norm.weight")),
}


@dataclass(frozen=True, slots=True, eq=False)
class GgufPart:
    """One file of a model."""

    path: Path
    reader: GGUFReader


class GgufTensors:
    """The tensors of the files of one of ARCHITECTURES. Raises WeightsError for one that is missing or not known."""

    def __init__(self, parts: Sequence[GgufPart], architecture: GgufArchitecture, num_layers: int) -> None:
        self._files = {tensor.name: part.path for part in parts for tensor in part.reader.tensors}
        self._tensors = {tensor.name: tensor for part in parts for tensor in part.reader.tensors}
        self._architecture = architecture
        self.attention_bias = architecture.optional_bias and f"blk.0.{OUTPUT_BIAS}" in self._tensors
        self._check_names(num_layers)

    def _check_names(self, num_layers: int) -> None:
        expected = set(TOP_NAMES) | {f"blk.{index}.{name}" for index in range(num_layers) for name in self._in_layer()}
        for name in sorted(expected - OPTIONAL_TOP_NAMES - set(self._tensors)):
            raise WeightsError(f"the GGUF file lacks the tensor {name}")
        for name in sorted(set(self._tensors) - expected - OPTIONAL_TOP_NAMES):
            layer = LAYER_TENSOR.fullmatch(name)
            if layer and int(layer[1]) >= num_layers:
                raise WeightsError(f"the GGUF file holds the tensor {name}, and its metadata says {num_layers} layers")
            raise WeightsError(f"the GGUF file holds a tensor that paceline does not know: {name}")

    def _in_layer(self) -> tuple[str, ...]:
        biases = (*QKV_BIASES, OUTPUT_BIAS) if self.attention_bias else ()
        return self._architecture.layer_tensors + biases

    @property
    def tied(self) -> bool:
        """Whether the LM head is the embedding."""
        return "output.weight" not in self._tensors

    @property
    def vocab_size(self) -> int:
        return int(self._tensors["token_embd.weight"].shape[-1])

    @property
    def frequency_factors(self) -> Tensor | None:
        """What the rope's frequencies are divided by."""
        tensor = self._tensors.get(FREQUENCY_FACTORS)
        return None if tensor is None else self._stored(tensor, 0).dequantized().flatten().double()

    def index(self, num_heads: int, num_kv_heads: int) -> list[StoredTensor]:
        """Every tensor of the model, and where it lies. Raises WeightsError for a vector with what is no number."""
        heads = {"attn_q": num_heads, "attn_k": num_kv_heads} if self._architecture.interleaved_rope else {}
        weights = [tensor for name, tensor in self._tensors.items() if name != FREQUENCY_FACTORS]
        index = [self._stored(tensor, heads.get(_projection(tensor.name), 0)) for tensor in weights]
        for stored in index:
            if len(stored.shape) == 1:
                stored.check_numbers(stored.dequantized())
        return index

    def _stored(self, tensor: ReaderTensor, heads: int) -> StoredTensor:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        name = tensor.name if tensor.name == FREQUENCY_FACTORS else _hugging_face_name(tensor.name)
        file, kind = str(self._files[tensor.name].resolve()), tensor.tensor_type.name
        return StoredTensor(
            name, tensor.name, kind, shape, file, int(tensor.data_offset), int(tensor.n_bytes), heads
        )


def unpacked(tensors: list[StoredTensor]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under its Hugging Face name: floating point as it is stored, quantized ones in bf16."""
    for tensor in track(tensors, "converting", len(tensors)):
        numbers = tensor.dequantized()
        tensor.check_numbers(numbers)
        yield tensor.name, numbers.to(getattr(torch, FLOAT_DTYPES.get(tensor.kind, "bfloat16"))).contiguous()


def _projection(name: str) -> str:
    return name.rpartition(".")[0].rpartition(".")[2]


def _hugging_face_name(name: str) -> str:
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, index, layer_name, kind = name.split(".")
    return f"model.layers.{index}.{LAYER_NAMES[layer_name]}.{kind}"
