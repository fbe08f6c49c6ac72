"""Where the tensors of a model lie in its GGUF files: kept in the cache, so that a start reads nothing but weights."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import WeightsError

if TYPE_CHECKING:  # the command line asks for a model's place without torch
    import numpy as np
    from torch import Tensor

INDEX = "gguf.json"
FLOAT_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # as torch names them


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a GGUF file.

    name      its Hugging Face name; stored_name the file's own
    kind      how its numbers are stored, as GGUF names it: Q4_K, F32 …
    heads     its rows are those of so many heads whose rotary pairs lie side by side; 0: nothing is to be reordered
    added     what the file's numbers are above those of Hugging Face; only vectors in floating point have it
    """

    name: str
    stored_name: str
    kind: str
    shape: tuple[int, ...]
    file: str
    offset: int
    size: int
    heads: int = 0
    added: float = 0.0

    @property
    def is_float(self) -> bool:
        return self.kind in FLOAT_DTYPES

    def stored(self) -> Tensor:
        """Its bytes, in the order of Hugging Face's rows: uint8 [rows, bytes of a row]"""
        import torch

        return _two_halves(torch.from_numpy(self._bytes()), self.heads)

    def dequantized(self) -> Tensor:
        """Its numbers in float32, in its own shape."""
        import numpy as np
        import torch
        from gguf import GGMLQuantizationType, dequantize

        numbers = dequantize(self._bytes(), GGMLQuantizationType[self.kind])
        rows = _two_halves(torch.from_numpy(np.ascontiguousarray(numbers)).view(self.shape), self.heads)
        return rows - self.added if self.added else rows

    def check_numbers(self, numbers: Tensor) -> None:
        """Raise WeightsError where a number is none."""
        if not numbers.float().sum().isfinite():
            raise WeightsError(f"the tensor {self.stored_name} holds values that are no numbers (NaN or infinity)")

    def _bytes(self) -> np.ndarray:
        import numpy as np

        rows = self.shape[0] if len(self.shape) > 1 else 1
        try:  # read and not mapped: what is unpacked would stay in memory beside the file's own pages
            read = np.fromfile(self.file, np.uint8, self.size, offset=self.offset)
        except OSError as error:
            raise WeightsError(f"{self.file} cannot be read: {error.strerror}") from error
        if read.size < self.size:
            raise WeightsError(f"{self.file} has become shorter; is it complete?")
        return read.reshape(rows, -1)


def _two_halves(rows: Tensor, num_heads: int) -> Tensor:
    """GGUF stores llama's rotary pairs side by side; Hugging Face keeps the two halves of a head apart."""
    if not num_heads:
        return rows
    return rows.view(num_heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def write_index(folder: Path, tensors: list[StoredTensor]) -> None:
    (folder / INDEX).write_text(json.dumps([asdict(tensor) for tensor in tensors]))


def has_index(folder: Path) -> bool:
    """Whether the weights of a model directory are in GGUF files elsewhere."""
    return (folder / INDEX).is_file()


def read_index(folder: Path) -> list[StoredTensor]:
    """Raises WeightsError where a file is gone."""
    entries = json.loads((folder / INDEX).read_text())
    tensors = [StoredTensor(**(entry | {"shape": tuple(entry["shape"])})) for entry in entries]
    for file in sorted({tensor.file for tensor in tensors}):
        if not Path(file).is_file():
            raise WeightsError(f"{file} is gone; name the model by its .gguf file")
    return tensors


class GgufSource:
    """Tensors by name out of GGUF files.

    packed  a quantized tensor is given as the bytes of its rows, under its name with its kind: `x.weight:Q4_K`;
            only the kinds named. All others are given in float32
    device  where tensors are given
    """

    def __init__(self, folder: Path, packed: frozenset[str] = frozenset(), device: str = "cpu") -> None:
        self._packed, self._device = packed, device
        self._tensors = {self._name(tensor): tensor for tensor in read_index(folder)}

    def _name(self, tensor: StoredTensor) -> str:
        return packed_name(tensor.name, tensor.kind) if tensor.kind in self._packed else tensor.name

    def names(self) -> list[str]:
        return list(self._tensors)

    def __call__(self, name: str) -> Tensor | None:
        tensor = self._tensors.get(name)
        if tensor is None:
            return None
        return (tensor.stored() if tensor.kind in self._packed else tensor.dequantized()).to(self._device)


def packed_name(name: str, kind: str) -> str:
    return f"{name}:{kind}"
