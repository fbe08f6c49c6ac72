"""A transformers model with full, sliding or chunked attention: many sequences a pass, chains and trees.

The model's own attention code writes into row buffers (runners/huggingface_cache.py), and a mask tells sequences,
padding, windows and branches of a tree apart. Nothing is computed again: forgetting is a smaller `length`.
runners/huggingface_state_runner.py runs the models that this does not fit; runners/huggingface_probe.py chooses.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.core.draft_tree import depths
from paceline.core.protocols import Adapter
from paceline.core.types import Capability, LayerKeys, ModelOutput, Row, SequenceCache
from paceline.device.memory import for_sampling
from paceline.errors import CapabilityError, OptionError, OutOfMemory
from paceline.kv.block_manager import BlockManager
from paceline.runners.huggingface_cache import HuggingFaceSequenceCache, PassPlan, RowBuffers, own
from paceline.runners.huggingface_masks import additive, attention_kinds, storing_layers, visible_keys
from paceline.runners.huggingface_model import TransformersRunner, explained_copy, explained_memory


@dataclass(frozen=True, slots=True, eq=False)
class ModelInputs:
    """What a model is called with."""

    tokens: Tensor  # int64 [batch, width]
    positions: Tensor  # int64 [batch, width]
    mask: Tensor | dict[str, Tensor]  # additive [batch, 1, width, keys]; by kind of layer where there are several


class HuggingFaceRunner(TransformersRunner):
    """A loaded transformers model behind `Runner`. `open_hugging_face` makes one whose capabilities were probed.

    features  layers whose entering hidden states are returned, joined (EAGLE-3 heads read these)
    hidden    return the last hidden states
    blocks    accounting of what its sequence caches hold; unbounded unless given
    """

    def __init__(
        self,
        model: PreTrainedModel,
        name: str,
        *,
        hidden: bool = False,
        features: tuple[int, ...] = (),
        blocks: BlockManager | None = None,
    ) -> None:
        super().__init__(model, name, blocks)
        self.expose(hidden=hidden, features=features)
        self.kinds = attention_kinds(model.config)
        self.capabilities |= {Capability.TREE, Capability.SHARED_KEYS}
        if hasattr(model.base_model, "layers"):
            self.capabilities |= {Capability.EARLY_EXIT}
        self._buffers = RowBuffers(self.info.num_layers)
        self._rows = RowNumbers()

    # --- sequence caches ----------------------------------------------------------------------------------------------

    def new_cache(self) -> HuggingFaceSequenceCache:
        return HuggingFaceSequenceCache(self._rows.take())

    @torch.inference_mode()
    def commit(self, seq_cache: SequenceCache, nodes: list[int]) -> None:
        cache = own(seq_cache)
        start = cache.last_row_start
        moved = [(start + node, start + place) for place, node in enumerate(nodes) if node != place]
        if moved:
            sources, targets = zip(*moved)
            self._buffers.move(cache.row, list(sources), list(targets), self._device)
        cache.length = start + len(nodes)

    def truncate(self, seq_cache: SequenceCache, length: int) -> None:
        cache = own(seq_cache)
        cache.length = min(cache.length, length)
        self.blocks.shrink(cache, cache.length)

    def free(self, seq_cache: SequenceCache) -> None:
        cache = own(seq_cache)
        self.blocks.release(cache)
        if cache.row >= 0:
            self._rows.give_back(cache.row)
            cache.row, cache.length = -1, 0

    @torch.inference_mode()
    def fork(self, seq_cache: SequenceCache, length: int) -> HuggingFaceSequenceCache:
        twin = self.new_cache()
        try:
            self.blocks.grow(twin, length)
            with explained_copy(length):
                self._buffers.reserve(self._rows.count, length)
                self._buffers.copy_row(own(seq_cache).row, twin.row, length)
        except OutOfMemory:
            self.free(twin)
            raise
        twin.length = length
        return twin

    # --- passes -------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(self, rows: list[Row], *, last_only: bool = False) -> ModelOutput:
        self.blocks.grow_rows(rows)
        with explained_memory(rows):
            output = self._pass(rows, last_only)
        for row in rows:
            cache = own(row.seq_cache)
            cache.last_row_start = cache.length
            cache.length += len(row.parents)
        return output

    def _pass(self, rows: list[Row], last_only: bool) -> ModelOutput:
        width = max(len(row.parents) for row in rows)
        self._buffers.reserve(self._rows.count, max(row.seq_cache.length for row in rows) + width)
        plan = self._buffers.plan = PassPlan([own(row.seq_cache) for row in rows], width, self._device)
        try:
            return self._run(rows, self._inputs(rows, plan, width), last_only)
        finally:
            self._buffers.plan = None

    def _run(self, rows: list[Row], inputs: ModelInputs, last_only: bool) -> ModelOutput:
        ends = sorted({len(row.parents) - 1 for row in rows}) if last_only else None
        columns = None if ends is None else torch.tensor(ends, device=self._device)
        states = self._wants_states
        extra: dict[str, Any] = {"logits_to_keep": columns} if self._picks_logits and columns is not None else {}
        output = self.model(
            input_ids=inputs.tokens,
            position_ids=inputs.positions,
            attention_mask=inputs.mask,
            past_key_values=self._buffers,
            use_cache=True,
            output_hidden_states=states,
            **extra,
        )
        logits = output.logits if self._picks_logits or columns is None else output.logits[:, columns]
        return self._pack(rows, for_sampling(logits), ends, output.hidden_states if states else None)

    def _inputs(self, rows: list[Row], plan: PassPlan, width: int) -> ModelInputs:
        tokens = torch.zeros(len(rows), width, dtype=torch.int64, device=self._device)
        positions = torch.zeros(len(rows), width, dtype=torch.int64)
        visible = [torch.zeros(len(rows), width, plan.end, dtype=torch.bool) for _ in self.kinds]
        for index, (row, start) in enumerate(zip(rows, plan.starts)):
            count = len(row.parents)
            tokens[index, :count] = row.ids().to(self._device)
            positions[index, :count] = torch.tensor(depths(row.parents)) + start
            seen = visible_keys(row.parents, start, width, plan.end)
            for kind, mask in zip(self.kinds, visible):
                mask[index] = kind.within_reach(seen, positions[index, :count], start)
        dtype = next(self.model.parameters()).dtype
        masks = {kind.name: additive(mask, dtype, self._device) for kind, mask in zip(self.kinds, visible)}
        return ModelInputs(tokens, positions.to(self._device), masks if len(masks) > 1 else masks[self.kinds[0].name])

    def _pack(self, rows: list[Row], logits: Tensor, ends: list[int] | None, states: Any) -> ModelOutput:
        """Drop the padding. ends: the nodes that logits are of, or None for all."""
        sizes = [len(row.parents) for row in rows]
        hidden = _packed(states[-1], sizes) if states is not None and self.want_hidden else None
        features = None
        if states is not None and self.feature_layers:
            entering = [self._entering(states, layer) for layer in self.feature_layers]
            features = _packed(torch.cat(entering, dim=-1), sizes)
        if ends is None:
            return ModelOutput(_packed(logits, sizes), sizes, hidden, features)
        last = torch.stack([logits[index, ends.index(size - 1)] for index, size in enumerate(sizes)])
        return ModelOutput(last, [1] * len(rows), hidden, features, sizes)

    # --- for drafters that read the target's states -------------------------------------------------------------------

    def shared_keys(self, seq_cache: SequenceCache) -> dict[str, LayerKeys]:
        """Of layers that store keys of their own; in some families the last layers use those of earlier ones."""
        cache = own(seq_cache)
        layers = storing_layers(self.model.config.get_text_config(decoder=True))
        return {kind: self._buffers.stored(layer, cache.row, cache.length) for kind, layer in layers.items()}

    def early_exit(self, layer: int, adapter: Adapter | None = None) -> HuggingFaceRunner:
        """The same model stopped after `layer` layers, on the same cache. The model itself is not changed."""
        if not 0 < layer < self.info.num_layers:
            raise OptionError(f"an exit is after layer 1 to {self.info.num_layers - 1}, not {layer}")
        if Capability.EARLY_EXIT not in self.capabilities:
            raise CapabilityError(f"{self.info.name} has no list of layers to stop in")
        runner = copy.copy(self)
        runner.model = _first_layers(self.model, layer)
        if adapter is not None:
            runner.model.set_output_embeddings(_AdaptedHead(adapter, self.model.get_output_embeddings()))
        runner.want_hidden, runner.feature_layers = True, ()
        return runner


class RowNumbers:
    """Which rows of the buffers are taken."""

    def __init__(self) -> None:
        self.count = 0  # rows ever taken
        self._free: list[int] = []

    def take(self) -> int:
        if self._free:
            self._free.sort(reverse=True)  # low rows first: neighbours are read without copying
            return self._free.pop()
        self.count += 1
        return self.count - 1

    def give_back(self, row: int) -> None:
        self._free.append(row)


def _packed(padded: Tensor, sizes: list[int]) -> Tensor:
    """[batch, width, …] -> [all nodes, …]"""
    if len(set(sizes)) == 1:
        return padded[:, : sizes[0]].flatten(0, 1)
    return torch.cat([padded[index, :count] for index, count in enumerate(sizes)])


class _AdaptedHead(torch.nn.Module):
    """An LM head that reads hidden states through an adapter."""

    def __init__(self, adapter: Adapter, head: Any) -> None:
        super().__init__()
        self._adapter, self._head = adapter, head

    def forward(self, states: Tensor) -> Tensor:
        output: Tensor = self._head(self._adapter(states))
        return output


def _first_layers(model: Any, layer: int) -> Any:
    """A model of the first layers that shares every weight."""
    short = _twin(model)
    decoder = short.base_model
    decoder.layers = decoder.layers[:layer]
    short.config = decoder.config = copy.copy(model.config)
    short.config.num_hidden_layers = layer
    return short


def _twin(module: Any) -> Any:
    """A copy that shares every weight. Its modules are its own: hooks that transformers adds to record hidden states
    in the copy would record them twice in the original."""
    twin = copy.copy(module)
    twin._forward_hooks = copy.copy(module._forward_hooks)
    twin._modules = {name: child if child is None else _twin(child) for name, child in module._modules.items()}
    return twin
