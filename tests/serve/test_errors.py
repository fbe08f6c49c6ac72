"""Errors as responses: what is wrong with a body is said by the path in the body."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.testclient import TestClient

from paceline.serve.api_chat import checked
from paceline.serve.errors import install_handlers, invalid_field
from paceline.serve.schema import ChatRequest, CompletionRequest, LenientModel

IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}
ONE_OF = [  # of fields that may be of several kinds
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0.type", "should be 'text'"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "a valid string or a valid list"),
    ({"stop": ["a", 5]}, "stop.1", "should be a valid string"),
    ({"stop": "x" * 300}, "stop", "stop: String should have at most 256 characters"),
    ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.function", "Field required"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools", "Field required"),
    ({"speculative": {"num_draft_tokens": 500}}, "speculative.num_draft_tokens", "less than or equal to 128 or 'auto'"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json", "a valid dictionary or a valid string"),
]


def refusal(schema: type[LenientModel], body: dict[str, Any]) -> dict[str, Any]:
    with pytest.raises(RequestValidationError) as caught:
        checked(schema, body)
    error: dict[str, Any] = invalid_field(caught.value.errors(), caught.value.body).body["error"]
    return error


@pytest.mark.parametrize(("fields", "param", "text"), ONE_OF, ids=[case[1] for case in ONE_OF])
def test_a_wrong_field_is_named_by_its_path_in_the_body(fields: dict[str, Any], param: str, text: str) -> None:
    """The names that the schema has for kinds of values are no part of it."""
    error = refusal(ChatRequest, {"messages": [{"role": "user", "content": "a"}], **fields})
    assert error["param"] == param and error["message"].startswith(f"{param}: ") and text in error["message"]


def test_a_list_of_prompts_names_the_one_that_is_wrong() -> None:
    assert refusal(CompletionRequest, {"prompt": [[1], ["a"]]})["param"] == "prompt.1.0"
    assert refusal(CompletionRequest, {"prompt": [1, "a"]})["param"] == "prompt.1"
    assert "at least 1 item" in refusal(CompletionRequest, {"prompt": []})["message"]


def test_a_body_that_was_sent_is_read_the_same_way() -> None:
    app = FastAPI()
    install_handlers(app)

    @app.post("/v1/chat/completions")
    async def route(body: ChatRequest) -> None: ...

    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}]}
    response = TestClient(app).post("/v1/chat/completions", json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == "messages.0.content.1.type"
