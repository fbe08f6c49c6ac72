"""What a model's `config.json` says about its size: `ModelShape`, and every weight it must therefore hold.

One route for all: the catalogue, a directory, a Hub id and a GGUF header all end in a config dictionary with the keys
of Hugging Face, and `shape_from_config` turns that into a `ModelShape`. Families differ in few ways (biases, norms,
whether the MLP is gated), so a family is a row of `FAMILIES`, not a class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from paceline.errors import OptionError

Config = Mapping[str, Any]


class Role(Enum):
    """Where a weight stands; quantisation schemes treat these places differently."""

    EMBEDDING = "embedding"
    HEAD = "head"
    VALUE = "attention value"
    OUT = "attention output"
    ATTENTION = "attention query and key"
    DOWN = "mlp down"
    MLP = "mlp up and gate"
    SMALL = "norms, biases, routers"
    OTHER = "outside the decoder"


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """Weights of one role: how many in all, how many of them one token uses, and the length of a row.

    `row` is the matrix's inner dimension; block-wise quantisation needs it to be a multiple of the block.
    """

    role: Role
    count: int
    used: int
    row: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """All the numbers planning needs of one model. `experts` is 0 for a dense model."""

    name: str
    family: str
    layers: int
    width: int
    vocab: int
    heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    mlp_matrices: int
    tied: bool
    context: int
    experts: int = 0
    experts_used: int = 0
    small_per_layer: int = 0
    small_outside: int = 0
    positions: int = 0
    other_parameters: int = 0
    window: int | None = None
    tokenizer: str | None = None
    stored_precision: str | None = None
    stored_bytes: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def groups(self) -> tuple[WeightGroup, ...]:
        """Every weight of the model, by role."""
        return (*self._outer_groups(), *self._attention_groups(), *self._mlp_groups())

    @property
    def parameters(self) -> int:
        return sum(group.count for group in self.groups)

    @property
    def parameters_per_token(self) -> int:
        """The weights multiplied for one token: less than all of them in a mixture of experts."""
        return sum(group.used for group in self.groups)

    @property
    def kv_values_per_token(self) -> int:
        """Numbers the cache keeps for one token of one text, over all layers."""
        return 2 * self.layers * self.num_kv_heads * self.head_dim

    def _outer_groups(self) -> tuple[WeightGroup, ...]:
        table = self.vocab * self.width
        positions = self.positions * self.width
        small = self.layers * self.small_per_layer + self.small_outside
        # A tied table is read whole as the head; an untied one only at the rows of the tokens at hand.
        groups = [
            WeightGroup(Role.EMBEDDING, table + positions, table if self.tied else 0, self.width),
            WeightGroup(Role.SMALL, small, small, 1),
            WeightGroup(Role.OTHER, self.other_parameters, 0, self.width),
        ]
        if not self.tied:
            groups.append(WeightGroup(Role.HEAD, table, table, self.width))
        return tuple(groups)

    def _attention_groups(self) -> tuple[WeightGroup, ...]:
        queries = self.layers * self.width * self.heads * self.head_dim
        keys = self.layers * self.width * self.num_kv_heads * self.head_dim
        return (
            WeightGroup(Role.ATTENTION, queries + keys, queries + keys, self.width),
            WeightGroup(Role.VALUE, keys, keys, self.width),
            WeightGroup(Role.OUT, queries, queries, self.heads * self.head_dim),
        )

    def _mlp_groups(self) -> tuple[WeightGroup, ...]:
        one = self.layers * self.width * self.mlp_width
        every, used = max(self.experts, 1) * one, max(self.experts_used, 1) * one
        ups = self.mlp_matrices - 1
        return (
            WeightGroup(Role.MLP, ups * every, ups * used, self.width),
            WeightGroup(Role.DOWN, every, used, self.mlp_width),
        )


@dataclass(frozen=True, slots=True)
class Family:
    """What the configs of one family leave unsaid, because its code fixes it."""

    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    norms: int = 2
    norm_bias: bool = False
    query_key_norms: bool = False
    learned_positions: bool = False
    tied: bool = False
    # Qwen's first generation counts gate and up together as its intermediate_size.
    mlp_halved: bool = False
    defaults: Mapping[str, int] = field(default_factory=dict)


_LLAMA = Family()
_BIASED = Family(gated=False, qkv_bias=True, out_bias=True, mlp_bias=True, norm_bias=True)
_GEMMA3 = Family(
    norms=4,
    query_key_norms=True,
    tied=True,
    defaults={"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
)

FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "phi3": _LLAMA,
    "granite": _LLAMA,
    "smollm3": Family(tied=True),
    "qwen": Family(qkv_bias=True, mlp_halved=True),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(query_key_norms=True),
    "qwen3_moe": Family(query_key_norms=True),
    "gemma": Family(tied=True),
    "gemma2": Family(norms=4, tied=True),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gpt2": replace(_BIASED, learned_positions=True, tied=True),
    "gpt_neox": _BIASED,
    "phi": replace(_BIASED, norms=1, head_bias=True),
}

# Shapes these formulas do not describe: a wrong size would be worse than none.
_NOT_MODELLED: Mapping[str, str] = {
    "kv_lora_rank": "it compresses its cache (multi-head latent attention)",
    "ssm_cfg": "it is recurrent and keeps a state instead of a cache",
    "state_size": "it is recurrent and keeps a state instead of a cache",
    "shared_expert_intermediate_size": "it mixes shared and routed experts",
    "is_encoder_decoder": "it has an encoder as well",
}


def shape_from_config(config: Config, name: str) -> ModelShape:
    """The shape a Hugging Face `config.json` describes.

    Raises OptionError where the config lacks a size, or describes a kind of model this planner cannot count.
    """
    reader = _Reader(config, name)
    reader.refuse_what_is_not_modelled()
    width, heads, family = reader.need("hidden_size"), reader.need("num_attention_heads"), reader.family
    experts = reader.get("num_local_experts", "num_experts")
    return ModelShape(
        name=name,
        family=reader.family_name,
        layers=reader.need("num_hidden_layers"),
        width=width,
        vocab=reader.need("vocab_size"),
        heads=heads,
        num_kv_heads=reader.get("num_key_value_heads") or heads,
        head_dim=reader.get("head_dim") or width // heads,
        mlp_width=reader.mlp_width(experts),
        mlp_matrices=3 if family.gated else 2,
        tied=reader.tied,
        context=reader.get("max_position_embeddings", "n_positions", "seq_length") or 2048,
        experts=experts,
        experts_used=reader.get("num_experts_per_tok"),
        small_per_layer=reader.small_per_layer(experts),
        small_outside=reader.small_outside(),
        positions=reader.get("n_positions", "max_position_embeddings") if family.learned_positions else 0,
        window=reader.window,
        stored_precision=reader.stored_precision,
        notes=reader.notes(),
    )


# The GPT-2 generation named the same sizes differently.
_OTHER_NAMES: Mapping[str, str] = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
}

_STORED: Mapping[str, str] = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


class _Reader:
    """Reads sizes out of one config, knowing the other names and the family's unsaid values."""

    def __init__(self, config: Config, name: str) -> None:
        inner = config.get("text_config")
        self._outer = config
        self._config: Config = inner if isinstance(inner, Mapping) else config
        self._name = name
        self.family_name = str(self._config.get("model_type") or config.get("model_type") or "unknown")
        self.family = FAMILIES.get(self.family_name, _LLAMA)

    def get(self, *keys: str) -> int:
        """The first of these that is there, else the family's value, else 0."""
        for key in keys:
            for place in (key, _OTHER_NAMES.get(key, key)):
                value = self._config.get(place)
                if isinstance(value, int) and not isinstance(value, bool):
                    return self._sane(place, value)
        return self.family.defaults.get(keys[0], 0)

    def need(self, key: str) -> int:
        value = self.get(key)
        if value == 0:
            raise OptionError(f"{self._name}: the config does not give {key}, so its size cannot be told")
        return value

    def _sane(self, key: str, value: int) -> int:
        if value < 0:
            raise OptionError(f"{self._name}: the config says {key} = {value}, which no model can have")
        return value

    def refuse_what_is_not_modelled(self) -> None:
        for key, reason in _NOT_MODELLED.items():
            if self._config.get(key):
                raise OptionError(f"{self._name}: paceline plan cannot size this model, {reason}")

    def mlp_width(self, experts: int) -> int:
        if experts and self.get("moe_intermediate_size"):
            return self.get("moe_intermediate_size")
        stated = self.get("intermediate_size") or 4 * self.need("hidden_size")
        return stated // 2 if self.family.mlp_halved else stated

    def small_per_layer(self, experts: int) -> int:
        """Norms, biases and the router of one layer."""
        width = self.need("hidden_size")
        heads = self.need("num_attention_heads")
        head_dim = self.get("head_dim") or width // heads
        keys = (self.get("num_key_value_heads") or heads) * head_dim
        output = bool(self._config.get("attention_bias"))
        mlp_bias = self.family.mlp_bias or bool(self._config.get("mlp_bias"))
        count = self.family.norms * width * (2 if self.family.norm_bias else 1)
        count += (heads * head_dim + 2 * keys) if self.family.qkv_bias or output else 0
        count += width if self.family.out_bias or output else 0
        count += self._mlp_bias_count(experts) if mlp_bias else 0
        count += 2 * head_dim if self.family.query_key_norms else 0
        return count + experts * width

    def _mlp_bias_count(self, experts: int) -> int:
        ups = 2 if self.family.gated else 1
        return ups * self.mlp_width(experts) + self.need("hidden_size")

    def small_outside(self) -> int:
        """The last norm, and the head's bias where a family has one."""
        last_norm = self.need("hidden_size") * (2 if self.family.norm_bias else 1)
        return last_norm + (self.need("vocab_size") if self.family.head_bias else 0)

    @property
    def tied(self) -> bool:
        output = self._config.get("tie_word_embeddings", self._outer.get("tie_word_embeddings"))
        return self.family.tied if output is None else bool(output)

    @property
    def window(self) -> int | None:
        switched_off = self._config.get("use_sliding_window") is False
        return None if switched_off else (self.get("sliding_window") or None)

    @property
    def stored_precision(self) -> str | None:
        """What the weights are saved as: the quantisation if there is one, else the dtype."""
        quantised = self._outer.get("quantization_config")
        if isinstance(quantised, Mapping):
            bits = quantised.get("bits") or (4 if quantised.get("load_in_4bit") else 8)
            return "int4" if bits == 4 else "fp8" if quantised.get("quant_method") == "fp8" else "int8"
        dtype = self._config.get("dtype") or self._config.get("torch_dtype") or self._outer.get("torch_dtype")
        return _STORED.get(str(dtype).removeprefix("torch."))

    def notes(self) -> tuple[str, ...]:
        notes = []
        if self.family_name not in FAMILIES:
            notes.append(f"{self._name}: family '{self.family_name}' is not known here; counted as if it were a Llama")
        if self._config is not self._outer:
            notes.append(f"{self._name}: only the text decoder is counted, not the vision or audio towers")
        return tuple(notes)
