"""What may be chosen about an engine."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import OptionError

PROBES = 64  # nodes a tree may have beyond its guesses


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How many texts at a time, and how much they may remember.

    largest_batch   texts written at the same time; others wait
    cache_tokens    tokens whose keys and values are kept, over all texts
    page            tokens a page
    prefill_chunk   prompt tokens read between two rounds of the texts being written
    residents       finished texts kept for whoever begins the same way; 0: no prefix is ever reused
    """

    largest_batch: int = 16
    cache_tokens: int = 32768
    page: int = 64
    prefill_chunk: int = 256
    residents: int = 16

    def __post_init__(self) -> None:
        for name in ("largest_batch", "cache_tokens", "page", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} must be 1 or more, not {getattr(self, name)}")
        if self.residents < 0:
            raise OptionError(f"residents must be 0 or more, not {self.residents}")
        if self.cache_tokens < 2 * self.page:
            raise OptionError(f"cache_tokens must hold at least two pages of {self.page}, not {self.cache_tokens}")

    @property
    def spare(self) -> int:
        """Tokens a runner should have room for beyond cache_tokens."""
        return PROBES * self.largest_batch
