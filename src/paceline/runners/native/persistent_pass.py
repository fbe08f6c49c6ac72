"""A whole decode pass as one kernel that stays on the device from the first layer to the argmax.

A small model's pass is hundreds of kernels of a few microseconds, and each border between two of them costs about as
much as the kernel itself. Here blocks hand their results to each other through memory instead, and load their next
weights while they wait. The kernel (persistent_pass.cu) is compiled for the shapes of one model, and reads weights of
few bits as they are packed (packed_units.cuh).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from paceline.core.confidence import EDGES, NUM_BINS
from paceline.core.looped_steps import ChainLimits
from paceline.device.kernel_cache import CompileError
from paceline.device.nvrtc import compiled_kernel
from paceline.device.properties import multiprocessor_count, supports_persistent_kernels
from paceline.device.tensor_maps import MatrixMap, encode
from paceline.layers.attention_triton import TritonBatch
from paceline.models.config import ArchConfig
from paceline.models.decoder import DecoderModel
from paceline.runners.native.kv_cache import KVCache
from paceline.runners.native.pass_weights import (
    FEATURE_FIELD,
    PLAIN_WEIGHTS,
    TILE_ROWS,
    WIDE_PLAIN_WEIGHTS,
    PassFormats,
    PassWeights,
)

TOKEN_TILES = (1, 2, 4)  # of eight tokens each: what a kernel is compiled for
TILE = 8
THREADS = 512
WARPS = 16
SPLITS = {64: 512, 128: 384}  # tokens of context that one block attends to, by the size of a head: they fit its memory
CHUNK = 32  # of them that a warp attends to
HEAD_ROWS = 16
BEST_FIELDS = 5  # of the best logits of a block
MOST_WORDS = 7168  # of `activated_words`
BLOCKS = 132  # of most devices that have the kernel
PACKED_ROWS = 16  # fewer would verify long drafts in another way, whose last bits differ
MAX_HIDDEN_SIZE = 2048  # larger models wait for their weights, unless those have few bits (docs/log.md)
MAX_SHARED_MEMORY = 232_448 - 8_960  # of a block, less what the kernel declares itself
SUMS_BYTES = WARPS * THREADS * 4  # partial sums of the warps
# Places in a draft chain, in the order of the kernel's.
CHAIN_GOES_ON, CHAIN_COUNT, CHAIN_MOST, CHAIN_LEAST, CHAIN_VOCAB_ROWS, CHAIN_RATES = range(6)
CHAIN_SURVIVAL = CHAIN_RATES + NUM_BINS


@dataclass(frozen=True, slots=True, eq=False)
class PersistentOutput:
    """What one launch leaves behind."""

    logits: Tensor  # float32 [rows, vocab]; not written unless asked for
    best: Tensor  # int64 [rows]
    second_best: Tensor  # int64 [rows]
    confidence: Tensor  # float32 [rows]: the probability of the best, …
    second_confidence: Tensor  # … and of the second best
    hidden: Tensor | None  # [rows, hidden_size], normed
    features: Tensor | None  # [rows, layers · hidden_size]; the kernel itself writes [layers, rows, hidden_size]


@dataclass(frozen=True, slots=True)
class TokenSource:
    """Where the tokens of a pass lie: node j of sequence i at i * stride + offset + j."""

    tokens: Tensor
    stride: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class OutputWish:
    """What a pass shall leave beside the argmax."""

    logits: bool = True
    hidden: bool = False
    features: tuple[int, ...] = ()


NO_LIMITS = ChainLimits(-1.0, (1.0,) * NUM_BINS)


class DraftChain:
    """How far the passes of a draft model in a row go, in the memory of the device: they decide it themselves.

    words  float32: whether the chain goes on, draft tokens so far, how many there may be, the least that a further one
           must promise, rows of the LM head that are read, how often draft tokens are accepted, and of every sequence
           the probability that all its draft tokens are
    """

    def __init__(self, num_seqs: int, device: torch.device) -> None:
        self.words = torch.zeros(CHAIN_SURVIVAL + num_seqs, device=device)
        self._set: tuple[int, ChainLimits, int] | None = None

    @property
    def count(self) -> Tensor:
        """Draft tokens that were made, [1]"""
        return self.words[CHAIN_COUNT : CHAIN_COUNT + 1]

    @torch.inference_mode()
    def set(self, most: int, limits: ChainLimits | None = None, vocab_rows: int = 0) -> None:
        """most: draft tokens. Without limits there are as many.

        vocab_rows: of the LM head, from the first on, that draft tokens are chosen from, in whole tiles; 0: all
        """
        limits = limits or NO_LIMITS
        if self._set == (most, limits, vocab_rows):
            return
        assert vocab_rows % TILE_ROWS == 0, "a tile of the LM head is read as a whole"
        self._set = (most, limits, vocab_rows)
        words = torch.tensor([float(most), limits.least, float(vocab_rows), *limits.rates])
        self.words[CHAIN_MOST:CHAIN_SURVIVAL].copy_(words, non_blocking=True)


@dataclass(frozen=True, slots=True)
class ChainLink:
    """A pass of a chain. step: of those before it."""

    chain: DraftChain
    step: int


@dataclass(frozen=True, slots=True, eq=False)
class PassWorkspace:
    """Memory that blocks exchange results through. Passes of one runner follow each other, so they share it.

    The first four are int64: two values, and the number of the layer that wrote them.
    """

    between: Tensor  # hidden states between attention and MLP
    hidden: Tensor  # hidden states behind a layer
    qkv: Tensor
    attended: Tensor
    activated: Tensor
    activated_words: Tensor  # the same as the first four, of few rows
    partial: Tensor
    partial_stats: Tensor
    splits_done: Tensor
    block_best: Tensor
    flags: Tensor

    @classmethod
    def allocate(cls, model: DecoderModel, rows: int, blocks: int, splits: int, device: torch.device) -> PassWorkspace:
        config, dtype = model.config, model.embedding.dtype
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        items = rows * config.num_kv_heads

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            between=zeros(rows, config.hidden_size // 2, dtype=torch.int64),
            hidden=zeros(rows, config.hidden_size // 2, dtype=torch.int64),
            qkv=zeros(rows, (query + 2 * kv) // 2, dtype=torch.int64),
            attended=zeros(rows, query // 2, dtype=torch.int64),
            activated=zeros(rows, config.intermediate_size, dtype=dtype),
            activated_words=zeros(MOST_WORDS, dtype=torch.int64),
            partial=zeros(items * splits * HEAD_ROWS, config.head_dim),
            partial_stats=zeros(items * splits * HEAD_ROWS, 2),
            splits_done=zeros(items, dtype=torch.int32),
            block_best=zeros(rows, blocks, BEST_FIELDS),
            flags=zeros(blocks + 2, dtype=torch.int32),
        )


@dataclass(slots=True, eq=False)
class PersistentPass:
    """Runs passes of up to `max_rows` tokens of one model. `of` makes one where the model and the device allow it."""

    model: DecoderModel
    kv: KVCache
    rope_cache: Tensor
    weights: PassWeights
    max_rows: int
    blocks: int
    splits: int
    workspace: PassWorkspace
    cache_maps: Tensor  # of the keys and of the values
    _kernels: dict[int, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: DecoderModel, kv: KVCache, rope_cache: Tensor) -> PersistentPass | None:
        """None: another kind of pass runs this model."""
        if not supports_persistent_kernels(kv.device) or not fits(model) or kv.keys.dtype != kv.dtype:  # rounded
            return None
        blocks = multiprocessor_count(kv.device)
        try:
            weights = PassWeights.of(model, blocks, plain_formats(model.config))
        except CompileError:
            return None
        if weights is None or not fits_shapes(model.config, weights.formats, blocks):
            return None
        rows = max_rows(model.config, weights.formats, blocks)
        splits = -(-rope_cache.shape[0] // SPLITS[model.config.head_dim])
        workspace = PassWorkspace.allocate(model, rows, blocks, splits, kv.device)
        try:
            maps = encode([_cache_map(kv.keys), _cache_map(kv.values)], kv.device)
            made = cls(model, kv, rope_cache, weights, rows, blocks, splits, workspace, maps)
            made.kernel(1)
        except CompileError:
            return None
        return made

    def holds(self, rows: int) -> bool:
        return rows <= self.max_rows

    def kernel(self, rows: int) -> Any:
        """The kernel of the smallest tile that holds so many rows; compiled on first use."""
        tiles = tiles_of(rows)
        if tiles not in self._kernels:
            constants = definitions(self.model, self.weights.formats, self.kv.block_size, tiles, self.blocks)
            self._kernels[tiles] = compiled_kernel(kernel_source(), "decode_pass", constants, MAX_SHARED_MEMORY)
        return self._kernels[tiles]

    def __call__(
        self, source: TokenSource, batch: TritonBatch, wish: OutputWish, link: ChainLink | None = None
    ) -> PersistentOutput:
        """One launch. Its output is read before the next one of this runner; a link that is not needed leaves none."""
        output = self._new_output(batch.num_seqs * batch.nodes, wish)
        self.kernel(batch.num_seqs * batch.nodes)(
            grid=(self.blocks, 1, 1),
            block=(THREADS, 1, 1),
            shared_mem=MAX_SHARED_MEMORY,
            args=self._arguments(source, batch, wish, output, link),
        )
        return self._with_last_feature(output, wish.features)

    def _new_output(self, rows: int, wish: OutputWish) -> PersistentOutput:
        device, size, dtype = self.kv.device, self.model.config.hidden_size, self.model.embedding.dtype
        logits = torch.empty(rows if wish.logits else 1, self.model.lm_head.out_features, device=device)
        hidden = torch.empty(rows, size, dtype=dtype, device=device) if wish.hidden else None
        features = torch.empty(len(wish.features), rows, size, dtype=dtype, device=device) if wish.features else None
        best, second = torch.empty(2, rows, dtype=torch.int64, device=device)
        stated, second_stated = torch.empty(2, rows, device=device)
        return PersistentOutput(logits, best, second, stated, second_stated, hidden, features)

    def _arguments(
        self,
        source: TokenSource,
        batch: TritonBatch,
        wish: OutputWish,
        output: PersistentOutput,
        link: ChainLink | None,
    ) -> list[Tensor | int]:
        """In the order of the kernel's parameters."""
        model, kv, work = self.model, self.kv, self.workspace
        embedding, embedded = self._embedding(source, batch)
        inputs = [source.tokens, batch.lengths, batch.counts, batch.depths, batch.tree_mask, batch.blocks]
        table = self._table(wish.features, output.features)
        weights = [table, embedding, model.final_norm.weight, self.weights.lm_head]
        handed = [work.between, work.hidden, work.qkv, work.attended]
        exchanged = [*handed, work.activated, work.activated_words, work.partial, work.partial_stats]
        hidden = work.hidden if output.hidden is None else output.hidden
        best = [output.best, output.second_best, output.confidence, output.second_confidence, work.block_best]
        results = [output.logits, *best, hidden, work.flags]
        sizes = [batch.num_seqs, batch.nodes, batch.blocks.shape[1], batch.offset, model.config.num_layers]
        places = [kv.keys.shape[1], source.stride, source.offset, self.splits]
        limit = self._input_limit(batch.num_seqs * batch.nodes)
        wishes = [int(wish.hidden), int(wish.logits), limit, int(embedded), -1 if link is None else link.step]
        cache = [kv.keys, kv.values, *self.cache_maps]
        tensors = [*inputs, *weights, self.rope_cache, *cache, *exchanged, work.splits_done, *results]
        chain = work.block_best if link is None else link.chain.words  # any: a pass of no chain reads none
        return [*tensors, chain, *sizes, *places, *wishes]

    def _embedding(self, source: TokenSource, batch: TritonBatch) -> tuple[Tensor, bool]:
        """The embedding; or of a packed one the rows of this pass, and that they are."""
        matrix = self.model.embedding_matrix
        if matrix is not None:
            return matrix, False
        flat = source.tokens.flatten()
        first = flat.storage_offset() + source.offset  # flat may be a part of a larger tensor
        tokens = flat.as_strided((batch.num_seqs, batch.nodes), (source.stride, 1), first)
        return self.model.embed(tokens.clamp(0, self.model.lm_head.out_features - 1).flatten()), True

    def _with_last_feature(self, output: PersistentOutput, layers: tuple[int, ...]) -> PersistentOutput:
        """What leaves the last layer is in the workspace; the features of a token are joined."""
        features, last = output.features, self.model.config.num_layers
        if features is None:
            return output
        if last in layers:
            words = self.workspace.hidden[: features.shape[1]]
            features[layers.index(last)].copy_(words.view(features.dtype).view(*words.shape, 4)[..., :2].flatten(1))
        return replace(output, features=features.transpose(0, 1).flatten(1))

    def _input_limit(self, rows: int) -> int:
        """Elements of a product's input that shared memory has room for."""
        config, formats, tiles = self.model.config, self.weights.formats, tiles_of(rows)
        ring = slots(config, tiles, formats) * formats.slot_bytes
        taken = SUMS_BYTES + formats.ring_alignment + ring + formats.sums_bytes(config, tiles * TILE)
        return (MAX_SHARED_MEMORY - taken) // 2 - config.hidden_size

    def _table(self, layers: tuple[int, ...], features: Tensor | None) -> Tensor:
        """The addresses of the weights, and of where the inputs of feature layers go."""
        if features is None:
            return self.weights.table
        table = self.weights.table.clone()
        for layer, feature in zip(layers, features):
            if layer < self.model.config.num_layers:
                # By a kernel: a graph can repeat no copy from the host.
                table[layer, FEATURE_FIELD].fill_(feature.data_ptr())
        return table


def _cache_map(cache: Tensor) -> MatrixMap:
    layers, tokens, heads, size = cache.shape
    return MatrixMap(cache.data_ptr(), layers * tokens, heads * size, CHUNK, box_columns=size)


# --- which models -----------------------------------------------------------------------------------------------------


def fits(model: DecoderModel) -> bool:
    """Whether the kernel runs this model."""
    return (
        model.embedding.dtype == torch.bfloat16
        and model.scale_embedding is None
        and model.scale_logits is None
        and model.lm_head_bias is None
        and not model.final_norm.centers
        and model.final_norm.weight.dtype == torch.bfloat16
    )


def fits_shapes(config: ArchConfig, formats: PassFormats = PLAIN_WEIGHTS, blocks: int = BLOCKS) -> bool:
    """Whether the kernel's tiles fit these shapes."""
    sizes = (config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size)
    return (
        (formats.packed or config.hidden_size <= MAX_HIDDEN_SIZE)
        and config.head_dim in SPLITS
        and config.num_heads // config.num_kv_heads <= HEAD_ROWS
        and all(size % formats.unit_columns == 0 for size in sizes)
        and max_rows(config, formats, blocks) >= (PACKED_ROWS if formats.packed else TILE)
    )


def max_rows(config: ArchConfig, formats: PassFormats = PLAIN_WEIGHTS, blocks: int = BLOCKS) -> int:
    """Tokens of a pass: their hidden states lie in shared memory beside partial sums and a ring of weights."""
    fitting = [tiles for tiles in TOKEN_TILES if formats.fits(config, tiles, blocks)]
    return max((TILE * tiles for tiles in fitting if slots(config, tiles, formats) >= formats.least_slots), default=0)


def plain_formats(config: ArchConfig) -> PassFormats:
    """How weights in bfloat16 are read: by copies of two boxes, unless that leaves no room for as many tokens."""
    wide = max_rows(config, WIDE_PLAIN_WEIGHTS) == max_rows(config, PLAIN_WEIGHTS)
    return WIDE_PLAIN_WEIGHTS if wide else PLAIN_WEIGHTS


def tiles_of(rows: int) -> int:
    """Tiles of eight tokens of the kernel that runs so many rows."""
    return next(tiles for tiles in TOKEN_TILES if tiles * TILE >= rows)


def slots(config: ArchConfig, tiles: int, formats: PassFormats = PLAIN_WEIGHTS) -> int:
    """Slots of the ring of weights: what the input of `tiles` tiles leaves of shared memory, as far as it helps."""
    size, rows = config.hidden_size, TILE * tiles
    inputs = rows * (formats.least_columns(config) + formats.pad)
    taken = SUMS_BYTES + formats.ring_alignment + formats.sums_bytes(config, rows) + 2 * (size + inputs)
    return min((MAX_SHARED_MEMORY - taken) // formats.slot_bytes, formats.most_slots)


@cache
def kernel_source() -> str:
    """The kernel with what it includes, as one text: the compiler has no folder to look in."""
    folder = files(__package__)
    include, packed = '#include "packed_units.cuh"', folder.joinpath("packed_units.cuh").read_text()
    return folder.joinpath("persistent_pass.cu").read_text().replace(include, packed)


def definitions(
    model: DecoderModel, formats: PassFormats, block_size: int, tiles: int, blocks: int
) -> list[str]:
    """The shapes of a model as constants of the kernel."""
    config = model.config
    head_norms = model.layers[0].weights()
    values = {
        "HIDDEN": config.hidden_size,
        "QUERY": config.num_heads * config.head_dim,
        "HEAD_DIM": config.head_dim,
        "KV_HEADS": config.num_kv_heads,
        "GROUP": config.num_heads // config.num_kv_heads,
        "INTER": config.intermediate_size,
        "VOCAB": model.lm_head.out_features,
        "TOKEN_TILES": tiles,
        "BLOCKS": blocks,
        "BLOCK_SIZE": block_size,
        "SPLIT": SPLITS[config.head_dim],
        "EPS": f"{config.rms_norm_eps!r}f",
        "SCALE": f"{config.head_dim**-0.5!r}f",
        "QK_NORM": int(head_norms is not None and head_norms.query_norm is not None),
        "SLOTS": slots(config, tiles, formats),
        "QKV_OUTPUTS": formats.tile_rows(sum(config.qkv_sizes), blocks),
        "HIDDEN_OUTPUTS": formats.tile_rows(config.hidden_size, blocks),
        "CONFIDENCE_BINS": NUM_BINS,
        "CONFIDENCE_EDGES": ",".join(f"{edge!r}f" for edge in EDGES),
        **formats.constants(),
    }
    return [f"-D{name}={value}" for name, value in values.items()]
