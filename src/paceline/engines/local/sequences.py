"""Requests -> sequences: everything about a request that can be wrong is found here, before any work is done."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from paceline.config import NONE, EngineConfig, as_int, checked_k
from paceline.core.constraints import AllConstraints, AllowedTokens, BannedWords
from paceline.core.request_fields import check_prompt, text_list, token_ids
from paceline.core.sequence import Constraint, MinNewTokens, Sequence, SequenceParams
from paceline.core.stopping import StopRules
from paceline.core.types import ModelInfo, Request
from paceline.core.verify import RULES, AcceptanceRule
from paceline.engines.local.reasoning import ReasoningConstraint
from paceline.engines.local.structured_output import GrammarCompiler
from paceline.errors import ContextLengthExceeded, OptionError
from paceline.hub.tokenizer import Tokenizer

PREDICTION = "prediction"


class SequenceBuilder:
    """Makes the sequences of one engine."""

    def __init__(
        self, info: ModelInfo, tokenizer: Tokenizer, config: EngineConfig, methods: tuple[str, ...], capacity: int
    ) -> None:
        """capacity: tokens that fit the KV cache if one sequence has all of it."""
        self._info, self._tokenizer, self._config, self._methods = info, tokenizer, config, methods
        self._max_seq_len = min(info.max_seq_len, config.model.max_model_len or info.max_seq_len)
        self._capacity = capacity
        self._grammars: GrammarCompiler | None = None
        self._opening = threading.Lock()  # of the grammar compiler, which takes about a second

    def build(self, request: Request) -> Sequence:
        """Raises OptionError, PromptError or ContextLengthExceeded."""
        method = self._method(request)
        self._token_ids("logit_bias", list(request.sampling.logit_bias))
        params = SequenceParams(
            request.sampling,
            self._stop_rules(request),
            rule=self._rule(request),
            constraint=self._constraint(request),
            method=method,
            num_draft_tokens=0 if method == NONE else self._num_draft_tokens(request),
            prediction=request.prediction,
            logprobs=self._logprobs("logprobs", request.logprobs),
            logprob_token_ids=self._logprob_token_ids(request),
            prompt_logprobs=self._logprobs("prompt_logprobs", request.prompt_logprobs),
            skip_special_tokens=bool(request.skip_special_tokens),
            lora=self._lora(request.lora),
        )
        return Sequence(request.prompt, params)

    def compilation(self, request: Request) -> Callable[[], None] | None:
        """Compiles the structured output of a request; None: there is none, or it has been compiled."""
        output = request.structured_output
        if output is None or (self._grammars is not None and self._grammars.has(output)):
            return None

        def compiled() -> None:
            self._compiler().compile(output)

        return compiled

    def _rule(self, request: Request) -> AcceptanceRule:
        """The acceptance rule of a sequence, however the request arrived.

        A seeded sequence is verified by the coupled rule, whatever the method: its output is then a function of the
        seed and not of the drafts. A rule that the user names is obeyed.
        """
        named = self._config.speculative.acceptance
        return RULES[named or ("token" if request.sampling.seed is None else "coupled")]

    def _method(self, request: Request) -> str:
        if request.method is None:
            return PREDICTION if request.prediction and PREDICTION in self._methods else self._methods[0]
        if request.method not in self._methods:
            raise OptionError(f"method must be one of {', '.join(self._methods)}; not {request.method!r}")
        return request.method

    def _lora(self, name: str | None) -> str | None:
        known = self._config.model.lora
        if name is not None and name not in known:
            hint = f"there is {', '.join(known)}" if known else "none was loaded (lora={name: directory})"
            raise OptionError(f"there is no LoRA adapter {name!r}; {hint}")
        return name

    def _num_draft_tokens(self, request: Request) -> int | None:
        return None if request.num_draft_tokens is None else checked_k(request.num_draft_tokens)

    def _logprobs(self, name: str, value: Any) -> int | None:
        if value is None:
            return None
        number, most = as_int(value), self._info.vocab_size
        if number is None or not 0 <= number <= most:
            raise OptionError(f"{name} must be 0 to {most}, not {value!r}")
        return number

    def _logprob_token_ids(self, request: Request) -> tuple[int, ...]:
        return tuple(sorted(token_ids("logprob_token_ids", request.logprob_token_ids, self._info.vocab_size)))

    # --- which tokens may follow --------------------------------------------------------------------------------------

    def _constraint(self, request: Request) -> Constraint | None:
        """All that the request says about it, the strongest rule first: a grammar also says where the output ends."""
        rules = [
            self._after_reasoning(request, self._grammar(request)),
            self._allowed_tokens(request),
            self._banned_words(request),
            self._min_new_tokens(request),
        ]
        parts = [rule for rule in rules if rule is not None]
        return AllConstraints(parts) if len(parts) > 1 else parts[0] if parts else None

    def _grammar(self, request: Request) -> Constraint | None:
        if request.structured_output is None:
            return None
        return self._compiler().compile(request.structured_output)

    def _compiler(self) -> GrammarCompiler:
        with self._opening:
            if self._grammars is None:
                self._grammars = GrammarCompiler(self._tokenizer.hf_tokenizer, self._info)
            return self._grammars

    def _after_reasoning(self, request: Request, answer: Constraint | None) -> Constraint | None:
        """What holds for the answer begins after the reasoning, and the reasoning may have a longest length."""
        span = request.reasoning
        if span is None or (answer is None and span.max_tokens is None):
            return answer
        return ReasoningConstraint(span, answer, self._info, self._tokenizer.decode_with_special)

    def _allowed_tokens(self, request: Request) -> Constraint | None:
        if request.allowed_token_ids is None:
            return None
        if not request.allowed_token_ids:
            raise OptionError("allowed_token_ids is empty: no token could be generated")
        tokens = self._token_ids("allowed_token_ids", request.allowed_token_ids)
        return AllowedTokens(tuple(tokens), self._info.vocab_size)

    def _banned_words(self, request: Request) -> Constraint | None:
        words = text_list("bad_words", request.bad_words)
        spellings = {spelling for word in words for spelling in word_token_ids(self._tokenizer.hf_tokenizer, word)}
        return BannedWords(sorted(spellings), self._info.vocab_size) if spellings else None

    def _min_new_tokens(self, request: Request) -> Constraint | None:
        number = as_int(request.min_new_tokens)
        if number is None or number < 0:
            raise OptionError(f"min_new_tokens must be 0 or more, not {request.min_new_tokens!r}")
        ends = self._info.eos_token_ids | self._token_ids("stop_token_ids", request.stop_token_ids)
        return MinNewTokens(number, ends, self._info.vocab_size) if number else None

    def _token_ids(self, name: str, value: Any) -> frozenset[int]:
        return token_ids(name, value, self._info.vocab_size)

    # --- where it ends ------------------------------------------------------------------------------------------------

    def _stop_rules(self, request: Request) -> StopRules:
        room = self._room(request.prompt)
        most = as_int(request.max_new_tokens)
        if most is None or most < 1:
            raise OptionError(f"max_new_tokens must be 1 or more, not {request.max_new_tokens!r}")
        eos: frozenset[int] = frozenset() if request.ignore_eos else self._info.eos_token_ids
        decode = self._tokenizer.decode if request.skip_special_tokens else self._tokenizer.decode_with_special
        ends = self._token_ids("stop_token_ids", request.stop_token_ids)
        strings = text_list("stop", request.stop)
        include_stop = bool(request.include_stop)
        return StopRules(min(most, room), eos, strings, decode, stop_token_ids=ends, include_stop=include_stop)

    def _room(self, prompt: list[int]) -> int:
        """Tokens that fit after the prompt, or the error that says why none do."""
        check_prompt(prompt, self._info, self._max_seq_len)
        length = len(prompt)
        if length >= self._capacity:
            raise ContextLengthExceeded(
                f"the prompt has {length} tokens; the KV cache holds {self._capacity} (--kv-cache-tokens)"
            )
        return min(self._max_seq_len, self._capacity) - length


def word_token_ids(hf_tokenizer: Any, word: str) -> set[tuple[int, ...]]:
    """The token ids of a word at the start of a text and after a space."""
    strings = (word, " " + word.lstrip())
    return {tuple(hf_tokenizer(string, add_special_tokens=False).input_ids) for string in strings} - {()}
