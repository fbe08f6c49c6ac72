"""Files of DFlash heads: z-lab's layout, speculators', SpecForge's and DeepSpec's DSpark, Meta's names.

They name the same tensors and disagree about what a config says:

layers    z-lab's target_layer_ids are layers whose OUTPUT is read; speculators' aux_hidden_state_layer_ids are layers
          whose INPUT is read, so they are larger by one, as ours are
block     block_size at the top level, or, in newer files, inside dflash_config
rows      a config that does not say sample_from_anchor means True for DSpark, False for DFlash
causality is_causal, else dflash_config.causal, else causal on sliding layers only; speculators says
          sliding_window_non_causal instead, which its DFlash 2 sets by default
windows   speculators trains with windows measured from the anchor, z-lab and vLLM run them from each row: the first
          columns of a window differ, and ours are those of z-lab and vLLM

Sizes are read from the tensors. A wrong reading still runs and only lowers acceptance; what is missing is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.errors import OptionError, WeightsError
from paceline.heads.block_attention import FULL, SLIDING
from paceline.heads.checkpoint import Checkpoint, declared_kind, install, number, plain_name, tensor_named
from paceline.heads.dflash import DFlashConfig, DFlashHead, usual_target_layers
from paceline.heads.dflash_writer import ORIGINAL, SPECULATORS, save
from paceline.heads.eagle_files import NOT_NEEDED
from paceline.heads.registry import HeadSpec
from paceline.heads.rope_options import rope_options

KINDS = ("dflash", "dflash2", "dspark", "jetspec")  # as speculators names them
ARCHITECTURES = ("DFlash", "DSpark")  # what published class names contain
FIRST = "layers.0."
SELECTOR = "candidate_selector."
CODEBOOKS = (f"{SELECTOR}predecessor_codebook", f"{SELECTOR}successor_codebook")
MARKOV = "markov_head."
MASK_EMBEDDING = "mask_embedding"
MASK_EMBEDDING_FILE = "mask_embedding.pt"
USUAL_BLOCK = 16
OTHER_NAMES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}


def matches(checkpoint: Checkpoint) -> bool:
    """A config that names the kind, or the tensors only these heads have together."""
    declared = declared_kind(checkpoint)
    if declared is not None:
        return declared in KINDS
    classes = "".join(map(str, checkpoint.config.get("architectures") or ()))
    names = set(map(_module_name, checkpoint.tensors))
    own = {"hidden_norm.weight", "fc.weight", f"{FIRST}self_attn.q_norm.weight"}
    return any(name in classes for name in ARCHITECTURES) or own <= names


def load(checkpoint: Checkpoint) -> DFlashHead:
    """The head of a checkpoint. Raises WeightsError naming the tensor or the config key that does not fit."""
    named, keys = _renamed(checkpoint), ConfigKeys.of(checkpoint)
    try:
        head = DFlashHead(_config_of(named, keys))
    except OptionError as error:
        raise WeightsError(f"{checkpoint.folder}: {error}") from error
    _order_features(named, keys)
    _fit_vocabulary(named, head.config)
    install(head, named)
    _check_vocabulary(head, checkpoint)
    return head


def config_of(checkpoint: Checkpoint) -> DFlashConfig:
    """What the files say of the head, without loading it. Raises WeightsError or OptionError."""
    return _config_of(_renamed(checkpoint), ConfigKeys.of(checkpoint))


# --- names ------------------------------------------------------------------------------------------------------------


def _module_name(name: str) -> str:
    name = plain_name(name)
    for other, ours in OTHER_NAMES.items():
        name = ours + name.removeprefix(other) if name.startswith(other) else name
    return name.removesuffix(".weight") if name.removesuffix(".weight") in CODEBOOKS else name


def _renamed(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the names of our modules; errors still name what the file has."""
    file_names = {_module_name(name): name for name in checkpoint.tensors if not name.endswith(NOT_NEEDED)}
    tensors = {ours: checkpoint.tensors[name] for ours, name in file_names.items()}
    beside = _mask_embedding(checkpoint)
    if beside is not None:
        tensors[MASK_EMBEDDING] = beside
    biased = [name for name in tensors if name.endswith("q_proj.bias")]
    for name in biased:  # some files have biases on three of the four products
        output = name.replace("q_proj.bias", "o_proj")
        if f"{output}.bias" not in tensors and f"{output}.weight" in tensors:
            tensors[f"{output}.bias"] = torch.zeros(tensors[f"{output}.weight"].shape[0])
    return Checkpoint(checkpoint.folder, checkpoint.config, tensors, lambda name: file_names.get(name, name))


def _mask_embedding(checkpoint: Checkpoint) -> Tensor | None:
    """The vector of the mask token, where it lies in a file of its own."""
    path = checkpoint.folder / MASK_EMBEDDING_FILE
    if MASK_EMBEDDING in checkpoint.tensors or not path.is_file():
        return None
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and torch each raise types of their own
        raise WeightsError(f"{path} is damaged, or would run code when opened and is refused ({error})") from error
    values = stored.values() if isinstance(stored, dict) else [stored]
    vectors = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    if len(vectors) != 1:  # beside it some files have the id of the token
        raise WeightsError(f"{path} does not hold one vector")
    return vectors[0].reshape(-1)


# --- the config -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConfigKeys:
    """Where the keys of a config lie: at the top level, in dflash_config or in transformer_layer_config."""

    top: Mapping[str, Any]
    nested: Mapping[str, Any]
    layer: Mapping[str, Any]
    kind: str  # one of KINDS

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> ConfigKeys:
        top = checkpoint.config
        nested = top.get("dflash_config") or {}
        return cls(top, nested, top.get("transformer_layer_config") or top, _kind(top, nested))

    def get(self, key: str, default: Any = None) -> Any:
        """A key of the head: nested, else at the top level."""
        value = self.nested.get(key)
        return self.top.get(key, default) if value is None else value

    @property
    def is_speculators(self) -> bool:
        return "speculators_model_type" in self.top


def _kind(top: Mapping[str, Any], nested: Mapping[str, Any]) -> str:
    declared = str(top.get("speculators_model_type") or nested.get("projector_type") or "")
    if declared in KINDS:
        return declared
    classes = "".join(map(str, top.get("architectures") or ()))
    return "dspark" if "DSpark" in classes else "dflash2" if "DFlash2" in classes else "dflash"


def _config_of(named: Checkpoint, keys: ConfigKeys) -> DFlashConfig:
    layers = _feature_layers(named, keys)
    joined = tensor_named(named, "fc.weight").shape[1]
    if joined % len(layers):
        raise WeightsError(
            f"{named.folder}: {named.file_name('fc.weight')} reads {joined} values, which the states of "
            f"{len(layers)} layers cannot fill evenly"
        )
    vocab_size = _vocab_size(named, keys)
    return DFlashConfig(
        **_layer_sizes(named),
        **_layer_options(named, keys),
        **_output_options(named, keys),
        vocab_size=vocab_size,
        draft_vocab_size=_draft_vocab_size(named, vocab_size),
        target_hidden_size=joined // len(layers),
        feature_layers=tuple(sorted(layers)),
        block_size=int(keys.get("block_size", USUAL_BLOCK)),
        mask_token_id=_mask_token_id(named, keys),
        causal=_causal(keys),
        sample_from_anchor=_sample_from_anchor(keys),
    )


def _feature_layers(named: Checkpoint, keys: ConfigKeys) -> tuple[int, ...]:
    """Layers whose entering states are read, in the order of the file."""
    entering = keys.get("aux_hidden_state_layer_ids")
    if keys.is_speculators and entering:
        return tuple(map(int, entering))
    outputs = keys.get("target_layer_ids")
    if not outputs:
        count = keys.get("num_target_layers")
        if count is None:
            raise WeightsError(f"{named.folder}: config.json says neither target_layer_ids nor num_target_layers")
        outputs = usual_target_layers(_num_layers(named), int(count))
    return tuple(int(layer) + 1 for layer in outputs)


def _order_features(named: Checkpoint, keys: ConfigKeys) -> None:
    """Put the columns of fc into the order in which a target joins its states: low to high."""
    layers = _feature_layers(named, keys)
    order = sorted(range(len(layers)), key=lambda index: layers[index])
    if order != list(range(len(layers))):
        parts = named.tensors["fc.weight"].chunk(len(layers), dim=1)
        named.tensors["fc.weight"] = torch.cat([parts[index] for index in order], dim=1)


def _num_layers(named: Checkpoint) -> int:
    return len({name.split(".")[1] for name in named.tensors if name.startswith("layers.")})


def _layer_sizes(named: Checkpoint) -> dict[str, Any]:
    head_dim = tensor_named(named, f"{FIRST}self_attn.q_norm.weight").shape[0]
    q_rows = tensor_named(named, f"{FIRST}self_attn.q_proj.weight").shape[0]
    k_rows = tensor_named(named, f"{FIRST}self_attn.k_proj.weight").shape[0]
    if q_rows % head_dim or k_rows % head_dim:
        raise WeightsError(f"{named.folder}: q_proj's {q_rows} and k_proj's {k_rows} rows are not heads of {head_dim}")
    return {
        "hidden_size": tensor_named(named, "norm.weight").shape[0],
        "intermediate_size": tensor_named(named, f"{FIRST}mlp.gate_proj.weight").shape[0],
        "num_layers": _num_layers(named),
        "num_heads": q_rows // head_dim,
        "num_kv_heads": k_rows // head_dim,
        "head_dim": head_dim,
    }


def _layer_options(named: Checkpoint, keys: ConfigKeys) -> dict[str, Any]:
    layer, tensors = keys.layer, named.tensors
    return {
        **rope_options(layer, named.folder),
        "max_seq_len": int(number(layer, "max_position_embeddings", 2048)),
        "rms_norm_eps": number(layer, "rms_norm_eps", 1e-6),
        "attention_bias": f"{FIRST}self_attn.q_proj.bias" in tensors,
        "attention_sinks": f"{FIRST}self_attn.attention_sink_bias" in tensors,
        **_window_options(keys, _num_layers(named)),
        **_convolution_options(named),
    }


def _window_options(keys: ConfigKeys, num_layers: int) -> dict[str, Any]:
    """The kinds of the layers and the window of the sliding ones; nothing where all are full."""
    if keys.get("use_swa"):
        window = int(number(keys.nested, "swa_window_size", 0))
        return {"layer_types": (SLIDING,) * num_layers, "sliding_window": window}
    types = tuple(map(str, keys.layer.get("layer_types") or ()))
    if SLIDING not in types:
        return {}
    known = tuple(kind if kind == SLIDING else FULL for kind in types)
    window = int(number(keys.layer, "sliding_window", 0))
    if _causal(keys) and window > number(keys.layer, "max_position_embeddings", window):
        return {}  # a causal head as speculators has it: the window holds any sequence
    return {"layer_types": known, "sliding_window": window}


def _convolution_options(named: Checkpoint) -> dict[str, Any]:
    base = named.tensors.get(f"{FIRST}attention_conv.base_kernel")
    if base is None:
        return {}
    rows = tensor_named(named, f"{FIRST}attention_conv.kernel_projection.weight").shape[0]
    sides, taps, channels = base.shape
    return {"conv_kernel_size": taps, "conv_group_size": max(1, sides * taps * channels // max(1, rows))}


def _output_options(named: Checkpoint, keys: ConfigKeys) -> dict[str, Any]:
    tensors = named.tensors
    selector, markov = tensors.get(CODEBOOKS[0]), tensors.get(f"{MARKOV}markov_w1.weight")
    confidence = tensors.get("confidence_head.proj.weight")
    hidden_size = tensor_named(named, "norm.weight").shape[0]
    gated, recurrent = f"{MARKOV}gate_proj.weight" in tensors, f"{MARKOV}joint_proj.weight" in tensors
    return {
        "selector_rank": 0 if selector is None else selector.shape[1],
        "selector_top_k": int(keys.get("selector_top_k", 16)),
        "markov_rank": 0 if markov is None else markov.shape[1],
        "markov_kind": "gated" if gated else "rnn" if recurrent else "vanilla",
        "confidence_head": confidence is not None,
        "confidence_reads_markov": confidence is not None and confidence.shape[-1] > hidden_size,
        "own_embeddings": "embed_tokens.weight" in tensors,
        "own_lm_head": "lm_head.weight" in tensors,
        "own_mask_embedding": MASK_EMBEDDING in tensors,
        "input_embedding_scale": float(keys.get("input_embedding_scale", 1.0)),
        "output_multiplier": float(keys.get("output_multiplier", keys.get("logit_scale", 1.0))),
        "logit_softcap": float(keys.get("final_logit_softcapping") or 0.0),
    }


def _mask_token_id(named: Checkpoint, keys: ConfigKeys) -> int:
    mask = keys.get("mask_token_id")
    if mask is None:
        raise WeightsError(f"{named.folder}: config.json has no mask_token_id, neither at its top level nor inside")
    return int(mask)


def _causal(keys: ConfigKeys) -> bool | None:
    for source, key in ((keys.top, "is_causal"), (keys.nested, "causal"), (keys.nested, "causal_head")):
        if source.get(key) is not None:
            return bool(source[key])
    if keys.kind == "jetspec":
        return True
    non_causal = keys.top.get("sliding_window_non_causal", keys.is_speculators and keys.kind == "dflash2")
    return False if non_causal and SLIDING in (keys.layer.get("layer_types") or ()) else None


def _sample_from_anchor(keys: ConfigKeys) -> bool:
    chosen = keys.get("sample_from_anchor", keys.get("shift_label"))
    return keys.kind == "dspark" if chosen is None else bool(chosen)


# --- the vocabulary ---------------------------------------------------------------------------------------------------


def _vocab_size(named: Checkpoint, keys: ConfigKeys) -> int:
    """Tokens of the target, from the tensors where they tell."""
    for name in ("t2d", "embed_tokens.weight", CODEBOOKS[0], f"{MARKOV}markov_w1.weight"):
        if name in named.tensors:
            return named.tensors[name].shape[0]
    vocab_size = keys.layer.get("vocab_size")
    if vocab_size is None:
        raise WeightsError(f"{named.folder}: config.json has no vocab_size, and no tensor tells it")
    return int(vocab_size)


def _draft_vocab_size(named: Checkpoint, vocab_size: int) -> int:
    for name in ("d2t", "lm_head.weight"):
        if name in named.tensors:
            return named.tensors[name].shape[0]
    return vocab_size


def _fit_vocabulary(named: Checkpoint, config: DFlashConfig) -> None:
    """Maps and tables of tokens as the head holds them: none for a whole vocabulary, of the draft's tokens else."""
    tensors = named.tensors
    if not config.is_reduced:
        if "d2t" in tensors and bool(tensors["d2t"].any()):
            raise WeightsError(f"{named.folder}: d2t moves tokens of a head that predicts the whole vocabulary")
        tensors.pop("d2t", None)
        tensors.pop("t2d", None)
        return
    ids = tensor_named(named, "d2t") + torch.arange(config.draft_vocab_size)
    inside = (ids >= 0) & (ids < config.vocab_size)
    if "t2d" not in tensors:
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
        tensors["t2d"][ids[inside]] = True
    for name in (CODEBOOKS[1], f"{MARKOV}markov_w2.weight"):
        if name in tensors and tensors[name].shape[0] == config.vocab_size and bool(inside.all()):
            tensors[name] = tensors[name][ids]


def _check_vocabulary(head: DFlashHead, checkpoint: Checkpoint) -> None:
    config, ids = head.config, head.target_ids
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        raise WeightsError(
            f"{checkpoint.folder}: d2t points outside the {config.vocab_size} tokens of the target; "
            f"it should hold offsets (target id = i + d2t[i])"
        )
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise WeightsError(
            f"{checkpoint.folder}: mask_token_id is {config.mask_token_id}; the target has {config.vocab_size} tokens"
        )


SPEC = HeadSpec("dflash", DFlashHead, matches, load, save, (ORIGINAL, SPECULATORS))
