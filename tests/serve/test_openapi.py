"""The OpenAPI description: no request that schemathesis generates from it makes the server fail."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error

from tests.serve.running import RunningServer

EXAMPLES = 30
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
)


@pytest.mark.slow
@pytest.mark.parametrize("path", ROUTES)
def test_no_request_makes_the_server_fail(tiny_server: RunningServer, path: str) -> None:
    api = schemathesis.openapi.from_url(f"{tiny_server.url}/openapi.json")
    operations = [result.ok() for result in api.get_all_operations()]
    operation = next(operation for operation in operations if operation.path == path)

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def send(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict):
            case.body["max_tokens"] = 2  # keeps the test short
            case.body.pop("max_completion_tokens", None)
        case.call_and_validate(checks=[not_a_server_error], timeout=60)

    send()


def test_every_route_is_described(tiny_server: RunningServer) -> None:
    paths = tiny_server.http().get("/openapi.json").json()["paths"]
    assert set(paths) == set(ROUTES)
    for path in ROUTES[:3]:
        responses = paths[path]["post"]["responses"]
        assert "422" not in responses and {"400", "429", "500"} <= set(responses)
