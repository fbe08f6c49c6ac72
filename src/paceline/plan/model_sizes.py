"""How many weights a model has, from its config: `ModelSizes`, and every weight by its role.

The catalogue, a directory, a Hub id and a GGUF header all give a config dictionary with the keys of Hugging Face;
`sizes_from_config` turns it into `ModelSizes`. Architectures differ in few ways (biases, norms, a gated MLP), so an
architecture is a row of `ARCHITECTURES`. A model whose layers are not all alike lists them one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.errors import OptionError
from paceline.hub.model_config import Config, ConfigReader, DecoderSizes, decoder_sizes, text_config
from paceline.plan.architectures import ARCHITECTURES, Architecture
from paceline.plan.layer_sizes import EXPERT_COUNTS, LayerCounter
from paceline.plan.weights import LayerSizes, WeightGroup, WeightRole


@dataclass(frozen=True, slots=True)
class ModelSizes(DecoderSizes):
    """All that planning needs to know of one model. num_experts is 0 for a dense model.

    shared_expert_size  the intermediate size of the expert that every token passes; 0: there is none
    layers              every layer by itself, where they are not all like Llama's
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
    layers: tuple[LayerSizes, ...] = ()

    @property
    def groups(self) -> tuple[WeightGroup, ...]:
        """Every weight of the model, by role."""
        if self.layers:
            return (*self._outer_groups(), *(group for layer in self.layers for group in layer.groups))
        return (*self._outer_groups(), *self._attention_groups(), *self._mlp_groups())

    @property
    def kv_values_per_token(self) -> int:
        """Numbers the KV cache stores for one token of one sequence, over all layers."""
        if self.layers:
            return sum(layer.kv_values for layer in self.layers)
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def kv_values(self, num_tokens: int, *, bounded: bool) -> int:
        """Numbers the KV cache stores for a sequence. bounded: layers with a window keep no more than it."""
        if not self.layers or not bounded:
            return self.kv_values_per_token * num_tokens
        return sum(layer.kv_values * min(num_tokens, layer.window or num_tokens) for layer in self.layers)

    @property
    def num_attention_layers(self) -> int:
        return sum(layer.kv_values > 0 for layer in self.layers) if self.layers else self.num_layers

    @property
    def state_values(self) -> int:
        """Numbers of recurrent states for one sequence, of whatever length; kept in float32."""
        return sum(layer.state_values for layer in self.layers)

    @property
    def conv_values(self) -> int:
        """Numbers of the inputs of convolutions for one sequence."""
        return sum(layer.conv_values for layer in self.layers)

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
        return sum(group.count for group in self.groups if group.routed)

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
        matrix = self.num_layers * self.hidden_size * self.intermediate_size
        every, used = max(self.num_experts, 1) * matrix, max(self.num_experts_per_token, 1) * matrix
        ups = self.mlp_matrices - 1
        return (
            WeightGroup(WeightRole.MLP, ups * every, ups * used, self.hidden_size, self.num_experts > 0),
            WeightGroup(WeightRole.DOWN, every, used, self.intermediate_size, self.num_experts > 0),
        )


# Models these formulas do not describe: a wrong size would be worse than none.
_NOT_MODELLED: Mapping[str, str] = {
    "ssm_cfg": "it is recurrent, of a kind that is not known here",
    "index_topk": "it chooses the tokens it looks at by an index",
    "is_encoder_decoder": "it has an encoder as well",
}


_STORED: Mapping[str, str] = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def quantised_precision(config: Mapping[str, Any]) -> str:
    """The name of the precision that a `quantization_config` describes."""
    method = str(config.get("quant_method") or "").lower()
    if method in ("awq", "gptq", "mxfp4") and int(config.get("bits") or 4) == 4:
        return method
    if config.get("load_in_4bit") or config.get("_load_in_4bit"):
        return "nf4" if config.get("bnb_4bit_quant_type", "nf4") == "nf4" else "int4"
    if "fp8" in method or "float" in str(config.get("format", "")):
        return "fp8"
    if config.get("load_in_8bit") or config.get("_load_in_8bit"):
        return "int8"
    return "int4" if (config.get("bits") or _group_bits(config)) == 4 else "int8"


def _group_bits(config: Mapping[str, Any]) -> int:
    """The bits that a compressed-tensors config states for its weights."""
    groups = config.get("config_groups")
    weights = [group.get("weights") or {} for group in groups.values()] if isinstance(groups, Mapping) else []
    return max((int(weight.get("num_bits") or 8) for weight in weights), default=8)


def sizes_from_config(config: Config, name: str) -> ModelSizes:
    """The sizes a Hugging Face `config.json` describes.

    Raises OptionError where the config lacks a size, or describes a kind of model this planner cannot count.
    """
    counter = _WeightCounter(config, name)
    counter.refuse_what_is_not_modelled()
    decoder = replace(counter.decoder, intermediate_size=counter.intermediate_size)
    layers = () if counter.layer_counter.are_alike else counter.layer_counter.layers()
    return ModelSizes(
        **asdict(decoder),
        name=name,
        architecture=counter.architecture_name,
        mlp_matrices=3 if counter.architecture.gated else 2,
        tied_embeddings=counter.tied_embeddings,
        num_experts=counter.num_experts,
        num_experts_per_token=counter.layer_counter.num_experts_per_token,
        shared_expert_size=counter.layer_counter.shared_size,
        small_per_layer=0 if layers else counter.layer_counter.small_per_layer,
        small_outside=counter.small_outside(),
        num_learned_positions=decoder.max_seq_len if counter.architecture.learned_positions else 0,
        sliding_window=counter.layer_counter.window,
        stored_precision=counter.stored_precision,
        notes=counter.notes(),
        layers=layers,
    )


class _WeightCounter:
    """Counts the weights of one config that follow from its architecture."""

    def __init__(self, config: Config, name: str) -> None:
        inner = text_config(config)
        self.architecture_name = str(inner.get("model_type") or config.get("model_type") or "unknown")
        self.architecture = ARCHITECTURES.get(self.architecture_name, Architecture())
        self._outer, self._nested, self._name = config, inner is not config, name
        reader = ConfigReader(config, name, self.architecture.defaults)
        self._config, self.number = reader.config, reader.get
        self.num_experts = self.number(*EXPERT_COUNTS)
        self.layer_counter = LayerCounter(reader, self.decoder, self.architecture, name)

    @property
    def decoder(self) -> DecoderSizes:
        return decoder_sizes(self._outer, self._name, self.architecture.defaults)

    def refuse_what_is_not_modelled(self) -> None:
        for key, reason in _NOT_MODELLED.items():
            if self._config.get(key):
                raise OptionError(f"{self._name}: paceline plan cannot size this model, {reason}")

    @property
    def intermediate_size(self) -> int:
        """Of one expert in a mixture of experts, else of the MLP."""
        if self.num_experts and self.number("moe_intermediate_size"):
            return self.number("moe_intermediate_size")
        stated = self.decoder.intermediate_size
        return stated // 2 if self.architecture.mlp_halved else stated

    def small_outside(self) -> int:
        """The last norm, and the bias of the head where an architecture has one."""
        decoder = self.decoder
        last_norm = decoder.hidden_size * (2 if self.architecture.norm_bias else 1) if self.architecture.norms else 0
        has_bias = self.architecture.head_bias or self._config.get("lm_head_bias")
        return last_norm + (decoder.vocab_size if has_bias else 0)

    @property
    def tied_embeddings(self) -> bool:
        stated = self._config.get("tie_word_embeddings", self._outer.get("tie_word_embeddings"))
        return self.architecture.tied_embeddings if stated is None else bool(stated)

    @property
    def stored_precision(self) -> str | None:
        """What the weights are saved as: the quantisation if there is one, else the dtype."""
        quantised = self._outer.get("quantization_config")
        if isinstance(quantised, Mapping):
            return quantised_precision(quantised)
        dtype = self._config.get("dtype") or self._config.get("torch_dtype") or self._outer.get("torch_dtype")
        return _STORED.get(str(dtype).removeprefix("torch."))

    def notes(self) -> tuple[str, ...]:
        notes = []
        if self.architecture_name not in ARCHITECTURES:
            notes.append(f"{self._name}: architecture '{self.architecture_name}' is unknown here; counted as a Llama")
        if self._nested:
            notes.append(f"{self._name}: only the text decoder is counted, not the vision or audio towers")
        return tuple(notes)
