"""Structured output by construction: llguidance computes which tokens may follow, node by node, so drafting stays on.

A mask is computed after the sequence and after every draft token on its path. The matcher walks there and back, so it
never keeps a token that was only drafted.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from paceline.core.types import ModelInfo, StructuredOutput
from paceline.engines.local.structural_tags import SPACING, structural_tag_grammar
from paceline.errors import MissingExtra, OptionError
from paceline.hub.resolved_tokenizer import ResolvedTokenizer

if TYPE_CHECKING:
    import llguidance

LOG = logging.getLogger(__name__)

ANY_OBJECT = json.dumps({"type": "object"})
MAX_COMPILED = 64  # grammars that are kept: choices of one request, and requests after it, mostly have the same


class GrammarCompiler:
    """Compiles constraints for one tokenizer, in any thread. Opening it takes about a second: an engine has one."""

    def __init__(self, hf_tokenizer: Any, info: ModelInfo) -> None:
        try:
            import llguidance  # noqa: F401  # whether it is there
        except ImportError as error:
            raise MissingExtra("llguidance", "serve") from error
        self._info = info
        eos = sorted(info.eos_token_ids) or [int(hf_tokenizer.eos_token_id or 0)]
        self._tokens = _grammar_tokens(hf_tokenizer, info.vocab_size, eos)
        self._compiled: OrderedDict[StructuredOutput, llguidance.LLMatcher] = OrderedDict()  # at their start
        self._lock = threading.Lock()  # of the compiled ones; compiling itself may take seconds, and goes without

    def has(self, output: StructuredOutput) -> bool:
        """Whether a constraint takes no compiling."""
        return output in self._compiled

    def compile(self, output: StructuredOutput) -> GrammarConstraint:
        """A constraint for one sequence. Raises OptionError where the schema or grammar is not supported."""
        known = self._compiled.get(output)
        matcher = self._matcher(output) if known is None else known
        with self._lock:
            self._compiled[output] = matcher
            self._compiled.move_to_end(output)
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            return GrammarConstraint(matcher.deep_copy(), self._info)

    def _matcher(self, output: StructuredOutput) -> llguidance.LLMatcher:
        import llguidance

        try:
            grammar = _grammar(output)
        except OptionError:
            raise
        except Exception as error:  # the converter of GBNF raises bare exceptions
            raise OptionError(f"the {output.kind} cannot be read: {_first_line(error)}") from error
        matcher = llguidance.LLMatcher(self._tokens, grammar)
        if matcher.is_error():
            name = "JSON schema" if output.kind.startswith("json") else output.kind
            raise OptionError(f"the {name} is not supported: {matcher.get_error().splitlines()[0]}")
        matcher.compute_bitmask()
        if matcher.is_error():
            raise OptionError(f"no output can match the {output.kind}")
        return matcher


def _grammar_tokens(hf_tokenizer: Any, vocab_size: int, eos: list[int]) -> llguidance.LLTokenizer:
    """The vocabulary as llguidance reads it."""
    if isinstance(hf_tokenizer, ResolvedTokenizer):
        from llguidance import LLTokenizer

        return LLTokenizer(hf_tokenizer.backend_json(), n_vocab=vocab_size, eos_token=eos)
    from llguidance.hf import from_tokenizer  # imports transformers, which a tokenizer of its kind has done already

    return from_tokenizer(hf_tokenizer, n_vocab=vocab_size, eos_token=eos)


def _grammar(output: StructuredOutput) -> str:
    import llguidance
    from llguidance import gbnf_to_lark

    matcher = llguidance.LLMatcher
    compilers: dict[str, Callable[[str], str]] = {
        "json_schema": lambda value: matcher.grammar_from_json_schema(value or ANY_OBJECT, defaults=SPACING),
        "json_object": lambda value: matcher.grammar_from_json_schema(value or ANY_OBJECT, defaults=SPACING),
        "regex": matcher.grammar_from_regex,
        "choice": lambda value: matcher.grammar_from_lark(_choice_grammar(value)),
        "grammar": lambda value: matcher.grammar_from_lark(gbnf_to_lark.any_to_lark(value)),
        "structural_tag": lambda value: matcher.grammar_from_lark(structural_tag_grammar(value)),
    }
    if output.kind not in compilers:
        names = ", ".join(list(compilers)[:-1])
        raise OptionError(f"structured output is {names} or structural_tag; not {output.kind!r}")
    return str(compilers[output.kind](output.value))


def _choice_grammar(value: str) -> str:
    choices = json.loads(value)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise ValueError("the choices are a list of strings, at least one")
    # One terminal: a rule of more than 2,000 alternatives outgrows llguidance's limits while the output is written.
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice) for choice in choices)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class GrammarConstraint:
    """A grammar over one sequence (core.sequence.Constraint)."""

    def __init__(self, matcher: llguidance.LLMatcher, info: ModelInfo) -> None:
        self._matcher, self._vocab_size = matcher, info.vocab_size
        self._eos = info.eos_token_ids
        self._has_ended = False  # an end token may be ignored: then nothing but more of them follows

    def allowed(self, path: list[int]) -> Tensor:
        if self._has_ended or not self._eos.isdisjoint(path):
            return self._only_eos()
        consumed = self._matcher.try_consume_tokens(path) if path else 0
        if consumed < len(path):  # no row after a draft token that the grammar excludes is ever sampled from
            self._matcher.rollback(consumed)
            return torch.ones(self._vocab_size, dtype=torch.bool)
        mask = self._mask()
        if consumed:
            self._matcher.rollback(consumed)
        return mask

    def advance(self, tokens: list[int]) -> None:
        for token in tokens:
            if token in self._eos:
                self._has_ended = True
            if self._has_ended or not self._matcher.try_consume_tokens([token]):
                return

    def _mask(self) -> Tensor:
        """The grammar's tokens; an end token only where the output is complete."""
        if self._matcher.is_stopped():
            mask = torch.zeros(self._vocab_size, dtype=torch.bool)
        else:
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            mask = torch.from_numpy(np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool))
        if self._matcher.is_error():  # the grammar has grown beyond llguidance's limits on the way
            LOG.warning("an output ends before it is complete: %s", self._matcher.get_error().splitlines()[0])
            self._has_ended = True
            return self._only_eos()
        mask[sorted(self._eos)] = self._matcher.is_accepting()
        return mask

    def _only_eos(self) -> Tensor:
        mask = torch.zeros(self._vocab_size, dtype=torch.bool)
        mask[sorted(self._eos)] = True
        return mask
