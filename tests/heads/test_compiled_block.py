"""A block of a DFlash head in one call of the compiled CPU kernels, against the same head through torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.heads.attention import KeyValues
from paceline.heads.compiled_block import RopeTable, compiled_block, compiled_context
from paceline.heads.dflash import ContextProduct, DFlashHead
from paceline.heads.kv_cache import KeyBuffers
from paceline.heads.rounded import round_linears
from paceline.layers.cpu_block import BlockCache
from paceline.layers.cpu_kernels import library
from tests.heads.dflash_reference import random_head

pytestmark = pytest.mark.skipif(library() is None, reason="no compiled kernels on this machine")
SIZES: dict[str, Any] = {"hidden_size": 64, "target_hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
CONVOLVED = {"conv_kernel_size": 2, "conv_group_size": 16}


def rounded_head(seed: int = 0, **changes: Any) -> DFlashHead:
    head, generator = random_head(seed, **SIZES, **changes), torch.Generator().manual_seed(seed)
    for name, weight in head.named_parameters():  # a convolution that starts as the identity hides mistakes
        if "conv" in name:
            torch.nn.init.normal_(weight, std=0.3, generator=generator)
    round_linears(head.layers)
    return head


@pytest.mark.parametrize("changes", [{}, {"causal": True}, CONVOLVED, {**CONVOLVED, "causal": True}])
@pytest.mark.parametrize(("length", "rows"), [(5, 4), (70, 8), (1, 2)])
def test_it_gives_the_states_that_torch_gives(changes: dict[str, Any], length: int, rows: int) -> None:
    """Of three heads: a number between two steps of eight bits may be rounded either way (one head of 30), a mistake
    shows in all of them."""
    heads = [rounded_head(seed, **changes, block_size=8) for seed in range(3)]
    assert min(difference(head, length, rows) for head in heads) < 1e-4


def difference(head: DFlashHead, length: int, rows: int) -> float:
    """Between the states of a block by compiled code and by torch, as a share of them."""
    if not head.config.is_causal:
        rows = 8
    compiled, config = compiled_block(head), head.config
    assert compiled is not None
    buffers = KeyBuffers(config.num_layers * config.num_kv_heads, config.head_dim, head.like)
    context = torch.randn(1, length, config.hidden_size, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(length, length + rows)
    ids = torch.tensor([[7] + [config.mask_token_id] * (rows - 1)])
    with torch.inference_mode():
        stores = head.context_stores(context, torch.arange(length)[None])
        keys = torch.cat([store.entries.keys[0] for store in stores])  # type: ignore[attr-defined]
        values = torch.cat([store.entries.values[0] for store in stores])  # type: ignore[attr-defined]
        row = buffers.take()
        buffers.write(row, KeyValues(keys, values))
        masks = head.layer_masks(None, positions[None], torch.arange(length + rows)[None])
        expected = head.forward_block(ids, stores, positions[None], masks)[0]
        cached = buffers.row(row)
        cache = BlockCache(cached.keys, cached.values, length, RopeTable(head).rows(length, rows))
        states = compiled.run(head.embed(ids)[0], cache)
    assert torch.equal(buffers.written(row, length).keys, keys), "the context stays as it is"
    return float((states - expected).norm() / expected.norm())


def test_heads_with_parts_the_kernels_lack_stay_with_torch() -> None:
    assert compiled_block(random_head(**SIZES)) is None, "its products are not in blocks"
    assert compiled_block(rounded_head(attention_sinks=True)) is None
    assert compiled_block(rounded_head(attention_bias=True)) is None


# --- the context ------------------------------------------------------------------------------------------------------


def context_of(
    head: DFlashHead, product: ContextProduct, features: torch.Tensor, first: int, parts: list[int]
) -> KeyValues:
    """Keys and values of a context from position `first` on, read in parts by the kernels."""
    compiled, rope, config = compiled_context(head, product), RopeTable(head), head.config
    assert compiled is not None
    buffers = KeyBuffers(config.num_layers * config.num_kv_heads, config.head_dim, head.like)
    row, length = buffers.take(), 0
    cached = buffers.row(row)
    for part in features.split(parts):
        compiled.run(part, BlockCache(cached.keys, cached.values, length, rope.rows(first + length, len(part))))
        length += len(part)
    return buffers.written(row, length)


@pytest.mark.parametrize("first", [0, 700])
def test_the_context_has_the_keys_and_values_that_torch_gives(first: int) -> None:
    head = random_head(**SIZES)
    product, joined = ContextProduct(head), head.fc.in_features
    round_linears(head)
    round_linears(product)
    features = torch.randn(21, joined, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expected = product(head.context(features)[None], torch.arange(first, first + 21)[None])
        whole, parts = (context_of(head, product, features, first, sizes) for sizes in ([21], [1, 4, 9, 7]))
    for name in ("keys", "values"):
        own, in_parts, other = (getattr(entries, name) for entries in (whole, parts, expected))
        assert torch.equal(own, in_parts), "a token's numbers do not depend on those beside it"
        assert (own - other[0]).norm() / other.norm() < 5e-3


def test_a_context_whose_products_are_not_in_blocks_stays_with_torch() -> None:
    head = random_head(**SIZES)
    assert compiled_context(head, ContextProduct(head)) is None
