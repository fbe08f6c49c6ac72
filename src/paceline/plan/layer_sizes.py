"""Layers that are not all alike: windows, latent attention, gated delta nets, Mamba, short convolutions, experts.

Every number comes from a config under the keys of Hugging Face; what configs leave out is in `ARCHITECTURES`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from paceline.errors import OptionError
from paceline.hub.model_config import ConfigReader, DecoderSizes
from paceline.plan.architectures import BOTH, CONV, FULL, MLP_ALONE, MOE_ALONE, RECURRENT, SLIDING, Architecture
from paceline.plan.weights import LayerSizes, WeightGroup, WeightRole

# What configs call the types above, beside these words themselves.
TYPE_NAMES = {
    "attention": FULL, "chunked_attention": FULL, "global": FULL, "*": FULL, "local": SLIDING, "mamba": RECURRENT,
    "M": RECURRENT, "short_conv": CONV, "-": MLP_ALONE, "E": MOE_ALONE,
}  # fmt: skip
MLPS = (MLP_ALONE, MOE_ALONE)
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_k", "moe_topk")
EXPERT_SIZES = ("moe_intermediate_size", "expert_ffn_hidden_size")


class LayerCounter:
    """Counts the layers of one config."""

    def __init__(self, reader: ConfigReader, decoder: DecoderSizes, architecture: Architecture, name: str) -> None:
        self._config, self._number = reader.config, reader.get
        self._sizes, self._architecture, self._name = decoder, architecture, name
        self.types = self._layer_types()

    @property
    def are_alike(self) -> bool:
        """Whether every layer is attention over everything and the same MLP, as in Llama."""
        special = self._number("kv_lora_rank") or self.shared_size or self._architecture.sinks
        gated = self._architecture.output_gate or self._architecture.one_block
        same_mlp = len({self._is_sparse(index) for index in range(len(self.types))}) == 1
        return not special and not gated and same_mlp and set(self.types) == {FULL}

    def layers(self) -> tuple[LayerSizes, ...]:
        return tuple(self._layer(index, kind) for index, kind in enumerate(self.types))

    # --- which layer is what ------------------------------------------------------------------------------------------

    def _layer_types(self) -> tuple[str, ...]:
        count, config = self._sizes.num_layers, self._config
        stated = config.get("layer_types") or config.get("layers_block_type") or config.get("hybrid_override_pattern")
        if stated:
            return tuple(TYPE_NAMES.get(kind, kind) for kind in stated)
        marked = self._full_layers()
        if marked is not None:
            return tuple(FULL if index in marked else self._architecture.others for index in range(count))
        return tuple(self._patterned(index) for index in range(count))

    def _full_layers(self) -> set[int] | None:
        """Layers that a config marks as attention among others."""
        for key in ("attn_layer_indices", "full_attn_idxs"):
            if isinstance(self._config.get(key), list):
                return set(self._config[key])
        if period := self._number("attn_layer_period"):
            offset = self._number("attn_layer_offset")
            return {index for index in range(self._sizes.num_layers) if index % period == offset}
        return None

    def _patterned(self, index: int) -> str:
        others = self._architecture.others
        pattern = self._number("full_attention_interval", "sliding_window_pattern") or self._architecture.pattern
        if others != SLIDING:
            return others if pattern < 0 or (pattern and (index + 1) % pattern) else FULL
        if self.window is None:
            return FULL
        if pattern:
            return SLIDING if (index + 1) % pattern else FULL
        return SLIDING if index >= self._number("max_window_layers") else FULL

    @property
    def window(self) -> int | None:
        switched_off = self._config.get("use_sliding_window") is False
        return None if switched_off else (self._number("sliding_window") or None)

    # --- one layer ----------------------------------------------------------------------------------------------------

    def _layer(self, index: int, kind: str) -> LayerSizes:
        mixer, architecture = self._mixer(kind), self._architecture
        has_mlp = kind in MLPS or not architecture.one_block
        mlp = tuple(self._mlp(index, kind)) if has_mlp else ()
        norms = architecture.norms * self._sizes.hidden_size * (2 if architecture.norm_bias else 1)
        groups = (*mixer.groups, *mlp, _small(norms))
        return replace(mixer, groups=groups)

    @property
    def small_per_layer(self) -> int:
        """Norms, biases and the router of one layer, where all are alike."""
        return sum(group.count for group in self._layer(0, FULL).groups if group.role is WeightRole.SMALL)

    def _mixer(self, kind: str) -> LayerSizes:
        if kind in MLPS:
            return LayerSizes(())
        if kind == RECURRENT:
            return self._gated_delta_net() if self._number("linear_num_value_heads") else self._mamba()
        if kind == CONV:
            return self._short_conv()
        if kind == BOTH:
            return _joined(self._attention(None), self._mamba())
        if kind not in (FULL, SLIDING):
            raise OptionError(f"{self._name}: paceline plan does not know layers of type {kind}")
        return self._latent_attention() if self._number("kv_lora_rank") else self._attention(self._window_of(kind))

    def _window_of(self, kind: str) -> int | None:
        return self.window if kind == SLIDING else None

    def _attention(self, window: int | None) -> LayerSizes:
        sizes, architecture = self._sizes, self._architecture
        queries, keys = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        inputs = (queries * (2 if architecture.output_gate else 1) + keys) * sizes.hidden_size
        small = self._head_norms(queries, keys) + self._attention_biases(queries, keys)
        groups = (
            _matrix(WeightRole.ATTENTION, inputs, sizes.hidden_size),
            _matrix(WeightRole.VALUE, keys * sizes.hidden_size, sizes.hidden_size),
            _matrix(WeightRole.OUT, queries * sizes.hidden_size, queries),
            _small(small + (sizes.num_heads if architecture.sinks else 0)),
        )
        return LayerSizes(groups, 2 * keys, window)

    def _head_norms(self, queries: int, keys: int) -> int:
        if not self._architecture.query_key_norms or self._config.get("use_qk_norm") is False:
            return 0
        return queries + keys if self._architecture.wide_norms else 2 * self._sizes.head_dim

    def _attention_biases(self, queries: int, keys: int) -> int:
        architecture, stated = self._architecture, bool(self._config.get("attention_bias"))
        inputs = queries + 2 * keys if architecture.qkv_bias or stated else 0
        outputs = architecture.out_bias or (stated and architecture.stated_out_bias)
        return inputs + (self._sizes.hidden_size if outputs else 0)

    def _latent_attention(self) -> LayerSizes:
        """Keys and values are made from one short vector of each token, which is what the cache keeps."""
        hidden, heads, latent = self._sizes.hidden_size, self._sizes.num_heads, self._number("kv_lora_rank")
        rope, plain, value = (self._number(f"{part}_head_dim") for part in ("qk_rope", "qk_nope", "v"))
        rank, queries = self._number("q_lora_rank"), heads * (rope + plain)
        query_weights = rank * (hidden + queries) if rank else hidden * queries
        bias = (rank + latent + rope + hidden) if self._config.get("attention_bias") else 0
        groups = (
            _matrix(WeightRole.ATTENTION, query_weights + hidden * (latent + rope), hidden),
            _matrix(WeightRole.VALUE, latent * heads * (plain + value), latent),
            _matrix(WeightRole.OUT, heads * value * hidden, heads * value),
            _small(rank + latent + bias),
        )
        return LayerSizes(groups, latent + rope)

    def _gated_delta_net(self) -> LayerSizes:
        hidden, kernel = self._sizes.hidden_size, self._number("linear_conv_kernel_dim")
        key_heads, value_heads = self._number("linear_num_key_heads"), self._number("linear_num_value_heads")
        key_dim, value_dim = self._number("linear_key_head_dim"), self._number("linear_value_head_dim")
        channels = 2 * key_heads * key_dim + value_heads * value_dim
        values = value_heads * value_dim
        groups = (
            _matrix(WeightRole.ATTENTION, hidden * (channels + values + 2 * value_heads), hidden),
            _matrix(WeightRole.OUT, values * hidden, values),
            _small(channels * kernel + 2 * value_heads + value_dim),
        )
        inputs = channels + 2 * value_heads
        state = value_heads * key_dim * value_dim
        return LayerSizes(groups, state_values=state, conv_values=channels * kernel, input_values=inputs)

    def _mamba(self) -> LayerSizes:
        heads = self._number("mamba_n_heads", "mamba_num_heads", "num_heads")
        if not self._number("state_size", "ssm_state_size", "mamba_d_state"):
            raise OptionError(f"{self._name}: paceline plan cannot size its recurrent layers, of an unknown kind")
        return self._mamba2(heads) if heads else self._mamba1()

    def _mamba1(self) -> LayerSizes:
        hidden, state = self._sizes.hidden_size, self._number("state_size", "mamba_d_state")
        kernel, rank = self._number("conv_kernel", "mamba_d_conv"), self._number("time_step_rank", "mamba_dt_rank")
        own = "state_size" in self._config  # in a model of nothing else intermediate_size is the mixer's
        inner = self._number("intermediate_size") if own else self._number("mamba_expand") * hidden
        bias = inner if self._config.get("use_conv_bias", self._config.get("mamba_conv_bias", True)) else 0
        projections = 2 * inner + hidden if self._config.get("use_bias") or self._config.get("mamba_proj_bias") else 0
        norms = 0 if own else rank + 2 * state
        groups = (
            _matrix(WeightRole.ATTENTION, hidden * 2 * inner + inner * (rank + 2 * state) + rank * inner, hidden),
            _matrix(WeightRole.OUT, inner * hidden, inner),
            _small(inner * kernel + bias + projections + norms + inner * (state + 2)),
        )
        return LayerSizes(groups, state_values=inner * state, conv_values=inner * kernel)

    def _mamba2(self, heads: int) -> LayerSizes:
        hidden, state = self._sizes.hidden_size, self._number("state_size", "ssm_state_size", "mamba_d_state")
        groups_of_states = self._number("mamba_n_groups", "n_groups")
        kernel = self._number("conv_kernel", "mamba_d_conv")
        inner = self._mamba2_inner(heads)
        channels = inner + 2 * groups_of_states * state
        normed = inner if self._config.get("mamba_rms_norm", True) else 0
        bias = channels if self._config.get("use_conv_bias", self._config.get("mamba_conv_bias", True)) else 0
        projected = inner + channels + heads
        stated = any(self._config.get(key) for key in ("use_bias", "mamba_proj_bias"))
        projections = (projected if stated else 0) + (hidden if stated or self._config.get("projectors_bias") else 0)
        groups = (
            _matrix(WeightRole.ATTENTION, hidden * projected, hidden),
            _matrix(WeightRole.OUT, inner * hidden, inner),
            _small(channels * kernel + bias + 3 * heads + normed + projections),
        )
        return LayerSizes(groups, state_values=inner * state, conv_values=channels * kernel)

    def _mamba2_inner(self, heads: int) -> int:
        stated = self._number("mamba_d_ssm")
        if stated:
            return stated
        if self._number("mamba_head_dim") and not self._number("mamba_expand"):
            return heads * self._number("mamba_head_dim")
        expand = self._number("mamba_expand", "expand")
        return expand * self._sizes.hidden_size if expand else heads * self._number("mamba_d_head", "head_dim")

    def _short_conv(self) -> LayerSizes:
        hidden, kernel = self._sizes.hidden_size, self._number("conv_L_cache")
        bias = 5 * hidden if self._config.get("conv_bias") else 0
        groups = (
            _matrix(WeightRole.ATTENTION, 3 * hidden * hidden, hidden),
            _matrix(WeightRole.OUT, hidden * hidden, hidden),
            _small(hidden * kernel + bias),
        )
        return LayerSizes(groups, conv_values=hidden * kernel)

    # --- MLP and experts ----------------------------------------------------------------------------------------------

    @property
    def num_experts(self) -> int:
        return self._number(*EXPERT_COUNTS)

    @property
    def num_experts_per_token(self) -> int:
        return self._number(*EXPERTS_PER_TOKEN)

    @property
    def _expert_size(self) -> int:
        return self._number(*EXPERT_SIZES) or self._sizes.intermediate_size

    @property
    def shared_size(self) -> int:
        """The intermediate_size of the expert that every token uses; 0: there is none."""
        own = self._number("shared_expert_intermediate_size", "shared_intermediate_size")
        own = own or self._number("moe_shared_expert_intermediate_size") * self._number("n_shared_experts")
        count = self._number("n_shared_experts", "moe_num_shared_experts", "num_shared_experts")
        return own or count * self._expert_size

    def _is_sparse(self, index: int) -> bool:
        """Whether the MLP of a layer is made of experts."""
        config = self._config
        if not self.num_experts:
            return False
        if isinstance(config.get("mlp_layer_types"), list):
            return bool(config["mlp_layer_types"][index] == "sparse")
        if period := self._number("expert_layer_period"):
            return index % period == self._number("expert_layer_offset")
        step = self._number("decoder_sparse_step") or 1
        dense_first = max(self._number("first_k_dense_replace"), self._number("num_dense_layers"))
        return index >= dense_first and (index + 1) % step == 0 and index not in (config.get("mlp_only_layers") or ())

    def _mlp(self, index: int, kind: str) -> Iterator[WeightGroup]:
        if kind == MOE_ALONE or (kind != MLP_ALONE and self._is_sparse(index)):
            yield from self._experts()
        elif self._number("shared_intermediate_size"):  # Granite's, also where there are no experts
            yield from self._dense(self.shared_size, bias=False)
        else:
            bias = self._architecture.mlp_bias or bool(self._config.get("mlp_bias"))
            yield from self._dense(self._dense_size, bias=bias)

    @property
    def _dense_size(self) -> int:
        """LFM2 adjusts what its configs state."""
        size = self._sizes.intermediate_size // (2 if self._architecture.mlp_halved else 1)
        if not self._config.get("block_auto_adjust_ff_dim"):
            return size
        multiple = self._number("block_multiple_of")
        scaled = int((self._config.get("block_ffn_dim_multiplier") or 1.0) * int(2 * size / 3))
        return multiple * -(-scaled // multiple)

    def _dense(self, size: int, *, bias: bool) -> Iterator[WeightGroup]:
        hidden, ups = self._sizes.hidden_size, 2 if self._architecture.gated else 1
        yield _matrix(WeightRole.MLP, ups * hidden * size, hidden)
        yield _matrix(WeightRole.DOWN, hidden * size, size)
        yield _small(ups * size + hidden if bias else 0)

    def _experts(self) -> Iterator[WeightGroup]:
        hidden, size, count = self._sizes.hidden_size, self._expert_size, self.num_experts
        used, ups = self.num_experts_per_token, 2 if self._architecture.gated else 1
        yield WeightGroup(WeightRole.MLP, count * ups * hidden * size, used * ups * hidden * size, hidden, routed=True)
        yield WeightGroup(WeightRole.DOWN, count * hidden * size, used * hidden * size, size, routed=True)
        biases = count * (ups * size + hidden) if self._architecture.expert_bias else 0
        chosen = count if self._architecture.router_bias and self._config.get("use_expert_bias", True) else 0
        yield _small(count * hidden + chosen + biases)
        if self.shared_size:
            yield from self._dense(self.shared_size, bias=False)
            yield _small(hidden if self._number("shared_expert_intermediate_size") else 0)  # its gate


def _matrix(role: WeightRole, count: int, row_size: int) -> WeightGroup:
    return WeightGroup(role, count, count, row_size)


def _small(count: int) -> WeightGroup:
    return WeightGroup(WeightRole.SMALL, count, count, 1)


def _joined(first: LayerSizes, second: LayerSizes) -> LayerSizes:
    groups = (*first.groups, *second.groups)
    return LayerSizes(groups, first.kv_values, first.window, second.state_values, second.conv_values)
