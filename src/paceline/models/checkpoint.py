"""Tensors of a checkpoint by name: checked against the config, made into linear layers, and all accounted for."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import WeightsError
from paceline.hub.shards import weight_files
from paceline.layers.gemm_types import Linear, StoredEmbedding
from paceline.layers.linear import UnquantizedLinear
from paceline.quantization.converted import ConvertedWeights
from paceline.quantization.registry import WeightFormat

Fetch = Callable[[str], Tensor | None]
Embedding = Tensor | StoredEmbedding
# What only kernels that round activations or cached keys read; products here leave both exact.
ACTIVATION_SUFFIXES = (".input_scale", ".input_scale_ub", ".activation_scale", ".output_scale", ".k_scale", ".v_scale")
HARMLESS_SUFFIXES = (  # buffers that old checkpoints carry
    "rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
)
HEAD_THAT_DRAFTS = ("mtp.", "model.mtp_layers.")  # an MTP head beside any model; heads/mtp.py reads it
LAYER_NAME = re.compile(r".*?\blayers\.(\d+)\.")
SUMMABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # torch adds no eight-bit floats


def finite(tensor: Tensor, name: str) -> Tensor:
    """The tensor itself. Raises WeightsError if it holds NaN or infinity.

    A sum shows either and is far cheaper than a look at each value; only where it overflows are the values looked at.
    """
    if tensor.dtype in SUMMABLE and not tensor.sum().isfinite() and not tensor.isfinite().all():
        kind = str(tensor.dtype).removeprefix("torch.")
        raise WeightsError(f"the tensor {name} holds values that are no numbers in {kind} (NaN or infinity)")
    return tensor


def _layer_index(name: str) -> int:
    match = LAYER_NAME.match(name)
    return int(match[1]) if match else -1


class Safetensors:
    """Tensors by name from the shards of a directory. Opens each file once."""

    def __init__(self, folder: Path, stack: ExitStack, device: str) -> None:
        from safetensors import SafetensorError, safe_open

        self._files: dict[str, Any] = {}
        paths = weight_files(folder)
        if not paths:
            raise WeightsError(f"{folder} holds no safetensors files")
        for path in paths:
            try:
                file = stack.enter_context(safe_open(path, framework="pt", device=device))
            except (SafetensorError, OSError) as error:
                raise WeightsError(f"{path.name} is damaged or incomplete: {error}") from error
            self._files |= dict.fromkeys(file.keys(), file)

    def names(self) -> Collection[str]:
        return self._files.keys()

    def __call__(self, name: str) -> Tensor | None:
        file = self._files.get(name)
        return None if file is None else file.get_tensor(name)


class ModelCheckpoint:
    """What an architecture reads its weights from.

    fetch, names  a tensor by its name, and the names there are
    target        the format that linear layers are converted to; None: they stay as they are
    stored        the format they are stored in; None: floating point
    quantization  the quantization_config of such a checkpoint
    converted     what an earlier start has converted; None: nothing is kept
    """

    def __init__(
        self,
        fetch: Fetch,
        names: Collection[str],
        dtype: torch.dtype,
        device: str,
        *,
        target: WeightFormat | None = None,
        stored: WeightFormat | None = None,
        quantization: Mapping[str, Any] | None = None,
        converted: ConvertedWeights | None = None,
    ) -> None:
        self._fetch, self._names, self._dtype, self._device = fetch, names, dtype, device
        self._target, self._stored, self._quantization = target, stored, quantization or {}
        self._converted, self._num_unnamed = converted, 0
        self._used: set[str] = set()

    def renamed(self, prefixes: Mapping[str, str], *, dropped: tuple[str, ...]) -> ModelCheckpoint:
        """The same tensors, their names with other prefixes, less those of parts that are not read."""
        names: dict[str, str] = {}
        for name in self._names:
            if not name.startswith(dropped):
                prefix = next(filter(name.startswith, prefixes), "")
                names[prefixes.get(prefix, "") + name.removeprefix(prefix)] = name

        def fetch(name: str) -> Tensor | None:
            return self._fetch(names[name]) if name in names else None

        parts = (fetch, names, self._dtype, self._device)
        formats: Any = {"target": self._target, "stored": self._stored, "quantization": self._quantization}
        return ModelCheckpoint(*parts, **formats, converted=self._converted)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    @property
    def device(self) -> str:
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return self._dtype

    @property
    def quantization(self) -> Mapping[str, Any]:
        """The quantization_config of the checkpoint; empty: there is none."""
        return self._quantization

    @property
    def keeps_float(self) -> bool:
        """Whether weights in floating point stay so."""
        return self._target is None

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A tensor on the device, in the model's dtype. Raises WeightsError if it is missing or of another shape."""
        return finite(self._of_shape(name, shape).to(self._device, self._dtype), name)

    def _of_shape(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._unpacked(name)
        if tuple(tensor.shape) != shape:
            raise WeightsError(f"the tensor {name} is {tuple(tensor.shape)}; the config says {shape}")
        return tensor

    def _unpacked(self, name: str) -> Tensor:
        """A tensor in floating point, also where the checkpoint stores it in another format."""
        layer = name.removesuffix(".weight")
        linear = None if self._stored is None or layer == name else self._stored.load(self, [layer])
        return self.raw(name) if linear is None else linear.dequantize(self._dtype)

    def raw(self, name: str) -> Tensor:
        """A tensor as it is stored. Raises WeightsError if it is missing."""
        tensor = self._fetch(name)
        if tensor is None:
            raise WeightsError(f"the weights lack the tensor {name}{self._layers_stored(name)}")
        self._used.add(name)
        return tensor

    def _layers_stored(self, missing: str) -> str:
        """Words for a config with more layers than the weights have."""
        last = max(map(_layer_index, self._names), default=-1)
        return f": the files hold {last + 1} layers, the config says more" if _layer_index(missing) > last >= 0 else ""

    def vector(self, names: list[str], sizes: list[int]) -> Tensor:
        """One-dimensional tensors, joined."""
        return torch.cat([self.tensor(name, size) for name, size in zip(names, sizes)])

    def linear(self, names: list[str], out_features: list[int], in_features: int) -> Linear:
        """Layers with the same input as one linear layer, joined by rows. Names come without `.weight`."""
        key = "+".join(names)
        kept = self._kept(key)
        if kept is not None:
            self._check_size(kept, names, sum(out_features), in_features)
            self._mark_used(names)
            return kept
        stored = None if self._stored is None else self._stored.load(self, names)
        if stored is not None:
            self._check_size(stored, names, sum(out_features), in_features)
            return stored if self._target is None else self._convert(stored.dequantize(self._dtype), key)
        weight = self._joined([f"{name}.weight" for name in names], out_features, in_features)
        return UnquantizedLinear(weight) if self._target is None else self._convert(weight, key)

    def _joined(self, names: list[str], out_features: list[int], in_features: int) -> Tensor:
        """Weights as one, each converted straight into its rows: a start waits for memory more than for anything."""
        if len(names) == 1:
            return self.tensor(names[0], out_features[0], in_features)
        joined = torch.empty(sum(out_features), in_features, dtype=self._dtype, device=self._device)
        for name, rows in zip(names, torch.split(joined, out_features)):
            finite(rows.copy_(self._of_shape(name, tuple(rows.shape))), name)
        return joined

    def _kept(self, key: str) -> Linear | None:
        """What an earlier start has converted."""
        return None if self._converted is None else self._converted.get(key)

    def _mark_used(self, layers: list[str]) -> None:
        """The weights of layers that need not be read."""
        prefixes = tuple(f"{name}." for name in layers)
        self._used.update(name for name in self._names if name.startswith(prefixes) and not name.endswith(".bias"))

    def _convert(self, weight: Tensor, key: str) -> Linear:
        """The weight in the format that was asked for, remembered for the next start."""
        assert self._target is not None
        linear = self._target.quantize(weight)
        if self._converted is not None:
            self._converted.add(key, linear)
        return linear

    def _check_size(self, linear: Linear, names: list[str], out_features: int, in_features: int) -> None:
        if (linear.out_features, linear.in_features) != (out_features, in_features):
            stored, expected = f"{linear.out_features} by {linear.in_features}", f"{out_features} by {in_features}"
            raise WeightsError(f"the weights of {names[0]} are {stored}; the config says {expected}")

    def embedding(self, name: str, *shape: int) -> Embedding:
        """A matrix that is read row by row: a tensor, or the blocks it is stored in. Comes without `.weight`."""
        stored = None if self._stored is None else self._stored.load(self, [name])
        if stored is None:
            return self.tensor(f"{name}.weight", *shape)
        self._check_size(stored, [name], *shape)
        embedding = stored.as_embedding(self._dtype)
        return stored.dequantize(self._dtype) if embedding is None else embedding

    def linear_of(self, weight: Embedding) -> Linear:
        """A linear layer of a weight that is already on the device."""
        if not isinstance(weight, Tensor):
            return weight.linear
        if self._target is None:
            return UnquantizedLinear(weight)
        key, self._num_unnamed = f"#{self._num_unnamed}", self._num_unnamed + 1  # an architecture asks in one order
        kept = self._kept(key)
        return self._convert(weight, key) if kept is None else kept

    def check_all_used(self) -> None:
        """Raise WeightsError if the checkpoint holds a tensor that no layer has read: the model is another one."""
        harmless = HARMLESS_SUFFIXES if self._stored is None else HARMLESS_SUFFIXES + ACTIVATION_SUFFIXES
        left = (name for name in self._names if name not in self._used and not name.endswith(harmless))
        unused = sorted(name for name in left if not (name.startswith(HEAD_THAT_DRAFTS) or self._is_zero_bias(name)))
        if unused:
            more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
            raise WeightsError(f"the weights hold the tensor {unused[0]}{more}, which this architecture does not use")

    def _is_zero_bias(self, name: str) -> bool:
        """Whether a tensor is a bias that adds nothing: quantized checkpoints may store one for every layer."""
        bias = self._fetch(name) if self._stored is not None and name.endswith(".bias") else None
        return bias is not None and not bool(bias.any())
