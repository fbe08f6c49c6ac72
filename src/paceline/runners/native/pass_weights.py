"""The weights of a model as the kernel of a whole pass reads them: addresses, and which formats they have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.device.tensor_maps import BOX_COLUMNS, MatrixMap, encode
from paceline.layers.decoder_layer import LayerWeights
from paceline.layers.weight_pieces import NUM_FIELDS, PieceFormat, Pieces
from paceline.models.config import ArchConfig
from paceline.models.decoder import DecoderModel

FEATURE_FIELD = 10  # of a layer: where its input goes, if anywhere
MATRIX_FIELDS = (1, 3, 6, 7)  # of a layer: its four products
MAX_PIECES = 2  # of a weight
TILE_ROWS = 16  # of a weight
MAX_BYTES = 1 << 32  # of a piece
KEPT_TILES = 4  # of packed weights and eight tokens: tiles of a block whose sums wait for further columns
WARPS = 16
PLAIN_BOX = WARPS * TILE_ROWS * BOX_COLUMNS * 2  # bytes of a slot of the ring, of a unit of one box for every warp
RING_ALIGNMENT = 1024  # bytes: after so many a copy spreads rows over the banks in the same way again
PART_BYTES = 2 * 512 * 16  # of a slot of packed weights: 16 bytes of two rows for every thread
BESIDE_BYTES = 16 * 192  # of a slot: scales and minimums for every warp
PLAIN_PAD, PACKED_PAD = 8, 16  # elements between rows of the input in shared memory
PLAIN_SLOTS, PACKED_SLOTS = 4, 3  # more of them do not help
STEP = 128  # columns of a unit of packed weights
SUMMED = 32  # inputs of a sum where groups of a step have minimums


@dataclass(frozen=True, slots=True)
class PassFormats:
    """What a kernel is compiled for.

    boxes  of BOX_COLUMNS columns that one copy of plain weights brings; slots of the ring are as much larger
    """

    formats: frozenset[PieceFormat] = frozenset((PieceFormat.PLAIN,))
    boxes: int = 1

    @property
    def packed(self) -> bool:
        return self.formats != {PieceFormat.PLAIN}

    @property
    def high_bits(self) -> bool:
        """Whether codes have bits beside their words."""
        return PieceFormat.Q6_K in self.formats

    @property
    def sums_inputs(self) -> bool:
        """Whether minimums, or what codes are too large by, are multiplied by sums of inputs."""
        return bool({PieceFormat.Q4_K, PieceFormat.INT4} & self.formats)

    @property
    def two_parts(self) -> bool:
        """Whether a step of a row is twice as long as in four bits."""
        return PieceFormat.FP8 in self.formats

    @property
    def pad(self) -> int:
        return PACKED_PAD if self.packed else PLAIN_PAD

    @property
    def most_slots(self) -> int:
        return PACKED_SLOTS if self.packed else PLAIN_SLOTS // self.boxes

    @property
    def least_slots(self) -> int:
        """Of the ring. A slot of plain weights is large: what is on its way into one alone keeps memory nearly busy."""
        return 2 if self.packed else 1

    @property
    def slot_bytes(self) -> int:
        """Of the ring of weights."""
        if not self.packed:
            return PLAIN_BOX * self.boxes
        return PART_BYTES * (2 if self.two_parts else 1) + (PART_BYTES // 2 if self.high_bits else 0) + BESIDE_BYTES

    @property
    def ring_alignment(self) -> int:
        return 1 if self.packed else RING_ALIGNMENT

    @property
    def unit_columns(self) -> int:
        """The number of inputs of every product is a multiple of this."""
        return 32 if self.packed else BOX_COLUMNS

    def tile_rows(self, rows: int, blocks: int) -> int:
        """Of a product with so many: such that blocks get equal shares, which rounds of all of them times rows says.

        They are even, for two neighbours are handed on together. Of packed weights eight take as long as sixteen.
        """
        if self.packed:
            return 8 if -(-rows // 8) <= blocks else TILE_ROWS
        return min(range(TILE_ROWS, 6, -2), key=lambda size: -(-rows // size // blocks) * size)

    def sums_bytes(self, config: ArchConfig, rows: int) -> int:
        """Of the sums of inputs."""
        widest = max(config.hidden_size, config.query_size, config.intermediate_size)
        summed = SUMMED if PieceFormat.Q4_K in self.formats else STEP
        return 4 * rows * (widest // summed + 4) if self.sums_inputs else 0

    def fits(self, config: ArchConfig, tiles: int, blocks: int) -> bool:
        """Whether so many blocks run `tiles` tiles of eight tokens: the longest input may come in parts."""
        return not self.packed or (blocks % 2 == 0 and config.hidden_size * tiles <= KEPT_TILES * TILE_ROWS * blocks)

    def least_columns(self, config: ArchConfig) -> int:
        """Of the input that shared memory must hold together."""
        widest = max(config.hidden_size, config.query_size)
        return max(widest, WARPS * STEP) if self.packed else widest  # the warps of a block take a step each

    def constants(self) -> dict[str, int]:
        """Of the kernel, by name."""
        present = {f"WITH_{form.name}": int(form in self.formats) for form in PieceFormat}
        return {"PACKED": int(self.packed), "BOXES": self.boxes, **present}


PLAIN_WEIGHTS = PassFormats()
WIDE_PLAIN_WEIGHTS = PassFormats(boxes=2)


@dataclass(frozen=True, slots=True, eq=False)
class PassWeights:
    """Addresses of every weight. The tensors themselves are the model's."""

    formats: PassFormats
    table: Tensor  # int64 [layers, fields]
    lm_head: Tensor  # int64: of the matrix its map, or the fields of its pieces
    maps: Tensor | None = None  # int64 [products, 16], whose addresses are in the table

    @classmethod
    def of(cls, model: DecoderModel, blocks: int, plain: PassFormats = PLAIN_WEIGHTS) -> PassWeights | None:
        """None: the kernel cannot read them all. blocks: of the kernel. plain: how it reads a model in bfloat16."""
        layers = [layer.weights() for layer in model.layers]
        weights = [layer for layer in layers if layer is not None]
        if len(weights) < len(layers):
            return None
        device, matrix = model.final_norm.weight.device, model.lm_head.matrix
        if matrix is not None and all(layer.is_plain for layer in weights):
            return cls._plain(weights, matrix, model.config, blocks, plain)
        heads = model.lm_head.pass_pieces
        if heads is None or len(heads) > 1 or not _joins(heads) or not all(map(_is_readable, weights)):
            return None
        rows = [[*layer.addresses(), *_fields(list(_pieces(layer)))] for layer in weights]
        found = {piece.format for layer in weights for pieces in _pieces(layer) for piece in pieces}
        formats = PassFormats(frozenset({*found, heads[0].format}))
        return cls(formats, _table(rows, device), _table(_fields([heads]), device))

    @classmethod
    def _plain(
        cls, weights: list[LayerWeights], lm_head: Tensor, config: ArchConfig, blocks: int, formats: PassFormats
    ) -> PassWeights:
        addresses = [layer.addresses() for layer in weights]
        described = [one for row in addresses for one in _matrices(row, config, blocks)]
        described.append(MatrixMap(lm_head.data_ptr(), lm_head.shape[0], lm_head.shape[1], TILE_ROWS))
        wide = [replace(one, box_columns=BOX_COLUMNS * formats.boxes) for one in described]
        maps = encode(wide, lm_head.device)
        places = iter(range(maps.data_ptr(), maps.data_ptr() + maps.nbytes, maps[0].nbytes))
        for row in addresses:
            for field in MATRIX_FIELDS:
                row[field] = next(places)
        return cls(formats, _table(addresses, lm_head.device), maps[-1], maps)


def _table(rows: list[list[int]] | list[int], device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _matrices(addresses: list[int], config: ArchConfig, blocks: int) -> Iterator[MatrixMap]:
    """Of a layer, in the order of its products. A tile of gate and up has eight rows of each."""
    size, inner, rows = config.hidden_size, config.intermediate_size, PLAIN_WEIGHTS.tile_rows
    qkv, output, gate_up, down = (addresses[field] for field in MATRIX_FIELDS)
    heads = sum(config.qkv_sizes)
    yield MatrixMap(qkv, heads, size, rows(heads, blocks))
    yield MatrixMap(output, size, config.query_size, rows(size, blocks))
    yield MatrixMap(gate_up, inner, size, TILE_ROWS // 2, parts=2)
    yield MatrixMap(down, size, inner, rows(size, blocks))


def _pieces(layer: LayerWeights) -> Iterator[Pieces]:
    yield from (pieces for pieces in layer.pieces if pieces is not None)


def _fields(products: list[Pieces]) -> list[int]:
    """Of the pieces of each product; a piece that is not there has none."""
    empty = [0] * NUM_FIELDS
    padded = [[piece.fields() for piece in pieces] + [empty] * (MAX_PIECES - len(pieces)) for pieces in products]
    return [number for pieces in padded for fields in pieces for number in fields]


def _is_readable(layer: LayerWeights) -> bool:
    """Whether the kernel takes the layer's weights as they are packed, and its vectors are in its own dtype."""
    norms = (layer.attention_norm, layer.mlp_norm, layer.query_norm, layer.key_norm)
    vectors = [vector for vector in (*norms, layer.qkv_bias, layer.output_bias) if vector is not None]
    if None in layer.pieces or any(vector.dtype != torch.bfloat16 for vector in vectors):
        return False
    qkv, *others = _pieces(layer)
    return _joins(qkv) and all(len(pieces) == 1 and _joins(pieces) for pieces in others)


def _joins(pieces: Pieces) -> bool:
    """Whether every tile is whole and in one piece, all of them have units of one size, and offsets have 32 bits."""
    plain = {piece.format is PieceFormat.PLAIN for piece in pieces}
    fits = all(piece.rows % TILE_ROWS == 0 and piece.codes.nbytes < MAX_BYTES for piece in pieces)
    return len(pieces) <= MAX_PIECES and len(plain) == 1 and fits
