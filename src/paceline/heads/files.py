"""The door to trained heads on disk: which kind lies in a folder, and the module it holds.

detect      the kind, from config.json and the names of the tensors
load_head   whatever it is; load_eagle, load_medusa, load_exit: that kind or a clear error
save_*      the layouts of the projects that publish such heads (see docs/heads.md)
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from paceline.errors import WeightsError
from paceline.heads.checkpoint import Checkpoint, install, read_checkpoint, tensor_named, write_checkpoint
from paceline.heads.eagle import EAGLE_1, EAGLE_3, EagleHead
from paceline.heads.eagle_files import Provenance, build_eagle, plain_name, save_eagle
from paceline.heads.exit_adapter import ExitAdapter, ExitConfig
from paceline.heads.medusa import MedusaHeads
from paceline.heads.medusa_files import build_medusa, is_medusa, save_medusa

__all__ = [
    "Provenance",
    "detect",
    "load_eagle",
    "load_exit",
    "load_head",
    "load_medusa",
    "save_eagle",
    "save_exit",
    "save_medusa",
]

MEDUSA = "medusa"
EXIT = "exit"
EXIT_MODEL_TYPE = "paceline_exit"
Head = EagleHead | MedusaHeads | ExitAdapter
Kind = TypeVar("Kind", bound=nn.Module)


def detect(checkpoint: Checkpoint) -> str:
    """eagle1, eagle3, medusa or exit. Raises WeightsError for anything else, saying what it seems to be."""
    config, names = checkpoint.config, [plain_name(name) for name in checkpoint.tensors]
    published = config.get("speculators_model_type")
    if "dflash_config" in config or published == "dflash":
        raise WeightsError(f"{checkpoint.folder} holds a DFlash head; paceline drafts with EAGLE and Medusa heads only")
    if published not in (None, EAGLE_3):
        raise WeightsError(f"{checkpoint.folder} holds a {published} head; of speculators' kinds paceline reads eagle3")
    if config.get("model_type") == EXIT_MODEL_TYPE:
        return EXIT
    if is_medusa(names):
        return MEDUSA
    if any(name.endswith(".hidden_norm.weight") or name.startswith("midlayer.") for name in names):
        return EAGLE_3
    if published == EAGLE_3 or "d2t" in names:
        return EAGLE_3
    layers = {name.split(".")[1] for name in names if name.startswith("layers.")}
    if "0" in layers and "1" not in layers:
        return EAGLE_1
    first = ", ".join(sorted(names)[:3])
    raise WeightsError(f"{checkpoint.folder} holds no EAGLE or Medusa head or exit adapter (it holds {first}, …)")


def load_head(folder: str | Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Head:
    """Read whatever head lies in a folder. Raises ModelNotFound or WeightsError."""
    checkpoint = read_checkpoint(folder)
    kind = detect(checkpoint)
    head: Head
    if kind == MEDUSA:
        head = build_medusa(checkpoint)
    elif kind == EXIT:
        head = _build_exit(checkpoint)
    else:
        head = build_eagle(checkpoint, kind)
    return head.to(device=device, dtype=dtype).requires_grad_(False)


def load_eagle(folder: str | Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> EagleHead:
    """An EAGLE head of either kind."""
    return _expected(load_head(folder, dtype=dtype, device=device), EagleHead, folder)


def load_medusa(folder: str | Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> MedusaHeads:
    """Medusa heads."""
    return _expected(load_head(folder, dtype=dtype, device=device), MedusaHeads, folder)


def load_exit(folder: str | Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> ExitAdapter:
    """An exit adapter."""
    return _expected(load_head(folder, dtype=dtype, device=device), ExitAdapter, folder)


def _expected(head: nn.Module, kind: type[Kind], folder: str | Path) -> Kind:
    if not isinstance(head, kind):
        raise WeightsError(f"{folder} holds {type(head).__name__}, and {kind.__name__} was asked for")
    return head


def _build_exit(checkpoint: Checkpoint) -> ExitAdapter:
    down = tensor_named(checkpoint, "down.weight")
    layer = checkpoint.config.get("layer")
    if not isinstance(layer, int):
        raise WeightsError(f"{checkpoint.folder}: config.json does not say after which layer the model is left")
    eps = float(checkpoint.config.get("rms_norm_eps", 1e-5))
    adapter = ExitAdapter(ExitConfig(layer, down.shape[1], down.shape[0], eps))
    install(adapter, checkpoint)
    return adapter.eval()


def save_exit(adapter: ExitAdapter, folder: str | Path, *, target: str = "") -> None:
    """Write an exit adapter."""
    config = {
        "model_type": EXIT_MODEL_TYPE,
        "base_model_name_or_path": target,
        "layer": adapter.config.layer,
        "hidden_size": adapter.config.hidden_size,
        "bottleneck": adapter.config.bottleneck,
        "rms_norm_eps": adapter.config.rms_norm_eps,
    }
    write_checkpoint(folder, config, adapter.state_dict())
