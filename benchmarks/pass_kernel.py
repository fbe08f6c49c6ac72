"""Kernel figures: one decode pass over random weights, by shape, weight format and number of tokens. No user's door.

    python benchmarks/pass_kernel.py [--shapes 135M 0.5B 1.5B 7.5B] [--formats bf16 int4 fp8 q4_k_m] [--rows 1 4 6 8 16]

Prints milliseconds of a replayed graph behind 300 tokens of context, and what part of the card's bandwidth the bytes of
the weights alone would need.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a program, it knows only its own folder
from paceline.core.types import Row
from paceline.layers.gemm_types import Linear
from paceline.layers.linear import UnquantizedLinear
from paceline.layers.weight_pieces import PieceFormat
from paceline.models.decoder import DecoderModel
from paceline.quantization.packed import PackedLinear
from paceline.quantization.packed_pieces import PackedPieces
from paceline.runners.native import NativeRunner
from paceline.runners.native.kv_cache import block_manager
from paceline.runners.native.loading import load_from_model, model_info
from tests.support.packed import random_packed

CONTEXT, REPLAYS = 300, 40
DEVICE = "cuda"


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_layers: int
    vocab_size: int


SHAPES = {
    "135M": Shape(576, 1536, 9, 3, 64, 30, 49_152),
    "0.5B": Shape(896, 4864, 14, 2, 64, 24, 151_936),
    "1.5B": Shape(1536, 8960, 12, 2, 128, 28, 151_936),
    "7.5B": Shape(4224, 14336, 66, 22, 64, 32, 49_152),
}
FORMATS = {"int4": PieceFormat.INT4, "fp8": PieceFormat.FP8}


def model_of(shape: Shape, form: str) -> DecoderModel:
    """A model whose every layer has weights of its own, so that none is read from a cache."""
    config = Qwen2Config(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        num_hidden_layers=1,
        vocab_size=shape.vocab_size,
        max_position_embeddings=4096,
    )
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device=DEVICE)
    for weight in model.parameters():
        weight.normal_(0.0, 0.02)
    dense = load_from_model(model, None)
    layers = [dense.layers[0].with_linears(_wrap(dense, form, index)) for index in range(shape.num_layers)]
    lm_head = _wrap(dense, form, 0)("lm_head", dense.lm_head)
    embedding = lm_head.as_embedding(torch.bfloat16) if isinstance(lm_head, PackedLinear) else None
    return replace(
        dense,
        config=replace(dense.config, num_layers=shape.num_layers),
        layers=layers,
        lm_head=lm_head,
        embedding=embedding if form == "q4_k_m" and embedding is not None else dense.embedding,
    )


def _wrap(model: DecoderModel, form: str, index: int) -> Callable[[str, Linear], Linear]:
    kv_rows = model.config.num_kv_heads * model.config.head_dim

    def wrap(name: str, linear: Linear) -> Linear:
        rows, columns = linear.out_features, linear.in_features
        if form == "bf16":
            return UnquantizedLinear(0.02 * torch.randn(rows, columns, dtype=torch.bfloat16, device=DEVICE))
        if form in FORMATS:
            return random_packed(FORMATS[form], rows, columns, DEVICE)
        precise = index % 2 == 0  # every other layer has values and down in six bits
        if name == "qkv" and precise:
            first = random_packed(PieceFormat.Q4_K, rows - kv_rows, columns, DEVICE)
            return PackedPieces((first, random_packed(PieceFormat.Q6_K, kv_rows, columns, DEVICE)))
        six = name == "lm_head" or (name == "down" and precise)
        return random_packed(PieceFormat.Q6_K if six else PieceFormat.Q4_K, rows, columns, DEVICE)

    return wrap


def milliseconds(runner: NativeRunner, rows: int) -> float:
    """Of a replayed pass over so many tokens."""
    graphs = runner.decode_graphs
    assert graphs is not None
    cache = runner.new_cache()
    runner.forward([Row.chain(cache, list(range(CONTEXT)))], last_only=True)
    row = Row.chain(cache, list(range(rows)))
    size = graphs.fits_rows([row], last_only=False)
    assert size is not None
    runner.forward([row])  # reserves blocks and captures
    runner.truncate(cache, CONTEXT)
    runner.forward([row])
    runner.truncate(cache, CONTEXT)
    graph = graphs.forward_graph(size)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(3):
        start.record()
        for _ in range(REPLAYS):
            graph.run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / REPLAYS)
    runner.free(cache)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--formats", nargs="+", choices=["bf16", *FORMATS, "q4_k_m"], default=["bf16", "int4"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 6, 8, 16])
    args = parser.parse_args()
    for name in args.shapes:
        for form in args.formats:
            model = model_of(SHAPES[name], form)
            info = model_info(name, model.config, (), DEVICE, "bfloat16")
            runner = NativeRunner(model, info, block_manager(8192))
            assert runner.decode_graphs is not None
            read = sum(linear.nbytes for linear in model.linears()) / 1e9
            kind = "one kernel" if runner.decode_graphs.is_persistent(1) else "Triton"
            cells = [f"{rows}: {milliseconds(runner, rows):.3f}" for rows in args.rows]
            print(f"{name} {form} ({kind}, {read:.2f} GB): ms by rows {', '.join(cells)}", flush=True)
            del runner, model
            torch.cuda.empty_cache()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
