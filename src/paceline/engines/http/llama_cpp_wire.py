"""llama.cpp's own completion route: prompts and outputs as token ids, draft counts with every token.

What differs from the engine local, and is refused or said: penalties count the prompt too, so only the repetition
penalty is taken; log-probabilities come without speculation only, and before biases, penalties and grammars; with
ignore_eos an end token is never generated. Tokens that end inside a character are not reported: those before the
character is complete are found again with the tokenizer, those after the last complete character are not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from paceline.config import NONE
from paceline.core.request_fields import text_list
from paceline.core.sampling import SamplingParams
from paceline.core.stats import SpecStats
from paceline.core.types import Request, RequestOutput, StructuredOutput, TokenLogprob
from paceline.engines.http.acceptance import DraftCounts
from paceline.engines.http.client import Json
from paceline.engines.http.request_checks import TAKEN
from paceline.engines.http.wire import Call, StepCounter
from paceline.engines.local.structural_tags import SPACING, structural_tag_grammar
from paceline.errors import OptionError
from paceline.hub.tokenizer import StreamDetokenizer, Tokenizer

PATH = "/completion"
TAKEN_BY_LLAMA_CPP = TAKEN | {"skip_special_tokens"}  # the characters are made here
RANDOM_SEED = (1 << 32) - 1
FINISH_REASONS = {"eos": "stop", "word": "stop", "limit": "length"}
BARE_SLASH, ESCAPED_SLASH = re.compile(r"(?<!\\)/"), r"\\/"  # a slash ends an expression in Lark


@dataclass(frozen=True, slots=True)
class LlamaCppWire:
    """Requests to llama.cpp.

    tokenizer     makes the characters; None: the server's own are taken
    cache_prompt  whether prompts may go on from what the server has kept of earlier ones
    eos_token_ids  that end a sequence: they are no part of its text
    """

    max_seq_len: int
    method: str = NONE
    num_draft_tokens: int | str = 0
    tokenizer: Tokenizer | None = None
    cache_prompt: bool = True
    eos_token_ids: frozenset[int] = frozenset()

    def check(self, request: Request) -> None:
        sampling = request.sampling
        if sampling.presence_penalty or sampling.frequency_penalty:
            raise OptionError(
                "llama.cpp counts the prompt in presence_penalty and frequency_penalty; use repetition_penalty, "
                "or the engine local"
            )
        if request.min_new_tokens:
            raise OptionError("llama.cpp has no min_new_tokens; use ignore_eos, or the engine local")
        if request.logprobs is not None and self.method != NONE:
            raise OptionError(
                f"llama.cpp reports no log-probabilities of accepted draft tokens; open it with method none, "
                f"not {self.method}"
            )
        number = request.num_draft_tokens
        if number is not None and self.method != NONE and number != self.num_draft_tokens:
            raise OptionError(
                f"llama.cpp takes num_draft_tokens when it starts ({self.num_draft_tokens}), not with a request"
            )

    def call(self, request: Request) -> Call:
        sampling = request.sampling
        body: Json = {
            "prompt": request.prompt,
            "n_predict": min(request.max_new_tokens, self.max_seq_len - len(request.prompt)),
            "stream": True,
            "return_tokens": True,
            "timings_per_token": True,
            "cache_prompt": self.cache_prompt,
            "n_probs": 0 if request.logprobs is None else max(1, request.logprobs),
            "stop": list(text_list("stop", request.stop)),
            "ignore_eos": request.ignore_eos,
            "logit_bias": [[token, bias] for token, bias in sampling.logit_bias.items()],
            **self._sampling(sampling),
        }
        if request.structured_output is not None:
            body["grammar"] = lark_grammar(request.structured_output)
        return Call(PATH, body)

    def reader(self, request: Request) -> LlamaCppReader:
        stops, skips = text_list("stop", request.stop), request.skip_special_tokens
        detokenizer = None if self.tokenizer is None else self.tokenizer.stream(stops, skip_special_tokens=skips)
        ends = frozenset() if request.ignore_eos else self.eos_token_ids
        return LlamaCppReader(request.logprobs, self.tokenizer, detokenizer, ends)

    def _sampling(self, sampling: SamplingParams) -> Json:
        """In paceline's order: penalties, temperature, then the cuts of the tempered distribution."""
        names = ["penalties"] if sampling.penalised else []
        names += ["top_k"] if sampling.greedy else ["temperature", "top_k", "top_p", "min_p"]
        return {
            "samplers": names,
            "temperature": sampling.temperature,
            "top_k": 1 if sampling.greedy else sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repeat_penalty": sampling.repetition_penalty,
            "repeat_last_n": self.max_seq_len,
            "seed": RANDOM_SEED if sampling.seed is None else sampling.seed % RANDOM_SEED,
        }


def lark_grammar(output: StructuredOutput) -> str:
    """A constraint in the language of llguidance, which llama.cpp is built with."""
    return f"%llguidance {{}}\n{LARK_RULES[output.kind](output.value)}"


def _json_rules(value: str) -> str:
    schema: Any = json.loads(value) if value else {"type": "object"}
    guided = {**schema, "x-guidance": SPACING} if isinstance(schema, dict) else schema
    return f"start: %json {json.dumps(guided)}"


def _choice_rules(value: str) -> str:
    return "start: " + " | ".join(json.dumps(choice) for choice in json.loads(value))


def _grammar_rules(value: str) -> str:
    from llguidance import gbnf_to_lark

    return str(gbnf_to_lark.any_to_lark(value))


LARK_RULES: dict[str, Callable[[str], str]] = {
    "json_schema": _json_rules,
    "json_object": _json_rules,
    "regex": lambda value: f"start: /{BARE_SLASH.sub(ESCAPED_SLASH, value)}/",
    "choice": _choice_rules,
    "grammar": _grammar_rules,
    "structural_tag": structural_tag_grammar,
}


@dataclass(slots=True)
class LlamaCppReader:
    """One answer of llama.cpp."""

    logprobs: int | None
    tokenizer: Tokenizer | None
    detokenizer: StreamDetokenizer | None
    eos_token_ids: frozenset[int]
    steps: StepCounter = field(default_factory=StepCounter)
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    counts: DraftCounts | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int | None = None
    _reported: int = 0  # tokens that the server has counted

    @property
    def knows_drafts(self) -> bool:
        return True

    @property
    def stats(self) -> SpecStats:
        return self.steps.stats

    @property
    def draft_lengths(self) -> dict[int, int]:
        return self.steps.draft_lengths

    def feed(self, event: Json) -> list[RequestOutput]:
        timings = event.get("timings") or {}
        self.steps.totals(int(timings.get("draft_n", 0)), int(timings.get("draft_n_accepted", 0)))
        self.prompt_tokens = event.get("tokens_evaluated", self.prompt_tokens)
        if event.get("stop"):
            self.finish_reason = FINISH_REASONS.get(str(event.get("stop_type")), "stop")
            self.stop_reason, self.num_cached_tokens = event.get("stopping_word") or None, timings.get("cache_n")
            return []
        tokens = self._tokens(event)
        logprobs = self._logprobs(event, len(tokens))
        return [self._output(token, event, logprobs) for token in tokens]

    def end(self) -> str:
        self.steps.close_step()
        return "" if self.detokenizer is None else self.detokenizer.flush()

    def _tokens(self, event: Json) -> list[int]:
        """The tokens of an event, with those of the same character that were not reported before."""
        tokens = [int(token) for token in event.get("tokens", ())]
        reported = int(event.get("tokens_predicted", self._reported + len(tokens)))
        number, self._reported = reported - self._reported, reported
        if number > len(tokens) and self.tokenizer is not None:
            encoded = self.tokenizer.hf_tokenizer(event.get("content", ""), add_special_tokens=False).input_ids
            if len(encoded) == number and encoded[-len(tokens) :] == tokens:
                return [int(token) for token in encoded]
        return tokens

    def _output(self, token: int, event: Json, logprobs: dict[int, TokenLogprob]) -> RequestOutput:
        from_draft = self.steps.token()
        characters = [] if token in self.eos_token_ids else [token]
        text = event.get("content", "") if self.detokenizer is None else self.detokenizer.feed(characters)
        entries = None if self.logprobs is None else tuple(filter(None, [logprobs.get(token)]))
        return RequestOutput(text, (token,), from_draft, entries, num_drafted=self.steps.num_drafted)

    def _logprobs(self, event: Json, number: int) -> dict[int, TokenLogprob]:
        if self.logprobs is None:
            return {}
        entries = event.get("completion_probabilities") or []
        return {int(entry["id"]): self._entry(entry) for entry in entries[:number]}

    def _entry(self, entry: Json) -> TokenLogprob:
        top = [(int(item["id"]), float(item["logprob"])) for item in entry.get("top_logprobs", ())]
        return TokenLogprob(int(entry["id"]), float(entry["logprob"]), tuple(top[: self.logprobs]))
