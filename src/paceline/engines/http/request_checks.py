"""What can be wrong with a request, found before it is sent: errors are the same as those of the engine local."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.config import as_int, checked_k
from paceline.core.request_fields import check_prompt, refuse_fields, text_list
from paceline.core.types import ModelInfo, Request, StructuredOutput
from paceline.errors import OptionError

MAX_LOGPROBS = 1024
TAKEN = frozenset(  # fields of a request that every server understands, or that change nothing where it does not
    {
        "stop", "ignore_eos", "min_new_tokens", "method", "num_draft_tokens", "prediction", "logprobs",
        "structured_output", "priority", "reasoning",
    }
)  # fmt: skip
STRUCTURED_OUTPUTS = ("json_schema", "json_object", "regex")


def check_structured_output(output: StructuredOutput) -> None:
    """Raise OptionError for a kind that does not exist, and for a schema that is no JSON."""
    if output.kind not in STRUCTURED_OUTPUTS:
        raise OptionError(f"structured output is {', '.join(STRUCTURED_OUTPUTS)}; not {output.kind!r}")
    if output.kind == "json_schema" and output.value:
        try:
            json.loads(output.value)
        except (ValueError, RecursionError) as error:
            raise OptionError(f"the json_schema cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class RequestChecks:
    """Checks against one model.

    takes          fields of a request that the engine knows; any other that asks for something is refused
    max_logprobs   alternatives that the engine reports for a token
    check_grammar  raises OptionError for a schema or grammar that the engine cannot keep to
    """

    info: ModelInfo
    methods: tuple[str, ...]
    max_logprobs: int = MAX_LOGPROBS
    takes: frozenset[str] = TAKEN
    check_grammar: Callable[[StructuredOutput], None] = check_structured_output

    def check(self, request: Request) -> None:
        """Raises OptionError, PromptError or ContextLengthExceeded."""
        refuse_fields(request, self.takes, "this engine")
        check_prompt(request.prompt, self.info, self.info.max_seq_len)
        self._check_numbers(request)
        if request.method is not None and request.method not in self.methods:
            raise OptionError(f"method must be one of {', '.join(self.methods)}; not {request.method!r}")
        outside = [token for token in request.sampling.logit_bias if not 0 <= token < self.info.vocab_size]
        if outside:
            raise OptionError(f"logit_bias names token {outside[0]}; the vocabulary has {self.info.vocab_size}")
        text_list("stop", request.stop)
        if request.structured_output is not None:
            self.check_grammar(request.structured_output)

    def _check_numbers(self, request: Request) -> None:
        for name, value, least in (
            ("max_new_tokens", request.max_new_tokens, 1), ("min_new_tokens", request.min_new_tokens, 0)
        ):  # fmt: skip
            number = as_int(value)
            if number is None or number < least:
                raise OptionError(f"{name} must be {least} or more, not {value!r}")
        if request.num_draft_tokens is not None:
            checked_k(request.num_draft_tokens)
        logprobs, most = request.logprobs, min(self.max_logprobs, self.info.vocab_size)
        if logprobs is not None and not 0 <= _number(logprobs) <= most:
            raise OptionError(f"logprobs must be 0 to {most}, not {logprobs!r}")


def _number(value: Any) -> int:
    number = as_int(value)
    return -1 if number is None else number
