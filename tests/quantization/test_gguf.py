"""Blocks of GGUF files as they are: the file's numbers to the last bit, and products of them at every width alike."""

from __future__ import annotations

from collections.abc import Iterator

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.errors import CapabilityError, WeightsError
from paceline.layers import cpu_kernels
from paceline.layers.cpu_kernels import GGUF_KINDS, repack_blocks, unpack_blocks
from paceline.quantization import gguf as gguf_format
from paceline.quantization.blocked import BlockedEmbedding, BlockedLinear
from tests.support.gguf import HALVES, random_blocks

pytestmark = pytest.mark.skipif(cpu_kernels.library() is None, reason="no compiled kernels on this machine")
KINDS = list(GGUF_KINDS)


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


class Stored:
    """The tensors of a checkpoint: random blocks of a kind by name, or a matrix in floating point."""

    def __init__(self, kinds: dict[str, str], rows: int, columns: int) -> None:
        self.tensors = {
            f"{name}.weight:{kind}" if kind in KINDS else f"{name}.weight": stored(kind, rows, columns, seed)
            for seed, (name, kind) in enumerate(kinds.items())
        }

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def raw(self, name: str) -> Tensor:
        return self.tensors[name]


def stored(kind: str, rows: int, columns: int, seed: int = 0) -> Tensor:
    if kind not in KINDS:
        return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).half()
    return torch.from_numpy(random_blocks(kind, rows, columns, seed))


def reference(kind: str, rows: Tensor) -> Tensor:
    """What the gguf package makes of the same bytes."""
    return torch.from_numpy(gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType[kind]))


def linear_of(kind: str, rows: int, columns: int) -> BlockedLinear:
    linear = gguf_format.load(Stored({"x": kind}, rows, columns), ["x"])
    assert isinstance(linear, BlockedLinear)
    return linear


def rounded_inputs(x: Tensor) -> Tensor:
    """Inputs as a product reads them: 8 bits, one scale for every 32."""
    groups = x.double().view(x.shape[0], -1, 32)
    scales = groups.abs().amax(dim=-1, keepdim=True) / 127
    return ((groups / scales).round() * scales).view(x.shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [8, 21])
def test_unpacked_blocks_are_those_of_the_gguf_package_to_the_last_bit(kind: str, rows: int) -> None:
    read = stored(kind, rows, 512)
    blocks = repack_blocks(read, GGUF_KINDS[kind], 512)
    assert blocks is not None and torch.equal(unpack_blocks(blocks), reference(kind, read))
    whole_rows = -(-rows // 8) * 8
    assert blocks.data.nbytes <= 1.04 * read.nbytes * whole_rows / rows, "no more than the file has"


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_blocks_that_the_gguf_package_rounds_are_read_as_it_reads_them(kind: str) -> None:
    weight = torch.randn(24, 96).numpy()
    read = torch.from_numpy(gguf.quantize(weight, gguf.GGMLQuantizationType[kind]))
    blocks = repack_blocks(read, GGUF_KINDS[kind], 96)
    assert blocks is not None and torch.equal(unpack_blocks(blocks), reference(kind, read))
    assert np.abs(unpack_blocks(blocks).numpy() - weight).max() < 0.6, "these are the weights, not any numbers"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes", [1, 2, 3, 7, 70])
def test_a_product_is_that_of_the_files_numbers_and_the_rounded_input(kind: str, nodes: int) -> None:
    linear, x, bias = linear_of(kind, 37, 512), torch.randn(nodes, 512), torch.randn(37)
    weight = reference(kind, stored(kind, 37, 512)).double()
    exact = rounded_inputs(x) @ weight.T + bias
    size = rounded_inputs(x).abs() @ weight.abs().T
    assert ((linear(x, bias).double() - exact).abs() <= 1e-6 * size + 1e-6).all(), "float32 sums, nothing else"
    unrounded = x.double() @ weight.T + bias
    step = x.abs().view(nodes, -1, 32).amax(dim=-1, keepdim=True).expand(-1, -1, 32).reshape(nodes, 512) / 254
    bound = step.double() @ weight.abs().T
    assert ((linear(x, bias).double() - unrounded).abs() <= bound + 1e-6 * size + 1e-6).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_the_same_bits_at_every_width_and_with_every_number_of_threads(kind: str) -> None:
    linear, x = linear_of(kind, 136, 768), torch.randn(69, 768)
    torch.set_num_threads(1)
    alone = torch.cat([linear(row[None]) for row in x])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for width in (2, 5, 9, 17, 69):
            assert torch.equal(linear(x[:width]), alone[:width])


def test_layers_of_different_kinds_are_joined_and_each_stays_as_it_is() -> None:
    """Q4_K_M: queries and keys in Q4_K, values in Q6_K; and one that is not quantized."""
    kinds = {"q": "Q4_K", "k": "F16", "v": "Q6_K"}
    tensors = Stored(kinds, 40, 512)
    joined = gguf_format.load(tensors, list(kinds))
    assert joined is not None and (joined.out_features, joined.in_features) == (120, 512)
    parts = [tensor.float() if kind == "F16" else reference(kind, tensor) for kind, tensor in
             zip(kinds.values(), tensors.tensors.values())]  # fmt: skip
    assert torch.equal(joined.dequantize(torch.float32), torch.cat(parts))
    x, bias = torch.randn(6, 512), torch.randn(120)
    inputs = [x.double() if kind == "F16" else rounded_inputs(x) for kind in kinds.values()]
    exact = torch.cat([values @ part.double().T for values, part in zip(inputs, parts)], dim=1) + bias
    torch.testing.assert_close(joined(x, bias).double(), exact, rtol=1e-4, atol=1e-4)
    assert joined.nbytes == sum(piece.data.nbytes for piece in joined.blocks or ())
    assert gguf_format.load(Stored({"o": "F16"}, 8, 64), ["o"]) is None, "all in floating point: not this format's"


@pytest.mark.parametrize("kind", KINDS)
def test_an_embedding_unpacks_the_rows_asked_for(kind: str) -> None:
    read = stored(kind, 50, 256)
    blocks = repack_blocks(read, GGUF_KINDS[kind], 256)
    assert blocks is not None
    embedding, tokens = BlockedEmbedding(blocks), torch.tensor([[49, 0], [7, 7]])
    assert torch.equal(embedding[tokens], reference(kind, read)[tokens])
    for token in (50, -1):
        with pytest.raises(IndexError):
            embedding[torch.tensor([token])]


@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_that_is_no_number_is_refused(kind: str) -> None:
    for place in HALVES[kind]:
        tensors = Stored({"x": kind}, 16, 512)
        tensors.raw(f"x.weight:{kind}")[3, place : place + 2] = torch.tensor([0, 0x7C], dtype=torch.uint8)
        with pytest.raises(WeightsError, match=r"x\.weight holds values that are no numbers"):
            gguf_format.load(tensors, ["x"])


def test_nothing_is_converted_to_it() -> None:
    with pytest.raises(CapabilityError, match="int8 or int4"):
        gguf_format.quantize(torch.ones(8, 32))
