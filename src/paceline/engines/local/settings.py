"""What may be chosen about an engine."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import OptionError

PROBES = 64  # nodes a tree may have beyond its draft tokens


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How many sequences at a time, and how much they may remember.

    max_num_seqs   sequences written at the same time; others wait
    kv_cache_tokens    tokens whose keys and values are kept, over all sequences
    block            tokens a block
    prefill_chunk   prompt tokens read between two steps of the sequences being written
    residents       finished sequences kept for whoever begins the same way; 0: no prefix is ever reused
    """

    max_num_seqs: int = 16
    kv_cache_tokens: int = 32768
    block: int = 64
    prefill_chunk: int = 256
    residents: int = 16

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "kv_cache_tokens", "block", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} must be 1 or more, not {getattr(self, name)}")
        if self.residents < 0:
            raise OptionError(f"residents must be 0 or more, not {self.residents}")
        if self.kv_cache_tokens < 2 * self.block:
            raise OptionError(f"kv_cache_tokens must hold at least two blocks of {self.block}, not {self.kv_cache_tokens}")

    @property
    def spare(self) -> int:
        """Tokens a runner should have room for beyond kv_cache_tokens."""
        return PROBES * self.max_num_seqs
