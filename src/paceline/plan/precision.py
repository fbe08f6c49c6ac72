"""How many bytes a weight takes: floats, torch's low-bit schemes, and the file types of GGUF.

A `Precision` says how each role of weight is stored, because no scheme treats them all alike: int8 and int4 leave the
embedding and the head in 16 bits, and GGUF's Q4_K_M keeps the head, and half of the value and down matrices, in Q6_K.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import OptionError
from paceline.plan.model_sizes import ModelSizes
from paceline.plan.weights import WeightGroup, WeightRole


@dataclass(frozen=True, slots=True)
class Storage:
    """One way to store a matrix. A row that is no multiple of `block` is stored in `odd_bits` instead."""

    name: str
    bits: float
    block: int = 1
    odd_bits: float = 0.0

    def bits_for_row(self, row_size: int) -> float:
        return self.bits if row_size % self.block == 0 else self.odd_bits


@dataclass(frozen=True, slots=True)
class Precision:
    """A named scheme. `roles` holds the exceptions to `body`; `compute_bits` are the bits of activations."""

    name: str
    body: Storage
    roles: Mapping[WeightRole, Storage]
    compute_bits: int = 16
    gguf: bool = False

    def storage(self, role: WeightRole) -> Storage:
        return self.roles.get(role, self.body)

    @property
    def kinds(self) -> frozenset[str]:
        """How its matrices are stored; a mix is several. Norms and other vectors do not count."""
        storages = (self.body, *(storage for role, storage in self.roles.items() if role is not WeightRole.SMALL))
        return frozenset(kind for storage in storages for kind in storage.name.split("+"))

    def group_bytes(self, group: WeightGroup) -> int:
        return round(group.count * self.storage(group.role).bits_for_row(group.row_size) / 8)


F32 = Storage("F32", 32)
F16 = Storage("F16", 16)
BF16 = Storage("BF16", 16)
Q4_0 = Storage("Q4_0", 4.5)
Q4_1 = Storage("Q4_1", 5.0)
Q5_0 = Storage("Q5_0", 5.5)
Q5_1 = Storage("Q5_1", 6.0)
Q8_0 = Storage("Q8_0", 8.5)
# The K types pack 256 weights; llama.cpp falls back to a 32-wide type for other rows, which small models often have.
Q2_K = Storage("Q2_K", 2.625, 256, Q4_0.bits)
Q3_K = Storage("Q3_K", 3.4375, 256, Q4_0.bits)
Q4_K = Storage("Q4_K", 4.5, 256, Q5_0.bits)
Q5_K = Storage("Q5_K", 5.5, 256, Q5_1.bits)
Q6_K = Storage("Q6_K", 6.5625, 256, Q8_0.bits)
IQ4_NL = Storage("IQ4_NL", 4.5)
IQ4_XS = Storage("IQ4_XS", 4.25, 256, IQ4_NL.bits)
IQ3_S = Storage("IQ3_S", 3.4375, 256, IQ4_NL.bits)
IQ3_XXS = Storage("IQ3_XXS", 3.0625, 256, IQ4_NL.bits)
IQ2_S = Storage("IQ2_S", 2.5625, 256, IQ4_NL.bits)
IQ2_XS = Storage("IQ2_XS", 2.3125, 256, IQ4_NL.bits)
IQ2_XXS = Storage("IQ2_XXS", 2.0625, 256, IQ4_NL.bits)
IQ1_M = Storage("IQ1_M", 1.75, 256, IQ4_NL.bits)
IQ1_S = Storage("IQ1_S", 1.5625, 256, IQ4_NL.bits)
TQ2_0 = Storage("TQ2_0", 2.0625, 256, Q4_0.bits)
TQ1_0 = Storage("TQ1_0", 1.6875, 256, Q4_0.bits)
MXFP4 = Storage("MXFP4", 4.25)
# One byte and a scale per row; half a byte, and a 16-bit scale and zero point for each 128 weights.
_FP8 = Storage("fp8", 8.0)
_INT8 = Storage("int8", 8.0)
_INT4 = Storage("int4", 4.25)
# Four bits, and for each 128 weights a 16-bit scale and a zero point of four bits.
_GROUPS_OF_128 = Storage("int4 in groups of 128", 4 + (16 + 4) / 128)
# Four bits, for each 64 weights a scale of eight bits, and for each 256 of those a float.
_NF4 = Storage("nf4", 4 + 8 / 64 + 32 / (64 * 256))
_MXFP4 = Storage("mxfp4", 4 + 8 / 32)  # a shared exponent for each 32 weights


def _half_of_each(low: Storage, high: Storage) -> Storage:
    """Half of the layers in one type and half in the other, as llama.cpp's _M mixes do."""
    odd = (low.odd_bits + high.odd_bits) / 2
    return Storage(f"{low.name}+{high.name}", (low.bits + high.bits) / 2, low.block, odd)


def _float(name: str, storage: Storage, compute_bits: int) -> Precision:
    return Precision(name, storage, {}, compute_bits)


def _torch_low_bit(name: str, storage: Storage) -> Precision:
    kept = (WeightRole.EMBEDDING, WeightRole.HEAD, WeightRole.SMALL, WeightRole.OTHER)
    return Precision(name, storage, dict.fromkeys(kept, BF16))


def _experts_only(name: str, storage: Storage) -> Precision:
    """All but the experts stays in 16 bits."""
    experts = (WeightRole.MLP, WeightRole.DOWN)
    roles: dict[WeightRole, Storage] = {role: BF16 for role in WeightRole if role not in experts}
    return Precision(name, storage, roles)


def _gguf(name: str, body: Storage, head: Storage | None = None, **exceptions: Storage) -> Precision:
    """A GGUF file type; norms always stay in F32. `exceptions` are named by role: value, out, down."""
    roles = {WeightRole[key.upper()]: storage for key, storage in exceptions.items()}
    roles[WeightRole.SMALL] = F32
    roles[WeightRole.HEAD] = head or body
    return Precision(name, body, roles, gguf=True)


_Q4_MIX = _half_of_each(Q4_K, Q6_K)
_Q5_MIX = _half_of_each(Q5_K, Q6_K)

PRECISIONS: Mapping[str, Precision] = {
    scheme.name.lower(): scheme
    for scheme in (
        _float("fp32", F32, 32),
        _float("bf16", BF16, 16),
        _float("fp16", F16, 16),
        _torch_low_bit("fp8", _FP8),
        _torch_low_bit("int8", _INT8),
        _torch_low_bit("int4", _INT4),
        _torch_low_bit("awq", _GROUPS_OF_128),
        _torch_low_bit("gptq", _GROUPS_OF_128),
        _torch_low_bit("nf4", _NF4),
        _experts_only("mxfp4", _MXFP4),
        _gguf("F32", F32),
        _gguf("F16", F16),
        _gguf("Q8_0", Q8_0),
        _gguf("Q6_K", Q6_K),
        _gguf("Q5_K_M", Q5_K, Q6_K, value=_Q5_MIX, down=_Q5_MIX),
        _gguf("Q5_K_S", Q5_K, Q6_K),
        _gguf("Q5_1", Q5_1, Q6_K),
        _gguf("Q5_0", Q5_0, Q6_K),
        _gguf("Q4_K_M", Q4_K, Q6_K, value=_Q4_MIX, down=_Q4_MIX),
        _gguf("Q4_K_S", Q4_K, Q6_K),
        _gguf("Q4_1", Q4_1, Q6_K),
        _gguf("Q4_0", Q4_0, Q6_K),
        _gguf("IQ4_NL", IQ4_NL, Q6_K),
        _gguf("IQ4_XS", IQ4_XS, Q6_K),
        _gguf("Q3_K_L", Q3_K, Q6_K, value=Q5_K, out=Q5_K, down=Q5_K),
        _gguf("Q3_K_M", Q3_K, Q6_K, value=Q4_K, out=Q4_K, down=Q4_K),
        _gguf("Q3_K_S", Q3_K, Q6_K),
        _gguf("Q2_K", Q2_K, Q6_K, value=Q3_K, out=Q3_K, down=Q3_K),
        _gguf("Q2_K_S", Q2_K, Q6_K, value=Q3_K),
        _gguf("IQ3_M", IQ3_S, Q6_K, value=Q4_K, out=Q4_K),
        _gguf("IQ3_S", IQ3_S, Q6_K),
        _gguf("IQ3_XS", IQ3_XXS, Q6_K, value=IQ3_S, out=IQ3_S),
        _gguf("IQ3_XXS", IQ3_XXS, Q5_K, out=IQ3_S),
        _gguf("IQ2_M", IQ2_S, Q5_K, value=IQ3_S, out=IQ3_S, down=IQ3_S),
        _gguf("IQ2_S", IQ2_XS, Q5_K, value=IQ3_S, out=IQ3_S),
        _gguf("IQ2_XS", IQ2_XS, Q5_K),
        _gguf("IQ2_XXS", IQ2_XXS, Q5_K),
        _gguf("IQ1_M", IQ1_M, Q5_K),
        _gguf("IQ1_S", IQ1_S, Q5_K),
        _gguf("TQ2_0", TQ2_0, Q6_K),
        _gguf("TQ1_0", TQ1_0, Q6_K),
        _gguf("MXFP4_MOE", MXFP4, Q8_0, embedding=Q8_0, value=Q8_0, out=Q8_0, attention=Q8_0),
    )
}

# Other common names of the same schemes.
_ALIASES: Mapping[str, str] = {
    "float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16",
    "float8": "fp8", "f8": "fp8", "8bit": "int8", "4bit": "int4", "q4_k": "q4_k_m", "q5_k": "q5_k_m", "q3_k": "q3_k_m",
}  # fmt: skip


def find_precision(name: str) -> Precision:
    """The scheme of this name. Raises OptionError naming the nearest ones."""
    key = name.strip().lower().replace("-", "_")
    key = _ALIASES.get(key, key)
    if key in PRECISIONS:
        return PRECISIONS[key]
    near = difflib.get_close_matches(key, PRECISIONS, n=3)
    hint = f"did you mean {' or '.join(PRECISIONS[n].name for n in near)}? " if near else ""
    every = ", ".join(scheme.name for scheme in PRECISIONS.values())
    raise OptionError(f"no precision called '{name}': {hint}the precisions are {every}")


def weight_bytes(sizes: ModelSizes, precision: Precision) -> int:
    """Bytes of all weights. The size of a file on disk is used for the precision it is stored in."""
    if sizes.stored_bytes is not None and same_scheme(sizes.stored_precision, precision):
        return sizes.stored_bytes
    roles = _tied_table(precision) if sizes.tied_embeddings else precision
    return sum(roles.group_bytes(group) for group in sizes.groups)


def same_scheme(stored: str | None, precision: Precision) -> bool:
    return stored is not None and stored.lower() == precision.name.lower()


def _tied_table(precision: Precision) -> Precision:
    """A tied table serves as the head too, so GGUF stores it in the head's better type."""
    if not precision.gguf:
        return precision
    roles = {**precision.roles, WeightRole.EMBEDDING: precision.storage(WeightRole.HEAD)}
    return Precision(precision.name, precision.body, roles, precision.compute_bits, gguf=True)
