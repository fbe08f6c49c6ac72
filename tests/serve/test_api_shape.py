"""How events of streams are framed."""

from __future__ import annotations

import json

import pytest

from paceline.serve.api_shape import ApiShape, JsonLinesShape, NamedEvents


@pytest.mark.parametrize("shape", [ApiShape(), NamedEvents(), JsonLinesShape()])
def test_an_event_is_one_line_for_every_reader(shape: ApiShape) -> None:
    event = {"type": "delta", "text": "a\u2028b\u2029c\x85d\ne é"}
    lines = [line for line in shape.frame(event).splitlines() if line]
    assert len(lines) == (2 if isinstance(shape, NamedEvents) else 1)
    assert json.loads(lines[-1].removeprefix("data: ")) == event and "é" in lines[-1]
