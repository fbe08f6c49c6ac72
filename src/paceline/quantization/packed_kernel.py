"""Triton kernel of linear layers with packed weights: 1 to 64 rows, codes become numbers in registers.

A program takes some columns of the output and a part of the input features. Per step it reads 128 input features of its
columns as 32-bit words, decodes one code of every word at a time and multiplies by the features of that code: words are
stored so that these are neighbours (packed_layout.py). Scales multiply the sum of their group, in float32, so the codes
themselves enter the product without rounding. The order of every sum depends on the weight alone, never on the number
of rows: a token's numbers are the same bits alone and among draft tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paceline.layers.gemm_kernels import clamped_index
from paceline.quantization.packed_asm import (
    FP4_ASM,
    FP8_ASM,
    INT2_ASM,
    INT3_ASM,
    INT4_ASM,
    INT4_ZERO_ASM,
    INT5_ASM,
    INT6_ASM,
    INT8_ASM,
    UINT2_ASM,
    UINT4_ASM,
    UINT5_ASM,
)
from paceline.quantization.packed_layout import TILE, Kind
from paceline.quantization.quantized_weight import OUTER_GROUP

INT4_KIND: tl.constexpr = tl.constexpr(int(Kind.INT4))
INT8_KIND: tl.constexpr = tl.constexpr(int(Kind.INT8))
FP8_KIND: tl.constexpr = tl.constexpr(int(Kind.FP8))
FP4_KIND: tl.constexpr = tl.constexpr(int(Kind.FP4))
LUT4_KIND: tl.constexpr = tl.constexpr(int(Kind.LUT4))
INT5_KIND: tl.constexpr = tl.constexpr(int(Kind.INT5))
INT6_KIND: tl.constexpr = tl.constexpr(int(Kind.INT6))
INT2_KIND: tl.constexpr = tl.constexpr(int(Kind.INT2))
INT3_KIND: tl.constexpr = tl.constexpr(int(Kind.INT3))
LOWER_HALF: tl.constexpr = tl.constexpr(1)  # of a byte
UPPER_HALF: tl.constexpr = tl.constexpr(2)
OUTER_FEATURES: tl.constexpr = tl.constexpr(OUTER_GROUP)
TILE_COLUMNS: tl.constexpr = tl.constexpr(TILE)
INT2_CODE: tl.constexpr = tl.constexpr(INT2_ASM)
UINT2_CODE: tl.constexpr = tl.constexpr(UINT2_ASM)
INT3_CODE: tl.constexpr = tl.constexpr(INT3_ASM)
UINT4_CODE: tl.constexpr = tl.constexpr(UINT4_ASM)
INT5_CODE: tl.constexpr = tl.constexpr(INT5_ASM)
UINT5_CODE: tl.constexpr = tl.constexpr(UINT5_ASM)
INT6_CODE: tl.constexpr = tl.constexpr(INT6_ASM)
INT4_CODE: tl.constexpr = tl.constexpr(INT4_ASM)
INT4_ZERO_CODE: tl.constexpr = tl.constexpr(INT4_ZERO_ASM)
INT8_CODE: tl.constexpr = tl.constexpr(INT8_ASM)
FP8_CODE: tl.constexpr = tl.constexpr(FP8_ASM)
FP4_CODE: tl.constexpr = tl.constexpr(FP4_ASM)


@triton.jit
def _decode_fast(
    words, high, zero, INDEX: tl.constexpr, KIND: tl.constexpr, ZEROS: tl.constexpr, MINIMUMS: tl.constexpr
):
    """Code number INDEX of every word as bfloat16, two words at a time in packed arithmetic."""
    if KIND == INT5_KIND:
        code: tl.constexpr = UINT5_CODE if MINIMUMS else INT5_CODE
        return tl.inline_asm_elementwise(
            code[INDEX], "=r,r,r,r,r", [words, high], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    elif KIND == INT6_KIND:
        return tl.inline_asm_elementwise(
            INT6_CODE[INDEX], "=r,r,r,r,r", [words, high], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    elif KIND == INT3_KIND:
        return tl.inline_asm_elementwise(
            INT3_CODE[INDEX], "=r,r,r,r,r", [words, high], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    elif KIND == INT2_KIND:
        two_bits: tl.constexpr = UINT2_CODE if MINIMUMS else INT2_CODE
        return tl.inline_asm_elementwise(
            two_bits[INDEX], "=r,r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    elif MINIMUMS:
        return tl.inline_asm_elementwise(
            UINT4_CODE[INDEX], "=r,r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    elif ZEROS:
        offset = tl.broadcast_to((-128.0 - zero).to(tl.bfloat16)[:, None], words.shape)
        return tl.inline_asm_elementwise(
            INT4_ZERO_CODE[INDEX], "=r,r,r,r", [words, offset], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    elif KIND == INT4_KIND:
        return tl.inline_asm_elementwise(
            INT4_CODE[INDEX], "=r,r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    elif KIND == INT8_KIND:
        return tl.inline_asm_elementwise(
            INT8_CODE[INDEX], "=r,r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    elif KIND == FP8_KIND:
        return tl.inline_asm_elementwise(
            FP8_CODE[INDEX], "=r,r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            FP4_CODE[INDEX], "=r,r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2
        )


@triton.jit
def _decode(
    words, high, zero, table, INDEX: tl.constexpr, KIND: tl.constexpr, ZEROS: tl.constexpr, MINIMUMS: tl.constexpr
):
    """Code number INDEX of every word as float32: the reference of `_decode_fast`, for any dtype and interpreter."""
    if KIND == INT8_KIND or KIND == FP8_KIND:  # noqa: SIM109 (constants of Triton are compared one by one)
        code = (words >> (8 * INDEX)) & 255
    elif KIND == INT2_KIND or KIND == INT3_KIND:  # noqa: SIM109
        code = (words >> (2 * INDEX)) & 3
    else:
        code = (words >> (4 * INDEX)) & 15
    if KIND == INT5_KIND:
        code |= ((high >> INDEX) & 1) << 4
    elif KIND == INT6_KIND:
        code |= ((high >> (2 * INDEX)) & 3) << 4
    elif KIND == INT3_KIND:
        code |= ((high >> INDEX) & 1) << 2
    if KIND == FP8_KIND:  # the exponent is 120 too small where the bits of the code are those of a float32
        return (((code & 128) << 24) | ((code & 127) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    elif KIND == FP4_KIND:  # 126 too small
        return (((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True) * 8.507059173023462e37
    elif KIND == LUT4_KIND:
        return tl.load(table + code)
    elif ZEROS:
        return code.to(tl.float32) - zero[:, None]
    elif MINIMUMS:
        return code.to(tl.float32)
    elif KIND == INT8_KIND:
        return code.to(tl.float32) - 128.0
    elif KIND == INT5_KIND:
        return code.to(tl.float32) - 16.0
    elif KIND == INT6_KIND:
        return code.to(tl.float32) - 32.0
    elif KIND == INT2_KIND:
        return code.to(tl.float32) - 2.0
    elif KIND == INT3_KIND:
        return code.to(tl.float32) - 4.0
    else:
        return code.to(tl.float32) - 8.0


@triton.jit
def _decoded(
    words, high, zero, table, INDEX: tl.constexpr, KIND: tl.constexpr, ZEROS: tl.constexpr, MINIMUMS: tl.constexpr,
    FAST: tl.constexpr, DTYPE: tl.constexpr,
):
    """Code number INDEX of every word, in the dtype of the product."""
    if FAST:
        return _decode_fast(words, high, zero, INDEX, KIND, ZEROS, MINIMUMS)
    else:
        return _decode(words, high, zero, table, INDEX, KIND, ZEROS, MINIMUMS).to(DTYPE)


@triton.jit
def _in_tiles(column, spans, WIDTH: tl.constexpr):
    """Where columns begin in [tiles, spans, 16, WIDTH]. 32 bits are enough for scales, words may need columns in 64."""
    return column // TILE_COLUMNS * (spans * (TILE_COLUMNS * WIDTH)) + column % TILE_COLUMNS * WIDTH


@triton.jit
def _of_group(numbers, outer, at, outer_at, OUTER: tl.constexpr, HALF: tl.constexpr):
    """Scales or minimums of a group of columns as float32, times those of the block around it.

    HALF: of their bytes, where the other half is something else; 0: they have bytes of their own.
    """
    group = tl.load(numbers + at)
    if HALF == LOWER_HALF:
        group = group & 15
    elif HALF == UPPER_HALF:
        group = group >> 4
    group = group.to(tl.float32)
    if OUTER:
        group *= tl.load(outer + outer_at).to(tl.float32)
    return group


@triton.jit
def _high_bits(high_at, words, HIGH: tl.constexpr):
    """What codes of 3, 5 and 6 bits have beside their words; for others the words, which are not read then."""
    if HIGH:
        return tl.load(high_at).to(tl.int32)
    else:
        return words


@triton.jit
def _prefetch(addresses):
    """Fetch a line at each address into the cache; nothing waits for it."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [addresses.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )


@triton.jit
def _store_tile(
    total, total_up, bias, residual, out, best_value, best_index, row, column, rows, columns, out_stride,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATE: tl.constexpr, ARGMAX: tl.constexpr,
):
    """Finish the sums of a tile [columns, rows]: bias, gate, residual, store, argmax of the program."""
    block = tl.program_id(0)
    row_ok = row < rows
    column_ok = column < columns
    total = tl.trans(total)
    if BIAS:
        total += tl.load(bias + column, mask=column_ok, other=0.0).to(tl.float32)[None, :]
    if GATE:
        total = total * tl.sigmoid(total) * tl.trans(total_up)
    ok = row_ok[:, None] & column_ok[None, :]
    at = row[:, None] * out_stride + column[None, :]
    if RESIDUAL:
        total += tl.load(residual + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=ok)
    if ARGMAX:
        masked = tl.where(ok, total, -float("inf"))
        value, place = tl.max(masked, axis=1, return_indices=True, return_indices_tie_break_left=True)
        best_at = row * tl.num_programs(0) + block
        first = tl.min(column, axis=0)
        tl.store(best_value + best_at, value, mask=row_ok)
        tl.store(best_index + best_at, clamped_index(place + first, columns), mask=row_ok)


@triton.jit
def packed_kernel(
    x, weight, high, scales, zeros, minimums, outer_scales, outer_minimums, table, bias, residual, out, best_value,
    best_index, partial_sums, programs_done,
    rows, columns, out_stride, in_features, steps, steps_per_split, spans, outer_spans,
    USE_PDL: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATE: tl.constexpr, ARGMAX: tl.constexpr,
    KIND: tl.constexpr, FAST: tl.constexpr, HIGH: tl.constexpr, ZEROS: tl.constexpr, MINIMUMS: tl.constexpr,
    NIBBLES: tl.constexpr, OUTER: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, EVEN: tl.constexpr,
    SPLITS: tl.constexpr, PREFETCH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WORDS: tl.constexpr,
    CODES: tl.constexpr,
):
    """out [rows, columns] = x · weightᵀ, plus bias, plus residual; or silu(gate) * up; or with the argmax.

    weight        words [tiles, steps, 16, WORDS] of CODES codes each; GATE: rows of gate, then rows of up
    high          upper bits of codes of 3, 5 and 6 bits, one element for every word
    scales        [tiles, spans, 16, GROUPS] (packed_layout.py); GROUP: input features that share one, 0 for all
    minimums      the same, added to code times scale: times the sum of the inputs, which the tensor cores make too,
                  since their order of sums does not depend on the number of rows; NIBBLES: they are in the upper
                  four bits of the scales
    outer_scales  [tiles, outer_spans, 16, 1]: what the scales of 256 input features are multiplied by
    out_stride    columns from one row of out and residual to the next
    SPLITS        programs that share the sums of a tile; the last to end adds them, first to last
    PREFETCH      steps whose words are fetched into the cache while the kernel before this one ends
    """
    block = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    word = tl.arange(0, WORDS)
    dtype: tl.constexpr = x.dtype.element_ty
    STEP: tl.constexpr = WORDS * CODES
    SCALE_HALF: tl.constexpr = LOWER_HALF if NIBBLES else 0
    MINIMUM_HALF: tl.constexpr = UPPER_HALF if NIBBLES else 0
    row_ok = (row < rows)[:, None]
    column_ok = column < columns
    weight_column = tl.where(column_ok, column, 0)  # clamped instead of masked: the loads stay plain
    first = split * steps_per_split
    last = tl.minimum(first + steps_per_split, steps)
    up_column = weight_column + columns  # not always at the same place of a tile
    step_words: tl.constexpr = TILE_COLUMNS * WORDS
    words_at = _in_tiles(weight_column.to(tl.int64), steps, WORDS)
    up_words_at = _in_tiles(up_column.to(tl.int64), steps, WORDS)
    weight_at = weight + first * step_words + words_at[:, None] + word[None, :]
    up_at = weight + first * step_words + up_words_at[:, None] + word[None, :]
    high_at = high + first * step_words + words_at[:, None] + word[None, :]
    high_up_at = high + first * step_words + up_words_at[:, None] + word[None, :]
    scales_at = _in_tiles(weight_column, spans, GROUPS)
    up_scales_at = _in_tiles(up_column, spans, GROUPS)
    outer_scales_at = _in_tiles(weight_column, outer_spans, 1)
    up_outer_scales_at = _in_tiles(up_column, outer_spans, 1)
    x_at = x + row[:, None] * in_features + first * STEP + word[None, :]
    total = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    total_up = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    zero = tl.zeros((COLUMNS,), dtype=tl.float32)
    zero_up = zero
    if ZEROS and GROUP == 0:  # one for all steps
        zero = tl.load(zeros + scales_at).to(tl.float32)
        if GATE:
            zero_up = tl.load(zeros + up_scales_at).to(tl.float32)
    x_sums = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    ones = tl.full((COLUMNS, WORDS), 1.0, dtype=dtype)
    for ahead in tl.static_range(PREFETCH):
        step_at = weight + tl.minimum(first + ahead, last - 1) * step_words
        _prefetch(step_at + words_at)
        if GATE:
            _prefetch(step_at + up_words_at)
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    for step in range(first, last):
        words = tl.load(weight_at).to(tl.int32)
        high_words = _high_bits(high_at, words, HIGH)
        if GATE:
            up_words = tl.load(up_at).to(tl.int32)
            high_up_words = _high_bits(high_up_at, up_words, HIGH)
        part = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
        part_up = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
        for index in tl.static_range(CODES):
            if GROUP > 0 and (index * WORDS) % (GROUP if GROUP < STEP else STEP) == 0:
                span = step if GROUP < STEP else step * STEP // GROUP
                group = span * (TILE_COLUMNS * GROUPS) + index * WORDS // GROUP % GROUPS
                scale_at = scales_at + group
                outer_step = step * STEP // OUTER_FEATURES * TILE_COLUMNS
                outer_at = outer_scales_at + outer_step
                scale = _of_group(scales, outer_scales, scale_at, outer_at, OUTER, SCALE_HALF)[:, None]
                if GATE:
                    up_scale_at = up_scales_at + group
                    up_outer_at = up_outer_scales_at + outer_step
                    scale_up = _of_group(scales, outer_scales, up_scale_at, up_outer_at, OUTER, SCALE_HALF)[:, None]
                if MINIMUMS:
                    minimum = _of_group(minimums, outer_minimums, scale_at, outer_at, OUTER, MINIMUM_HALF)[:, None]
                    if GATE:
                        minimum_up = _of_group(
                            minimums, outer_minimums, up_scale_at, up_outer_at, OUTER, MINIMUM_HALF
                        )[:, None]
                if ZEROS:
                    zero = tl.load(zeros + scale_at).to(tl.float32)
                    if GATE:
                        zero_up = tl.load(zeros + up_scale_at).to(tl.float32)
            feature = step * STEP + index * WORDS + word
            x_ok = row_ok if EVEN else row_ok & (feature < in_features)[None, :]
            x_tile = tl.trans(tl.load(x_at + index * WORDS, mask=x_ok, other=0.0))
            weights = _decoded(words, high_words, zero, table, index, KIND, ZEROS, MINIMUMS, FAST, dtype)
            if GATE:
                up_weights = _decoded(
                    up_words, high_up_words, zero_up, table, index, KIND, ZEROS, MINIMUMS, FAST, dtype
                )
            if MINIMUMS:
                x_sums = tl.dot(ones, x_tile, x_sums, input_precision="ieee")
            if GROUP == 0:
                total = tl.dot(weights, x_tile, total, input_precision="ieee")
                if GATE:
                    total_up = tl.dot(up_weights, x_tile, total_up, input_precision="ieee")
            else:
                part = tl.dot(weights, x_tile, part, input_precision="ieee")
                if GATE:
                    part_up = tl.dot(up_weights, x_tile, part_up, input_precision="ieee")
                if (index + 1) * WORDS % (GROUP if GROUP < STEP else STEP) == 0:
                    total += part * scale
                    part = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
                    if GATE:
                        total_up += part_up * scale_up
                        part_up = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
                    if MINIMUMS:
                        total += x_sums * minimum
                        if GATE:
                            total_up += x_sums * minimum_up
                        x_sums = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
        weight_at += step_words
        up_at += step_words
        high_at += step_words
        high_up_at += step_words
        x_at += STEP
    if GROUP == 0:
        total *= tl.load(scales + scales_at).to(tl.float32)[:, None]
        if GATE:
            total_up *= tl.load(scales + up_scales_at).to(tl.float32)[:, None]
    if SPLITS == 1:
        _store_tile(
            total, total_up, bias, residual, out, best_value, best_index, row, column, rows, columns, out_stride,
            BIAS, RESIDUAL, GATE, ARGMAX,
        )
    else:
        ok = column_ok[:, None] & (row < rows)[None, :]
        width = columns * (2 if GATE else 1)
        sums_at = row[None, :] * width + column[:, None]
        tl.store(partial_sums + split * rows * width + sums_at, total, mask=ok)
        if GATE:
            tl.store(partial_sums + split * rows * width + columns + sums_at, total_up, mask=ok)
        tl.debug_barrier()
        tile = tl.program_id(2) * tl.num_programs(0) + block
        if tl.atomic_add(programs_done + tile, 1, sem="acq_rel") == SPLITS - 1:
            total = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
            total_up = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
            for other in range(SPLITS):
                other_at = partial_sums + other * rows * width + sums_at
                total += tl.load(other_at, mask=ok, other=0.0, cache_modifier=".cg")
                if GATE:
                    total_up += tl.load(other_at + columns, mask=ok, other=0.0, cache_modifier=".cg")
            tl.store(programs_done + tile, 0)
            _store_tile(
                total, total_up, bias, residual, out, best_value, best_index, row, column, rows, columns, out_stride,
                BIAS, RESIDUAL, GATE, ARGMAX,
            )


@triton.jit
def unpack_kernel(
    weight, high, scales, zeros, minimums, outer_scales, outer_minimums, table, order, places, out,
    rows, in_features, steps, spans, outer_spans,
    KIND: tl.constexpr, HIGH: tl.constexpr, ZEROS: tl.constexpr, MINIMUMS: tl.constexpr, NIBBLES: tl.constexpr,
    OUTER: tl.constexpr, ORDER: tl.constexpr, SOME: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    ROUNDING: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, CODES: tl.constexpr,
):
    """out [rows, in_features]: the numbers that the words of a packed weight stand for. SOME: of the rows at places."""
    SCALE_HALF: tl.constexpr = LOWER_HALF if NIBBLES else 0
    MINIMUM_HALF: tl.constexpr = UPPER_HALF if NIBBLES else 0
    step = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    word = tl.arange(0, WORDS)
    row_ok = row < rows
    source = tl.where(row_ok, row, 0)  # clamped instead of masked: loads stay plain
    if SOME:
        source = tl.load(places + source)
    word_at = _in_tiles(source.to(tl.int64), steps, WORDS)[:, None] + step * (TILE_COLUMNS * WORDS) + word[None, :]
    words = tl.load(weight + word_at).to(tl.int32)
    high_words = _high_bits(high + word_at, words, HIGH)
    scales_at = _in_tiles(source, spans, GROUPS)
    outer_at = _in_tiles(source, outer_spans, 1) + step * CODES * WORDS // OUTER_FEATURES * TILE_COLUMNS
    zero = tl.zeros((ROWS,), dtype=tl.float32)
    for index in tl.static_range(CODES):
        first = (step * CODES + index) * WORDS
        group = tl.minimum(first // GROUP, spans * GROUPS - 1)
        scale_at = scales_at + (group // GROUPS * (TILE_COLUMNS * GROUPS) + group % GROUPS)
        scale = _of_group(scales, outer_scales, scale_at, outer_at, OUTER, SCALE_HALF)
        if ZEROS:
            zero = tl.load(zeros + scale_at).to(tl.float32)
        numbers = _decode(words, high_words, zero, table, index, KIND, ZEROS, MINIMUMS) * scale[:, None]
        if MINIMUMS:
            numbers += _of_group(minimums, outer_minimums, scale_at, outer_at, OUTER, MINIMUM_HALF)[:, None]
        ok = row_ok[:, None] & (first + word < in_features)[None, :]
        column = first + word
        if ORDER:
            column = tl.load(order + column, mask=column < in_features, other=0)
        at = row[:, None].to(tl.int64) * in_features + column[None, :]
        tl.store(out + at, numbers.to(ROUNDING).to(out.dtype.element_ty), mask=ok)
