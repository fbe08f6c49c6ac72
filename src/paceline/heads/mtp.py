"""MTP (NEXTN) heads: one further decoder layer of the target's own family, published inside the target's checkpoint.

    out = norm(layer(fc([norm(embedding of token t + 1) ; norm(state at t)])))      logits of token t + 2: lm_head(out)

States come after the target's final norm, and `out`, after the head's own, is the next state. Embedding and output head
are the target's. heads/mtp_names.py lists how families name the tensors.

A head of one module drafts any number of tokens, each from its own output. A head of several drafts one with each:

    out of module m at t = module m(embedding of token t + m + 1, out of module m - 1 at t)   logits of token t + m + 2

MiMo-V2's modules all read the target's state at t, where others read the module before.
Paper: DeepSeek-V3, https://arxiv.org/abs/2412.19437
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import OptionError, WeightsError
from paceline.heads.attention import JoinedKeys, KeyStore, KeyValues
from paceline.heads.checkpoint import Checkpoint, Provenance, converted, declared_kind, install, write_checkpoint
from paceline.heads.eagle import EagleConfig, LastStateHead
from paceline.heads.kv_cache import KeyBuffers
from paceline.heads.mtp_files import HeadTensors, read_head, single_experts, stacked_experts
from paceline.heads.mtp_layer import MtpLayer, RotaryTables, family_of, layer_config
from paceline.heads.mtp_names import LAYOUTS, QWEN, SPECULATORS, HeadNames, Layout, find_names, layout_for
from paceline.heads.registry import HeadSpec
from paceline.hub.documents import checked_config

BEFORE_FINAL_NORM = "mtp_reads_before_final_norm"  # of paceline's own: published configs never say it
ORIGINAL = "original"
# Families whose code is not in transformers, and the one whose layers they have.
LAYERS_OF = {"mimo": "qwen2"}


@dataclass(frozen=True, slots=True)
class MtpConfig(EagleConfig):
    """Sizes of an MTP head.

    layer     the Hugging Face config of its layer
    layout    how its checkpoint names tensors, and what goes with that
    document  the config.json of its target
    num_modules  of the head
    """

    layer: Any = field(default=None, compare=False)
    layout: Layout = QWEN
    document: Mapping[str, Any] = field(default_factory=dict)
    num_modules: int = 1

    @property
    def max_draft_tokens(self) -> int | None:
        """Tokens that the head was trained to draft in a row; None: any number."""
        return self.layout.max_draft_tokens if self.num_modules == 1 else self.num_modules


class FurtherModule(nn.Module):
    """A module after the first: a decoder layer, and norms and a product where it does not share the first one's."""

    def __init__(self, config: MtpConfig) -> None:
        super().__init__()
        self.midlayer = MtpLayer(config.layer)
        if not config.layout.shares:
            size, norm = config.hidden_size, family_of(config.layer).norm
            self.enorm, self.hnorm = norm(size, eps=config.rms_norm_eps), norm(size, eps=config.rms_norm_eps)
            self.fc = nn.Linear(2 * size, size, bias=False)
            self.norm = norm(size, eps=config.rms_norm_eps)


class MtpHead(LastStateHead):
    """One decoder layer between two norms and a third; some heads have further modules of that kind."""

    config: MtpConfig

    def __init__(self, config: MtpConfig) -> None:
        super().__init__(config)
        size, layer = config.hidden_size, config.layer
        norm = family_of(layer).norm
        self.enorm, self.hnorm = norm(size, eps=config.rms_norm_eps), norm(size, eps=config.rms_norm_eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.midlayer = MtpLayer(layer)
        self.norm = norm(size, eps=config.rms_norm_eps)
        self.further = nn.ModuleList(FurtherModule(config) for _ in range(config.num_modules - 1))
        self.max_draft_tokens, self.tokens_ahead = config.max_draft_tokens, config.num_modules
        # transformers' experts ask the device which of them have tokens; a graph holds passes of one module
        self.can_capture = config.num_modules == 1 and not _has_experts(self)

    @property
    def num_modules(self) -> int:
        return self.config.num_modules

    @property
    def like(self) -> Tensor:
        return self.norm.get_parameter("weight")

    @torch.inference_mode()
    def key_buffers(self) -> KeyBuffers:
        """Buffers for the keys of all modules side by side."""
        entries = self._stored_entries()
        _, heads, _, key_dim = entries.keys.shape
        return KeyBuffers(heads * self.num_modules, key_dim, self.like, value_dim=entries.values.shape[3])

    def _stored_entries(self) -> KeyValues:
        """What a pass over one row stores: sizes of latent attention are neither heads nor head_dim."""
        keys = JoinedKeys()
        row = torch.zeros_like(self.like).view(1, 1, -1)
        self.midlayer(row, torch.zeros(1, 1, dtype=torch.int64, device=row.device), None, keys)
        assert keys.entries is not None
        return keys.entries

    def block(
        self,
        embeddings: Tensor,
        g: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        store: KeyStore | None = None,
    ) -> Tensor:
        return self.module_pass(0, embeddings, g, positions, mask, store)

    def module_pass(
        self,
        index: int,
        embeddings: Tensor,
        g: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        store: KeyStore | None,
    ) -> Tensor:
        """A pass of one module, as `block` is one of the first. positions: of the states. store: of this module."""
        if index == 0 and self.config.layout.zeroes_first:
            embeddings = embeddings.masked_fill((positions == 0)[..., None], 0.0)
        own = self if index == 0 else self.further[index - 1]
        common = self if self.config.layout.shares else own
        parts = [common.enorm(embeddings), common.hnorm(g)]  # type: ignore[operator]
        joined = torch.cat(parts[::-1] if self.config.layout.states_first else parts, dim=-1)
        states = own.midlayer(common.fc(joined), positions, mask, store)  # type: ignore[operator]
        out: Tensor = common.norm(states)  # type: ignore[operator]
        return out


def _has_experts(head: nn.Module) -> bool:
    return any(".experts." in name for name, _ in head.named_parameters())


# --- reading ----------------------------------------------------------------------------------------------------------


def load_mtp(
    folder: str | Path, name: str, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> MtpHead:
    """The MTP head of a directory, which may be its target's own. Raises WeightsError in one line if there is none."""
    head = stored_mtp(folder, name, dtype=dtype)
    if head is None:
        raise WeightsError(
            f"{name} has no MTP head: its weights hold no mtp.* tensors and no layer behind its last one; "
            f"choose another method, or name a directory that holds the head (draft_model=..., --draft-model)"
        )
    return head.eval().to(device=device, dtype=dtype).requires_grad_(False)


def stored_mtp(folder: str | Path, name: str, *, dtype: torch.dtype = torch.float32) -> MtpHead | None:
    """The MTP head of a directory as it is stored; None: it holds none. dtype: of weights that are unpacked."""
    path = Path(folder)
    document = checked_config(path, name)
    config = hugging_face_config(target_document(document))
    with ExitStack() as stack:
        tensors = HeadTensors(path, stack, dtype, config)
        names = find_names(tensors.names(), _num_layers(config), layouts_of(document))
        return None if names is None else load(Checkpoint(path, document, read_head(tensors, names)))


def load_mtp_gguf(
    path: Path, target: str | Path, name: str, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> MtpHead:
    """The MTP head of a GGUF file. target: the directory of the model it was made for. Raises WeightsError."""
    from paceline.heads.mtp_gguf import read_mtp_gguf

    head = load(read_mtp_gguf(path, checked_config(Path(target), name)))
    return head.eval().to(device=device, dtype=dtype).requires_grad_(False)


def fresh_mtp(folder: str | Path, name: str) -> MtpHead:
    """A head without training for the target in a directory, shaped as its last layer. Raises WeightsError."""
    path = Path(folder)
    document = checked_config(path, name)
    config = hugging_face_config(document)
    with ExitStack() as stack:
        last = f"layers.{_num_layers(config) - 1}.mlp.experts."
        has_experts = any(last in name for name in HeadTensors(path, stack, torch.float32).names())
    layer = layer_config(config, has_experts=has_experts)
    head = MtpHead(mtp_config(layer, layout_for(str(document.get("model_type"))), document))
    _check_runs(head)
    return head


def _check_runs(head: MtpHead) -> None:
    """Raise WeightsError where the layers of a family need more than states, positions and keys."""
    row = torch.zeros(1, 1, head.config.hidden_size)
    try:
        with torch.no_grad():
            head.block(row, row, torch.zeros(1, 1, dtype=torch.int64), None, JoinedKeys())
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        kind = head.config.layer.model_type
        raise WeightsError(f"layers of model type {kind} cannot be an MTP head; train another kind, such as eagle: "
                           f"{str(error).splitlines()[0]}") from error  # fmt: skip


def target_document(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the target in the config.json of a head: speculators nests it."""
    nested: Mapping[str, Any] = document.get("transformer_layer_config") or document
    return nested


def layouts_of(document: Mapping[str, Any]) -> tuple[Layout, ...]:
    """The namings that a checkpoint with this config.json may have."""
    return (SPECULATORS,) if "speculators_model_type" in document else LAYOUTS


def hugging_face_config(document: Mapping[str, Any]) -> Any:
    """The config object of a config.json. Raises WeightsError for a family that transformers does not have."""
    from transformers import CONFIG_MAPPING

    model_type = str(document.get("model_type"))
    known = LAYERS_OF.get(model_type, model_type)
    if known not in CONFIG_MAPPING:
        raise WeightsError(f"transformers has no model type {model_type!r}, whose layers an MTP head would need")
    return CONFIG_MAPPING[known].from_dict({**document, "model_type": known})


def _num_layers(config: Any) -> int:
    return int(config.get_text_config(decoder=True).num_hidden_layers)


def matches(checkpoint: Checkpoint) -> bool:
    """Tensors that only MTP heads have, or a config that names it."""
    return declared_kind(checkpoint) in (None, SPEC.name) and _names_in(checkpoint) is not None


def _names_in(checkpoint: Checkpoint) -> HeadNames | None:
    document = target_document(checkpoint.config)
    layers = (document.get("text_config") or document).get("num_hidden_layers")
    layouts = layouts_of(checkpoint.config)
    return find_names(checkpoint.tensors, layers, layouts) if isinstance(layers, int) else None


def load(checkpoint: Checkpoint) -> MtpHead:
    """The head of a checkpoint. Raises WeightsError naming the tensor that does not fit."""
    names = _names_in(checkpoint)
    if names is None:
        raise WeightsError(f"{checkpoint.folder} holds no MTP head")
    tensors = stacked_experts({own: checkpoint.tensors[name] for own, name in names.stored.items()})
    document = target_document(checkpoint.config)
    layer = layer_config(hugging_face_config(document), has_experts=names.has_experts)
    config = mtp_config(layer, names.layout, document, names.num_modules)
    with torch.device("meta"):  # its weights are those of the checkpoint; a head may have billions of them
        head = MtpHead(config)
    for layer_of_module in (module for module in head.modules() if isinstance(module, MtpLayer)):
        layer_of_module.tables = RotaryTables(config.layer)
    own = Checkpoint(checkpoint.folder, {}, tensors, lambda name: names.stored.get(name, name))
    install(head, own, assign=True)
    return head


def mtp_config(layer: Any, layout: Layout, document: Mapping[str, Any], num_modules: int = 1) -> MtpConfig:
    """Sizes of a head whose layer has this config."""
    heads = layer.num_attention_heads
    return MtpConfig(
        hidden_size=layer.hidden_size,
        intermediate_size=int(layer.to_dict().get("intermediate_size") or 0),  # none where every layer has experts
        num_heads=heads,
        num_kv_heads=layer.num_key_value_heads or heads,
        head_dim=int(layer.to_dict().get("head_dim") or layer.hidden_size // heads),
        vocab_size=layer.vocab_size,
        draft_vocab_size=layer.vocab_size,
        target_hidden_size=layer.hidden_size,
        max_seq_len=layer.max_position_embeddings,
        rms_norm_eps=layer.rms_norm_eps,
        before_final_norm=bool(document.get(BEFORE_FINAL_NORM)),
        layer=layer,
        layout=layout,
        document=document,
        num_modules=num_modules,
    )


# --- writing ----------------------------------------------------------------------------------------------------------


def save(head: MtpHead, folder: str | Path, *, layout: str, provenance: Provenance, dtype: torch.dtype | None) -> None:
    """Write a head under the names of its family, with the config of its target: a directory of its own.

    Raises OptionError for a head that speculators' layout cannot describe.
    """
    if layout == SPECULATORS.name:
        _check_speculators(head.config)
        config = speculators_config(head.config.document, provenance, dtype or head.like.dtype)
        write_checkpoint(folder, config, named_tensors(head, SPECULATORS, dtype))
    else:
        document = {**head.config.document, **({BEFORE_FINAL_NORM: True} if head.config.before_final_norm else {})}
        write_checkpoint(folder, document, named_tensors(head, family_layout(head.config), dtype))


def family_layout(config: MtpConfig) -> Layout:
    """The names of the target's family: a file of speculators does not say them."""
    return config.layout if config.layout is not SPECULATORS else layout_for(str(config.document.get("model_type")))


def named_tensors(head: MtpHead, layout: Layout, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The tensors of a head as checkpoints of a layout hold them."""
    num_layers = _num_layers(hugging_face_config(head.config.document))
    tensors = single_experts(head.state_dict())
    return {layout.stored_name(name, num_layers): converted(value, dtype) for name, value in tensors.items()}


def _check_speculators(config: MtpConfig) -> None:
    """speculators joins [embedding; state], zeroes nothing, and has one module."""
    if config.num_modules > 1 or config.layout.states_first or config.layout.zeroes_first or config.before_final_norm:
        raise OptionError(
            "the layout speculators has no word for how this MTP head reads its inputs; write the layout original"
        )


def speculators_config(document: Mapping[str, Any], provenance: Provenance, dtype: torch.dtype) -> dict[str, Any]:
    """The config of a head in the speculators layout."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": provenance.num_draft_tokens,
                "verifier_accept_k": 1, "accept_tolerance": 0.0}  # fmt: skip
    return {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "num_nextn_predict_layers": 1,
        "transformer_layer_config": dict(document.get("text_config") or document),
        "torch_dtype": str(dtype).removeprefix("torch."),
        "speculators_config": {
            "algorithm": "mtp",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": provenance.target, "architectures": list(provenance.architectures)},
        },
    }


SPEC = HeadSpec("mtp", MtpHead, matches, load, save, (ORIGINAL, SPECULATORS.name))
