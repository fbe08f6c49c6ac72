"""A block of a DFlash head in one call of the compiled CPU kernels, against the same head through torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.heads.attention import KeyValues
from paceline.heads.compiled_block import compiled_block, rope_of
from paceline.heads.dflash import DFlashHead
from paceline.heads.kv_cache import KeyBuffers
from paceline.heads.rounded import round_linears
from paceline.layers.cpu_kernels import library
from tests.heads.dflash_reference import random_head

pytestmark = pytest.mark.skipif(library() is None, reason="no compiled kernels on this machine")
SIZES: dict[str, Any] = {"hidden_size": 64, "target_hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
CONVOLVED = {"conv_kernel_size": 2, "conv_group_size": 16}


def rounded_head(**changes: Any) -> DFlashHead:
    head = random_head(**SIZES, **changes)
    for name, weight in head.named_parameters():  # a convolution that starts as the identity hides mistakes
        if "conv" in name:
            torch.nn.init.normal_(weight, std=0.3)
    round_linears(head.layers)
    return head


@pytest.mark.parametrize("changes", [{}, {"causal": True}, CONVOLVED, {**CONVOLVED, "causal": True}])
@pytest.mark.parametrize(("length", "rows"), [(5, 4), (70, 8), (1, 2)])
def test_it_gives_the_states_that_torch_gives(changes: dict[str, Any], length: int, rows: int) -> None:
    head = rounded_head(**changes, block_size=8)
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
        states = compiled.run(head.embed(ids)[0], rope_of(head, positions), cached.keys, cached.values, length)
    assert (states - expected).norm() / expected.norm() < 5e-3
    assert torch.equal(buffers.written(row, length).keys, keys), "the context stays as it is"


def test_heads_with_parts_the_kernels_lack_stay_with_torch() -> None:
    assert compiled_block(random_head(**SIZES)) is None, "its products are not in blocks"
    assert compiled_block(rounded_head(attention_sinks=True)) is None
    assert compiled_block(rounded_head(attention_bias=True)) is None
