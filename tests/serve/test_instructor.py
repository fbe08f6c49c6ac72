"""The `instructor` package against the server: answers that are objects of a class."""

from __future__ import annotations

from typing import Any, Literal

import pydantic
import pytest

from tests.serve.running import NAME, RunningServer

instructor = pytest.importorskip("instructor", reason="pip install instructor")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class City(pydantic.BaseModel):
    """What is asked for."""

    name: str = pydantic.Field(max_length=10)
    size: Literal["small", "large"]
    people: int = pydantic.Field(ge=0, le=999)


@pytest.mark.parametrize("method", ["none", "ngram"])
def test_an_answer_is_an_object(default_server: RunningServer, method: str) -> None:
    client = instructor.from_openai(default_server.client(), mode=instructor.Mode.JSON_SCHEMA)
    messages: list[Any] = [{"role": "user", "content": "Paris is a large city. Describe it."}]
    city = client.chat.completions.create(
        model=NAME,
        messages=messages,
        response_model=City,
        temperature=0,
        max_tokens=60,
        max_retries=1,
        extra_body={"speculative": {"method": method}, "structured_outputs": None},
    )
    assert isinstance(city, City) and city.size in ("small", "large")
