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
from paceline.layers.gemm_types import Linear
from paceline.layers.linear import UnquantizedLinear
from paceline.quantization.registry import WeightFormat

Fetch = Callable[[str], Tensor | None]
HARMLESS_SUFFIXES = (  # buffers that old checkpoints carry
    "rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
)
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
        paths = sorted(folder.glob("*.safetensors"))
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
    ) -> None:
        self._fetch, self._names, self._dtype, self._device = fetch, names, dtype, device
        self._target, self._stored = target, stored
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

        kinds = {"target": self._target, "stored": self._stored}
        return ModelCheckpoint(fetch, names, self._dtype, self._device, **kinds)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    @property
    def keeps_float(self) -> bool:
        """Whether weights in floating point stay so."""
        return self._target is None

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A tensor on the device, in the model's dtype. Raises WeightsError if it is missing or of another shape."""
        tensor = self.raw(name)
        if tuple(tensor.shape) != shape:
            raise WeightsError(f"the tensor {name} is {tuple(tensor.shape)}; the config says {shape}")
        return finite(tensor.to(self._device, self._dtype), name)

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
        stored = None if self._stored is None else self._stored.load(self, names)
        if stored is not None:
            return stored
        weights = [self.tensor(f"{name}.weight", size, in_features) for name, size in zip(names, out_features)]
        return self.linear_of(torch.cat(weights) if len(weights) > 1 else weights[0])

    def linear_of(self, weight: Tensor) -> Linear:
        """A linear layer of a weight that is already on the device."""
        return UnquantizedLinear(weight) if self._target is None else self._target.quantize(weight)

    def check_all_used(self) -> None:
        """Raise WeightsError if the checkpoint holds a tensor that no layer has read: the model is another one."""
        unused = sorted(name for name in self._names if name not in self._used and not name.endswith(HARMLESS_SUFFIXES))
        if unused:
            more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
            raise WeightsError(f"the weights hold the tensor {unused[0]}{more}, which this architecture does not use")
