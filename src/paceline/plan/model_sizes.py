"""How many weights a model has, from its config: `ModelSizes`, and every weight by its role.

The catalogue, a directory, a Hub id and a GGUF header all give a config dictionary with the keys of Hugging Face;
`sizes_from_config` turns it into `ModelSizes`. Architectures differ in few ways (biases, norms, a gated MLP), so an
architecture is a row of `ARCHITECTURES`, not a class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum

from paceline.errors import OptionError
from paceline.hub.model_config import Config, ConfigReader, DecoderSizes, decoder_sizes, text_config


class WeightRole(Enum):
    """What a weight is for; quantisation schemes treat these roles differently."""

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
    """Weights of one role: how many there are, how many of them one token uses, and the length of a row.

    row_size is the number of columns of the matrix; block-wise quantisation needs a multiple of its block.
    """

    role: WeightRole
    count: int
    used: int
    row_size: int


@dataclass(frozen=True, slots=True)
class ModelSizes(DecoderSizes):
    """All that planning needs to know of one model. num_experts is 0 for a dense model.

    shared_expert_size: the intermediate size of the expert that every token passes; 0: there is none
    """

    name: str
    architecture: str
    mlp_matrices: int
    tied_embeddings: bool
    num_experts: int = 0
    num_experts_per_token: int = 0
    shared_expert_size: int = 0
    small_per_layer: int = 0
    small_outside: int = 0
    num_learned_positions: int = 0
    other_parameters: int = 0
    sliding_window: int | None = None
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
        """The weights multiplied for one token: fewer than all in a mixture of experts."""
        return sum(group.used for group in self.groups)

    @property
    def expert_parameters(self) -> int:
        """The weights of all experts that a router chooses among."""
        return self.num_experts * self.mlp_matrices * self.num_layers * self.hidden_size * self.intermediate_size

    def expected_experts(self, tokens: int) -> float:
        """How many experts of a layer so many tokens choose, each for itself: E · (1 - (1 - k/E)^tokens)."""
        if not self.num_experts:
            return 0.0
        return self.num_experts * (1.0 - (1.0 - self.num_experts_per_token / self.num_experts) ** tokens)

    def _outer_groups(self) -> tuple[WeightGroup, ...]:
        table = self.vocab_size * self.hidden_size
        positions = self.num_learned_positions * self.hidden_size
        small = self.num_layers * self.small_per_layer + self.small_outside
        # A tied table is read whole as the head; an untied one only at the rows of the current tokens.
        groups = [
            WeightGroup(
                WeightRole.EMBEDDING, table + positions, table if self.tied_embeddings else 0, self.hidden_size
            ),
            WeightGroup(WeightRole.SMALL, small, small, 1),
            WeightGroup(WeightRole.OTHER, self.other_parameters, 0, self.hidden_size),
        ]
        if not self.tied_embeddings:
            groups.append(WeightGroup(WeightRole.HEAD, table, table, self.hidden_size))
        return tuple(groups)

    def _attention_groups(self) -> tuple[WeightGroup, ...]:
        queries = self.num_layers * self.hidden_size * self.num_heads * self.head_dim
        keys = self.num_layers * self.hidden_size * self.num_kv_heads * self.head_dim
        return (
            WeightGroup(WeightRole.ATTENTION, queries + keys, queries + keys, self.hidden_size),
            WeightGroup(WeightRole.VALUE, keys, keys, self.hidden_size),
            WeightGroup(WeightRole.OUT, queries, queries, self.num_heads * self.head_dim),
        )

    def _mlp_groups(self) -> tuple[WeightGroup, ...]:
        rows = self.num_layers * self.hidden_size
        matrix, shared = rows * self.intermediate_size, rows * self.shared_expert_size
        every, used = max(self.num_experts, 1) * matrix, max(self.num_experts_per_token, 1) * matrix
        every, used = every + shared, used + shared
        ups = self.mlp_matrices - 1
        return (
            WeightGroup(WeightRole.MLP, ups * every, ups * used, self.hidden_size),
            WeightGroup(WeightRole.DOWN, every, used, self.intermediate_size),
        )


@dataclass(frozen=True, slots=True)
class Architecture:
    """What an architecture fixes in its code and leaves out of its configs."""

    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    norms: int = 2
    norm_bias: bool = False
    query_key_norms: bool = False
    whole_query_key_norms: bool = False  # one norm for the queries of all heads, one for their keys
    shared_expert: bool = False
    learned_positions: bool = False
    tied_embeddings: bool = False
    # The intermediate_size of Qwen's first generation counts gate and up together.
    mlp_halved: bool = False
    defaults: Mapping[str, int] = field(default_factory=dict)


_LLAMA = Architecture()
_BIASED = Architecture(gated=False, qkv_bias=True, out_bias=True, mlp_bias=True, norm_bias=True)
_GEMMA3 = Architecture(
    norms=4,
    query_key_norms=True,
    tied_embeddings=True,
    defaults={"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "granitemoe": Architecture(tied_embeddings=True),
    "olmoe": Architecture(whole_query_key_norms=True),
    "phi3": _LLAMA,
    "granite": _LLAMA,
    "smollm3": Architecture(tied_embeddings=True),
    "qwen": Architecture(qkv_bias=True, mlp_halved=True),
    "qwen2": Architecture(qkv_bias=True),
    "qwen2_moe": Architecture(qkv_bias=True, shared_expert=True),
    "qwen3": Architecture(query_key_norms=True),
    "qwen3_moe": Architecture(query_key_norms=True),
    "gemma": Architecture(tied_embeddings=True),
    "gemma2": Architecture(norms=4, tied_embeddings=True),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gpt2": replace(_BIASED, learned_positions=True, tied_embeddings=True),
    "gpt_neox": _BIASED,
    "phi": replace(_BIASED, norms=1, head_bias=True),
}

# Models these formulas do not describe: a wrong size would be worse than none.
_NOT_MODELLED: Mapping[str, str] = {
    "kv_lora_rank": "it compresses its cache (multi-head latent attention)",
    "ssm_cfg": "it is recurrent and keeps a state instead of a cache",
    "state_size": "it is recurrent and keeps a state instead of a cache",
    "shared_expert_intermediate_size": "it mixes shared and routed experts",
    "mlp_only_layers": "some of its layers have no experts",
    "is_encoder_decoder": "it has an encoder as well",
}


_STORED: Mapping[str, str] = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def sizes_from_config(config: Config, name: str) -> ModelSizes:
    """The sizes a Hugging Face `config.json` describes.

    Raises OptionError where the config lacks a size, or describes a kind of model this planner cannot count.
    """
    counter = _WeightCounter(config, name)
    counter.refuse_what_is_not_modelled()
    decoder = replace(counter.decoder, intermediate_size=counter.intermediate_size)
    return ModelSizes(
        **asdict(decoder),
        name=name,
        architecture=counter.architecture_name,
        mlp_matrices=3 if counter.architecture.gated else 2,
        tied_embeddings=counter.tied_embeddings,
        num_experts=counter.num_experts,
        num_experts_per_token=counter.number("num_experts_per_tok"),
        shared_expert_size=counter.number("shared_expert_intermediate_size"),
        small_per_layer=counter.small_per_layer(),
        small_outside=counter.small_outside(),
        num_learned_positions=decoder.max_seq_len if counter.architecture.learned_positions else 0,
        sliding_window=counter.sliding_window,
        stored_precision=counter.stored_precision,
        notes=counter.notes(),
    )


class _WeightCounter:
    """Counts the weights of one config that follow from its architecture."""

    def __init__(self, config: Config, name: str) -> None:
        inner = text_config(config)
        self.architecture_name = str(inner.get("model_type") or config.get("model_type") or "unknown")
        self.architecture = ARCHITECTURES.get(self.architecture_name, _LLAMA)
        self._outer, self._nested, self._name = config, inner is not config, name
        reader = ConfigReader(config, name, self.architecture.defaults)
        self._config, self.number = reader.config, reader.get
        self.num_experts = self.number("num_local_experts", "num_experts")

    @property
    def decoder(self) -> DecoderSizes:
        return decoder_sizes(self._outer, self._name, self.architecture.defaults)

    def refuse_what_is_not_modelled(self) -> None:
        known = {"shared_expert_intermediate_size"} if self.architecture.shared_expert else set()
        for key, reason in _NOT_MODELLED.items():
            if self._config.get(key) and key not in known:
                raise OptionError(f"{self._name}: paceline plan cannot size this model, {reason}")
        if self.number("decoder_sparse_step") > 1:
            reason = _NOT_MODELLED["mlp_only_layers"]
            raise OptionError(f"{self._name}: paceline plan cannot size this model, {reason}")

    @property
    def intermediate_size(self) -> int:
        """Of one expert in a mixture of experts, else of the MLP."""
        if self.num_experts and self.number("moe_intermediate_size"):
            return self.number("moe_intermediate_size")
        stated = self.decoder.intermediate_size
        return stated // 2 if self.architecture.mlp_halved else stated

    def small_per_layer(self) -> int:
        """Norms, biases and the router of one layer."""
        decoder, architecture = self.decoder, self.architecture
        norms = architecture.norms * decoder.hidden_size * (2 if architecture.norm_bias else 1)
        norms += 2 * decoder.head_dim if architecture.query_key_norms else 0
        norms += (decoder.num_heads + decoder.num_kv_heads) * decoder.head_dim * architecture.whole_query_key_norms
        router = (self.num_experts + architecture.shared_expert) * decoder.hidden_size
        return norms + self._attention_biases(decoder) + self._mlp_biases(decoder) + router

    def _attention_biases(self, decoder: DecoderSizes) -> int:
        stated = bool(self._config.get("attention_bias"))
        inputs = (decoder.num_heads + 2 * decoder.num_kv_heads) * decoder.head_dim
        count = inputs if self.architecture.qkv_bias or stated else 0
        return count + (decoder.hidden_size if self.architecture.out_bias or stated else 0)

    def _mlp_biases(self, decoder: DecoderSizes) -> int:
        if not self.architecture.mlp_bias and not self._config.get("mlp_bias"):
            return 0
        ups = 2 if self.architecture.gated else 1
        return ups * self.intermediate_size + decoder.hidden_size

    def small_outside(self) -> int:
        """The last norm, and the bias of the head where an architecture has one."""
        decoder = self.decoder
        last_norm = decoder.hidden_size * (2 if self.architecture.norm_bias else 1)
        return last_norm + (decoder.vocab_size if self.architecture.head_bias else 0)

    @property
    def tied_embeddings(self) -> bool:
        stated = self._config.get("tie_word_embeddings", self._outer.get("tie_word_embeddings"))
        return self.architecture.tied_embeddings if stated is None else bool(stated)

    @property
    def sliding_window(self) -> int | None:
        switched_off = self._config.get("use_sliding_window") is False
        return None if switched_off else (self.number("sliding_window") or None)

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
        if self.architecture_name not in ARCHITECTURES:
            notes.append(f"{self._name}: architecture '{self.architecture_name}' is unknown here; counted as a Llama")
        if self._nested:
            notes.append(f"{self._name}: only the text decoder is counted, not the vision or audio towers")
        return tuple(notes)
