"""What ends a sequence, from what its writer asked for."""

from __future__ import annotations

from typing import Any

from paceline.core.stopping import StopRules
from paceline.core.types import ModelInfo
from paceline.errors import OptionError, PromptError
from paceline.hub.tokenizer import Tokenizer


def stop_rules(
    info: ModelInfo, tokenizer: Tokenizer, ids: list[int], wanted: int, stop: Any = (), ignore_eos: bool = False
) -> StopRules:
    """What ends a sequence with this prompt, or the error that says why it cannot even begin."""
    if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
        raise OptionError(f"max_new_tokens must be 1 or more, not {wanted!r}")
    if len(ids) >= info.max_seq_len:
        raise PromptError(f"the prompt has {len(ids)} tokens; {info.name} reads at most {info.max_seq_len - 1}")
    outside = [token for token in ids if not 0 <= token < info.vocab_size]
    if outside:
        raise PromptError(f"the prompt holds token {outside[0]}; the vocabulary has {info.vocab_size}")
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if any(not isinstance(string, str) or not string for string in strings):
        raise OptionError("a stop string must be a text that is not empty")
    ends: frozenset[int] = frozenset() if ignore_eos else info.eos_token_ids
    return StopRules(min(wanted, info.max_seq_len - len(ids)), ends, strings, tokenizer.decode)
