"""When a sequence is over: end tokens, stop strings, lengths. Also inside an accepted run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

BYTES_A_CHARACTER = 4  # a character may be spread over this many byte tokens


@dataclass(frozen=True, slots=True)
class Stop:
    """Where a sequence ends, and why. `kept`: how many of the written tokens belong to it."""

    kept: int
    reason: str


@dataclass(frozen=True, slots=True)
class StopRules:
    """What ends a sequence. `decode` turns ids into characters and is needed only for stop strings."""

    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    decode: Callable[[list[int]], str] | None = None

    def check(self, written: Sequence[int], fresh: int) -> Stop | None:
        """Look at the last `fresh` tokens of an answer, oldest first; None: the sequence goes on."""
        for count in range(len(written) - fresh + 1, len(written) + 1):
            if written[count - 1] in self.eos_token_ids:
                return Stop(count, "stop")
            if self.stop_strings and self._says_stop(written, count):
                return Stop(count, "stop")
            if count >= self.max_new_tokens:
                return Stop(count, "length")
        return None

    def _says_stop(self, written: Sequence[int], count: int) -> bool:
        """Whether the characters up to token `count` hold a stop string. Only the tail that can hold one is decoded."""
        assert self.decode is not None, "stop strings need a tokenizer"
        reach = BYTES_A_CHARACTER * max(map(len, self.stop_strings)) + 8
        tail = self.decode(list(written[max(0, count - reach) : count]))
        return any(stop in tail for stop in self.stop_strings)
