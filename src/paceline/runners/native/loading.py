"""From a directory, or a loaded transformers model, to a native model: config, weights, model info."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import torch

from paceline import models
from paceline.core.types import ModelInfo
from paceline.device.properties import default_dtype, supports_fused_kernels, supports_persistent_kernels
from paceline.device.triton_key import compute_triton_key_beside
from paceline.errors import CapabilityError, OutOfMemory, WeightsError
from paceline.hub.convert import unpacked_folder
from paceline.hub.documents import checked_config, generation_config
from paceline.hub.gguf_index import GgufSource, StoredTensor, has_index, read_index
from paceline.hub.resolved import resolved_file
from paceline.hub.resolved_config import ResolvedConfig, config_document, keep_config_file, read_config_file
from paceline.models import registry
from paceline.models.checkpoint import ModelCheckpoint, Safetensors
from paceline.models.config import ArchConfig
from paceline.models.decoder import DecoderModel
from paceline.quantization import gguf
from paceline.quantization import registry as formats
from paceline.quantization.converted import converted_weights
from paceline.runners.loading import dtype_named

LOG = logging.getLogger("paceline")
DEFAULT_SEQS = 8
EXACT_DTYPE = "float32"  # holds every number of a GGUF file, so that none is rounded on the way
DEFAULT_SEQ_TOKENS = 8192
OTHER_FILES = {"auto_map", "configuration_files"}  # keys of a config that lies in other files too
MIN_HALF_HEAD = 16  # values of half a head that the attention kernel takes
MAX_HALF_HEAD = 64  # heads of 256 fail the float64 test on a card (Triton 3.6); their passes are eager until it holds


def is_native(config: Any) -> bool:
    """Whether a model with this Hugging Face config runs natively."""
    return registry.unsupported(config) is None


def can_fuse(model: DecoderModel, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether fused kernels and graphs exist on this device and take this model. dtype: of its keys and values."""
    if not may_fuse(model.config, device, dtype) or model.quantizes_input:
        return False
    return all(layer.can_fuse for layer in model.layers)


def may_fuse(config: ArchConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """The same, as far as it is known before the weights are read."""
    if not supports_fused_kernels(device, dtype.itemsize) or find_spec("triton") is None:
        return False
    if config.delta_net is not None and not config.delta_net.fits_kernels:
        return False
    half = config.head_dim // 2
    return MIN_HALF_HEAD <= half <= MAX_HALF_HEAD and half & (half - 1) == 0


def is_one_kernel(config: Any, device: str) -> bool:
    """Whether a pass of a model with this Hugging Face config is one kernel on this device, given plain weights.

    Such a model is too small to wait for its bytes: in packed weights it is slower.
    """
    if not is_native(config) or not supports_persistent_kernels(torch.device(device)) or find_spec("triton") is None:
        return False
    from paceline.runners.native.persistent_pass import fits_shapes

    architecture = registry.get(config.model_type)
    return architecture is not None and fits_shapes(architecture.config_from_hf(config))


def default_cache_tokens(config: ArchConfig) -> int:
    return DEFAULT_SEQS * min(config.max_seq_len, DEFAULT_SEQ_TOKENS)


def stored_dtype(folder: Path, name: str | None, device: str) -> str:
    """The dtype of this name; unless one is named, `gguf` where a model has blocks that can be kept here."""
    dtype = dtype_named(name, device)
    if name not in (None, "auto") or not has_index(folder):
        return dtype
    kept = gguf.KINDS if gguf.runs_on(device) else frozenset[str]()
    quantized = [tensor for tensor in read_index(folder) if not tensor.is_float]
    unpacked = [tensor for tensor in quantized if tensor.kind not in kept]
    if unpacked:
        _say_unpacked(unpacked, dtype)
    return gguf.NAME if len(unpacked) < len(quantized) else dtype


def _say_unpacked(unpacked: list[StoredTensor], dtype: str) -> None:
    """Memory is then many times that of the file, which may surprise."""
    size = sum(prod(tensor.shape) for tensor in unpacked) * getattr(torch, dtype).itemsize / 2**30
    LOG.warning(
        "no kernels for GGUF blocks of %s on this device: these weights are unpacked to %s, %.2g GiB; "
        "--quantize int8 is smaller, --engine llama_cpp runs the file as it is",
        ", ".join(sorted({tensor.kind for tensor in unpacked})),
        dtype,
        size,
    )


def load_folder(folder: Path, config: Any, dtype: str, device: str) -> DecoderModel:
    """Read a directory. dtype: a floating-point type, a weight format of quantization/, or `gguf`: as it is stored."""
    if has_index(folder) and dtype in (gguf.NAME, EXACT_DTYPE):
        return _load_gguf(folder, config, dtype, device)
    folder = unpacked_folder(folder)
    target = formats.get(dtype) if dtype in formats.names() else None
    float_dtype = getattr(torch, dtype if target is None else default_dtype(device))
    converted = None if target is None else converted_weights(folder, dtype, float_dtype, device)
    with ExitStack() as stack:
        # Each tensor is copied to the device once and not kept on the host; joined weights are built layer by layer.
        tensors = Safetensors(folder, stack, device)
        stored = formats.format_of(config)
        quantization = formats.quantization_of(config)
        formats_of: Any = {"target": target, "stored": stored, "quantization": quantization, "converted": converted}
        checkpoint = ModelCheckpoint(tensors, tensors.names(), float_dtype, device, **formats_of)
        try:
            model = _load(checkpoint, config)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(f"{folder.name} does not fit on {device}: choose a smaller --dtype") from error
    if converted is not None:
        converted.save()
    return model


def _load_gguf(folder: Path, config: Any, dtype: str, device: str) -> DecoderModel:
    """Read GGUF files: quantized tensors as they are, or all of them in float32."""
    is_packed = dtype == gguf.NAME
    source = GgufSource(folder, gguf.KINDS if is_packed else frozenset(), device)
    stored = gguf if is_packed else None
    float_dtype = getattr(torch, default_dtype(device) if is_packed else EXACT_DTYPE)
    return _load(ModelCheckpoint(source, source.names(), float_dtype, device, stored=stored), config)


@torch.no_grad()
def load_from_model(model: Any, weight_format: str | None = None) -> DecoderModel:
    """The weights of a loaded transformers model. Joined weights are copies, the rest is shared."""
    state, first = dict(model.state_dict()), next(model.parameters())
    target = None if weight_format is None else formats.get(weight_format)
    return _load(ModelCheckpoint(state.get, state, first.dtype, str(first.device), target=target), model.config)


def _load(checkpoint: ModelCheckpoint, config: Any) -> DecoderModel:
    reason = registry.unsupported(config)
    architecture = registry.get(config.model_type)
    if reason is not None or architecture is None:
        raise CapabilityError(f"this model does not run natively: {reason}")
    sizes = architecture.config_from_hf(config)
    if may_fuse(sizes, torch.device(checkpoint.device), checkpoint.dtype):
        compute_triton_key_beside()
    return architecture.load(checkpoint, sizes)


def read_config(folder: Path, name: str, *, trust_remote_code: bool = False) -> Any:
    """The Hugging Face config of a directory, also of a registered architecture that transformers does not have.

    A config that an earlier start read is taken from the cache: transformers takes seconds to import.
    Raises WeightsError.
    """
    document = checked_config(folder, name)
    kept = resolved_file("config", [folder / "config.json"]) if _can_be_kept(document) else None
    resolved = None if kept is None else read_config_file(kept)
    if resolved is not None:
        return resolved
    config = _read_by_transformers(folder, name, document, trust_remote_code=trust_remote_code)
    if kept is not None:
        _keep(config, kept)
    return config


def _read_by_transformers(folder: Path, name: str, document: dict[str, Any], *, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig, PreTrainedConfig

    try:
        if document.get("model_type") in registry.model_types() and not _in_transformers(document["model_type"]):
            return _with_rope_parameters(PreTrainedConfig.from_dict(document), document)
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise WeightsError(f"{name} has no readable config.json: {reason}") from error


def _can_be_kept(document: dict[str, Any]) -> bool:
    """Whether config.json alone decides the config, and an architecture of models/ reads it."""
    if OTHER_FILES & set(document) or not isinstance(document.get("model_type"), str):
        return False
    module = getattr(registry.get(document["model_type"]), "__name__", "")
    return module.startswith(f"{models.__name__}.")


def _keep(config: Any, path: Path) -> None:
    """Keep a config for later starts where the architecture reads the same from what is kept."""
    try:
        document = config_document(config)
        if _reading(ResolvedConfig(document)) == _reading(config):
            keep_config_file(path, document)
    except Exception as error:  # properties of a config raise anything; some ropes need transformers' own config
        LOG.debug("the config is not kept: %s", error)


def _reading(config: Any) -> list[Any]:
    """All that loading reads from a config, in a form that can be compared."""
    architecture = registry.get(config.model_type)
    if architecture is None or architecture.unsupported(config) is not None:
        raise ValueError("it does not run natively")
    sizes = comparable(architecture.config_from_hf(config))
    return [sizes, formats.quantization_of(config), getattr(config, "eos_token_id", None)]


def comparable(value: Any) -> Any:
    """A record with its tensors as lists, for those that do not compare by value."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if is_dataclass(value):
        return [comparable(getattr(value, field.name)) for field in fields(value)]
    return [comparable(part) for part in value] if isinstance(value, tuple) else value


def _in_transformers(model_type: str) -> bool:
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def _with_rope_parameters(config: Any, document: dict[str, Any]) -> Any:
    """transformers moves rope_theta into rope_parameters for the types it has; do the same for the others."""
    config.model_type = document["model_type"]
    if not getattr(config, "rope_parameters", None) and "rope_theta" in document:
        config.rope_parameters = {"rope_type": "default", "rope_theta": document["rope_theta"]}
    return config


def eos_token_ids_in(folder: Path, config: Any) -> frozenset[int]:
    """Every token that ends a sequence: by the generation config, or else the model's or its text decoder's."""
    named = generation_config(folder, folder.name).get("eos_token_id")
    choices = (named, *(getattr(part, "eos_token_id", None) for part in (config, config.get_text_config())))
    ids = next((choice for choice in choices if choice is not None), None)
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def model_info(name: str, config: ArchConfig, eos_token_ids: frozenset[int], device: str, dtype: str) -> ModelInfo:
    return ModelInfo(
        name, config.vocab_size, eos_token_ids, config.max_seq_len, config.num_layers, config.hidden_size, device, dtype
    )
