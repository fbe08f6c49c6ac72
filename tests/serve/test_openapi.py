"""The OpenAPI description: no request that schemathesis generates from it makes the server fail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.serve.running import RunningServer

if TYPE_CHECKING:  # its import takes longer than the quick test of this file
    import schemathesis

EXAMPLES = 20
ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/tokenize",
    "/v1/models",
    "/v1/models/{name}",
    "/health",
    "/health/ready",
    "/health/live",
    "/metrics",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/responses/{response_id}",
    "/v1/responses/{response_id}/cancel",
    "/v1/responses/{response_id}/input_items",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/api/chat",
    "/api/generate",
    "/api/embed",
    "/api/embeddings",
    "/api/show",
    "/api/tags",
    "/api/ps",
    "/api/version",
    "/v1/chat/completions/batch",
    "/v1/chat/completions/input_tokens",
    "/invocations",
    "/completion",
    "/infill",
    "/detokenize",
    "/apply-template",
    "/tokenizer_info",
    "/props",
    "/slots",
    "/version",
    "/ping",
    "/load",
)
SHORT: dict[str, dict[str, Any]] = {  # keeps the test short
    "/v1/chat/completions": {"max_tokens": 2},
    "/v1/completions": {"max_tokens": 2},
    "/v1/messages": {"max_tokens": 2},
    "/v1/responses": {"max_output_tokens": 2, "background": None},
    "/api/chat": {"options": {"num_predict": 2}},
    "/api/generate": {"options": {"num_predict": 2}},
    "/v1/chat/completions/batch": {"max_tokens": 2},
    "/invocations": {"max_tokens": 2},
    "/completion": {"n_predict": 2},
    "/infill": {"n_predict": 2},
}


@pytest.fixture(scope="module")
def operations(tiny_server: RunningServer) -> list[schemathesis.APIOperation]:
    """Everything that the description offers, read once for all routes."""
    import schemathesis

    api = schemathesis.openapi.from_url(f"{tiny_server.url}/openapi.json")
    return [result.ok() for result in api.get_all_operations()]


@pytest.mark.slow
@pytest.mark.parametrize("path", ROUTES)
def test_no_request_makes_the_server_fail(operations: list[schemathesis.APIOperation], path: str) -> None:
    for operation in operations:
        if operation.path == path:
            send_examples(operation)


def send_examples(operation: schemathesis.APIOperation) -> None:
    from schemathesis.checks import not_a_server_error

    @settings(
        max_examples=EXAMPLES if operation.method == "post" else 5,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def send(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict):
            case.body |= SHORT.get(operation.path, {})
            case.body.pop("max_completion_tokens", None)
        case.call_and_validate(checks=[not_a_server_error], timeout=60)

    send()


def test_every_route_is_described(tiny_server: RunningServer) -> None:
    paths = tiny_server.http().get("/openapi.json").json()["paths"]
    assert set(paths) == set(ROUTES)
    for path in ROUTES[:3]:
        responses = paths[path]["post"]["responses"]
        assert "422" not in responses and {"400", "429", "500"} <= set(responses)
