"""What checkpoints call the tensors of an MTP head, and what its module calls them.

    Qwen3-Next, Qwen3.5    mtp.fc, mtp.pre_fc_norm_{embedding,hidden}, mtp.layers.0.*, mtp.norm
    DeepSeek-V3, GLM-4.5   model.layers.L.{eh_proj,enorm,hnorm,shared_head.norm} beside one decoder layer; L: the number
                           of layers of the target
    MiMo-7B                model.mtp_layers.0.{input_proj,token_layernorm,hidden_layernorm,final_layernorm} likewise

Copies of the target's embedding and output head, which some checkpoints hold, are not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

ROOT = r"(?:model\.)?(?:language_model\.)?(?:model\.)?"  # of a language model, alone or beside a vision part
BLOCK = "midlayer.block."  # where the decoder layer is in the module
EXPERT = re.compile(rf"({re.escape(BLOCK)}mlp\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True, slots=True)
class Layout:
    """One way of naming, and what goes with it.

    prefix        of all tensors of the head, as a pattern; {layers}: the number of layers of the target
    parts         names behind the prefix -> the module's names
    states_first  the state comes before the embedding where the two are joined
    zeroes_first  the row at position 0 has no embedding
    max_draft_tokens  that the head was trained to draft in a row; None: any number
    """

    name: str
    prefix: str
    parts: Mapping[str, str]
    states_first: bool = False
    zeroes_first: bool = True
    max_draft_tokens: int | None = None

    def rest(self, name: str, num_layers: int) -> str | None:
        """The name behind the prefix; None: the tensor is not of the head."""
        match = re.match(rf"{ROOT}{self.prefix.format(layers=num_layers)}(.+)", name)
        return None if match is None else match[1]

    def module_name(self, rest: str) -> str | None:
        """What the module calls a tensor; None: it is not read."""
        if rest.startswith(COPIES):
            return None
        part = next((part for part in self.parts if rest.startswith(part)), None)
        return None if part is None else self.parts[part] + rest.removeprefix(part)

    def stored_name(self, name: str, num_layers: int) -> str:
        """What a checkpoint of this layout calls a tensor of the module."""
        longest = sorted(self.parts.items(), key=lambda item: -len(item[1]))
        part = next((part for part, own in longest if name.startswith(own)), "")
        stored = self.prefix.format(layers=num_layers).replace("\\", "")
        return ROOTS[self.name] + stored + part + name.removeprefix(self.parts.get(part, ""))


COPIES = ("embed_tokens.", "shared_head.head.", "lm_head.")
NORMS = {"enorm.": "enorm.", "hnorm.": "hnorm.", "shared_head.norm.": "norm.", "eh_proj.": "fc."}
QWEN = Layout(
    "qwen",
    r"mtp\.",
    {"fc.": "fc.", "pre_fc_norm_embedding.": "enorm.", "pre_fc_norm_hidden.": "hnorm.", "norm.": "norm.",
     "layers.0.": BLOCK},
    zeroes_first=False,
)  # fmt: skip
DEEPSEEK = Layout("deepseek", r"layers\.{layers}\.", {**NORMS, "": BLOCK})
MIMO = Layout(
    "mimo",
    r"mtp_layers\.0\.",
    {"token_layernorm.": "enorm.", "hidden_layernorm.": "hnorm.", "final_layernorm.": "norm.", "input_proj.": "fc.",
     "": BLOCK},
    states_first=True,
    max_draft_tokens=1,
)  # fmt: skip
ROOTS = {"qwen": "", "deepseek": "model.", "mimo": "model."}
LAYOUTS = (QWEN, MIMO, DEEPSEEK)
# Model types whose published heads have other names than Qwen's, which all others are given.
PUBLISHED = (("mimo", MIMO), ("deepseek", DEEPSEEK), ("glm4", DEEPSEEK), ("glm_", DEEPSEEK), ("exaone", DEEPSEEK))
MARK = "fc.weight"  # every head has one


@dataclass(frozen=True, slots=True)
class HeadNames:
    """The tensors of a head: the module's names -> the checkpoint's."""

    layout: Layout
    stored: Mapping[str, str]

    @property
    def has_experts(self) -> bool:
        """Whether the head's layer has a mixture of experts."""
        return any(name.startswith(f"{BLOCK}mlp.experts.") for name in self.stored)


def layout_for(model_type: str) -> Layout:
    """How a head that is made for a target of this type names its tensors."""
    return next((layout for start, layout in PUBLISHED if model_type.startswith(start)), QWEN)


def find_names(names: Iterable[str], num_layers: int) -> HeadNames | None:
    """The tensors of the MTP head among these; None: there is none. num_layers: of the target."""
    every = list(names)
    for layout in LAYOUTS:
        stored: dict[str, str] = {}
        for name in every:
            rest = layout.rest(name, num_layers)
            own = None if rest is None else layout.module_name(rest)
            if own is not None:
                stored[own] = name
        if MARK in stored:
            return HeadNames(layout, stored)
    return None
