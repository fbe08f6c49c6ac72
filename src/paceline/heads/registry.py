"""Kinds of trained heads. A kind is one file of this room that ends in its `SPEC`; modules are imported when needed.

load_head   the head in a directory, of the class the caller expects
save_head   writes a head in the layout of the project that publishes its kind (docs/heads.md)
register    adds a kind at run time
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from paceline.errors import OptionError, WeightsError
from paceline.heads.checkpoint import (
    Checkpoint,
    Provenance,
    WithoutRandomWeights,
    declared_kind,
    gguf_file,
    plain_name,
    read_checkpoint,
    tensor_names,
)

Head = TypeVar("Head", bound=nn.Module)
SHOWN = 3  # tensor names listed in an error
EMBEDDINGS = frozenset({"embed_tokens.weight", "wte.weight", "transformer.wte.weight", "gpt_neox.embed_in.weight"})
JOINS_STATES = "fc.weight"  # of the target, as input: no whole model has it


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """One kind of head.

    module   the class its weights are loaded into
    matches  whether a checkpoint holds this kind
    load     the module of a checkpoint; raises WeightsError naming the tensor that does not fit
    save     (head, folder, layout=..., provenance=..., dtype=...) writes a head
    layouts  the layouts it is written in, the default first
    """

    name: str
    module: type[nn.Module]
    matches: Callable[[Checkpoint], bool]
    load: Callable[[Checkpoint], nn.Module]
    save: Callable[..., None]
    layouts: tuple[str, ...] = ("original",)


# In the order in which a checkpoint is tried: EAGLE-1 has the least specific tensor names and comes last.
MODULES: dict[str, str] = {
    "exit_adapter": "paceline.heads.exit_adapter",
    "medusa": "paceline.heads.medusa",
    "dflash": "paceline.heads.dflash_files",
    "mtp": "paceline.heads.mtp",
    "peagle": "paceline.heads.peagle",
    "eagle3": "paceline.heads.eagle3",
    "eagle1": "paceline.heads.eagle1",
}
_registered: dict[str, HeadSpec] = {}


def register(spec: HeadSpec) -> None:
    """Add a kind of head; checkpoints are tried against it before the built-in ones."""
    _registered[spec.name] = spec


def names() -> tuple[str, ...]:
    """All kinds, in the order in which a checkpoint is tried."""
    return (*_registered, *(name for name in MODULES if name not in _registered))


def spec(name: str) -> HeadSpec:
    """The kind of this name. Raises OptionError for an unknown one."""
    if name in _registered:
        return _registered[name]
    if name not in MODULES:
        raise OptionError(f"there is no head of kind {name!r}; the kinds are {', '.join(names())}")
    built_in: HeadSpec = import_module(MODULES[name]).SPEC
    return built_in


def specs() -> Iterator[HeadSpec]:
    """All kinds, each imported when it is reached."""
    return map(spec, names())


def spec_of(checkpoint: Checkpoint) -> HeadSpec:
    """The kind a checkpoint holds. Raises WeightsError that says what the checkpoint seems to hold instead."""
    match = next((kind for kind in specs() if kind.matches(checkpoint)), None)
    if match is not None:
        return match
    kinds, declared = ", ".join(names()), declared_kind(checkpoint)
    if declared is not None:
        raise WeightsError(f"{checkpoint.folder} holds a {declared} head; paceline reads heads of the kinds {kinds}")
    first = ", ".join(sorted(map(plain_name, checkpoint.tensors))[:SHOWN])
    raise WeightsError(f"{checkpoint.folder} holds no head of the kinds {kinds} (its tensors are {first}, …)")


def kind_in(folder: Path) -> str | None:
    """The kind of head in a directory or GGUF file; None where that is a whole model. Raises WeightsError."""
    gguf = gguf_file(folder)
    if gguf is None:
        names = set(map(plain_name, tensor_names(folder)))
        is_model = not names or (JOINS_STATES not in names and bool(names & EMBEDDINGS))
        return None if is_model else spec_of(read_checkpoint(folder)).name
    from paceline.heads.dflash_gguf import holds_head

    return spec_of(_stored_head(gguf)).name if holds_head(gguf) else None


def load_head(
    folder: str | Path, expected: type[Head], *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Head:
    """The head in a directory. Raises ModelNotFound or WeightsError, also where it is not of the class expected."""
    checkpoint = _stored_head(folder)
    head = head_from(checkpoint)
    if not isinstance(head, expected):
        raise WeightsError(f"{folder} holds {type(head).__name__}, and {expected.__name__} is needed")
    return head.eval().to(device=device, dtype=dtype).requires_grad_(False)


def head_from(checkpoint: Checkpoint) -> nn.Module:
    """The head of a checkpoint that was read. Raises WeightsError or OptionError."""
    with WithoutRandomWeights():
        return spec_of(checkpoint).load(checkpoint)


def _stored_head(folder: str | Path) -> Checkpoint:
    """Config and tensors of a directory, or of a GGUF file."""
    gguf = gguf_file(Path(folder).expanduser())
    if gguf is None:
        return read_checkpoint(folder)
    from paceline.heads.dflash_gguf import read_gguf

    return read_gguf(gguf)


def save_head(
    head: nn.Module,
    folder: str | Path,
    *,
    layout: str | None = None,
    provenance: Provenance | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a head. Raises OptionError for a layout its kind does not have."""
    kind = next(kind for kind in specs() if isinstance(head, kind.module))
    layout = layout or kind.layouts[0]
    if layout not in kind.layouts:
        raise OptionError(f"a head of kind {kind.name} is not written in the layout {layout!r}, only in "
                          f"{' or '.join(kind.layouts)}")  # fmt: skip
    arguments: dict[str, Any] = {"layout": layout, "provenance": provenance or Provenance(), "dtype": dtype}
    kind.save(head, folder, **arguments)
