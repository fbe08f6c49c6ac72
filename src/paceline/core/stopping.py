"""When a sequence is over: end tokens, stop strings, lengths. Also inside an accepted run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

BYTES_A_CHARACTER = 4  # a character may be spread over this many byte tokens


@dataclass(frozen=True, slots=True)
class Stop:
    """Where a sequence ends, and why. `kept`: how many of the generated tokens belong to it."""

    kept: int
    reason: str


@dataclass(frozen=True, slots=True)
class StopRules:
    """What ends a sequence. `decode` turns ids into characters and is needed only for stop strings."""

    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    decode: Callable[[list[int]], str] | None = None
    ends: Callable[[list[int]], bool] | None = None  # of the tokens generated so far: a condition of the caller's own

    def check(self, ids: Sequence[int], new: int, prompt_length: int = 0) -> Stop | None:
        """Look at the last `new` ids, oldest first; None: the sequence goes on. The prompt ends no sequence."""
        generated = len(ids) - prompt_length
        for count in range(generated - new + 1, generated + 1):
            if ids[prompt_length + count - 1] in self.eos_token_ids:
                return Stop(count, "stop")
            if self.stop_strings and self._holds_stop_string(ids[prompt_length:], count):
                return Stop(count, "stop")
            if count >= self.max_new_tokens:
                return Stop(count, "length")
            if self.ends is not None and self.ends(list(ids[prompt_length : prompt_length + count])):
                return Stop(count, "stop")
        return None

    def _holds_stop_string(self, generated: Sequence[int], count: int) -> bool:
        """Whether the characters up to token `count` hold a stop string. Only the tail that can hold one is decoded."""
        assert self.decode is not None, "stop strings need a tokenizer"
        reach = BYTES_A_CHARACTER * max(map(len, self.stop_strings)) + 8
        tail = self.decode(list(generated[max(0, count - reach) : count]))
        return any(stop in tail for stop in self.stop_strings)
