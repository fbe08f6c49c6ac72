"""Any causal language model of transformers whose cache can be cut back.

Keys and values of all sequences lie in one buffer a layer, [sequence caches, heads, capacity, head size]; a sequence cache is a row of it. The
model's own attention code sees a `Cache` that writes each sequence's new entries behind its old ones, and a mask that
tells sequences, padding and branches of a tree apart. NoDraft is ever recomputed: forgetting is a smaller `length`.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from paceline.core.draft_tree import ancestors, depths
from paceline.core.protocols import Adapter, Runner
from paceline.core.types import Capability, ModelInfo, ModelOutput, Row, SequenceCache
from paceline.errors import CapabilityError, OptionError, OutOfMemory
from paceline.kv.block_manager import BlockManager
from paceline.runners.loading import eos_token_ids_of

FIRST_CAPACITY = 256
CANNOT_ROLL_BACK = ("sliding_attention", "chunked_attention", "linear_attention", "mamba", "recurrent", "conv")


class HuggingFaceSequenceCache(SequenceCache):
    """A row of the buffers."""

    __slots__ = ("fresh", "row")

    def __init__(self, row: int) -> None:
        super().__init__()
        self.row = row
        self.fresh = 0  # where the last row read begins


class _Layer(CacheLayerMixin):
    """One layer's keys and values of every sequence cache; `plan` says where the rows of the pass in progress belong."""

    is_croppable = True

    def __init__(self, store: _Store) -> None:
        super().__init__()
        self.store = store

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = self._buffer(key_states)
        self.values = self._buffer(value_states)
        self.is_initialized = True

    def _buffer(self, like: Tensor) -> Tensor:
        return like.new_zeros(self.store.seq_caches, like.shape[1], self.store.capacity, like.shape[3])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        plan = self.store.plan
        assert plan is not None and self.keys is not None and self.values is not None
        return plan.write(self.keys, key_states), plan.write(self.values, value_states)

    def grow(self) -> None:
        if self.is_initialized:
            assert self.keys is not None and self.values is not None
            self.keys, self.values = self._copied(self.keys), self._copied(self.values)

    def _copied(self, old: Tensor) -> Tensor:
        new = old.new_zeros(self.store.seq_caches, old.shape[1], self.store.capacity, old.shape[3])
        new[: old.shape[0], :, : old.shape[2]] = old
        return new

    def move(self, row: int, source: Tensor, target: Tensor) -> None:
        if self.is_initialized:
            assert self.keys is not None and self.values is not None
            for buffer in (self.keys, self.values):
                buffer[row][:, target] = buffer[row][:, source]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.store.plan.longest if self.store.plan else 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


class _Plan:
    """Where the rows of one pass are written and read."""

    def __init__(self, seq_caches: list[HuggingFaceSequenceCache], width: int, device: torch.device) -> None:
        self.starts = [seq_cache.length for seq_cache in seq_caches]
        self.longest = max(self.starts)
        self.end = self.longest + width
        rows = [seq_cache.row for seq_cache in seq_caches]
        # Neighbouring rows are read where they lie; others have to be gathered.
        self._adjacent = rows == list(range(rows[0], rows[0] + len(rows)))
        self._first, self._count, self._width = rows[0], len(rows), width
        self._even = len(set(self.starts)) == 1
        self._rows = torch.tensor(rows, device=device)
        self._places = torch.tensor(self.starts, device=device)[:, None] + torch.arange(width, device=device)

    def write(self, buffer: Tensor, fresh: Tensor) -> Tensor:
        """Put the new entries [batch, heads, width, size] behind the old ones; returns all a pass may look at."""
        if self._adjacent and self._even:
            start = self.starts[0]
            buffer[self._first : self._first + self._count, :, start : start + self._width] = fresh
        else:
            buffer[self._rows[:, None], :, self._places] = fresh.transpose(1, 2)
        if self._adjacent:
            return buffer[self._first : self._first + self._count, :, : self.end]
        return buffer[self._rows, :, : self.end]


class _Store(Cache):
    """The buffers of all layers. They grow by doubling and never shrink."""

    def __init__(self, layers: int) -> None:
        self.seq_caches, self.capacity = 1, FIRST_CAPACITY
        self.plan: _Plan | None = None
        super().__init__(layers=[_Layer(self) for _ in range(layers)])

    def reserve(self, seq_caches: int, capacity: int) -> None:
        if seq_caches <= self.seq_caches and capacity <= self.capacity:
            return
        self.seq_caches = max(self.seq_caches, 1 << (seq_caches - 1).bit_length())
        self.capacity = max(self.capacity, 1 << (capacity - 1).bit_length())
        for layer in self.layers:
            layer.grow()

    def copy_row(self, source: int, target: int, length: int) -> None:
        for layer in self.layers:
            if layer.is_initialized:
                for buffer in (layer.keys, layer.values):
                    buffer[target, :, :length] = buffer[source, :, :length]

    def move(self, row: int, source: list[int], target: list[int], device: torch.device) -> None:
        for layer in self.layers:
            layer.move(row, torch.tensor(source, device=device), torch.tensor(target, device=device))


class HuggingFaceRunner(Runner):
    """A loaded transformers model behind `Runner`.

    features  layers whose entering hidden states are handed out, joined (EAGLE-3 heads want these)
    hidden    hand out the last hidden states
    """

    def __init__(
        self, model: PreTrainedModel, name: str, *, hidden: bool = False, features: tuple[int, ...] = ()
    ) -> None:
        refuse_what_cannot_roll_back(model.config, name, stateful=bool(getattr(model, "_is_stateful", False)))
        self.model = model.eval()
        self.want_hidden, self.feature_layers = hidden, features
        config = model.config.get_text_config()
        self._device = next(model.parameters()).device
        self.info = ModelInfo(
            name,
            model.get_input_embeddings().weight.shape[0] if model.get_output_embeddings() is None else _vocab(model),
            eos_token_ids_of(model),
            int(getattr(config, "max_position_embeddings", None) or 1 << 20),
            config.num_hidden_layers,
            config.hidden_size,
            str(self._device),
            str(next(model.parameters()).dtype).removeprefix("torch."),
        )
        found = {Capability.TREE, Capability.HIDDEN_STATES}
        if hasattr(model.base_model, "layers"):
            found.add(Capability.EARLY_EXIT)
        self.capabilities = frozenset(found)
        self.blocks = BlockManager()
        self._store = _Store(config.num_hidden_layers)
        self._free: list[int] = []
        self._rows = 0
        self._picks_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    # --- sequence caches --------------------------------------------------------------------------------------------------------

    def new_cache(self) -> HuggingFaceSequenceCache:
        if self._free:
            self._free.sort(reverse=True)  # low rows first: neighbours are read without copying
            return HuggingFaceSequenceCache(self._free.pop())
        self._rows += 1
        return HuggingFaceSequenceCache(self._rows - 1)

    @torch.inference_mode()
    def commit(self, seq_cache: SequenceCache, nodes: list[int]) -> None:
        own = _own(seq_cache)
        source = [own.fresh + node for node in nodes]
        target = list(range(own.fresh, own.fresh + len(nodes)))
        if source != target:
            moved = [pair for pair in zip(source, target) if pair[0] != pair[1]]
            self._store.move(own.row, [s for s, _ in moved], [t for _, t in moved], self._device)
        own.length = own.fresh + len(nodes)

    def truncate(self, seq_cache: SequenceCache, length: int) -> None:
        seq_cache.length = min(seq_cache.length, length)

    def free(self, seq_cache: SequenceCache) -> None:
        own = _own(seq_cache)
        if own.row >= 0:
            self._free.append(own.row)
            own.row, own.length = -1, 0

    @torch.inference_mode()
    def fork(self, seq_cache: SequenceCache, length: int) -> HuggingFaceSequenceCache:
        twin = self.new_cache()
        self._store.reserve(self._rows, length)
        self._store.copy_row(_own(seq_cache).row, twin.row, length)
        twin.length = length
        return twin

    def free_tokens(self) -> int:
        return 1 << 30  # buffers grow until the machine says no

    # --- passes -------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(self, rows: list[Row], *, last_only: bool = False) -> ModelOutput:
        seq_caches = [_own(row.seq_cache) for row in rows]
        widths = [len(row.parents) for row in rows]
        width = max(widths)
        try:
            self._store.reserve(self._rows, max(seq_cache.length for seq_cache in seq_caches) + width)
            output = self._run(rows, seq_caches, width, last_only)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(f"a pass over {sum(widths)} tokens does not fit: {_knob(rows)}") from error
        finally:
            self._store.plan = None
        for seq_cache, count in zip(seq_caches, widths):
            seq_cache.fresh = seq_cache.length
            seq_cache.length += count
        return output

    def _run(self, rows: list[Row], seq_caches: list[HuggingFaceSequenceCache], width: int, last_only: bool) -> ModelOutput:
        plan = self._store.plan = _Plan(seq_caches, width, self._device)
        tokens, positions, mask = self._inputs(rows, plan, width)
        wanted = self._wanted_positions(rows, last_only)
        states = self.want_hidden or bool(self.feature_layers)
        extra: dict[str, Any] = {"logits_to_keep": wanted} if self._picks_logits and wanted is not None else {}
        output = self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self._store,
            use_cache=True,
            output_hidden_states=states,
            **extra,
        )
        if self._picks_logits or wanted is None:
            logits = output.logits
        else:
            logits = output.logits[:, wanted]
        return self._pack(rows, logits, wanted, output.hidden_states if states else None, last_only)

    def _inputs(self, rows: list[Row], plan: _Plan, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids and positions [batch, width] and the additive mask [batch, 1, width, end]."""
        tokens = torch.zeros(len(rows), width, dtype=torch.int64, device=self._device)
        positions = torch.zeros(len(rows), width, dtype=torch.int64)
        visible = torch.zeros(len(rows), width, plan.end, dtype=torch.bool)
        for index, (row, start) in enumerate(zip(rows, plan.starts)):
            count = len(row.parents)
            tokens[index, :count] = row.ids().to(self._device)
            positions[index, :count] = torch.tensor(depths(row.parents)) + start
            visible[index, :, : max(start, 1)] = True  # padding looks at something, or its softmax would be NaN
            visible[index, :count, :start] = True
            visible[index, :count, start : start + count] = ancestors(row.parents)
        dtype = next(self.model.parameters()).dtype
        mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)
        return tokens, positions.to(self._device), mask[:, None].to(self._device)

    def _wanted_positions(self, rows: list[Row], last_only: bool) -> Tensor | None:
        if not last_only:
            return None
        return torch.tensor(sorted({len(row.parents) - 1 for row in rows}), device=self._device)

    def _pack(
        self, rows: list[Row], logits: Tensor, wanted: Tensor | None, states: Any, last_only: bool
    ) -> ModelOutput:
        widths = [len(row.parents) for row in rows]
        hidden = _packed(states[-1], widths) if states is not None and self.want_hidden else None
        features = None
        if states is not None and self.feature_layers:
            features = _packed(torch.cat([states[layer] for layer in self.feature_layers], dim=-1), widths)
        if not last_only:
            return ModelOutput(_packed(logits, widths), widths, hidden, features)
        assert wanted is not None
        column = {int(position): index for index, position in enumerate(wanted.tolist())}
        picked = torch.stack([logits[index, column[count - 1]] for index, count in enumerate(widths)])
        return ModelOutput(picked, [1] * len(rows), hidden, features, widths)

    # --- for drafters that live on the target -------------------------------------------------------------------------

    def expose(self, *, hidden: bool = False, features: tuple[int, ...] = ()) -> None:
        self.want_hidden = self.want_hidden or hidden
        self.feature_layers = features or self.feature_layers

    def early_exit(self, layer: int, adapter: Adapter | None = None) -> HuggingFaceRunner:
        """The same model left after `layer` layers, on the same cache. The model itself is not touched."""
        if not 0 < layer < self.info.num_layers:
            raise OptionError(f"an exit lies after layer 1 to {self.info.num_layers - 1}, not {layer}")
        if Capability.EARLY_EXIT not in self.capabilities:
            raise CapabilityError(f"{self.info.name} has no list of layers to leave early")
        short = _shallow(self.model)
        inner = _shallow(self.model.base_model)
        inner.layers = inner.layers[:layer]
        setattr(short, self.model.base_model_prefix, inner)
        short.config = inner.config = copy.copy(self.model.config)
        short.config.num_hidden_layers = layer
        if adapter is not None:
            short.set_output_embeddings(_Through(adapter, self.model.get_output_embeddings()))
        runner = copy.copy(self)
        runner.model = short
        runner.want_hidden, runner.feature_layers = True, ()
        return runner

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Hidden states after the final norm -> logits."""
        return self.model.get_output_embeddings()(hidden)

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens -> input vectors."""
        return self.model.get_input_embeddings()(tokens)


def _own(seq_cache: SequenceCache) -> HuggingFaceSequenceCache:
    assert isinstance(seq_cache, HuggingFaceSequenceCache), "this slot belongs to another runner"
    return seq_cache


def _packed(padded: Tensor, widths: list[int]) -> Tensor:
    """[batch, width, …] -> [all nodes, …]"""
    if len(set(widths)) == 1:
        return padded[:, : widths[0]].flatten(0, 1)
    return torch.cat([padded[index, :count] for index, count in enumerate(widths)])


class _Through(torch.nn.Module):
    """A head that reads its states through an adapter."""

    def __init__(self, adapter: Adapter, head: Any) -> None:
        super().__init__()
        self._adapter, self._head = adapter, head

    def forward(self, states: Tensor) -> Tensor:
        output: Tensor = self._head(self._adapter(states))
        return output


def _shallow(module: Any) -> Any:
    """A copy that shares every weight and whose list of children is its own."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin


def _vocab(model: PreTrainedModel) -> int:
    return int(model.get_output_embeddings().weight.shape[0])


def _knob(rows: list[Row]) -> str:
    return "use fewer prompts at a time or a shorter text" if len(rows) > 1 else "use a shorter text or a smaller dtype"


def refuse_what_cannot_roll_back(config: Any, name: str, *, stateful: bool = False) -> None:
    """Raise CapabilityError for models whose memory of a sequence cannot be cut back to a shorter one.

    stateful: transformers marks the model's class as one that carries a state from token to token
    """
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = set(getattr(config, "layer_types", None) or ())
    bad = sorted(kind for kind in kinds if any(word in kind for word in CANNOT_ROLL_BACK))
    window = getattr(config, "sliding_window", None)
    if not kinds and window and getattr(config, "use_sliding_window", True):
        bad = ["sliding_attention"]
    if stateful:
        bad = bad or ["recurrent state"]
    if bad:
        raise CapabilityError(
            f"{name} keeps a cache that cannot be cut back ({', '.join(bad)}), so guesses that fail could not be "
            f"forgotten. Speculative decoding needs a model with full attention in every layer"
        )
