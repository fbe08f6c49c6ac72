"""Weight formats by name. A format is one module; registering it here is all it takes to use it.

A format module has:
  quantize(weight) -> Linear   a floating-point weight in this format, for the device it lies on
  matches(config) -> bool      whether a checkpoint with this Hugging Face config is stored in this format
  load(tensors, names) -> Linear | None   layers of such a checkpoint, joined by rows; None: they are not quantized

Formats that only convert at load match no checkpoint; formats that are only read from checkpoints cannot quantize.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from paceline.errors import OptionError

if TYPE_CHECKING:  # the list of formats must not load torch
    import torch
    from torch import Tensor

    from paceline.layers.gemm_types import Linear


class Tensors(Protocol):
    """The tensors of a checkpoint."""

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor of this name."""

    def raw(self, name: str) -> Tensor:
        """A tensor as it is stored. Raises WeightsError if it is missing."""

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""

    @property
    def quantization(self) -> Mapping[str, Any]:
        """The quantization_config of the checkpoint."""


class WeightFormat(Protocol):
    """A module of this room."""

    def quantize(self, weight: Tensor) -> Linear:
        """The weight [out_features, in_features] in this format."""

    def matches(self, config: Any) -> bool:
        """Whether checkpoints with this config are stored in this format."""

    def load(self, tensors: Tensors, names: list[str]) -> Linear | None:
        """The layers of these names, joined by rows; None: they are stored in floating point."""


_formats: dict[str, str | WeightFormat] = {
    "int8": "paceline.quantization.int8",
    "int4": "paceline.quantization.int4",
    "fp8": "paceline.quantization.fp8",
    "awq": "paceline.quantization.awq",
    "gptq": "paceline.quantization.gptq",
    "compressed-tensors": "paceline.quantization.compressed_tensors",
    "bitsandbytes": "paceline.quantization.bitsandbytes",
    "mxfp4": "paceline.quantization.mxfp4",
    "gguf": "paceline.quantization.gguf",
}
# Which of them are only read from checkpoints. The file of a format is not opened to print a list.
_read_only = {"awq", "gptq", "compressed-tensors", "bitsandbytes", "mxfp4", "gguf"}


def register(name: str, weight_format: str | WeightFormat) -> None:
    """Add a format: a module, or the name of one, imported when it is first used."""
    _formats[name] = weight_format


def unregister(name: str) -> None:
    """Remove a format that `register` added."""
    _formats.pop(name, None)


def names() -> tuple[str, ...]:
    """Every format that weights can be converted to at load, as `--dtype` and `--quantize` take it."""
    return tuple(name for name in _formats if name not in _read_only)


def read_only_names() -> tuple[str, ...]:
    """Every format that is read from checkpoints and cannot be converted to."""
    return tuple(name for name in _formats if name in _read_only)


def get(name: str) -> WeightFormat:
    """The format of this name. Raises OptionError."""
    weight_format = _formats.get(name)
    if weight_format is None:
        raise OptionError(f"there is no weight format {name!r}; there are {', '.join(_formats)}")
    if isinstance(weight_format, str):
        module: Any = import_module(weight_format)
        weight_format = _formats[name] = module
    return weight_format


def quantization_of(config: Any) -> Mapping[str, Any]:
    """The quantization_config of a Hugging Face config; empty: there is none."""
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        return {}
    return stored if isinstance(stored, Mapping) else stored.to_dict()  # type: ignore[no-any-return]


def format_of(config: Any) -> WeightFormat | None:
    """The format a checkpoint with this config is stored in; None: floating point, or no format that is registered."""
    if getattr(config, "quantization_config", None) is None:
        return None
    return next((get(name) for name in _formats if get(name).matches(config)), None)
