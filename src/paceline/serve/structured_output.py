"""JSON by construction: llguidance says which tokens may follow, node by node, so that guessing stays on.

A mask is asked for after the text and after every guess on its way. The matcher walks there and back, so nothing that
was merely guessed is ever remembered.
"""

from __future__ import annotations

import json
from typing import Any

import llguidance
import llguidance.hf
import numpy as np
import torch
from torch import Tensor

from paceline.core.types import ModelInfo
from paceline.errors import OptionError

ANY_OBJECT: dict[str, Any] = {"type": "object"}
# Free whitespace would let a small model write blanks until its length ends.
SPACING: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammars:
    """Makes constraints for one tokenizer. Opening one is slow (about a second), so there is one a server."""

    def __init__(self, tokenizer: Any, info: ModelInfo) -> None:
        self._card = info
        self._tokens = llguidance.hf.from_tokenizer(
            tokenizer, n_vocab=info.vocab_size, eos_token=_ends(tokenizer, info)
        )

    def json(self, schema: dict[str, Any] | None = None) -> JsonConstraint:
        """A constraint to JSON of this schema, or to any JSON object. Raises OptionError if the schema is no use."""
        try:
            text = json.dumps(schema or ANY_OBJECT)
        except (ValueError, RecursionError) as error:
            raise OptionError(f"the JSON schema cannot be read: {error}") from error
        grammar = llguidance.LLMatcher.grammar_from_json_schema(text, defaults=SPACING)
        matcher = llguidance.LLMatcher(self._tokens, grammar)
        if matcher.is_error():
            raise OptionError(f"the JSON schema is not supported: {matcher.get_error().splitlines()[0]}")
        return JsonConstraint(matcher, self._card)


def _ends(tokenizer: Any, info: ModelInfo) -> list[int]:
    return sorted(info.eos_token_ids) or [int(tokenizer.eos_token_id or 0)]


class JsonConstraint:
    """A grammar over one text (core.sequence.Constraint)."""

    def __init__(self, matcher: llguidance.LLMatcher, info: ModelInfo) -> None:
        self._matcher, self._vocab = matcher, info.vocab_size
        self._ends = info.eos_token_ids

    def allowed(self, path: list[int]) -> Tensor:
        walked = self._matcher.try_consume_tokens(path) if path else 0
        if walked < len(path):  # behind a guess that cannot stand nothing is ever asked in earnest
            self._matcher.rollback(walked)
            return torch.ones(self._vocab, dtype=torch.bool)
        mask = self._mask()
        if walked:
            self._matcher.rollback(walked)
        return mask

    def advance(self, tokens: list[int]) -> None:
        for token in tokens:
            if token in self._ends or not self._matcher.try_consume_tokens([token]):
                return

    def _mask(self) -> Tensor:
        """The grammar's tokens; an end only where the text is complete."""
        if self._matcher.is_stopped():
            mask = torch.zeros(self._vocab, dtype=torch.bool)
        else:
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            mask = torch.from_numpy(np.unpackbits(bits, bitorder="little")[: self._vocab].astype(bool))
        mask[sorted(self._ends)] = self._matcher.is_accepting()
        return mask
