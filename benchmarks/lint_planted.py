"""Mistakes planted in the files of the shipped heads, and copies of them that are right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.heads.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from paceline.heads.registry import save_head, spec_of
from paceline.heads.shipped import HERE
from paceline.hub import locate
from paceline.lint.transformer_readings import pairs_of_halves
from paceline.models.checkpoint import Safetensors

LAYER_KEYS = (("eagle_config", "eagle_aux_hidden_state_layer_ids"), ("dflash_config", "target_layer_ids"))
Plant = Callable[[Checkpoint], Checkpoint]
CopyHead = Callable[[Path, Path], None]  # from a folder to a new one


def config(**changes: Any) -> Plant:
    return lambda files: replace(files, config={**files.config, **changes})


def section(name: str, **changes: Any) -> Plant:
    return lambda files: replace(files, config={**files.config, name: {**files.config[name], **changes}})


def layers(change: Callable[[int], int]) -> Plant:
    """Other layers of the target, by either kind's key."""

    def plant(files: Checkpoint) -> Checkpoint:
        name, key = LAYER_KEYS[0] if "eagle_config" in files.config else LAYER_KEYS[1]
        return section(name, **{key: [change(layer) for layer in files.config[name][key]]})(files)

    return plant


def layers_reversed(files: Checkpoint) -> Checkpoint:
    name, key = LAYER_KEYS[0]
    return section(name, **{key: files.config[name][key][::-1]})(files)


def tensors(ending: str, change: Callable[[Tensor], Tensor]) -> Plant:
    def plant(files: Checkpoint) -> Checkpoint:
        changed = {name: change(value) for name, value in files.tensors.items() if name.endswith(ending)}
        assert changed, ending
        return replace(files, tensors={**files.tensors, **changed})

    return plant


def all_of(*plants: Plant) -> Plant:
    def plant(files: Checkpoint) -> Checkpoint:
        for step in plants:
            files = step(files)
        return files

    return plant


def halves_exchanged(weight: Tensor) -> Tensor:
    half = weight.shape[1] // 2
    return torch.cat([weight[:, half:], weight[:, :half]], dim=1)


def one_less(weight: Tensor) -> Tensor:
    return (weight.float() - 1).to(weight.dtype)


def interleaved(weight: Tensor) -> Tensor:
    return pairs_of_halves(weight, 64)


def exchanged_norms(files: Checkpoint) -> Checkpoint:
    first, second = "hidden_norm.weight", "norm.weight"
    return replace(files, tensors={**files.tensors, first: files.tensors[second], second: files.tensors[first]})


def flipped(axis: int) -> Callable[[Tensor], Tensor]:
    """The two taps (1) or sides (0) of a convolution's weights in the other order."""
    return lambda weight: weight.view(2, 2, -1).flip(axis).reshape(weight.shape)


def convolutions(change: Callable[[Tensor], Tensor]) -> Plant:
    return all_of(tensors("_conv.base_kernel", change), tensors("_conv.kernel_projection.weight", change))


IDS_IN_D2T = tensors("d2t", lambda offsets: offsets + torch.arange(len(offsets)))
ROWS_OF_NEIGHBOURS = all_of(tensors("q_proj.weight", interleaved), tensors("k_proj.weight", interleaved))
NORMS_OF_NEIGHBOURS = all_of(tensors("q_norm.weight", interleaved), tensors("k_norm.weight", interleaved))


@dataclass(frozen=True, slots=True)
class Mistake:
    """A planted mistake, and the readings that the linter must name. names (): it does not lower acceptance."""

    plant: Plant
    names: tuple[str, ...]


EAGLE: dict[str, Mistake] = {
    "layers one too high": Mistake(layers(lambda layer: layer + 1), ("layers one lower",)),
    "layers one too low": Mistake(layers(lambda layer: layer - 1), ("layers one higher",)),
    "layers from high to low": Mistake(layers_reversed, ("layers from low to high",)),
    "norm_before_residual": Mistake(config(norm_before_residual=True), ("residual after its norm off",)),
    "norm_output": Mistake(config(norm_output=True), ("feed back after the norm off",)),
    "hidden before embedding": Mistake(
        all_of(*(tensors(f"{name}_proj.weight", halves_exchanged) for name in "qkv")), ("[hidden; embedding]",)
    ),
    "rope of neighbours": Mistake(ROWS_OF_NEIGHBOURS, ("rope interleaved",)),
    "ids in d2t": Mistake(IDS_IN_D2T, ("d2t as ids",)),
    "head_dim": Mistake(config(head_dim=32), ("head_dim 64",)),
    "norms around zero": Mistake(tensors("norm.weight", one_less), ("norms around zero",)),
    "two mistakes": Mistake(all_of(config(head_dim=32), IDS_IN_D2T), ("d2t as ids", "head_dim 64")),
}

DFLASH: dict[str, Mistake] = {
    "layers one too high": Mistake(layers(lambda layer: layer + 1), ("layers one lower",)),
    "layers one too low": Mistake(layers(lambda layer: layer - 1), ("layers one higher",)),
    "rows shifted": Mistake(section("dflash_config", sample_from_anchor=True), ("rows in place",)),
    "rows see all": Mistake(
        all_of(config(is_causal=False), section("dflash_config", causal=False)), ("causal on",)
    ),
    "mask token": Mistake(section("dflash_config", mask_token_id=0), ("mask token 16",)),
    "rope theta": Mistake(config(rope_theta=1e6), ("rope theta 100000",)),
    "rope of neighbours": Mistake(all_of(ROWS_OF_NEIGHBOURS, NORMS_OF_NEIGHBOURS), ("rope interleaved",)),
    "norms around zero": Mistake(tensors("norm.weight", one_less), ("norms around zero",)),
    "norms exchanged": Mistake(exchanged_norms, ("hidden_norm and norm exchanged",)),
    "taps reversed": Mistake(convolutions(flipped(1)), ("convolution taps reversed",)),
    "sides reversed": Mistake(convolutions(flipped(0)), ("convolution sides reversed",)),
    "ids in d2t": Mistake(IDS_IN_D2T, ("d2t as ids",)),
    "embedding scaled": Mistake(section("dflash_config", input_embedding_scale=24.0), ("embedding times 1",)),
    "unused mask token": Mistake(section("dflash_config", mask_token_id=15), ()),  # has the same embedding
    "shorter blocks": Mistake(all_of(config(block_size=8), section("dflash_config", block_size=8)), ()),
}


# --- correct copies ---------------------------------------------------------------------------------------------------


@cache
def _target_functions() -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Of the default model, which ties both: token ids -> input vectors, hidden states -> logits."""
    with ExitStack() as stack:
        weight = Safetensors(locate("default").folder, stack, "cpu")("model.embed_tokens.weight")
    assert weight is not None
    return weight.__getitem__, lambda hidden: torch.nn.functional.linear(hidden, weight.to(hidden.dtype))


def resaved(layout: str, dtype: torch.dtype) -> CopyHead:
    """Written by paceline in a layout and a dtype."""

    def write(source: Path, folder: Path) -> None:
        checkpoint = read_checkpoint(source)
        head = spec_of(checkpoint).load(checkpoint)
        head.bind_target(*_target_functions())  # some layouts hold output rows of the target
        save_head(head, folder, layout=layout, dtype=dtype)

    return write


def prefixed(source: Path, folder: Path) -> None:
    """With the wrapper module that some trainers save around a head."""
    files = read_checkpoint(source)
    write_checkpoint(folder, files.config, {f"model.{name}": value for name, value in files.tensors.items()})


def pickled(source: Path, folder: Path) -> None:
    files = read_checkpoint(source)
    write_checkpoint(folder, files.config, {})
    (folder / "model.safetensors").unlink()
    torch.save(files.tensors, folder / "pytorch_model.bin")


OPTIONAL = (
    "norm_before_residual", "norm_output", "eagle_config", "fc_norm", "norm_before_fc",
    "block_size", "is_causal", "layer_types", "rope_scaling", "sliding_window",
)  # fmt: skip


def sparse(source: Path, folder: Path) -> None:
    """What a config may leave out, left out."""
    files = read_checkpoint(source)
    kept = {name: value for name, value in files.config.items() if name not in OPTIONAL}
    tensors = {name: value for name, value in files.tensors.items() if name != "t2d"}
    write_checkpoint(folder, kept, tensors)


COPIES: dict[str, CopyHead] = {
    "original bf16": resaved("original", torch.bfloat16),
    "original fp32": resaved("original", torch.float32),
    "original fp16": resaved("original", torch.float16),
    "speculators bf16": resaved("speculators", torch.bfloat16),
    "speculators fp32": resaved("speculators", torch.float32),
    "prefixed": prefixed,
    "pickled": pickled,
    "sparse": sparse,
}


@dataclass(frozen=True, slots=True)
class ShippedHead:
    """A shipped head and the mistakes that can be planted in it."""

    folder: Path
    mistakes: Mapping[str, Mistake]


HEADS = {
    "eagle": ShippedHead(HERE / "eagle-SmolLM2-135M-Instruct", EAGLE),
    "dflash": ShippedHead(HERE / "dflash-SmolLM2-135M-Instruct", DFLASH),
}
