"""Tensors of a GGUF file under their Hugging Face names: all that the architecture has, and no others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.errors import WeightsError
from paceline.hub.gguf_architectures import GgufArchitecture
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
TOP_BIAS = "output_norm.bias"
QKV_BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
OUTPUT_BIAS = "attn_output.bias"
LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+\.(?:weight|bias))")


@dataclass(frozen=True, slots=True, eq=False)
class GgufPart:
    """One file of a model."""

    path: Path
    reader: GGUFReader


class GgufTensors:
    """The tensors of the files of one architecture. Raises WeightsError for one that is missing or not known."""

    def __init__(self, parts: Sequence[GgufPart], architecture: GgufArchitecture, num_layers: int) -> None:
        self._files = {tensor.name: part.path for part in parts for tensor in part.reader.tensors}
        self._tensors = {tensor.name: tensor for part in parts for tensor in part.reader.tensors}
        self._architecture = architecture
        self.attention_bias = architecture.optional_bias and f"blk.0.{OUTPUT_BIAS}" in self._tensors
        self._check_names(num_layers)

    def _check_names(self, num_layers: int) -> None:
        expected = {f"blk.{index}.{name}" for index in range(num_layers) for name in self._in_layer()}
        expected |= set(TOP_NAMES) | ({TOP_BIAS} if "output_norm" in self._architecture.biased else set())
        optional = {"output.weight"} | ({FREQUENCY_FACTORS} if self._architecture.frequency_factors else set())
        for name in sorted(expected - optional - set(self._tensors)):
            raise WeightsError(f"the GGUF file lacks the tensor {name}")
        for name in sorted(set(self._tensors) - expected - optional):
            layer = LAYER_TENSOR.fullmatch(name)
            if layer and int(layer[1]) >= num_layers:
                raise WeightsError(f"the GGUF file holds the tensor {name}, and its metadata says {num_layers} layers")
            raise WeightsError(f"the GGUF file holds a tensor that paceline does not know: {name}")

    def _in_layer(self) -> list[str]:
        parts, biased = self._architecture.parts, self._architecture.biased
        biases = [*QKV_BIASES, OUTPUT_BIAS] if self.attention_bias else []
        return [*(f"{part}.weight" for part in parts), *(f"{part}.bias" for part in parts if part in biased), *biases]

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
        whole = [self._stored(tensor, heads.get(_part(tensor.name), 0)) for tensor in weights]
        for stored in whole:
            if len(stored.shape) == 1:
                self._check_vector(stored)
        return [stored for tensor in whole for stored in _one_by_one(tensor)]

    def _check_vector(self, stored: StoredTensor) -> None:
        if not stored.is_float:
            raise WeightsError(f"the tensor {stored.stored_name} is a vector in {stored.kind}; it should be in F32")
        stored.check_numbers(stored.dequantized())

    def _stored(self, tensor: ReaderTensor, heads: int) -> StoredTensor:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        file, kind = str(self._files[tensor.name].resolve()), tensor.tensor_type.name
        is_norm = tensor.name.endswith("norm.weight")
        return StoredTensor(
            self._hugging_face_name(tensor.name),
            tensor.name,
            kind,
            shape,
            file,
            int(tensor.data_offset),
            int(tensor.n_bytes),
            heads,
            self._architecture.added_to_norms if is_norm else 0.0,
        )

    def _hugging_face_name(self, name: str) -> str:
        if name == FREQUENCY_FACTORS:
            return name
        if not name.startswith("blk."):
            part, _, kind = name.rpartition(".")
            return TOP_NAMES[f"{part}.weight"].removesuffix("weight") + kind
        _, index, part, kind = name.split(".")
        return f"model.layers.{index}.{self._architecture.parts[part]}.{kind}"


def _one_by_one(stacked: StoredTensor) -> list[StoredTensor]:
    """The tensor itself, or each of the experts that it has one behind the other."""
    if "*" not in stacked.name:
        return [stacked]
    count, *shape = stacked.shape
    size = stacked.size // count
    return [
        replace(
            stacked,
            name=stacked.name.replace("*", str(expert)),
            shape=tuple(shape),
            offset=stacked.offset + expert * size,
            size=size,
        )
        for expert in range(count)
    ]


def unpacked(tensors: list[StoredTensor]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under its Hugging Face name: floating point as it is stored, quantized ones in bf16."""
    for tensor in track(tensors, "converting", len(tensors)):
        numbers = tensor.dequantized()
        tensor.check_numbers(numbers)
        yield tensor.name, numbers.to(getattr(torch, FLOAT_DTYPES.get(tensor.kind, "bfloat16"))).contiguous()


def _part(name: str) -> str:
    return name.rpartition(".")[0].rpartition(".")[2]
