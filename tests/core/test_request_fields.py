"""Fields that an engine does not take are refused by name."""

from __future__ import annotations

import pytest

from paceline.core.request_fields import refuse_fields
from paceline.core.sampling import SamplingParams
from paceline.core.types import Request
from paceline.errors import OptionError


def test_a_field_that_an_engine_does_not_take_is_refused_by_name() -> None:
    request = Request([1], SamplingParams(), 4, stop=("a",), bad_words=("b",))
    refuse_fields(request, {"stop", "bad_words"}, "the toy")
    with pytest.raises(OptionError, match="the toy takes no bad_words"):
        refuse_fields(request, {"stop"}, "the toy")


def test_a_field_that_asks_for_nothing_is_no_matter() -> None:
    refuse_fields(Request([1], SamplingParams(), 4, stop=(), prediction=[]), (), "the toy")
