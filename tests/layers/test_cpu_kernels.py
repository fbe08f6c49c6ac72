"""Products of blocked weights: close to the exact ones, and the same bits for a token whatever is beside it."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.device.kernel_cache import CompileError
from paceline.layers import cpu_kernels
from paceline.layers.cpu_kernels import (
    GGUF_KINDS,
    MACHINES,
    X86,
    Machine,
    WeightBlocks,
    blocks_product,
    compile_kernels,
    float_blocks,
    joined,
    norm_rows,
    pack_blocks,
    repack_blocks,
    unpack_blocks,
)
from paceline.quantization.blocked import BlockedLinear
from tests.support.gguf import random_blocks

pytestmark = pytest.mark.skipif(cpu_kernels.library() is None, reason="no compiled kernels on this machine")


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("size", [16, 576])
def test_a_norm_is_that_of_float64_and_the_same_bits_beside_other_rows(size: int) -> None:
    x, weight = 30 * torch.randn(7, size), torch.rand(size)
    normed = norm_rows(x, weight, 1e-5)
    exact = torch.nn.functional.rms_norm(x.double(), (size,), weight.double(), 1e-5)
    torch.testing.assert_close(normed.double(), exact, rtol=3e-6, atol=3e-6)
    assert all(torch.equal(norm_rows(row[None], weight, 1e-5)[0], normed[place]) for place, row in enumerate(x))
    assert torch.equal(norm_rows(x.t().contiguous().t(), weight, 1e-5), normed)


@pytest.mark.parametrize(("bits", "error"), [(8, 0.01), (4, 0.12)])
@pytest.mark.parametrize("rows", [8, 37])
def test_blocks_hold_the_weight_but_for_rounding(bits: int, error: float, rows: int) -> None:
    weight = torch.randn(rows, 96) * torch.rand(rows, 1)
    unpacked = unpack_blocks(pack_blocks(weight, bits))
    assert (unpacked - weight).norm() / weight.norm() < error
    again = unpack_blocks(pack_blocks(unpacked, bits))
    torch.testing.assert_close(again, unpacked, rtol=0.01, atol=1e-3)  # scales have eight bits


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [64, 37])
@pytest.mark.parametrize("nodes", [1, 2, 3, 7, 70])
def test_a_product_is_that_of_the_rounded_weight_and_input(bits: int, rows: int, nodes: int) -> None:
    blocks, x, bias = pack_blocks(torch.randn(rows, 96), bits), torch.randn(nodes, 96), torch.randn(rows)
    groups = x.double().view(nodes, -1, 32)
    scales = groups.abs().amax(dim=-1, keepdim=True) / 127
    rounded = ((groups / scales).round() * scales).view(nodes, 96)
    exact = rounded @ unpack_blocks(blocks).double().T + bias
    torch.testing.assert_close(blocks_product(x, joined([blocks]), bias).double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_token_is_the_same_bits_at_every_width_and_with_every_number_of_threads(bits: int) -> None:
    blocks, x = pack_blocks(torch.randn(136, 576), bits), torch.randn(69, 576)
    weight = joined([blocks])
    torch.set_num_threads(1)
    alone = torch.cat([blocks_product(row[None], weight, None) for row in x])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for width in (2, 3, 4, 5, 8, 12, 17, 69):
            assert torch.equal(blocks_product(x[:width], weight, None), alone[:width])


@pytest.mark.parametrize("rows", [64, 37])
def test_a_product_in_floating_point_is_exact_but_for_last_bits(rows: int) -> None:
    weight, x, bias = torch.randn(rows, 96), torch.randn(70, 96), torch.randn(rows)
    blocks = float_blocks(weight)
    assert blocks is not None and float_blocks(weight.bfloat16()) is None and float_blocks(weight[:, 1:]) is None
    whole = blocks_product(x, joined([blocks]), bias)
    torch.testing.assert_close(whole.double(), x.double() @ weight.double().T + bias, rtol=1e-5, atol=1e-5)
    for width in (1, 2, 3, 9):
        assert torch.equal(blocks_product(x[:width], joined([blocks]), bias), whole[:width])


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_zeros_stay_zeros_and_what_is_no_number_stays_none(value: float) -> None:
    blocks = pack_blocks(torch.ones(8, 64), 8)
    out = blocks_product(torch.full((1, 64), value), joined([blocks]), None)
    assert (out == 0).all() if value == 0 else not out.isfinite().any()


def test_what_is_no_number_stays_none_beside_numbers() -> None:
    blocks, x = pack_blocks(torch.ones(8, 64), 8), torch.ones(1, 64)
    for place in (0, 13, 31):
        x[0, place] = float("nan")
        assert blocks_product(x, joined([blocks]), None).isnan().all()
        x[0, place] = 1.0


# --- forms for other x86-64 CPUs --------------------------------------------------------------------------------------

needs_x86 = pytest.mark.skipif(MACHINES.get(platform.machine()) is not X86, reason="needs an x86-64 CPU")
FORMS = {  # the compiler's flags of CPUs with less than this one may have
    "256 bits": Machine("x86", (*X86.options, "-DPACELINE_256_BITS")),
    "AVX2": Machine("x86", (*X86.options, "-march=haswell")),
    "AVX-512 without VNNI": Machine("x86", (*X86.options, "-march=skylake-avx512")),
}


EMULATED_ARM = Machine("neon", ("-O1", f"-I{Path(__file__).with_name('neon')}"))
AVX512_FLAGS = ("avx512f", "avx512bw", "avx512dq", "avx512vl")


def cpu_flags() -> list[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split() for line in lines if line.startswith("flags")), [])


def every_kind(rows: int, columns: int) -> dict[str, WeightBlocks]:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    files = {
        name: repack_blocks(torch.from_numpy(random_blocks(name, rows, columns, 0)), kind, columns)
        for name, kind in GGUF_KINDS.items()
    }
    kinds = {"int4": pack_blocks(weight, 4), "int8": pack_blocks(weight, 8), "float32": float_blocks(weight)} | files
    return {name: blocks for name, blocks in kinds.items() if blocks is not None}


def all_products(kinds: dict[str, WeightBlocks], x: Tensor) -> dict[str, Tensor]:
    return {name: blocks_product(x, joined([blocks]), None) for name, blocks in kinds.items()}


def test_the_first_rows_of_a_weight_are_read_alone_and_give_the_same_bits() -> None:
    x = torch.randn(3, 256)
    for name, blocks in every_kind(64, 256).items():
        linear = BlockedLinear((blocks,))
        part = linear.first_rows(24)
        assert part is not None and part.out_features == 24 and part.blocks[0].data is blocks.data, name
        assert torch.equal(part(x), linear(x)[:, :24]), name
        assert linear.first_rows(20) is None, "rows are stored eight at a time"
    assert BlockedLinear((blocks, blocks)).first_rows(24) is None


@needs_x86
@pytest.mark.slow  # compiles all kernels
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_bits(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "AVX-512" in form and not set(AVX512_FLAGS) <= set(cpu_flags()):
        pytest.skip("needs a CPU with AVX-512")
    kinds = every_kind(37, 512)
    assert len(kinds) == len(GGUF_KINDS) + 3
    x = torch.randn(70, 512, generator=torch.Generator().manual_seed(1))
    x[1, :32] = torch.tensor([127.0, -127.0]).repeat(16)  # the largest sums of a group
    widths = (1, 2, 3, 5, 8, 70)
    own = {width: all_products(kinds, x[:width]) for width in widths}
    compiled = compile_kernels(FORMS[form])
    monkeypatch.setattr(cpu_kernels, "library", lambda: compiled)
    for width in widths:
        for name, product in all_products(kinds, x[:width]).items():
            assert torch.equal(product, own[width][name]), f"{name} of {width} tokens"


@needs_x86
@pytest.mark.slow  # compiles all kernels
def test_the_form_for_arm_agrees_to_the_last_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its intrinsics in plain C (neon/arm_neon.h): the same weights, and sums of the same integers."""
    kinds = every_kind(37, 512)
    x = torch.randn(70, 512, generator=torch.Generator().manual_seed(1))
    x[1, :32] = torch.tensor([127.0, -127.0]).repeat(16)  # the largest sums of a group
    own = {name: (unpack_blocks(blocks), blocks_product(x, joined([blocks]), None)) for name, blocks in kinds.items()}
    compiled = compile_kernels(EMULATED_ARM)
    monkeypatch.setattr(cpu_kernels, "library", lambda: compiled)
    for name, blocks in every_kind(37, 512).items():
        weight, expected = own[name]
        assert torch.equal(unpack_blocks(blocks), weight), name
        product = blocks_product(x, joined([blocks]), None)
        assert ((product - expected).abs() <= 1e-6 * (x.abs() @ weight.abs().T)).all(), name
        for width in (1, 2, 3, 5, 17, 33):
            assert torch.equal(blocks_product(x[:width], joined([blocks]), None), product[:width]), name


@pytest.mark.slow
@needs_x86
def test_a_cpu_without_the_instructions_is_told_so() -> None:
    with pytest.raises(CompileError, match="AVX2, FMA and F16C"):
        compile_kernels(Machine("x86", ("-march=x86-64",)))
