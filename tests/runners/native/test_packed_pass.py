"""The decode pass that is one kernel, over weights of few bits: which it reads, and on a GPU what it computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.types import Row
from paceline.layers.gemm_types import Linear
from paceline.layers.linear import UnquantizedLinear
from paceline.layers.weight_pieces import PieceFormat
from paceline.models.decoder import DecoderModel
from paceline.quantization.int4 import pack_int4
from paceline.quantization.packed import PackedLinear
from paceline.quantization.packed_pieces import PackedPieces
from paceline.runners.native import NativeRunner, pass_weights
from paceline.runners.native.kv_cache import block_manager
from paceline.runners.native.loading import load_from_model, model_info
from paceline.runners.native.pass_weights import PassFormats, PassWeights
from paceline.runners.native.persistent_pass import BLOCKS, fits_shapes, max_rows, slots
from tests.runners.native.models import tiny
from tests.runners.native.part_drafts import part_drafts
from tests.runners.native.rounding import relative_errors
from tests.support.packed import random_packed

SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1008,
}
LONG_ROWS = SMALL | {
    "hidden_size": 2304,
    "intermediate_size": 14336,
    "num_attention_heads": 36,
    "num_key_value_heads": 12,
}
# Fewer units in a row than there are warps, and more tiles than blocks: some warps begin with a block's second tile.
SHORT_ROWS = SMALL | {"hidden_size": 1536, "intermediate_size": 4352, "num_attention_heads": 24}
FORMATS = {form.name: form for form in PieceFormat if form is not PieceFormat.PLAIN}


def packed_model(form: str, sizes: dict[str, Any], device: str) -> DecoderModel:
    """Every linear layer of it in a format; `mixed` as llama.cpp mixes them: values, down and LM head in Q6_K."""
    dense: DecoderModel = load_from_model(tiny("qwen2", torch.bfloat16, **sizes).to(device), None)
    kv_rows = dense.config.num_kv_heads * dense.config.head_dim

    def wrap(name: str, linear: Linear) -> Linear:
        rows, columns = linear.out_features, linear.in_features
        if form != "mixed":
            return random_packed(FORMATS[form], rows, columns, device)
        if name == "qkv":
            first = random_packed(PieceFormat.Q4_K, rows - kv_rows, columns, device)
            return PackedPieces((first, random_packed(PieceFormat.Q6_K, kv_rows, columns, device)))
        kind = PieceFormat.Q6_K if name in ("down", "lm_head") else PieceFormat.Q4_K
        return random_packed(kind, rows, columns, device)

    layers = [layer.with_linears(wrap) for layer in dense.layers]
    lm_head = wrap("lm_head", dense.lm_head)
    embedding = dense.embedding
    if form == "mixed" and isinstance(lm_head, PackedLinear):  # a packed embedding, as files with tied weights have it
        embedding = lm_head.as_embedding(torch.bfloat16)
    return replace(dense, layers=layers, lm_head=lm_head, embedding=embedding)


def unpacked(model: DecoderModel, dtype: torch.dtype) -> DecoderModel:
    """The same model with its weights unpacked."""

    def wrap(_: str, linear: Linear) -> Linear:
        return UnquantizedLinear(linear.dequantize(torch.float64).to(dtype))

    head = wrap("lm_head", model.lm_head)
    embedding = model.embedding
    if not isinstance(embedding, Tensor):
        assert head.matrix is not None
        embedding = head.matrix
    layers = [_cast(layer, dtype).with_linears(wrap) for layer in model.layers]
    norm = replace(model.final_norm, weight=model.final_norm.weight.to(dtype))
    return replace(model, layers=layers, lm_head=head, embedding=embedding.to(dtype), final_norm=norm)


def _cast(layer: Any, dtype: torch.dtype) -> Any:
    def cast(norm: Any) -> Any:
        return replace(norm, weight=norm.weight.to(dtype))

    bias = None if layer.qkv_bias is None else layer.qkv_bias.to(dtype)
    return replace(layer, attention_norm=cast(layer.attention_norm), mlp_norm=cast(layer.mlp_norm), qkv_bias=bias)


def runner_of(model: DecoderModel, device: str = "cuda") -> NativeRunner:
    dtype = str(model.final_norm.weight.dtype).removeprefix("torch.")
    info = model_info("packed", model.config, (), device, dtype)
    return NativeRunner(model, info, block_manager(8192))


# --- which weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [*FORMATS, "mixed"])
def test_every_format_is_read(form: str) -> None:
    weights = PassWeights.of(packed_model(form, SMALL, "cpu"), BLOCKS)
    assert weights is not None
    wanted = {PieceFormat.Q4_K, PieceFormat.Q6_K} if form == "mixed" else {FORMATS[form]}
    assert weights.formats.formats == wanted
    assert weights.table.shape[1] == 11 + 4 * 2 * 9




CHANGES: dict[str, Callable[[PackedLinear], PackedLinear]] = {
    "zero points": lambda linear: replace(linear, zeros=linear.scales),
    "an order of columns": lambda linear: replace(linear, order=torch.arange(linear.in_features)),
    "scales in another dtype": lambda linear: replace(linear, scales=linear.scales.float()),
    "small groups": lambda linear: replace(linear, group_size=32, scales=linear.scales.repeat(1, 1, 1, 4)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_weights_run_in_another_way(change: str) -> None:
    linear = random_packed(PieceFormat.INT4, 256, 256, "cpu")
    assert linear.pass_pieces is not None
    assert CHANGES[change](linear).pass_pieces is None


def test_a_layer_with_one_weight_it_cannot_read_is_not_read() -> None:
    model = packed_model("INT4", SMALL, "cpu")
    odd = replace(model.layers[0], output=pack_int4(torch.randn(256, 96)))  # type: ignore[type-var]
    assert PassWeights.of(replace(model, layers=[odd, *model.layers[1:]]), BLOCKS) is None


def test_a_weight_that_is_too_large_for_offsets_of_32_bits_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model = packed_model("INT4", SMALL, "cpu")
    monkeypatch.setattr(pass_weights, "MAX_BYTES", model.lm_head.nbytes // 2)
    assert PassWeights.of(model, BLOCKS) is None


def test_larger_models_fit_when_their_weights_have_few_bits() -> None:
    config = packed_model("INT4", SMALL, "cpu").config
    large = replace(config, hidden_size=4224, intermediate_size=14336, num_heads=66, num_kv_heads=22)
    packed = PassFormats(frozenset((PieceFormat.INT4,)))
    assert fits_shapes(large, packed)
    assert not fits_shapes(large)
    assert slots(large, 1, packed) > slots(large, 2, packed)
    assert max_rows(large, packed) == 16
    assert not fits_shapes(replace(large, hidden_size=4352, num_heads=68), packed)
    wide = PassFormats(frozenset((PieceFormat.FP8,)))  # there is no room for sixteen rows
    assert max_rows(large, wide) == 8
    assert not fits_shapes(large, wide)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def persistent(model: DecoderModel) -> NativeRunner:
    runner = runner_of(model)
    assert runner.decode_graphs is not None
    assert runner.decode_graphs.is_persistent(1)
    return runner


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [SMALL, SHORT_ROWS, LONG_ROWS], ids=["small", "short rows", "long rows"])
@pytest.mark.parametrize("form", [*FORMATS, "mixed"])
def test_it_rounds_no_worse_than_the_unpacked_weights(form: str, sizes: dict[str, Any]) -> None:
    model = packed_model(form, sizes, "cuda")
    eager, exact = (runner_of(unpacked(model, dtype)) for dtype in (torch.bfloat16, torch.float64))
    eager.decode_graphs = exact.decode_graphs = None
    own, usual = relative_errors([persistent(model), eager], exact, lengths=(20, 300), widths=(1, 3, 4))
    assert own < 1.25 * usual


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [SMALL, SHORT_ROWS, LONG_ROWS], ids=["small", "short rows", "long rows"])
@pytest.mark.parametrize("form", [*FORMATS, "mixed"])
def test_a_token_has_the_same_bits_alone_in_a_chain_and_in_a_batch(form: str, sizes: dict[str, Any]) -> None:
    runner = persistent(packed_model(form, sizes, "cuda"))
    prompt, tokens = torch.randint(0, 1008, (40,)).tolist(), torch.randint(0, 1008, (8,)).tolist()
    cache, neighbour = runner.new_cache(), runner.new_cache()
    runner.forward([Row.chain(cache, prompt)], last_only=True)
    runner.forward([Row.chain(neighbour, prompt[:17])], last_only=True)

    def passed(row: Row, *others: Row) -> Tensor:
        logits = runner.forward([row, *others]).logits[: len(row.parents)].clone()
        runner.truncate(cache, len(prompt))
        return logits

    chain = passed(Row.chain(cache, tokens))
    beside = passed(Row.chain(cache, tokens[:6]), Row.chain(neighbour, [5, 6, 7]))
    alone = torch.cat([runner.forward([Row.chain(cache, [token])]).logits.clone() for token in tokens])
    assert torch.equal(chain, alone)
    assert torch.equal(beside, alone[:6])


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_rows", [128, 2048, 4096], ids=["few blocks", "one tile a block", "two tiles"])
@pytest.mark.parametrize("form", ["INT4", "Q6_K"])
def test_a_drafting_loop_chooses_from_the_rows_of_the_lm_head_that_it_is_told_to_read(
    form: str, vocab_rows: int
) -> None:
    drafts = part_drafts(persistent(packed_model(form, SMALL | {"vocab_size": 9008}, "cuda")), vocab_rows)
    assert max(drafts.part) < vocab_rows
    assert drafts.part == drafts.expected
    assert drafts.whole_again == drafts.whole
