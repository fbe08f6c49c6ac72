"""Fields that an engine does not take are refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.core.request_fields import refuse_fields
from paceline.core.sampling import SamplingParams
from paceline.core.types import ReasoningSpan, Request, StructuredOutput
from paceline.errors import OptionError


def test_a_field_that_an_engine_does_not_take_is_refused_by_name() -> None:
    request = Request([1], SamplingParams(), 4, stop=("a",), bad_words=("b",))
    refuse_fields(request, {"stop", "bad_words"}, "the toy")
    with pytest.raises(OptionError, match="the toy takes no bad_words"):
        refuse_fields(request, {"stop"}, "the toy")


def test_a_field_that_asks_for_nothing_is_no_matter() -> None:
    refuse_fields(Request([1], SamplingParams(), 4, stop=(), prediction=[]), (), "the toy")


def test_reasoning_is_taken_where_it_needs_no_constraint_of_ours() -> None:
    span = ReasoningSpan("<think>", "</think>", (1,), (2,))
    grammar = StructuredOutput("regex", "a")
    refuse_fields(Request([1], SamplingParams(), 4, reasoning=span), {"reasoning"}, "the toy")
    optional = Request([1], SamplingParams(), 4, structured_output=grammar, reasoning=span)
    refuse_fields(optional, {"reasoning", "structured_output"}, "the toy")
    with pytest.raises(OptionError, match="no thinking budget"):
        limited = replace(span, max_tokens=5)
        refuse_fields(Request([1], SamplingParams(), 4, reasoning=limited), {"reasoning"}, "the toy")
    with pytest.raises(OptionError, match="no grammar after reasoning"):
        request = replace(optional, reasoning=replace(span, is_open=True))
        refuse_fields(request, {"reasoning", "structured_output"}, "the toy")
