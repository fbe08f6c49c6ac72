"""Packed weights: what is stored, the kernel that dequantizes it, and a draft model made of them.

Without a GPU the kernel runs through Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from paceline.core.types import DraftInput, Row
from paceline.errors import OptionError
from paceline.layers.gemm import GemmLauncher
from paceline.layers.gemm_types import Epilogue
from paceline.layers.linear_triton import argmax
from paceline.layers.weight_pieces import PieceFormat
from paceline.quantization import fp8, registry
from paceline.quantization.int4 import pack_int4
from paceline.quantization.packed import PackedLinear, fits_kernel, pack_weight, round_weight
from paceline.quantization.packed_layout import Kind, decode, pack_high, pack_words, unpack_words
from paceline.quantization.packed_triton import MAX_SPLITS, packed_tiling, unpack
from paceline.quantization.quantized_weight import BlockScales, QuantizedWeight
from paceline.runners.native import NativeRunner
from tests.runners.native.fused import eager_graphs
from tests.runners.native.models import tiny
from tests.support.packed import random_packed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TABLE = torch.linspace(-1.0, 1.0, 16) ** 3
# kind, input features that share a scale (0: all), zero points, act-order
LAYOUTS = {
    "int4": (Kind.INT4, 128, False, False),
    "int4 in small groups": (Kind.INT4, 32, False, False),
    "int4 with zero points": (Kind.INT4, 64, True, False),
    "int4 with one zero point a row": (Kind.INT4, 0, True, False),
    "int4 in act-order": (Kind.INT4, 64, True, True),
    "int8": (Kind.INT8, 0, False, False),
    "int8 with zero points": (Kind.INT8, 128, True, False),
    "int8 with one zero point a row": (Kind.INT8, 0, True, False),
    "fp8": (Kind.FP8, 0, False, False),
    "fp8 in blocks": (Kind.FP8, 128, False, False),
    "fp4": (Kind.FP4, 32, False, False),
    "table": (Kind.LUT4, 64, False, False),
}


def random_weight(layout: str, rows: int, columns: int) -> QuantizedWeight:
    """Random codes, every one of them, with scales and zero points that differ by group."""
    kind, group, has_zeros, act_order = LAYOUTS[layout]
    codes = torch.randint(0, 1 << kind.bits, (rows, columns)).to(torch.uint8)
    if kind is Kind.FP8:
        codes[(codes & 127) == 127] = 0  # stands for no number
    groups = -(-columns // group) if group else 1
    scales = torch.rand(rows, groups) * 0.1 + 0.01
    zeros = torch.randint(0, 1 << kind.bits, (rows, groups)) if has_zeros else None
    order = torch.randperm(columns) if act_order else None
    table = TABLE if kind is Kind.LUT4 else None
    return QuantizedWeight(kind, codes, scales, group or columns, zeros, order, table)


def on_device(layout: str, rows: int, columns: int) -> PackedLinear:
    return pack_weight(moved(random_weight(layout, rows, columns)))


def moved(weight: QuantizedWeight) -> QuantizedWeight:
    tensors = {name: getattr(weight, name) for name in ("codes", "scales", "zeros", "order", "table")}
    return replace(weight, **{name: None if part is None else part.to(DEVICE) for name, part in tensors.items()})


@pytest.mark.parametrize("kind", Kind)
def test_every_code_of_a_word_comes_back(kind: Kind) -> None:
    codes = torch.randint(0, 1 << kind.bits, (5, 300)).to(torch.uint8)
    words, high = pack_words(codes, kind), pack_high(codes, kind)
    assert words.shape == (1, 3, 16, kind.words) and torch.equal(unpack_words(words, kind, (5, 300), high), codes)


# input features that share a scale, spans of 300 of them, groups of a span
GROUPINGS = ((16, 3, 8), (32, 3, 4), (64, 3, 2), (128, 3, 1), (256, 2, 1), (300, 1, 1))


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize(("group_size", "spans", "width"), GROUPINGS)
def test_a_weight_of_no_whole_tiles_and_steps_comes_back(kind: Kind, group_size: int, spans: int, width: int) -> None:
    groups = -(-300 // group_size)
    codes = torch.randint(0, 1 << kind.bits, (37, 300)).to(torch.uint8)
    scales, zeros, minimums = torch.randn(37, groups), torch.randint(0, 16, (37, groups)), torch.randn(37, groups)
    block = BlockScales(minimums, *(None if groups == 1 else torch.randn(37, 2) for _ in range(2)))
    packed = pack_weight(QuantizedWeight(kind, codes, scales, group_size, zeros, block=block))
    assert (packed.out_features, packed.in_features, packed.groups) == (37, 300, groups)
    assert packed.words.shape == (3, 3, 16, kind.words) and packed.scales.shape == (3, spans, 16, width)
    read = packed._unpacked()
    assert (read.kind, read.group_size) == (kind, group_size) and torch.equal(read.codes, codes)
    assert read.zeros is not None and torch.equal(read.scales, scales) and torch.equal(read.zeros.long(), zeros)
    for name in ("minimums", "outer_scales", "outer_minimums"):
        part, expected = getattr(read.block, name), getattr(block, name)
        assert part is expected is None or torch.equal(part, expected)
    places = torch.tensor([36, 0, 17, 16, 15, 17])
    taken = packed._taken(places)
    assert taken.out_features == 6 and torch.equal(taken._unpacked().codes, codes[places])
    assert torch.equal(taken._unpacked().scales, scales[places])


# kind, columns, input features that share a scale, the column of the code in row 18, and where in memory its word, its
# scale and the scale around that are: row 18 is the third of the second tile
ADDRESSES = {
    # step 1 of 2, feature 42 of it: word 10; the second of four groups of the step
    "small groups": (Kind.INT4, 200, 32, 170, (16 * 2 + 1 * 16 + 2) * 16 + 10, (16 * 2 + 1 * 16 + 2) * 4 + 1, None),
    # step 2 of 5, feature 44: word 12; the second of three groups
    "large groups": (Kind.FP8, 600, 256, 300, (16 * 5 + 2 * 16 + 2) * 32 + 12, 16 * 3 + 1 * 16 + 2, None),
    # step 2 of 4, feature 44: word 12; the third of eight groups of the step, in the second block of two
    "blocks": (Kind.INT6, 512, 16, 300, (16 * 4 + 2 * 16 + 2) * 16 + 12, (16 * 4 + 2 * 16 + 2) * 8 + 2, 16 * 2 + 18),
    # step 3 of 4, feature 45: word 13; the third of eight groups of the step, in the second block of two
    "two bits": (Kind.INT2, 512, 16, 429, (16 * 7 + 2) * 16 + 13, (16 * 7 + 2) * 8 + 2, 16 * 3 + 2),
    "three bits": (Kind.INT3, 512, 16, 429, (16 * 7 + 2) * 16 + 13, (16 * 7 + 2) * 8 + 2, 16 * 3 + 2),
    # step 2 of 3, feature 43: word 11
    "one group": (Kind.INT8, 300, 300, 299, (16 * 3 + 2 * 16 + 2) * 32 + 11, 16 + 2, None),
}


@pytest.mark.parametrize("case", ADDRESSES)
def test_every_number_is_where_a_kernel_that_takes_16_rows_reads_it(case: str) -> None:
    """By hand: of all numbers only those of one code are not zero, and so are those of the padding."""
    kind, columns, group_size, column, word, scale, outer = ADDRESSES[case]
    codes, code = torch.zeros(20, columns, dtype=torch.uint8), (1 << kind.bits) - 1
    scales, outer_scales = torch.zeros(20, -(-columns // group_size)), torch.zeros(20, -(-columns // 256))
    codes[18, column], scales[18, column // group_size], outer_scales[18, column // 256] = code, 2.0, 3.0
    block = None if outer is None else BlockScales(outer_scales=outer_scales)
    linear = pack_weight(QuantizedWeight(kind, codes, scales, group_size, block=block))
    assert linear.words.is_contiguous() and linear.words.flatten().nonzero().tolist() == [[word]]
    index = column % 128 // kind.words
    assert linear.words.flatten()[word] == ((1 << kind.word_bits) - 1) << (kind.word_bits * index)
    assert linear.scales.is_contiguous() and linear.scales.flatten().nonzero().tolist() == [[scale]]
    if linear.high is not None:
        assert linear.high.flatten().nonzero().tolist() == [[word]]
        assert linear.high.flatten()[word] == ((1 << kind.high_bits) - 1) << (kind.high_bits * index)
    if linear.block is not None and linear.block.outer_scales is not None:
        assert linear.block.outer_scales.flatten().nonzero().tolist() == [[outer]]


@pytest.mark.parametrize("form", [PieceFormat.INT4, PieceFormat.Q4_K, PieceFormat.Q6_K, PieceFormat.FP8])
def test_the_kernel_of_a_whole_pass_takes_whole_tiles(form: PieceFormat) -> None:
    assert random_packed(form, 32, 256, "cpu").pass_pieces is not None
    odd = random_packed(form, 24, 256, "cpu")
    assert odd.pass_pieces is None and odd.dequantize(torch.float32).shape == (24, 256)


def test_small_floats_stand_for_what_their_bits_say() -> None:
    eight, four = torch.arange(256).to(torch.uint8), torch.arange(16).to(torch.uint8)
    sign, exponent, fraction = eight >> 7, ((eight >> 3) & 15).double(), (eight & 7).double()
    normal = (1 + fraction / 8) * 2.0 ** (exponent - 7)
    expected = torch.where(exponent == 0, fraction / 8 * 2.0**-6, normal) * (1 - 2 * sign.double())
    numbers = (eight & 127) != 127
    assert torch.equal(decode(eight, Kind.FP8).double()[numbers], expected[numbers])
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert decode(four, Kind.FP4).tolist() == values + [-value for value in values]


@pytest.mark.parametrize(("kind", "error"), [(Kind.INT8, 0.01), (Kind.INT4, 0.14)])
def test_a_rounded_weight_is_the_weight_but_for_rounding(kind: Kind, error: float) -> None:
    weight = torch.randn(48, 256)
    linear = pack_int4(weight) if kind is Kind.INT4 else pack_weight(round_weight(weight, kind, 256))
    assert (linear.out_features, linear.in_features, linear.quantizes_input) == (48, 256, False)
    assert linear.words.nbytes == 48 * 256 * kind.bits // 8 and linear.nbytes > linear.words.nbytes
    assert (linear.dequantize(torch.float32) - weight).norm() / weight.norm() < error


def test_int4_takes_groups_of_128_or_else_of_32() -> None:
    assert pack_int4(torch.randn(4, 256)).group_size == 128
    assert pack_int4(torch.randn(4, 96)).group_size == 32
    with pytest.raises(OptionError, match="multiple of 32"):
        pack_int4(torch.randn(4, 40))


def test_fp8_keeps_three_bits_of_every_weight() -> None:
    weight = torch.randn(48, 96) * torch.rand(48, 1)
    linear = fp8.quantize(weight)
    rounded = linear.dequantize(torch.float32)
    large = weight.abs() > weight.abs().amax(dim=1, keepdim=True) / 1000
    assert ((rounded - weight).abs() <= weight.abs() / 16)[large].all() and not torch.equal(rounded, weight)


def test_groups_that_the_kernel_does_not_take_are_known() -> None:
    weight = QuantizedWeight(Kind.INT4, torch.zeros(4, 96, dtype=torch.uint8), torch.ones(4, 2), 48)
    assert not fits_kernel(weight)


@pytest.mark.parametrize(("out_features", "steps"), [(3584, 148), (4608, 28), (37888, 28), (152064, 28), (64, 1)])
def test_the_order_of_sums_depends_on_the_weight_alone(out_features: int, steps: int) -> None:
    tiles = {packed_tiling(out_features, steps, rows, gate=False) for rows in range(1, 65)}
    assert len({(tile.splits, tile.steps_per_split) for tile in tiles}) == 1
    splits, per_split = next(iter((tile.splits, tile.steps_per_split) for tile in tiles))
    assert 1 <= splits <= MAX_SPLITS and (splits - 1) * per_split < steps <= splits * per_split


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter does not round to bfloat16
def test_the_kernel_that_unpacks_a_weight_rounds_like_torch(layout: str, dtype: torch.dtype) -> None:
    weight = random_weight(layout, 37, 304)
    weight = moved(replace(weight, scales=weight.scales.to(dtype)))
    expected = weight.dequantize(torch.float32)  # torch's own operations, on any device
    assert torch.equal(unpack(pack_weight(weight), torch.float32), expected)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 5])
def test_products_agree_with_float64(layout: str, rows: int) -> None:
    gemm = GemmLauncher(torch.float32, torch.device(DEVICE), 1e-6)
    x, bias = torch.randn(rows, 608, device=DEVICE), torch.randn(37, device=DEVICE)
    linear, pair = (on_device(layout, size, 608) for size in (37, 74))
    exact = x.double() @ linear.dequantize(torch.float64).t()
    biased = gemm.product(x, linear, Epilogue(bias=bias)).out.double()
    torch.testing.assert_close(biased, exact + bias, rtol=1e-4, atol=1e-3)
    residual = torch.randn(rows, 37, device=DEVICE)
    added = gemm.product(x, linear, Epilogue(residual=residual, bias=bias)).out.double()
    torch.testing.assert_close(added, exact + residual + bias, rtol=1e-4, atol=1e-3)
    gate, up = (x.double() @ pair.dequantize(torch.float64).t()).chunk(2, dim=-1)
    gated = gemm.product(x, pair, Epilogue(gate=True)).out.double()
    torch.testing.assert_close(gated, torch.nn.functional.silu(gate) * up, rtol=1e-3, atol=1e-2)
    logits = gemm.product(x, linear, Epilogue(norm=torch.ones(608, device=DEVICE), argmax=True))
    assert torch.equal(argmax(gemm, logits).token, logits.out.argmax(dim=-1))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [20, 40, 70])
def test_more_rows_than_a_tile_agree_with_float64(rows: int) -> None:
    """Up to 64 by the kernel, above that by the dequantized weight; with batch_invariant by the kernel alone."""
    linear, x = on_device("int4", 150, 384), torch.randn(rows, 384, device=DEVICE)
    exact = x.double() @ linear.dequantize(torch.float64).t()
    for invariant in (False, True):
        gemm = GemmLauncher(torch.float32, torch.device(DEVICE), 1e-6, batch_invariant=invariant)
        torch.testing.assert_close(gemm.product(x, linear, Epilogue()).out.double(), exact, rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", [(512, 640), (4608, 3584), (3584, 8192)])
def test_a_row_in_bfloat16_has_the_same_bits_in_every_pass(layout: str, sizes: tuple[int, int]) -> None:
    linear, gemm = on_device(layout, *sizes), GemmLauncher(torch.bfloat16, torch.device(DEVICE), 1e-6)
    x = torch.randn(64, sizes[1], device=DEVICE, dtype=torch.bfloat16)
    for epilogue in (Epilogue(), Epilogue(gate=True), Epilogue(argmax=True)):
        sizes_of_passes = (1, 2, 6, 16, 17, 33, 64)
        outputs = {rows: gemm.product(x[:rows].contiguous(), linear, epilogue).out for rows in sizes_of_passes}
        assert all(torch.equal(out, outputs[64][:rows]) for rows, out in outputs.items())
    exact = x.double() @ linear.dequantize(torch.float32).double().t()
    assert (gemm.product(x, linear, Epilogue()).out.double() - exact).norm() / exact.norm() < 0.005


class PackedInt4:
    """int4 as on a GPU, on any device."""

    def quantize(self, weight: torch.Tensor) -> PackedLinear:
        return pack_int4(weight)

    def matches(self, config: object) -> bool:
        return False

    def load(self, tensors: object, names: list[str]) -> PackedLinear:
        raise NotImplementedError


@pytest.mark.slow
def test_a_packed_draft_model_drafts_what_single_steps_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._formats, "packed-int4", PackedInt4())
    model = tiny("llama", hidden_size=96, intermediate_size=96, num_hidden_layers=1).to(DEVICE)
    runner = NativeRunner.of_model(model, "tiny", 1024, weight_format="packed-int4")
    assert not runner.model.quantizes_input
    runner.decode_graphs = eager_graphs(runner)
    prompts = [torch.randint(0, 101, (length,)).tolist() for length in (9, 5)]
    inputs = [DraftInput(runner.new_cache(), prompt) for prompt in prompts]
    drafted = runner.draft(inputs, 2)
    assert drafted is not None
    runner.decode_graphs = None
    for row, prompt in enumerate(prompts):
        seq_cache, steps = runner.new_cache(), []
        output = runner.forward([Row.chain(seq_cache, prompt)], last_only=True)
        for _ in range(2):
            steps.append(int(output.logits[0].argmax()))
            output = runner.forward([Row.chain(seq_cache, steps[-1:])])
        assert drafted.tokens[row].tolist() == steps
