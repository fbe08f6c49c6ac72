"""Any causal language model of transformers whose cache can be cut back.

The model's own attention code writes into row buffers (runners/huggingface_cache.py), and a mask tells sequences,
padding and branches of a tree apart. Nothing is computed again: forgetting is a smaller `length`.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.core.draft_tree import ancestors, depths
from paceline.core.protocols import Adapter, Runner
from paceline.core.types import Capability, ModelInfo, ModelOutput, Row, SequenceCache
from paceline.device.memory import for_sampling
from paceline.errors import CapabilityError, OptionError, OutOfMemory
from paceline.kv.block_manager import BlockManager
from paceline.models.registry import model_types
from paceline.runners.huggingface_cache import HuggingFaceSequenceCache, PassPlan, RowBuffers, own
from paceline.runners.huggingface_probe import probe_length, reads_batches, reads_trees
from paceline.runners.loading import eos_token_ids_of

CANNOT_ROLL_BACK = ("sliding_attention", "chunked_attention", "linear_attention", "mamba", "recurrent", "conv")


@dataclass(frozen=True, slots=True, eq=False)
class ModelInputs:
    """What a model is called with."""

    tokens: Tensor  # int64 [batch, width]
    positions: Tensor  # int64 [batch, width]
    mask: Tensor  # additive [batch, 1, width, keys]


class HuggingFaceRunner(Runner):
    """A loaded transformers model behind `Runner`.

    features  layers whose entering hidden states are returned, joined (EAGLE-3 heads read these)
    hidden    return the last hidden states
    blocks    accounting of what its sequence caches hold; unbounded unless given

    Some models compute positions or windows from the cache and not from the positions they are given. A probe finds
    them: their rows run one at a time, and they have no Capability.TREE.
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
        refuse_what_cannot_roll_back(model.config, name, stateful=bool(getattr(model, "_is_stateful", False)))
        self.model = model.eval()
        self.want_hidden, self.feature_layers = hidden, features
        self.info = _info(model, name)
        self.blocks = blocks or BlockManager()
        self._buffers = RowBuffers(self.info.num_layers)
        self._rows = RowNumbers()
        self._picks_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._batches = True  # whether rows of different lengths may share a pass
        self.capabilities = self._probed()

    def _probed(self) -> frozenset[Capability]:
        """What the model can do; the probe is left out for architectures that are known to be right."""
        capabilities = {Capability.TREE, Capability.HIDDEN_STATES}
        if hasattr(self.model.base_model, "layers"):
            capabilities.add(Capability.EARLY_EXIT)
        if self.model.config.model_type not in model_types():
            prefix = probe_length(self.model.config)
            self._batches = reads_batches(self, prefix)
            if not (self._batches and reads_trees(self, prefix)):
                capabilities.remove(Capability.TREE)
        return frozenset(capabilities)

    @property
    def _device(self) -> torch.device:
        return torch.device(self.info.device)

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
        except OutOfMemory:
            self.free(twin)
            raise
        self._buffers.reserve(self._rows.count, length)
        self._buffers.copy_row(own(seq_cache).row, twin.row, length)
        twin.length = length
        return twin

    def free_tokens(self) -> int:
        return self.blocks.free * self.blocks.block_size

    # --- passes -------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(self, rows: list[Row], *, last_only: bool = False) -> ModelOutput:
        self._reserve(rows)
        groups = [rows] if self._batches or len(rows) == 1 else [[row] for row in rows]
        try:
            outputs = [self._pass(group, last_only) for group in groups]
        except torch.OutOfMemoryError as error:
            tokens = sum(len(row.parents) for row in rows)
            raise OutOfMemory(f"a pass over {tokens} tokens does not fit: {_advice(rows)}") from error
        for row in rows:
            cache = own(row.seq_cache)
            cache.last_row_start = cache.length
            cache.length += len(row.parents)
        return outputs[0] if len(outputs) == 1 else ModelOutput.of([row for output in outputs for row in output])

    def _reserve(self, rows: list[Row]) -> None:
        """Blocks for every row, or OutOfMemory and nothing changed."""
        try:
            for row in rows:
                self.blocks.grow(row.seq_cache, row.seq_cache.length + len(row.parents))
        except OutOfMemory:
            for row in rows:
                self.blocks.shrink(row.seq_cache, row.seq_cache.length)
            raise

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
        states = self.want_hidden or bool(self.feature_layers)
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
        visible = torch.zeros(len(rows), width, plan.end, dtype=torch.bool)
        for index, (row, start) in enumerate(zip(rows, plan.starts)):
            count = len(row.parents)
            tokens[index, :count] = row.ids().to(self._device)
            positions[index, :count] = torch.tensor(depths(row.parents)) + start
            visible[index, :, : max(start, 1)] = True  # padding sees something, or its softmax would be NaN
            visible[index, :count, :start] = True
            visible[index, :count, start : start + count] = ancestors(row.parents)
        dtype = next(self.model.parameters()).dtype
        mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)
        return ModelInputs(tokens, positions.to(self._device), mask[:, None].to(self._device))

    def _pack(self, rows: list[Row], logits: Tensor, ends: list[int] | None, states: Any) -> ModelOutput:
        """Drop the padding. ends: the nodes that logits are of, or None for all."""
        sizes = [len(row.parents) for row in rows]
        hidden = _packed(states[-1], sizes) if states is not None and self.want_hidden else None
        features = None
        if states is not None and self.feature_layers:
            features = _packed(torch.cat([states[layer] for layer in self.feature_layers], dim=-1), sizes)
        if ends is None:
            return ModelOutput(_packed(logits, sizes), sizes, hidden, features)
        last = torch.stack([logits[index, ends.index(size - 1)] for index, size in enumerate(sizes)])
        return ModelOutput(last, [1] * len(rows), hidden, features, sizes)

    # --- for drafters that read the target's states -------------------------------------------------------------------

    def expose(self, *, hidden: bool = False, features: tuple[int, ...] = ()) -> None:
        self.want_hidden = self.want_hidden or hidden
        self.feature_layers = features or self.feature_layers

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

    def lm_head(self, hidden: Tensor) -> Tensor:
        return self.model.get_output_embeddings()(hidden)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.model.get_input_embeddings()(tokens)


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


def _info(model: PreTrainedModel, name: str) -> ModelInfo:
    config, first = model.config.get_text_config(), next(model.parameters())
    embeddings = model.get_output_embeddings() or model.get_input_embeddings()
    return ModelInfo(
        name,
        int(embeddings.weight.shape[0]),
        eos_token_ids_of(model),
        int(getattr(config, "max_position_embeddings", None) or 1 << 20),
        int(getattr(config, "decoder_layers", None) or config.num_hidden_layers),
        config.hidden_size,
        str(first.device),
        str(first.dtype).removeprefix("torch."),
    )


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
    short, decoder = _shallow(model), _shallow(model.base_model)
    decoder.layers = decoder.layers[:layer]
    setattr(short, model.base_model_prefix, decoder)
    short.config = decoder.config = copy.copy(model.config)
    short.config.num_hidden_layers = layer
    return short


def _shallow(module: Any) -> Any:
    """A copy that shares every weight and has its own list of children."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin


def _advice(rows: list[Row]) -> str:
    if len(rows) > 1:
        return "use fewer prompts at a time or a shorter sequence"
    return "use a shorter sequence or a smaller dtype"


def refuse_what_cannot_roll_back(config: Any, name: str, *, stateful: bool = False) -> None:
    """Raise CapabilityError for models whose cache of a sequence cannot be cut back to a shorter one.

    stateful: transformers marks the model's class as one that carries a state from token to token
    """
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = set(getattr(config, "layer_types", None) or ())
    bad = sorted(kind for kind in kinds if any(part in kind for part in CANNOT_ROLL_BACK))
    window = getattr(config, "sliding_window", None)
    if not kinds and window and getattr(config, "use_sliding_window", True):
        bad = ["sliding_attention"]
    if stateful:
        bad = bad or ["recurrent state"]
    if bad:
        raise CapabilityError(
            f"{name} keeps a cache that cannot be cut back ({', '.join(bad)}), so rejected draft tokens could not be "
            f"forgotten. Speculative decoding needs a model with full attention in every layer"
        )
