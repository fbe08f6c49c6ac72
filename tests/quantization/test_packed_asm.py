"""The PTX that decodes two codes at a time, run here instruction by instruction: what every code stands for."""

from __future__ import annotations

import re
import struct
from typing import Any

import pytest
import torch

from paceline.quantization import packed_asm
from paceline.quantization.packed_layout import Kind, decode, pack_high, pack_words

# The code by its kind, and what is taken off it: integers without a minimum have an offset.
CODES = {
    "INT2_ASM": (Kind.INT2, 2), "UINT2_ASM": (Kind.INT2, 0), "INT3_ASM": (Kind.INT3, 4), "INT4_ASM": (Kind.INT4, 8),
    "UINT4_ASM": (Kind.INT4, 0), "INT5_ASM": (Kind.INT5, 16), "UINT5_ASM": (Kind.INT5, 0), "INT6_ASM": (Kind.INT6, 32),
    "FP8_ASM": (Kind.FP8, 0), "FP4_ASM": (Kind.FP4, 0),
}  # fmt: skip
WORD = (1 << 32) - 1


def number_of(bits: int) -> float:
    """A bfloat16."""
    return float(struct.unpack("<f", struct.pack("<I", bits << 16))[0])


def bits_of(number: float) -> int:
    bits = int(struct.unpack("<I", struct.pack("<f", number))[0])
    assert bits & 0xFFFF == 0, "nothing is rounded"
    return bits >> 16


def permuted(first: int, second: int, selector: int) -> int:
    source = (first | second << 32).to_bytes(8, "little")
    return int.from_bytes(bytes(source[selector >> 4 * place & 7] for place in range(4)), "little")


def fused(first: int, second: int, third: int) -> int:
    halves = [[number_of(pair >> shift & 0xFFFF) for pair in (first, second, third)] for shift in (0, 16)]
    low, high = (bits_of(a * b + c) for a, b, c in halves)
    return low | high << 16


INSTRUCTIONS: dict[str, Any] = {
    "mov.b32": lambda a: a,
    "prmt.b32": permuted,
    "shl.b32": lambda a, distance: a << distance,
    "shr.b32": lambda a, distance: a >> distance,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "lop3.b32": lambda a, b, c, table: (a & b) | c,
    "fma.rn.bf16x2": fused,
}


def run(program: str, registers: dict[str, int]) -> int:
    for statement in re.sub(r"[{}]", " ", program).split(";"):
        name, _, operands = statement.strip().partition(" ")
        if not name or name == ".reg":
            continue
        out, *inputs = (operand.strip() for operand in operands.split(","))
        values = [registers[place] if place in registers else int(place, 0) for place in inputs]
        if name == "lop3.b32":
            assert values[3] == 0xEA
        registers[out] = INSTRUCTIONS[name](*values) & WORD
    return registers["$0"]


@pytest.mark.parametrize("name", CODES)
def test_both_numbers_of_a_pair_are_those_of_their_codes(name: str) -> None:
    """Words are given as the kernel holds them: those of 16 bits with their sign in the upper half."""
    kind, offset = CODES[name]
    codes = torch.randint(0, 1 << kind.bits, (2, 128), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    codes[kind is Kind.FP8 and (codes & 127) == 127] = 0  # stands for no number
    words, high = pack_words(codes, kind), pack_high(codes, kind)
    numbers = decode(codes, kind) - offset
    for index, program in enumerate(getattr(packed_asm, name)):
        for word in range(kind.words):
            registers = {f"${row + 1}": int(words[0, 0, row, word]) & WORD for row in range(2)}
            if high is not None:
                registers |= {f"${row + 3}": int(high[0, 0, row, word]) & WORD for row in range(2)}
            pair, feature = run(program, registers), index * kind.words + word
            assert [number_of(pair & 0xFFFF), number_of(pair >> 16)] == numbers[:, feature].tolist()
