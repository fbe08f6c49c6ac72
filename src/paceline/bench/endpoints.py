"""Two OpenAI-compatible servers that should give the same outputs: one that speculates, one that does not.

Only their responses are used. Greedy outputs are compared as text; where they differ, the reference gives the
log-probabilities at that place. Sampled outputs are drawn from both and tested for coming from one distribution.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
import zlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from paceline.bench.audit import AuditCheck, CheckStatus
from paceline.bench.statistics import GoodnessOfFit, detectable_distance, two_samples
from paceline.errors import EngineClosed, OptionError

NEAR_TIE = 0.25  # difference of log-probabilities; servers round in 16 bits
CONCURRENCY = 8
TIMEOUT = 120.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server and one model on it."""

    url: str
    model: str

    @classmethod
    def connect(cls, url: str, model: str | None = None) -> Endpoint:
        """Ask a server for its model. Raises EngineClosed when it cannot be reached, OptionError if it has none."""
        base = url.rstrip("/")
        base = base if base.endswith("/v1") else f"{base}/v1"
        if model is None:
            models = _fetch(f"{base}/models", None).get("data") or []
            if not models:
                raise OptionError(f"{url} lists no model; name one with --endpoint-model")
            model = str(models[0]["id"])
        return cls(base, model)

    def complete(self, prompt: str, **settings: Any) -> dict[str, Any]:
        """One completion: its choice, with `text`."""
        body = {"model": self.model, "prompt": prompt, **settings}
        return dict(_fetch(f"{self.url}/completions", body)["choices"][0])

    def text(self, prompt: str, **settings: Any) -> str:
        return str(self.complete(prompt, **settings)["text"])


def _fetch(url: str, body: dict[str, Any] | None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            return dict(json.load(response))
    except urllib.error.HTTPError as error:
        raise OptionError(f"{url} answered {error.code}: {error.read(300).decode(errors='replace')}") from error
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise EngineClosed(f"{url} cannot be reached or does not have OpenAI's API: {error}") from error


@dataclass(frozen=True, slots=True)
class EndpointPlan:
    """drawn_tokens: tokens of one sampled output; alpha: the probability of a false alarm in all checks together."""

    prompts: list[str]
    max_tokens: int = 48
    temperatures: tuple[float, ...] = (1.0,)
    draws: int = 200
    drawn_tokens: int = 2
    alpha: float = 0.001


@dataclass(frozen=True, slots=True)
class EndpointPair:
    """A server under test, and the one that is taken to be right."""

    tested: Endpoint
    reference: Endpoint


def compare_endpoints(pair: EndpointPair, plan: EndpointPlan) -> Iterator[AuditCheck]:
    """Greedy equality, then the two-sample tests, yielding each check as it is done."""
    yield _greedy_check(pair, plan)
    cases = [(temperature, prompt) for temperature in plan.temperatures if temperature > 0 for prompt in plan.prompts]
    threshold = plan.alpha / max(len(cases), 1)
    for temperature, prompt in cases:
        yield _sampled_check(pair, plan, temperature, prompt, threshold)


# --- greedy -----------------------------------------------------------------------------------------------------------


def _greedy_check(pair: EndpointPair, plan: EndpointPlan) -> AuditCheck:
    started = time.perf_counter()
    settings = {"max_tokens": plan.max_tokens, "temperature": 0}
    same, near_ties, bugs = 0, 0, []
    for prompt in plan.prompts:
        output, expected = (server.text(prompt, **settings) for server in (pair.tested, pair.reference))
        if output == expected:
            same += 1
        elif _is_near_tie(pair.reference, prompt, output, expected):
            near_ties += 1
        else:
            bugs.append(_difference(output, expected))
    detail = f"{same} of {len(plan.prompts)} outputs equal, {near_ties} differ at a near-tie"
    detail += f"; {bugs[0]}" if bugs else ""
    status = CheckStatus.FAILED if bugs else CheckStatus.PASSED
    return AuditCheck("greedy endpoint = reference", "greedy", status, detail, time.perf_counter() - started)


def _is_near_tie(reference: Endpoint, prompt: str, a: str, b: str) -> bool:
    """Whether the reference's two best tokens are close where the outputs differ. Without logprobs nothing is shown."""
    choice = reference.complete(prompt + _common_prefix(a, b), max_tokens=1, temperature=0, logprobs=2)
    top = ((choice.get("logprobs") or {}).get("top_logprobs") or [{}])[0]
    values = sorted(top.values(), reverse=True)
    return len(values) > 1 and values[0] - values[1] < NEAR_TIE


def _difference(a: str, b: str) -> str:
    common = _common_prefix(a, b)
    return f"after {common[-30:]!r}: {a[len(common) :][:20]!r}, not {b[len(common) :][:20]!r}"


def _common_prefix(a: str, b: str) -> str:
    count = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    return a[:count]


# --- sampled ----------------------------------------------------------------------------------------------------------


def _sampled_check(
    pair: EndpointPair, plan: EndpointPlan, temperature: float, prompt: str, threshold: float
) -> AuditCheck:
    started = time.perf_counter()
    counts, expected = (_draw(server, plan, temperature, prompt) for server in (pair.tested, pair.reference))
    fit = two_samples(counts, expected)
    # Two samples of n each show as much as one of n/2 against the exact distribution.
    distance = detectable_distance(fit.draws // 2, fit.degrees_of_freedom, threshold)
    status = CheckStatus.FAILED if fit.p_value < threshold else CheckStatus.PASSED
    detail = _explained(fit, counts, expected, distance)
    name = f"sampled endpoint = reference T={temperature:g} {prompt[:24]!r}"
    return AuditCheck(name, "sampled", status, detail, time.perf_counter() - started, fit.p_value, fit.draws, distance)


def _explained(fit: GoodnessOfFit, counts: Counter[str], expected: Counter[str], distance: float) -> str:
    n, m = sum(counts.values()), sum(expected.values())
    worst = max(counts | expected, key=lambda text: abs(counts[text] / n - expected[text] / m))
    return (
        f"p = {fit.p_value:.2g} over {n} and {m} draws; furthest apart is {worst!r}: {counts[worst] / n:.1%} and "
        f"{expected[worst] / m:.1%}; a distance of {distance:.2f} would be found with 95% certainty"
    )


def _draw(server: Endpoint, plan: EndpointPlan, temperature: float, prompt: str) -> Counter[str]:
    def draw(seed: int) -> str:
        return server.text(prompt, max_tokens=plan.drawn_tokens, temperature=temperature, seed=seed)

    # Other seeds for each server: with the same ones, two servers could agree or differ for the wrong reason.
    first = zlib.crc32(f"{server.url} {prompt}".encode())
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        return Counter(pool.map(draw, range(first, first + plan.draws)))
