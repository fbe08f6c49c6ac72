"""A request -> vLLM's sampling parameters. Everything about it that can be wrong is found here, before any work.

What vLLM fixes at the start (the method, the number of draft tokens) or cannot do is refused by name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from paceline.config import NONE, as_int, checked_k
from paceline.core.request_fields import check_prompt, refuse_fields, text_list, token_ids
from paceline.core.sequence import Sequence, SequenceParams
from paceline.core.stopping import StopRules
from paceline.core.types import ModelInfo, Request, StructuredOutput
from paceline.engines.vllm.arguments import MAX_LOGPROBS
from paceline.errors import OptionError
from paceline.hub.tokenizer import Tokenizer

SEED_RANGE = 1 << 63
TAKEN = frozenset(
    {
        "stop", "ignore_eos", "min_new_tokens", "method", "num_draft_tokens", "prediction", "logprobs",
        "structured_output", "stop_token_ids", "include_stop", "skip_special_tokens", "priority", "reasoning",
    }
)  # fmt: skip
STRUCTURED = {"json_schema": "json", "regex": "regex", "grammar": "grammar"}


@dataclass(frozen=True, slots=True)
class VllmRequest:
    """A request that is possible.

    seq       follows what vLLM generates, and decides where it ends
    settings  arguments of vLLM's SamplingParams
    """

    seq: Sequence
    settings: dict[str, Any]


class RequestTranslator:
    """Checks and translates the requests of one engine."""

    def __init__(self, info: ModelInfo, tokenizer: Tokenizer, method: str, num_draft_tokens: int) -> None:
        """num_draft_tokens: of every step of every sequence; 0 with method none."""
        self._info, self._tokenizer = info, tokenizer
        self._method, self._num_draft_tokens = method, num_draft_tokens

    def translate(self, request: Request) -> VllmRequest:
        """Raises OptionError, PromptError or ContextLengthExceeded."""
        refuse_fields(request, TAKEN, "the engine vllm")
        self._check_speculation(request)
        stopping = self._stop_rules(request)
        params = SequenceParams(
            request.sampling,
            stopping,
            method=self._method,
            logprobs=self._logprobs(request.logprobs),
            skip_special_tokens=bool(request.skip_special_tokens),
        )
        settings = {
            **self._sampling(request),
            **self._ending(request, stopping),
            **_structured(request.structured_output),
            "logprobs": params.logprobs,
            "detokenize": False,
        }
        return VllmRequest(Sequence(request.prompt, params), settings)

    # --- speculation --------------------------------------------------------------------------------------------------

    def _check_speculation(self, request: Request) -> None:
        if request.method not in (None, self._method):
            raise OptionError(f"method must be {self._method}, as the engine vllm was started; not {request.method!r}")
        if request.prediction:
            raise OptionError("the engine vllm takes no prediction; use engine local, or leave it out")
        if request.num_draft_tokens is None or self._method == NONE:
            return
        if checked_k(request.num_draft_tokens) != self._num_draft_tokens:
            raise OptionError(
                f"num_draft_tokens must be {self._num_draft_tokens}, as the engine vllm was started; "
                f"not {request.num_draft_tokens}"
            )

    # --- sampling -----------------------------------------------------------------------------------------------------

    def _sampling(self, request: Request) -> dict[str, Any]:
        sampling = request.sampling
        if self._method != NONE and (sampling.min_p or sampling.logit_bias):
            name = "min_p" if sampling.min_p else "logit_bias"
            raise OptionError(f"the engine vllm cannot verify draft tokens under {name}; start it with --method none")
        self._check_bias(sampling.logit_bias)
        return {
            "temperature": float(sampling.temperature),
            "top_k": sampling.top_k,
            "top_p": float(sampling.top_p),
            "min_p": float(sampling.min_p),
            "repetition_penalty": float(sampling.repetition_penalty),
            "presence_penalty": float(sampling.presence_penalty),
            "frequency_penalty": float(sampling.frequency_penalty),
            "logit_bias": dict(sampling.logit_bias) or None,
            "seed": None if sampling.seed is None else sampling.seed % SEED_RANGE,
        }

    def _check_bias(self, bias: Any) -> None:
        outside = next((token for token in bias if not 0 <= token < self._info.vocab_size), None)
        if outside is not None:
            raise OptionError(f"logit_bias names token {outside}; the vocabulary has {self._info.vocab_size}")

    def _logprobs(self, value: Any) -> int | None:
        if value is None:
            return None
        number, most = as_int(value), min(MAX_LOGPROBS, self._info.vocab_size)
        if number is None or not 0 <= number <= most:
            raise OptionError(f"logprobs must be 0 to {most}, not {value!r}")
        return number

    # --- the end ------------------------------------------------------------------------------------------------------

    def _ending(self, request: Request, stopping: StopRules) -> dict[str, Any]:
        """vLLM ends a sequence by length and end tokens; stop strings are found in our own text of it."""
        least = as_int(request.min_new_tokens)
        if least is None or least < 0:
            raise OptionError(f"min_new_tokens must be 0 or more, not {request.min_new_tokens!r}")
        if least and request.structured_output is not None:
            raise OptionError("min_new_tokens and structured output exclude each other: a grammar says when it ends")
        return {
            "max_tokens": stopping.max_new_tokens,
            "min_tokens": min(least, stopping.max_new_tokens),
            "ignore_eos": bool(request.ignore_eos),
            "stop_token_ids": sorted(stopping.eos_token_ids | stopping.stop_token_ids),
        }

    def _stop_rules(self, request: Request) -> StopRules:
        room = self._room(request.prompt)
        most = as_int(request.max_new_tokens)
        if most is None or most < 1:
            raise OptionError(f"max_new_tokens must be 1 or more, not {request.max_new_tokens!r}")
        eos: frozenset[int] = frozenset() if request.ignore_eos else self._info.eos_token_ids
        decode = self._tokenizer.decode if request.skip_special_tokens else self._tokenizer.decode_with_special
        return StopRules(
            min(most, room),
            eos,
            text_list("stop", request.stop),
            decode,
            stop_token_ids=token_ids("stop_token_ids", request.stop_token_ids, self._info.vocab_size),
            include_stop=bool(request.include_stop),
        )

    def _room(self, prompt: list[int]) -> int:
        """Tokens that fit after the prompt, or the error that says why none do."""
        check_prompt(prompt, self._info, self._info.max_seq_len)
        return self._info.max_seq_len - len(prompt)



def _structured(output: StructuredOutput | None) -> dict[str, Any]:
    """Arguments of vLLM's StructuredOutputsParams under the key `structured`; nothing where all is allowed."""
    if output is None:
        return {}
    if output.kind == "json_object":
        return {"structured": {"json_object": True}}
    if output.kind == "choice":
        return {"structured": {"choice": _json("list of choices", output.value)}}
    if output.kind not in STRUCTURED:
        kinds = ", ".join((*STRUCTURED, "json_object", "choice"))
        raise OptionError(f"structured output of the engine vllm is one of {kinds}, not {output.kind!r}")
    if output.kind == "json_schema":
        _json("JSON schema", output.value)
    return {"structured": {STRUCTURED[output.kind]: output.value}}


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise OptionError(f"the {name} is not JSON: {error}") from error
