"""From a directory to a transformers model, and the names of the precisions a model runs in.

transformers' models are imported only where one is loaded: native models do without them, and they take seconds to
import.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.device.properties import default_dtype, supports_integer_weights
from paceline.errors import ModelError, OptionError, OutOfMemory, WeightsError
from paceline.hub.convert import unpacked_folder
from paceline.hub.documents import checked_config, generation_config
from paceline.models.checkpoint import HARMLESS_SUFFIXES, finite
from paceline.quantization import registry as formats
from paceline.quantization.packages import check_packages

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPE_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Parts of a model for other inputs than text, and heads that draft: a causal language model runs without them.
OTHER_PARTS = re.compile(r"(^|\.)(vision\w*|visual|audio\w*|multi_modal_projector|image_newline|mtp)(\.|$)")
LISTED_LAYER = re.compile(r"(^|\.)layers\.\d+\.$")
FILE_ERRORS = (OSError, RuntimeError, ValueError, KeyError, EOFError)
LIBRARY_ERRORS = ("SafetensorError", "UnpicklingError", "JSONDecodeError", "StrictDataclassClassValidationError")


def dtype_named(name: str | None, device: str) -> str:
    """A dtype's full name: float32 on a CPU and bfloat16 on a GPU unless another is chosen. Raises OptionError."""
    if name is None or name == "auto":
        return default_dtype(device)
    full_name = DTYPE_ALIASES.get(name, name)
    if full_name not in DTYPES and full_name not in formats.names():
        choices = ", ".join((*DTYPE_ALIASES, *DTYPES, *formats.names()))
        raise OptionError(f"there is no dtype or weight format {name!r}; there are {choices}")
    if full_name in formats.names() and not supports_integer_weights(device):
        raise OptionError(f"dtype {full_name} runs on a CPU or on CUDA; on {device} use bfloat16")
    return full_name


def load_model(folder: Path, name: str, dtype: torch.dtype, device: str, *, trust_remote_code: bool = False) -> Any:
    """Read a directory with transformers. Pickled weights are opened with weights_only, or refused.

    Raises WeightsError that names a tensor which is missing, not used or not finite; transformers itself only warns.
    """
    folder = unpacked_folder(folder)
    method = _quantization_method(checked_config(folder, name))
    generation_config(folder, name)  # transformers passes over one that it cannot read
    check_packages(method, name)
    _check_known(method, name)
    try:
        loaded = _from_pretrained(folder, name, dtype, trust_remote_code)
        loaded.model.to(device).eval()
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(f"{name} does not fit on {device}: choose a smaller --dtype or another --device") from error
    except ModelError:
        raise
    except Exception as error:  # transformers, safetensors and pickle raise anything
        raise _explained(error, name, method) from error
    _check_tensors(loaded, name)
    return loaded.model


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A transformers model, and the names that its class and its files do not share."""

    model: Any
    missing: frozenset[str]
    surplus: frozenset[str]


def _from_pretrained(folder: Path, name: str, dtype: torch.dtype, trust_remote_code: bool) -> LoadedModel:
    from paceline.runners.huggingface_class import model_class

    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "weights_only": True}
    model, names = model_class(folder, name, trust_remote_code=trust_remote_code).from_pretrained(
        folder, dtype=dtype, local_files_only=True, output_loading_info=True, **options
    )
    return LoadedModel(model, frozenset(names["missing_keys"]), frozenset(names["unexpected_keys"]))


def _check_tensors(loaded: LoadedModel, name: str) -> None:
    """Every weight is read from the files, every tensor of the files is used, and every value is a number."""
    for tensor in sorted(loaded.missing):
        if not tensor.endswith(HARMLESS_SUFFIXES):
            raise WeightsError(f"{name}: the weights lack the tensor {tensor}; the files are not whole")
    mtp_layers = _mtp_layers(loaded)
    for tensor in sorted(loaded.surplus):
        if not (tensor.endswith(HARMLESS_SUFFIXES) or OTHER_PARTS.search(tensor) or tensor.startswith(mtp_layers)):
            raise WeightsError(f"{name}: the weights hold the tensor {tensor}, which this architecture does not use")
    for tensor, weight in loaded.model.named_parameters():
        finite(weight.detach(), tensor)


def _mtp_layers(loaded: LoadedModel) -> tuple[str, ...]:
    """Prefixes of layers behind the last one that are heads which draft (DeepSeek, GLM): transformers leaves out those
    of the published sizes only."""
    marks = (tensor.removesuffix("eh_proj.weight") for tensor in loaded.surplus if tensor.endswith(".eh_proj.weight"))
    return tuple(prefix for prefix in marks if LISTED_LAYER.search(prefix))


def _quantization_method(config: Mapping[str, Any]) -> str:
    """How the weights of a directory are quantized; empty: they are not."""
    for part in (config, config.get("text_config") or {}):
        stored = part.get("quantization_config") or part.get("compression_config")
        if isinstance(stored, Mapping):
            is_old_bitsandbytes = stored.get("load_in_4bit") or stored.get("load_in_8bit")
            usual = "bitsandbytes" if is_old_bitsandbytes else "compressed-tensors"
            return str(stored.get("quant_method") or usual)
    return ""


def _check_known(method: str, name: str) -> None:
    """transformers warns of a method that it does not have, and takes the weights as they are."""
    if not method:
        return
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    if not any(known in (method, f"{method}_4bit") for known in AUTO_QUANTIZER_MAPPING):
        raise ModelError(f"{name} is quantized with {method}, which this version of transformers does not read")


def _explained(error: Exception, name: str, method: str) -> ModelError:
    reason = (str(error).strip() or type(error).__name__).split("\n")[0]
    if "weights_only" in str(error) or "unpickl" in str(error).lower():
        return WeightsError(
            f"{name} holds pickled weights that would run code when opened, so they are refused. "
            f"Convert them to safetensors first ({reason})"
        )
    if isinstance(error, ImportError):
        return ModelError(f"{name} needs a package that is not installed: {reason}")
    if method:
        return ModelError(f"{name} is quantized with {method} and cannot be loaded here: {reason}")
    if not isinstance(error, FILE_ERRORS) and type(error).__name__ not in LIBRARY_ERRORS:
        return ModelError(f"{name} cannot be loaded by transformers: {type(error).__name__}: {reason}")
    return WeightsError(f"{name} cannot be loaded; its files are damaged, incomplete or of an unknown kind: {reason}")


def eos_token_ids_of(model: Any) -> frozenset[int]:
    """Every token that ends a sequence, by the generation config or else the model's."""
    for config in (getattr(model, "generation_config", None), model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
