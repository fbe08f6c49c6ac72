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
    """What ends a sequence. `decode` turns ids into characters and is needed only for stop strings.

    include_stop: the text keeps what ended it; the tokens of the sequence always do
    """

    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    decode: Callable[[list[int]], str] | None = None
    stop_token_ids: frozenset[int] = frozenset()
    include_stop: bool = False
    ends: Callable[[list[int]], bool] | None = None  # of the tokens generated so far: a condition of the caller's own

    def check(self, ids: Sequence[int], new: int, prompt_length: int = 0) -> Stop | None:
        """Look at the last `new` ids, oldest first; None: the sequence goes on. The prompt ends no sequence."""
        generated = len(ids) - prompt_length
        for count in range(generated - new + 1, generated + 1):
            last = ids[prompt_length + count - 1]
            if last in self.eos_token_ids or last in self.stop_token_ids:
                return Stop(count, "stop")
            if self.stop_strings and self._holds_stop_string(ids[prompt_length:], count):
                return Stop(count, "stop")
            if count >= self.max_new_tokens:
                return Stop(count, "length")
            if self.ends is not None and self.ends(list(ids[prompt_length : prompt_length + count])):
                return Stop(count, "stop")
        return None

    def text_tokens(self, tokens: list[int], finish_reason: str | None) -> list[int]:
        """Those of a run whose characters belong to the text: the token that ends a sequence has none there."""
        last = tokens[-1] if tokens and finish_reason == "stop" and not self.include_stop else None
        return tokens[:-1] if last in self.eos_token_ids or last in self.stop_token_ids else tokens

    def stop_reason(self, generated: Sequence[int]) -> int | str | None:
        """Which stop token or stop string ended a sequence whose finish reason is "stop"; None: an end token."""
        last = generated[-1]
        if last in self.eos_token_ids:
            return None
        if last in self.stop_token_ids:
            return last
        if not self.stop_strings:
            return None
        tail = self._tail(generated, len(generated))
        return min((stop for stop in self.stop_strings if stop in tail), key=tail.find, default=None)

    def _holds_stop_string(self, generated: Sequence[int], count: int) -> bool:
        tail = self._tail(generated, count)
        return any(stop in tail for stop in self.stop_strings)

    def _tail(self, generated: Sequence[int], count: int) -> str:
        """The characters before the end of token `count` that can hold a stop string."""
        assert self.decode is not None, "stop strings need a tokenizer"
        reach = BYTES_A_CHARACTER * max(map(len, self.stop_strings)) + 8
        return self.decode(list(generated[max(0, count - reach) : count]))
