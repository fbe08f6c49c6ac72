"""PTX that turns one code of each of two 32-bit words into a pair of bfloat16 numbers.

$0 is the pair, $1 and $2 are the words: the code of the first lands in the low half. A `prmt` puts the byte with the
code into both bytes of its half. Numbers are then made by writing the code into the bits of a bfloat16: for integers
into the mantissa of 128, for small floats into exponent and mantissa; one multiply-add takes the offset back exactly.
"""

from __future__ import annotations

ONE, MINUS_ZERO = "0x3F803F80", "0x80008000"


def _byte_pair(byte: int) -> str:
    """p: the byte of both words, twice in each half."""
    return f"prmt.b32 p, $1, $2, 0x{4 + byte:X}{4 + byte:X}{byte:X}{byte:X};"


def _int4(index: int, offset: str, high: str = "") -> str:
    """Code + 128 by its bits, plus offset: a register with two negative bfloat16 numbers. high: adds upper bits."""
    shift = "shr.b32 p, p, 4;" if index % 2 else ""
    return (
        f"{{.reg .b32 p, u; mov.b32 u, {ONE}; {_byte_pair(index // 2)} {shift} "
        f"lop3.b32 p, p, 0x000F000F, 0x43004300, 0xEA; {high} {offset}}}"
    )


def _int2(index: int, offset: str, high: str = "") -> str:
    """The same of words of 16 bits, in the low halves of $1 and $2."""
    return (
        f"{{.reg .b32 p, u; mov.b32 u, {ONE}; prmt.b32 p, $1, $2, 0x5410; shr.b32 p, p, {2 * index}; "
        f"lop3.b32 p, p, 0x00030003, 0x43004300, 0xEA; {high} {offset}}}"
    )


def _high(index: int, bits: int, lower: int = 4) -> str:
    """Upper bits of a code, out of the low halves of $3 and $4, to the places above its lower ones."""
    distance, mask = lower - bits * index, f"{(1 << bits) - 1 << lower:04X}"
    shift = f"shl.b32 h, h, {distance};" if distance >= 0 else f"shr.b32 h, h, {-distance};"
    return f"{{.reg .b32 h; prmt.b32 h, $3, $4, 0x5410; {shift} and.b32 h, h, 0x{mask}{mask}; or.b32 p, p, h;}}"


def _minus(bits: str) -> str:
    """Add a negative number: its bfloat16 twice."""
    return f"{{.reg .b32 o; mov.b32 o, 0x{bits}{bits}; fma.rn.bf16x2 $0, p, u, o;}}"


def _int8(index: int) -> str:
    """The byte as the lowest bits of the float32 2²³, which has no fraction; a pair is rounded to bfloat16, exactly."""
    select = f"0x754{index}"
    return (
        f"{{.reg .b32 a, b; .reg .f32 f, g; prmt.b32 a, $1, 0x4B000000, {select}; "
        f"prmt.b32 b, $2, 0x4B000000, {select}; mov.b32 f, a; mov.b32 g, b; "
        "add.f32 f, f, 0fCB000080; add.f32 g, g, 0fCB000080; cvt.rn.bf16x2.f32 $0, g, f;}"
    )


def _scaled(bits: str, factor: str) -> str:
    """Bits of bfloat16 numbers in p, times a power of two."""
    return f"{{.reg .b32 p, s, u, z; mov.b32 u, {factor}; mov.b32 z, {MINUS_ZERO}; {bits} fma.rn.bf16x2 $0, p, u, z;}}"


def _fp8(index: int) -> str:
    """e4m3: sign to bit 15, the rest to bits 4 to 10; the exponent is then 120 too small."""
    return _scaled(
        f"{_byte_pair(index)} and.b32 s, p, 0x80008000; shr.b32 p, p, 4; lop3.b32 p, p, 0x07F007F0, s, 0xEA;",
        "0x7B807B80",
    )


def _fp4(index: int) -> str:
    """e2m1: sign to bit 15, the rest to bits 6 to 8; the exponent is then 126 too small."""
    sign = "and.b32 s, p, 0x80008000;" if index % 2 else "shl.b32 s, p, 4; and.b32 s, s, 0x80008000;"
    shift = 2 if index % 2 else 6
    return _scaled(
        f"{_byte_pair(index // 2)} {sign} shl.b32 p, p, {shift}; lop3.b32 p, p, 0x01C001C0, s, 0xEA;", "0x7E807E80"
    )


MINUS_128, MINUS_130, MINUS_132, MINUS_136 = (_minus(bits) for bits in ("C300", "C302", "C304", "C308"))
MINUS_144, MINUS_160 = (_minus(bits) for bits in ("C310", "C320"))
INT2_ASM = tuple(_int2(index, MINUS_130) for index in range(8))
UINT2_ASM = tuple(_int2(index, MINUS_128) for index in range(8))
INT3_ASM = tuple(_int2(index, MINUS_132, _high(index, 1, 2)) for index in range(8))
INT4_ASM = tuple(_int4(index, MINUS_136) for index in range(8))
UINT4_ASM = tuple(_int4(index, MINUS_128) for index in range(8))
INT5_ASM = tuple(_int4(index, MINUS_144, _high(index, 1)) for index in range(8))
UINT5_ASM = tuple(_int4(index, MINUS_128, _high(index, 1)) for index in range(8))
INT6_ASM = tuple(_int4(index, MINUS_160, _high(index, 2)) for index in range(8))
INT4_ZERO_ASM = tuple(_int4(index, "fma.rn.bf16x2 $0, p, u, $3;") for index in range(8))
INT8_ASM = tuple(_int8(index) for index in range(4))
FP8_ASM = tuple(_fp8(index) for index in range(4))
FP4_ASM = tuple(_fp4(index) for index in range(8))
