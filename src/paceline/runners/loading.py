"""From a directory to a transformers model, and the names of the precisions a model runs in.

transformers' models are imported only where one is loaded: native models do without them, and they take seconds to
import.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from paceline.device.properties import default_dtype, supports_integer_weights
from paceline.errors import ModelError, OptionError, OutOfMemory, WeightsError
from paceline.quantization import registry as formats

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPE_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def dtype_named(name: str | None, device: str) -> str:
    """A dtype's full name: float32 on a CPU and bfloat16 on a GPU unless another is chosen. Raises OptionError."""
    if name is None or name == "auto":
        return default_dtype(device)
    full_name = DTYPE_ALIASES.get(name, name)
    if full_name not in DTYPES and full_name not in formats.names():
        choices = ", ".join((*DTYPE_ALIASES, *DTYPES, *formats.names()))
        raise OptionError(f"dtype must be one of {choices}, not {name!r}")
    if full_name in formats.names() and not supports_integer_weights(device):
        raise OptionError(f"dtype {full_name} runs on a CPU or on CUDA; on {device} use bfloat16")
    return full_name


def load_model(folder: Path, name: str, dtype: torch.dtype, device: str, *, trust_remote_code: bool = False) -> Any:
    """Read a directory with transformers. Pickled weights are opened with weights_only, or refused."""
    from paceline.runners.huggingface_class import model_class

    auto_class = model_class(folder, name, trust_remote_code=trust_remote_code)
    try:
        model = auto_class.from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=trust_remote_code, weights_only=True
        )
        return model.to(device).eval()
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(f"{name} does not fit on {device}: choose a smaller --dtype or another --device") from error
    except Exception as error:  # transformers, safetensors and pickle raise anything
        raise _explained(error, name) from error


def _explained(error: Exception, name: str) -> ModelError:
    reason = str(error).strip().split("\n")[0]
    if "weights_only" in str(error) or "unpickl" in str(error).lower():
        return WeightsError(
            f"{name} holds pickled weights that would run code when opened, so they are refused. "
            f"Convert them to safetensors first ({reason})"
        )
    return WeightsError(f"{name} cannot be loaded; its files are damaged, incomplete or of an unknown kind: {reason}")


def eos_token_ids_of(model: Any) -> frozenset[int]:
    """Every token that ends a sequence, by the generation config or else the model's."""
    for config in (getattr(model, "generation_config", None), model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
