"""What checkpoints call the tensors of an MTP head, and what its module calls them.

    Qwen3-Next, Qwen3.5    mtp.fc, mtp.pre_fc_norm_{embedding,hidden}, mtp.layers.I.*, mtp.norm
    DeepSeek-V3, GLM-4.5   model.layers.L.{eh_proj,enorm,hnorm,shared_head.norm} beside one decoder layer; L: the number
                           of layers of the target, and further ones for further modules
    MiMo-7B                model.mtp_layers.I.{input_proj,token_layernorm,hidden_layernorm,final_layernorm} likewise
    MiMo-V2                model.mtp.layers.I.{eh_proj,enorm,hnorm,final_layernorm} likewise
    speculators            mtp_layers.I.*, as MiMo names them, in a directory of the head alone

I counts the modules of the head; most have one. Copies of the target's embedding and output head, which some
checkpoints hold, are not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

ROOT = r"(?:model\.)?(?:language_model\.)?(?:model\.)?"  # of a language model, alone or beside a vision part
BLOCK = "midlayer.block."  # where the decoder layer is in a module
FURTHER = "further."  # where modules after the first are: further.0. is the second
MODULE = re.compile(rf"(?:{re.escape(FURTHER)}(\d+)\.)?(.+)")
EXPERT = re.compile(r"((?:further\.\d+\.)?midlayer\.block\.mlp\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True, slots=True)
class Layout:
    """One way of naming, and what goes with it.

    pattern       of what stands before the names below; the group `index` counts modules
    prefix        the same to write, for parts of the decoder layer; outer for the others
    parts         names behind the prefix -> the module's names
    shares        modules after the first have nothing of their own but the decoder layer
    chains        modules after the first read what the one before made; otherwise the target's states too
    counts_on     the first module has the number of the target's layers as its index, not 0
    states_first  the state comes before the embedding where the two are joined
    zeroes_first  the row at position 0 has no embedding
    max_draft_tokens  that the head was trained to draft in a row; None: any number
    """

    name: str
    pattern: str
    prefix: str
    outer: str
    parts: Mapping[str, str]
    shares: bool = False
    chains: bool = True
    counts_on: bool = False
    states_first: bool = False
    zeroes_first: bool = True
    max_draft_tokens: int | None = None

    def module_name(self, name: str, num_layers: int) -> str | None:
        """What the module calls a tensor; None: the tensor is not of the head, or is not read."""
        match = re.match(rf"{ROOT}{self.pattern}(?P<rest>.+)", name)
        if match is None or match["rest"].startswith(COPIES):
            return None
        index = int(match["index"] or 0) - (num_layers if self.counts_on else 0)
        part = next((part for part in self.parts if match["rest"].startswith(part)), None)
        if index < 0 or part is None:
            return None
        own = self.parts[part] + match["rest"].removeprefix(part)
        return own if index == 0 else f"{FURTHER}{index - 1}.{own}"

    def stored_name(self, name: str, num_layers: int) -> str:
        """What a checkpoint of this layout calls a tensor of the module."""
        match = MODULE.fullmatch(name)
        assert match is not None
        index = (0 if match[1] is None else int(match[1]) + 1) + (num_layers if self.counts_on else 0)
        longest = sorted(self.parts.items(), key=lambda item: -len(item[1]))
        part, own = next((part, own) for part, own in longest if match[2].startswith(own))
        prefix = self.prefix if own == BLOCK else self.outer
        return prefix.format(index=index) + part + match[2].removeprefix(own)


COPIES = ("embed_tokens.", "shared_head.head.", "lm_head.")
DEEPSEEK_PARTS = {"enorm.": "enorm.", "hnorm.": "hnorm.", "shared_head.norm.": "norm.", "eh_proj.": "fc.", "": BLOCK}
MIMO_PARTS = {
    "token_layernorm.": "enorm.", "hidden_layernorm.": "hnorm.", "final_layernorm.": "norm.", "input_proj.": "fc.",
    "": BLOCK,
}  # fmt: skip
QWEN = Layout(
    "qwen",
    r"mtp\.(?:layers\.(?P<index>\d+)\.)?",
    "mtp.layers.{index}.",
    "mtp.",
    {"fc.": "fc.", "pre_fc_norm_embedding.": "enorm.", "pre_fc_norm_hidden.": "hnorm.", "norm.": "norm.", "": BLOCK},
    shares=True,
    zeroes_first=False,
)
DEEPSEEK = Layout(
    "deepseek",
    r"layers\.(?P<index>\d+)\.",
    "model.layers.{index}.",
    "model.layers.{index}.",
    DEEPSEEK_PARTS,
    counts_on=True,
)
MIMO = Layout(
    "mimo",
    r"mtp_layers\.(?P<index>\d+)\.",
    "model.mtp_layers.{index}.",
    "model.mtp_layers.{index}.",
    MIMO_PARTS,
    states_first=True,
    max_draft_tokens=1,
)
# SGLang and llm-compressor give every module the target's states, at unchanged positions.
MIMO_V2 = Layout(
    "mimo_v2",
    r"mtp\.layers\.(?P<index>\d+)\.",
    "model.mtp.layers.{index}.",
    "model.mtp.layers.{index}.",
    {
        "enorm.": "enorm.", "hnorm.": "hnorm.", "final_layernorm.": "norm.", "eh_proj.": "fc.",
        "pre_mlp_layernorm.": f"{BLOCK}post_attention_layernorm.",
        "self_attn.attention_sink_bias": f"{BLOCK}self_attn.sinks",
        "": BLOCK,
    },
    chains=False,
    zeroes_first=False,
)  # fmt: skip
SPECULATORS = Layout(
    "speculators",
    r"mtp_layers\.(?P<index>\d+)\.",
    "mtp_layers.{index}.",
    "mtp_layers.{index}.",
    MIMO_PARTS,
    zeroes_first=False,
)
LAYOUTS = (QWEN, MIMO, MIMO_V2, DEEPSEEK)
# Model types whose published heads have other names than Qwen's, which all others are given.
PUBLISHED = (
    ("mimo_v2", MIMO_V2), ("mimo", MIMO), ("deepseek", DEEPSEEK), ("glm4", DEEPSEEK), ("glm_", DEEPSEEK),
    ("exaone", DEEPSEEK),
)  # fmt: skip
MARK = "fc.weight"  # every head has one


@dataclass(frozen=True, slots=True)
class HeadNames:
    """The tensors of a head: the module's names -> the checkpoint's."""

    layout: Layout
    stored: Mapping[str, str]

    @property
    def has_experts(self) -> bool:
        """Whether the head's layers have a mixture of experts."""
        return any(f"{BLOCK}mlp.experts." in name for name in self.stored)

    @property
    def num_modules(self) -> int:
        """How many modules the head has, one for each token it drafts; one module may draft any number."""
        matches = (MODULE.fullmatch(name) for name in self.stored)
        return 1 + max(0 if match is None or match[1] is None else int(match[1]) + 1 for match in matches)


def layout_for(model_type: str) -> Layout:
    """How a head that is made for a target of this type names its tensors."""
    return next((layout for start, layout in PUBLISHED if model_type.startswith(start)), QWEN)


def find_names(names: Iterable[str], num_layers: int, layouts: Iterable[Layout] = LAYOUTS) -> HeadNames | None:
    """The tensors of the MTP head among these; None: there is none. num_layers: of the target."""
    every = list(names)
    for layout in layouts:
        stored: dict[str, str] = {}
        for name in every:
            own = layout.module_name(name, num_layers)
            if own is not None:
                stored[own] = name
        if MARK in stored:
            return HeadNames(layout, stored)
    return None
