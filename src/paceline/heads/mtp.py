"""MTP (NEXTN) heads: one further decoder layer of the target's own family, published inside the target's checkpoint.

    out = norm(layer(fc([norm(embedding of token t + 1) ; norm(state at t)])))      logits of token t + 2: lm_head(out)

States come after the target's final norm, and `out`, after the head's own, is the next state. Embedding and output head
are the target's. heads/mtp_names.py lists how families name the tensors.
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

from paceline.errors import WeightsError
from paceline.heads.attention import JoinedKeys, KeyStore
from paceline.heads.checkpoint import Checkpoint, Provenance, converted, declared_kind, install, write_checkpoint
from paceline.heads.eagle import EagleConfig, LastStateHead
from paceline.heads.kv_cache import KeyBuffers
from paceline.heads.mtp_files import HeadTensors, read_head, single_experts, stacked_experts
from paceline.heads.mtp_layer import MtpLayer, RotaryTables, family_of, layer_config
from paceline.heads.mtp_names import QWEN, HeadNames, Layout, find_names, layout_for
from paceline.heads.registry import HeadSpec
from paceline.hub.documents import checked_config

BEFORE_FINAL_NORM = "mtp_reads_before_final_norm"  # of paceline's own: published configs never say it
# Families whose code is not in transformers, and the one whose layers they have.
LAYERS_OF = {"mimo": "qwen2"}


@dataclass(frozen=True, slots=True)
class MtpConfig(EagleConfig):
    """Sizes of an MTP head.

    layer     the Hugging Face config of its layer
    layout    how its checkpoint names tensors, and what goes with that
    document  the config.json of its checkpoint
    """

    layer: Any = field(default=None, compare=False)
    layout: Layout = QWEN
    document: Mapping[str, Any] = field(default_factory=dict)


class MtpHead(LastStateHead):
    """One decoder layer between two norms and a third."""

    config: MtpConfig

    def __init__(self, config: MtpConfig) -> None:
        super().__init__(config)
        size, layer = config.hidden_size, config.layer
        norm = family_of(layer).norm
        self.enorm, self.hnorm = norm(size, eps=config.rms_norm_eps), norm(size, eps=config.rms_norm_eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.midlayer = MtpLayer(layer)
        self.norm = norm(size, eps=config.rms_norm_eps)
        self.num_modules = 1
        self.max_draft_tokens = config.layout.max_draft_tokens
        self.can_capture = not _has_experts(self)  # transformers' experts ask the device which of them have tokens

    @property
    def like(self) -> Tensor:
        return self.norm.get_parameter("weight")

    @torch.inference_mode()
    def key_buffers(self) -> KeyBuffers:
        """Buffers of the sizes that a pass stores: those of latent attention are neither heads nor head_dim."""
        keys = JoinedKeys()
        row = torch.zeros_like(self.like).view(1, 1, -1)
        self.midlayer(row, torch.zeros(1, 1, dtype=torch.int64, device=row.device), None, keys)
        assert keys.entries is not None
        _, heads, _, key_dim = keys.entries.keys.shape
        return KeyBuffers(heads, key_dim, self.like, value_dim=keys.entries.values.shape[3])

    def block(
        self,
        embeddings: Tensor,
        g: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        store: KeyStore | None = None,
    ) -> Tensor:
        layout = self.config.layout
        if layout.zeroes_first:
            embeddings = embeddings.masked_fill((positions == 0)[..., None], 0.0)
        parts = [self.enorm(embeddings), self.hnorm(g)]
        mixed = self.fc(torch.cat(parts[::-1] if layout.states_first else parts, dim=-1))
        out: Tensor = self.norm(self.midlayer(mixed, positions, mask, store))
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
    config = hugging_face_config(document)
    with ExitStack() as stack:
        tensors = HeadTensors(path, stack, dtype, config)
        names = find_names(tensors.names(), _num_layers(config))
        return None if names is None else load(Checkpoint(path, document, read_head(tensors, names)))


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
    """Tensors that only MTP heads have."""
    return declared_kind(checkpoint) is None and _names_in(checkpoint) is not None


def _names_in(checkpoint: Checkpoint) -> HeadNames | None:
    text = checkpoint.config.get("text_config") or checkpoint.config
    layers = text.get("num_hidden_layers")
    return find_names(checkpoint.tensors, layers) if isinstance(layers, int) else None


def load(checkpoint: Checkpoint) -> MtpHead:
    """The head of a checkpoint. Raises WeightsError naming the tensor that does not fit."""
    names = _names_in(checkpoint)
    if names is None:
        raise WeightsError(f"{checkpoint.folder} holds no MTP head")
    tensors = stacked_experts({own: checkpoint.tensors[name] for own, name in names.stored.items()})
    source = hugging_face_config(checkpoint.config)
    config = mtp_config(layer_config(source, has_experts=names.has_experts), names.layout, checkpoint.config)
    with torch.device("meta"):  # its weights are those of the checkpoint; a head may have billions of them
        head = MtpHead(config)
    head.midlayer.tables = RotaryTables(family_of(config.layer).rotary(config.layer))
    own = Checkpoint(checkpoint.folder, {}, tensors, lambda name: names.stored.get(name, name))
    install(head, own, assign=True)
    return head


def mtp_config(layer: Any, layout: Layout, document: Mapping[str, Any]) -> MtpConfig:
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
    )


# --- writing ----------------------------------------------------------------------------------------------------------


def save(head: MtpHead, folder: str | Path, *, layout: str, provenance: Provenance, dtype: torch.dtype | None) -> None:
    """Write a head under the names of its family, with the config of its target: a directory of its own."""
    write_checkpoint(folder, head.config.document, published_tensors(head, dtype))


def published_tensors(head: MtpHead, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The tensors of a head as checkpoints of its family hold them."""
    num_layers = _num_layers(hugging_face_config(head.config.document))
    stored_name = head.config.layout.stored_name
    tensors = single_experts(head.state_dict())
    return {stored_name(name, num_layers): converted(value, dtype) for name, value in tensors.items()}


SPEC = HeadSpec("mtp", MtpHead, matches, load, save)
