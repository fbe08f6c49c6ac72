"""What ends a text, from what its writer asked for."""

from __future__ import annotations

from typing import Any

from paceline.core.protocols import ModelCard
from paceline.core.stopping import StopRules
from paceline.decode.text import Codec
from paceline.errors import OptionError, PromptError


def stop_rules(
    card: ModelCard, codec: Codec, ids: list[int], wanted: int, stop: Any = (), ignore_end: bool = False
) -> StopRules:
    """What ends a text with this prompt, or the error that says why it cannot even begin."""
    if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
        raise OptionError(f"max_new_tokens must be 1 or more, not {wanted!r}")
    if len(ids) >= card.longest_text:
        raise PromptError(f"the prompt has {len(ids)} tokens; {card.name} reads at most {card.longest_text - 1}")
    outside = [token for token in ids if not 0 <= token < card.vocab_size]
    if outside:
        raise PromptError(f"the prompt holds token {outside[0]}; the vocabulary has {card.vocab_size}")
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if any(not isinstance(string, str) or not string for string in strings):
        raise OptionError("a stop string must be a text that is not empty")
    ends: frozenset[int] = frozenset() if ignore_end else card.end_tokens
    return StopRules(min(wanted, card.longest_text - len(ids)), ends, strings, codec.decode)
