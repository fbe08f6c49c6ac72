"""Our OpenAPI description: whatever schemathesis makes of it, the server never fails."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error

from tests.serve.running import Running

EXAMPLES = 30
ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/tokenize",
    "/v1/models",
    "/v1/models/{name}",
    "/health",
    "/metrics",
)


@pytest.mark.parametrize("path", ROUTES)
def test_no_request_makes_the_server_fail(tiny: Running, path: str) -> None:
    api = schemathesis.openapi.from_url(f"{tiny.url}/openapi.json")
    operations = [found.ok() for found in api.get_all_operations()]
    operation = next(found for found in operations if found.path == path)

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def attack(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict):
            case.body["max_tokens"] = 2  # what is written does not matter here, only that it is short
            case.body.pop("max_completion_tokens", None)
        case.call_and_validate(checks=[not_a_server_error], timeout=60)

    attack()


def test_every_route_is_described(tiny: Running) -> None:
    described = tiny.http().get("/openapi.json").json()["paths"]
    assert set(described) == set(ROUTES)
    for path in ROUTES[:3]:
        responses = described[path]["post"]["responses"]
        assert "422" not in responses and {"400", "429", "500"} <= set(responses)
