"""The front of a GGUF file: its settings and the list of its tensors, read without touching the weights.

The format is little-endian: magic, version, two counts, key/value pairs, then for each tensor its name, dimensions,
type and offset. Only what a plan needs is kept; a token list is counted and skipped.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from paceline.errors import WeightsError
from paceline.hub.gguf_architectures import MODEL_TYPES
from paceline.hub.model_config import gguf_config


@dataclass(frozen=True, slots=True)
class BlockType:
    """How GGUF packs numbers: a number of weights in a number of bytes."""

    name: str
    weights: int
    size: int


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One line of the tensor list."""

    name: str
    dimensions: tuple[int, ...]
    packing: BlockType

    @property
    def weights(self) -> int:
        return prod(self.dimensions)

    @property
    def bytes(self) -> int:
        return self.weights // self.packing.weights * self.packing.size


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Settings and tensors of one model, over all of its parts. Of an array only short lists of numbers are kept."""

    settings: Mapping[str, Any]
    tensors: tuple[TensorEntry, ...]

    @property
    def tensor_bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors)


# ggml's type numbers; missing ones are retired.
_BLOCKS: Mapping[int, BlockType] = {
    0: BlockType("F32", 1, 4), 1: BlockType("F16", 1, 2), 2: BlockType("Q4_0", 32, 18), 3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22), 7: BlockType("Q5_1", 32, 24), 8: BlockType("Q8_0", 32, 34),
    9: BlockType("Q8_1", 32, 36), 10: BlockType("Q2_K", 256, 84), 11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144), 13: BlockType("Q5_K", 256, 176), 14: BlockType("Q6_K", 256, 210),
    15: BlockType("Q8_K", 256, 292), 16: BlockType("IQ2_XXS", 256, 66), 17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98), 19: BlockType("IQ1_S", 256, 50), 20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110), 22: BlockType("IQ2_S", 256, 82), 23: BlockType("IQ4_XS", 256, 136),
    24: BlockType("I8", 1, 1), 25: BlockType("I16", 1, 2), 26: BlockType("I32", 1, 4), 27: BlockType("I64", 1, 8),
    28: BlockType("F64", 1, 8), 29: BlockType("IQ1_M", 256, 56), 30: BlockType("BF16", 1, 2),
    34: BlockType("TQ1_0", 256, 54), 35: BlockType("TQ2_0", 256, 66), 39: BlockType("MXFP4", 32, 17),
}  # fmt: skip

# `general.file_type`: the common name of the whole mix.
_FILE_TYPES: Mapping[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE",
}  # fmt: skip

_SCALARS: Mapping[int, str] = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_LONGEST_STRING = 1 << 26
_MOST_ENTRIES = 1 << 24
_MOST_LAYERS = 1024  # an array of numbers as long as this is not one of layers, and not kept

# GGUF's name of an architecture, where Hugging Face's `model_type` is another.
_MODEL_TYPES: Mapping[str, str] = {
    **MODEL_TYPES, "qwen2moe": "qwen2_moe", "qwen3next": "qwen3_next",
    "gptneox": "gpt_neox", "phi2": "phi", "gpt-oss": "gpt_oss", "falcon-h1": "falcon_h1", "deepseek2": "deepseek_v3",
    "granitehybrid": "granitemoehybrid", "glm4moe": "glm4_moe", "lfm2moe": "lfm2_moe", "mistral3": "ministral3",
    "qwen35": "qwen3_5", "qwen35moe": "qwen3_5_moe", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3_moe",
    "hunyuan-dense": "hunyuan_v1_dense", "nemotron_h_moe": "nemotron_h",
}  # fmt: skip


def read_header(path: Path) -> GgufHeader:
    """The header of a GGUF file, together with its sibling parts when the file is `…-00001-of-0000N.gguf`.

    Raises WeightsError when it is not GGUF, is cut short, or a part is missing.
    """
    headers = [_read_file(part) for part in _parts(path)]
    tensors = tuple(tensor for header in headers for tensor in header.tensors)
    return GgufHeader(headers[0].settings, tensors)


def header_config(header: GgufHeader) -> dict[str, Any]:
    """The header under the keys of a Hugging Face config, so that one function sizes both."""
    architecture = str(header.settings.get("general.architecture", "unknown"))
    config = gguf_config(architecture, header.settings.get)
    config["model_type"] = _MODEL_TYPES.get(architecture, architecture)
    config |= _by_layer(header.settings, architecture)
    config |= _recurrent(config, header.settings, architecture)
    names = {tensor.name: tensor for tensor in header.tensors}
    table = names.get("token_embd.weight")
    config["vocab_size"] = table.dimensions[-1] if table else header.settings.get("tokenizer.ggml.tokens", 0)
    config["tie_word_embeddings"] = "output.weight" not in names
    return config


def _by_layer(settings: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """What is stated for each layer: a layer that has no key/value heads is no attention."""
    heads = settings.get(f"{architecture}.attention.head_count_kv")
    windows = settings.get(f"{architecture}.attention.sliding_window_pattern")
    if isinstance(windows, tuple):
        types = ["sliding_attention" if sliding else "full_attention" for sliding in windows]
        return {"layer_types": types} | ({"num_key_value_heads": max(heads)} if isinstance(heads, tuple) else {})
    if not isinstance(heads, tuple) or not heads:
        return {}
    others = "conv" if f"{architecture}.shortconv.l_cache" in settings else "linear_attention"
    types = ["full_attention" if count else others for count in heads]
    return {"num_key_value_heads": max(heads)} | ({"layer_types": types} if 0 in heads else {})


def _recurrent(config: Mapping[str, Any], settings: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """GGUF has one set of keys for all recurrent layers and for latent attention; Hugging Face one for each kind."""
    latent = settings.get(f"{architecture}.attention.key_length_mla")
    if config.get("kv_lora_rank") and latent:
        return {"qk_nope_head_dim": latent - config.get("qk_rope_head_dim", 0)}
    inner, heads = config.get("mamba_d_ssm"), config.get("mamba_n_heads")
    if not inner or not heads:
        return {}
    if architecture == "mamba":
        return {"time_step_rank": heads, "mamba_n_heads": 0, "intermediate_size": inner}
    if not config["model_type"].startswith("qwen3"):
        return {}
    return {
        "linear_conv_kernel_dim": config.get("conv_kernel"),
        "linear_key_head_dim": config.get("state_size"),
        "linear_num_key_heads": config.get("mamba_n_groups"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": inner // heads,
    }


def file_type(header: GgufHeader) -> str:
    """The file's own name for its mix, such as Q4_K_M; without one, the packing of the largest tensor."""
    named = _FILE_TYPES.get(header.settings.get("general.file_type", -1))
    if named is not None or not header.tensors:
        return named or "unknown"
    return max(header.tensors, key=lambda tensor: tensor.weights).packing.name


def _parts(path: Path) -> list[Path]:
    match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if match is None:
        return [path]
    count = int(match[3])
    parts = [path.with_name(f"{match[1]}-{number:05d}-of-{match[3]}.gguf") for number in range(1, count + 1)]
    for part in parts:
        if not part.is_file():
            raise WeightsError(f"{path.name} is one of {count} parts and {part.name} is not beside it")
    return parts


def _read_file(path: Path) -> GgufHeader:
    try:
        with path.open("rb") as file:
            return _Cursor(file).header()
    except (struct.error, EOFError, UnicodeDecodeError) as error:
        raise WeightsError(f"{path}: the GGUF header is cut short or damaged; fetch the file again") from error
    except _NotGguf as error:
        raise WeightsError(f"{path}: {error}") from error


class _NotGguf(Exception):
    """The bytes are not what GGUF promises."""


class _Cursor:
    """Reads values of GGUF's types from the current position of a file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def header(self) -> GgufHeader:
        if self._take(4) != b"GGUF":
            raise _NotGguf("this is not a GGUF file")
        version = self._number("<I")
        if version not in (2, 3):
            raise _NotGguf(f"GGUF version {version} is not supported (2 and 3 are)")
        tensor_count, setting_count = self._count(), self._count()
        settings = {self._string(): self._value(self._number("<I")) for _ in range(setting_count)}
        return GgufHeader(settings, tuple(self._tensor() for _ in range(tensor_count)))

    def _take(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) != size:
            raise EOFError
        return data

    def _number(self, layout: str) -> Any:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))[0]

    def _count(self) -> int:
        count = int(self._number("<Q"))
        if count > _MOST_ENTRIES:
            raise _NotGguf("the header is damaged: it announces an impossible number of entries")
        return count

    def _string(self) -> str:
        size = int(self._number("<Q"))
        if size > _LONGEST_STRING:
            raise _NotGguf("the header is damaged: it announces an impossibly long name")
        return self._take(size).decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._skip_array()
        if kind not in _SCALARS:
            raise _NotGguf(f"the header is damaged: unknown kind of value {kind}")
        return self._number(_SCALARS[kind])

    def _skip_array(self) -> int | tuple[Any, ...]:
        """A list of numbers, one for each layer; of any other array its length."""
        kind, count = int(self._number("<I")), self._count()
        if kind in _SCALARS:
            layout = _SCALARS[kind]
            values = self._take(count * struct.calcsize(layout))
            return struct.unpack(f"<{count}{layout[1]}", values) if count <= _MOST_LAYERS else count
        else:
            for _ in range(count):
                self._value(kind)
        return count

    def _tensor(self) -> TensorEntry:
        name = self._string()
        rank = int(self._number("<I"))
        dimensions = tuple(int(self._number("<Q")) for _ in range(rank))
        kind = int(self._number("<I"))
        self._number("<Q")  # the offset of its data, which is not read here
        if kind not in _BLOCKS:
            raise _NotGguf(f"tensor {name} has the unknown type {kind}")
        return TensorEntry(name, dimensions, _BLOCKS[kind])
