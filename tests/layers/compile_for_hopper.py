"""Compile every kernel for an H100 or H200 without one: what the interpreter forgives, the compiler does not.

Run as a program of its own, since the interpreter is chosen for a whole process.
"""

from __future__ import annotations

import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paceline.drafting.tree_kernel import grow_trees
from paceline.layers.attention_kernels import attend_kernel
from paceline.layers.gemm_kernels import argmax_kernel, project_kernel, vector_kernel
from paceline.layers.gemm_tiling import TILE_ROWS, WIDE_TILES
from paceline.layers.linear_attention_triton import MATH, delta_kernel, gated_norm_kernel
from paceline.layers.mlp_triton import silu_mul_kernel
from paceline.layers.moe_kernels import (
    expert_down_kernel,
    expert_gate_up_kernel,
    route_kernel,
    weighted_sum_kernel,
)
from paceline.layers.moe_tiling import FEW_EXPERTS, MANY_EXPERTS, PROMPT
from paceline.layers.norm_triton import norm_kernel
from paceline.quantization.packed_kernel import packed_kernel, unpack_kernel
from paceline.quantization.packed_layout import Kind, groups_of_span
from paceline.quantization.packed_triton import FAST_KINDS, packed_tiling
from paceline.runners.native.tree_kernels import move_accepted, put_tree, settle_tree

HALF, FLOAT, LONG, INT = "*bf16", "*fp32", "*i64", "*i32"
ATTENTION = {"GROUP": 3, "NUM_KV_HEADS": 3, "HALF": 32, "BLOCK_SIZE": 64, "CHUNK_TOKENS": 128}
SHARED_MEMORY = 232_448  # of a block
FLAGS = {"BIAS": False, "RESIDUAL": False, "GATE": False, "ARGMAX": False}

Arguments = tuple[dict[str, str], dict[str, object]]


def attention(
    nodes: int, rows: int, qk_norm: bool, special: bool = False, rounded: bool = False, trees: bool = False
) -> Arguments:
    pointers = dict.fromkeys(("qkv", "keys", "values", "query_norm", "key_norm", "sinks", "out"), HALF)
    floats = ("rope_cache", "query_rope_cache", "partial", "partial_stats")
    pointers |= dict.fromkeys(floats, FLOAT) | {"chunks_done": INT}
    pointers |= {"keys": "*u8", "values": "*u8"} if rounded else {}
    pointers |= dict.fromkeys(("lengths", "counts", "depths", "tree_mask", "blocks"), LONG)
    numbers = {"offset": "i32", "table_width": "i32", "layer_base": "i64", "max_chunks": "i32", "lanes": "i32"}
    numbers |= {"eps": "fp32", "scale": "fp32", "softcap": "fp32"}
    constants = ATTENTION | {"USE_PDL": True, "TRIGGER_DEPENDENTS": True, "QK_NORM": qk_norm, "NODES": nodes}
    constants |= {"ROWS": rows, "NEW_TOKENS": triton.next_power_of_2(nodes), "PARTS": triton.cdiv(nodes, rows // 3)}
    constants |= {"WINDOW": 512 if special else 0, "ROPE": not special, "ROUNDED": rounded, "TREES": trees}
    constants |= dict.fromkeys(("SOFTCAP", "SINKS"), special)
    return pointers | numbers, constants | ({"HALF": 128} if special else {})


def _outputs(flags: dict[str, bool]) -> dict[str, str]:
    return {"out": FLOAT if flags["ARGMAX"] else HALF, "best_value": FLOAT, "best_index": INT}


def product(rows: int, flags: dict[str, bool]) -> Arguments:
    signature = dict.fromkeys(("x", "weight", "bias", "residual"), HALF) | _outputs(flags)
    signature |= {"rows": "i32", "columns": "i32", "in_features": "i32"}
    transposed = rows > TILE_ROWS
    tile = {"TRANSPOSED": transposed, "ROWS": rows, "COLUMNS": 64 if transposed else 32, "STEP": 64}
    return signature, flags | tile | {"USE_PDL": True, "EVEN": False}


def vector(flags: dict[str, bool]) -> Arguments:
    signature = dict.fromkeys(("x", "norm", "weight", "bias", "residual"), HALF) | _outputs(flags)
    signature |= {"columns": "i32", "in_features": "i32", "eps": "fp32"}
    constants = {"NORM": not flags["RESIDUAL"], "USE_PDL": True, "COLUMNS": 2, "IN_FEATURES": 1024}
    return signature, flags | constants


def packed(
    kind: Kind, group: int, splits: int, rows: int, flags: dict[str, bool], *, minimums: bool = False
) -> Arguments:
    """Groups of 16 and 32 with upper bits or minimums are those of GGUF's K formats: small integers as scales."""
    zeros = kind is Kind.INT4 and group == 64
    outer = minimums or kind in (Kind.INT3, Kind.INT6) or (kind, group) == (Kind.LUT4, 32)
    signature = dict.fromkeys(("x", "bias", "residual", "scales", "zeros"), HALF) | {"weight": INT, "table": FLOAT}
    signature |= {"high": "*i16" if kind is Kind.INT6 else "*u8", "minimums": "*u8"}
    signature |= {"outer_scales": "*fp16", "outer_minimums": "*fp16"}
    signature |= {"scales": "*u8" if minimums else "*i8"} if outer else {}
    signature |= {"weight": "*i16"} if kind.word_bits == 2 else {}
    signature |= {"partial_sums": FLOAT, "programs_done": INT} | _outputs(flags)
    signature |= dict.fromkeys(("rows", "columns", "in_features", "out_stride"), "i32")
    signature |= dict.fromkeys(("steps", "steps_per_split", "spans", "outer_spans"), "i32")
    constants = {"USE_PDL": True, "KIND": int(kind), "FAST": kind in FAST_KINDS, "ZEROS": zeros, "GROUP": group}
    constants |= {"HIGH": kind.high_bits > 0, "MINIMUMS": minimums, "NIBBLES": kind is Kind.INT2, "OUTER": outer}
    constants |= {"GROUPS": groups_of_span(group, 4096) if group else 1}
    columns = packed_tiling(4096, 32, rows, gate=flags["GATE"]).columns
    tile = {"ROWS": rows, "COLUMNS": columns, "WORDS": kind.words, "CODES": kind.codes}
    return signature, flags | constants | tile | {"EVEN": True, "SPLITS": splits, "PREFETCH": 2}


def unpacking() -> Arguments:
    """Rows of an embedding in Q6_K."""
    pointers = {"weight": INT, "high": "*i16", "scales": "*i8", "zeros": HALF, "minimums": "*u8", "table": FLOAT}
    pointers |= {"outer_scales": "*fp16", "outer_minimums": "*fp16", "order": LONG, "places": LONG, "out": HALF}
    signature = pointers | dict.fromkeys(("rows", "in_features", "steps", "spans", "outer_spans"), "i32")
    constants = {"KIND": int(Kind.INT6), "HIGH": True, "ZEROS": False, "MINIMUMS": False, "ORDER": False}
    constants |= {"NIBBLES": False, "OUTER": True, "SOME": True, "GROUP": 16, "GROUPS": 8, "ROUNDING": tl.float32}
    constants |= {"ROWS": 32, "WORDS": 16, "CODES": 8}
    return signature, constants


def compile_experts() -> None:
    """The kernels of a mixture of experts, with the tilings they are launched with."""
    tiles = {"tile_expert": INT, "tile_pairs": INT}
    route = {"logits": HALF, "counts": LONG, "experts": INT, "weights": FLOAT} | tiles
    route |= {"rows": "i32", "num_experts": "i32", "tiles": "i32", "scale": "fp32"}
    constants = {"USE_PDL": True, "RENORMALIZE": True, "PADDED": True, "NODES": 6, "TOP_K": 8, "ROWS": TILE_ROWS}
    for experts, tile_count in ((128, 128), (512, 0)):
        compile_kernel(route_kernel, route, constants | {"EXPERTS": experts, "TILES": tile_count})
    sizes = {"columns": "i32", "in_features": "i32"}
    float4 = {"weight": "*u8", "exponents": "*u8"}
    gate_up = dict.fromkeys(("x", "weight", "exponents", "bias", "out"), HALF) | tiles | sizes
    gate_up |= {"alpha": "fp32", "limit": "fp32"}
    down = dict.fromkeys(("activated", "weight", "exponents", "bias"), HALF) | tiles | sizes | {"out": FLOAT}
    plain, special, packed = (False, {}), (True, {}), (True, float4)
    for tiling, (other, stored) in (
        (FEW_EXPERTS, plain), (FEW_EXPERTS, special), (FEW_EXPERTS, packed), (MANY_EXPERTS, special),
        (MANY_EXPERTS, packed), (PROMPT, plain), (PROMPT, packed),
    ):  # fmt: skip
        first, second = (
            {"USE_PDL": True, "BIAS": other, "EVEN": not other, "TRANSPOSED": tile.transposed, "ROWS": tile.rows}
            | {"COLUMNS": tile.columns, "STEP": tile.step, "MXFP4": bool(stored)}
            for tile in (tiling.gate_up, tiling.down)
        )
        stages = {"num_stages": tiling.gate_up.stages, "num_warps": tiling.gate_up.warps}
        compile_kernel(expert_gate_up_kernel, gate_up | stored, first | {"CLAMPED": other, "TOP_K": 8}, **stages)
        stages = {"num_stages": tiling.down.stages, "num_warps": tiling.down.warps}
        compile_kernel(expert_down_kernel, down | stored, second, **stages)
    parts = {"parts": FLOAT, "weights": FLOAT, "residual": HALF, "out": HALF, "columns": "i32"}
    compile_kernel(weighted_sum_kernel, parts, {"USE_PDL": True, "RESIDUAL": True, "TOP_K": 8, "COLUMNS": 512})


def compile_kernel(kernel: object, signature: dict[str, str], constants: dict[str, object], **options: int) -> None:
    types = signature | dict.fromkeys(constants, "constexpr")
    ordered = {name: types[name] for name in kernel.arg_names}  # type: ignore[attr-defined]
    source = ASTSource(fn=kernel, signature=ordered, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, **options})
    assert compiled.metadata.shared <= SHARED_MEMORY, f"{kernel} needs {compiled.metadata.shared} bytes"


def compile_products() -> None:
    """Every epilogue with the narrow tile; of the wide ones and of the numbers of warps each with some of them."""
    epilogues = (*(FLAGS | {name: True} for name in FLAGS), FLAGS | {"BIAS": True, "RESIDUAL": True})
    for number, flags in enumerate(epilogues):
        for rows in (TILE_ROWS, WIDE_TILES[number % len(WIDE_TILES)]):
            compile_kernel(project_kernel, *product(rows, flags))
        compile_kernel(vector_kernel, *vector(flags))
        compile_kernel(packed_kernel, *packed(Kind.INT4, 128, 4, 16, flags), num_warps=2 + 2 * (number % 2))


def compile_packed_products() -> None:
    for kind, group, splits, rows in (
        (Kind.INT4, 32, 1, 16), (Kind.INT4, 64, 1, 64), (Kind.INT8, 0, 2, 16), (Kind.FP8, 0, 1, 32),
        (Kind.FP8, 128, 1, 16), (Kind.FP4, 32, 1, 16), (Kind.LUT4, 64, 1, 16), (Kind.LUT4, 32, 1, 16),
    ):  # fmt: skip
        compile_kernel(packed_kernel, *packed(kind, group, splits, rows, FLAGS), num_warps=4)
    for kind, group, rows, minimums, name in (
        (Kind.INT4, 32, 16, True, "GATE"), (Kind.INT4, 32, 64, True, "RESIDUAL"), (Kind.INT5, 32, 16, True, "GATE"),
        (Kind.INT5, 32, 16, False, "BIAS"), (Kind.INT6, 16, 16, False, "ARGMAX"), (Kind.INT6, 16, 64, False, "GATE"),
        (Kind.INT2, 16, 16, True, "GATE"), (Kind.INT2, 16, 64, True, "BIAS"), (Kind.INT3, 16, 64, False, "RESIDUAL"),
    ):  # fmt: skip
        arguments = packed(kind, group, 2, rows, FLAGS | {name: True}, minimums=minimums)
        compile_kernel(packed_kernel, *arguments, num_warps=4)
    compile_kernel(unpack_kernel, *unpacking(), num_warps=4)


def compile_delta_nets() -> None:
    """Sizes of Qwen3.5's larger models."""
    spans = dict.fromkeys(("slots", "lengths", "counts", "starts"), LONG)
    signature = dict.fromkeys(("projected", "convolution", "decay_bias", "inputs"), HALF) | spans
    signature |= dict.fromkeys(("decay_rate", "states", "out"), FLOAT) | dict.fromkeys(("state_lengths", "folds"), LONG)
    signature |= {"states_base": "i64", "inputs_base": "i64", "scale": "fp32"}
    constants = {"KEY_HEADS": 16, "GROUP": 3, "KEY_DIM": 128, "VALUE_DIM": 128, "TILE": 32, "TAPS": 4}
    compile_kernel(delta_kernel, signature, {**constants, **MATH, "USE_PDL": True})
    signature = dict.fromkeys(("projected", "norm", "inputs", "out"), HALF) | {"mixed": FLOAT, "node_seqs": LONG}
    signature |= spans | {"inputs_base": "i64", "eps": "fp32"}
    constants = {"HEADS": 48, "VALUE_DIM": 128, "INPUT": 10336, "COPIED": 256, "RING_SIZE": 64}
    compile_kernel(gated_norm_kernel, signature, {**constants, "USE_PDL": True})


def compile_trees() -> None:
    """What makes draft trees, and what lies between the passes of steps in a row."""
    sizes = dict.fromkeys(("drafted_stride", "nodes", "k"), "i32")
    numbers = dict.fromkeys(("num_tokens", "num_nodes", "depth", "before", "ranks"), "i32")
    tensors = dict.fromkeys(("places", "tokens", "drafted", "parents"), LONG)
    compile_kernel(grow_trees, {"scores": FLOAT, **tensors, **numbers}, {"LANES": 16}, num_warps=1)
    put = ("drafted", "parents", "limits", "token_ids", "counts", "depths", "tree_mask")
    compile_kernel(put_tree, dict.fromkeys(put, LONG) | sizes, {"BLOCK": 64}, num_warps=1)
    outputs = ("accepted", "grown", "last_tokens", "order", "result")
    settled = dict.fromkeys(("parents", "limits", "best", "token_ids", "lengths", *outputs), LONG)
    compile_kernel(settle_tree, settled | sizes, {"FIELDS": 3, "BLOCK": 64}, num_warps=1)
    moved = dict.fromkeys(("keys", "values"), HALF) | dict.fromkeys(("blocks", "lengths", "accepted", "order"), LONG)
    moved |= {"layer_stride": "i64", "block_size": "i32", "table_width": "i32", "k": "i32"}
    compile_kernel(move_accepted, moved, {"SIZE": 1408, "BLOCK": 2048})


def main() -> int:
    compile_trees()
    compile_products()
    compile_delta_nets()
    compile_packed_products()
    compile_experts()
    for nodes, rows, special in ((1, 16, False), (2, 16, True), (6, 16, False), (16, 32, False), (16, 32, True)):
        for trees in (False, True)[: 1 + (nodes > 2)]:
            compile_kernel(attend_kernel, *attention(nodes, rows, nodes == 16, special, trees=trees))
    compile_kernel(attend_kernel, *attention(6, 16, False, rounded=True))
    norm = {"x": HALF, "weight": HALF, "bias": HALF, "residual": HALF, "out": HALF, "hidden_size": "i32", "eps": "fp32"}
    for other in (False, True):
        parts = {"CENTER": other, "BIAS": other, "RESIDUAL": other}
        compile_kernel(norm_kernel, norm, {"USE_PDL": True, **parts, "HIDDEN_SIZE": 1024})
    compile_kernel(silu_mul_kernel, {"both": HALF, "out": HALF, "size": "i32"}, {"BLOCK_COLUMNS": 1024})
    argmax = {"best_value": FLOAT, "best_index": INT, "out": LONG, "embedding": HALF, "hidden_states": HALF}
    argmax |= {"blocks": "i32", "hidden_size": "i32"}
    compile_kernel(argmax_kernel, argmax, {"USE_PDL": True, "EMBED": True, "BLOCKS": 2048, "HIDDEN_SIZE": 1024})
    print("compiled")
    return 0


if __name__ == "__main__":
    sys.exit(main())
