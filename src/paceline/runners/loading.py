"""From a directory to a model of transformers, and the words for the precision it runs in.

transformers' models are imported where one is loaded: our own runs never need them, and they take seconds to import.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from paceline.errors import ModelError, OptionError, OutOfMemory, WeightsError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
INTEGER_WORDS = ("int8", "int4")  # runners/native/quantized.py
DTYPE_WORDS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
FOREIGN_ERRORS = ("SafetensorError", "UnpicklingError", "JSONDecodeError", "StrictDataclassClassValidationError")


def dtype_named(word: str | None, device: str) -> str:
    """A dtype's full name: float32 on a CPU and bfloat16 on a GPU unless told."""
    if word is None or word == "auto":
        return "float32" if device == "cpu" else "bfloat16"
    name = DTYPE_WORDS.get(word, word)
    if name not in DTYPES and name not in INTEGER_WORDS:
        raise OptionError(f"dtype must be one of {', '.join((*DTYPE_WORDS, *DTYPES, *INTEGER_WORDS))}, not {word!r}")
    if name in INTEGER_WORDS and not device.startswith(("cpu", "cuda")):
        raise OptionError(f"dtype {name} runs on a CPU or on CUDA; on {device} use bfloat16")
    return name


def load_model(folder: Path, name: str, dtype: torch.dtype, device: str, *, trust_remote_code: bool = False) -> Any:
    """EngineStats a directory with transformers. Pickled weights are opened with weights_only, or refused."""
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=trust_remote_code, weights_only=True
        )
        return model.to(device).eval()
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(f"{name} does not fit on {device}: choose a smaller --dtype or another --device") from error
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, ImportError) as error:
        raise _explained(error, name) from error
    except Exception as error:  # safetensors and pickle raise types of their own
        if type(error).__name__ in FOREIGN_ERRORS:
            raise _explained(error, name) from error
        raise


def _explained(error: Exception, name: str) -> ModelError:
    seq = str(error).strip().split("\n")[0]
    if "weights_only" in str(error) or "unpickl" in str(error).lower():
        return WeightsError(
            f"{name} holds pickled weights that would run code when opened, so they are refused. "
            f"Convert them to safetensors first ({seq})"
        )
    return WeightsError(f"{name} cannot be loaded; its files are damaged, incomplete or of an unknown kind: {seq}")


def eos_token_ids_of(model: Any) -> frozenset[int]:
    """Every token that ends a sequence, by the generation config or else the model's."""
    for config in (getattr(model, "generation_config", None), model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
