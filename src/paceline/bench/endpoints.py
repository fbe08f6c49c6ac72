"""Two OpenAI-compatible servers that should say the same: one that speculates, one that does not.

NoDraft is known of the models but what the servers say. Greedy texts are compared as they are; where they part, the
reference is asked for the log-probabilities at that place. Sampled texts are drawn from both and tested for coming
from one distribution.
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

from paceline.bench.audit import Check, Outcome
from paceline.bench.statistics import Fit, two_samples, visible_distance
from paceline.errors import EngineClosed, OptionError

NEAR_TIE = 0.25  # difference of log-probabilities; servers round in 16 bits
AT_ONCE = 8
TIMEOUT = 120.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server and one model on it."""

    url: str
    model: str

    @classmethod
    def reach(cls, url: str, model: str | None = None) -> Endpoint:
        """Find out which model a server has. Raises OptionError when it cannot be reached."""
        base = url.rstrip("/")
        base = base if base.endswith("/v1") else f"{base}/v1"
        if model is None:
            listed = _ask(f"{base}/models", None).get("data") or []
            if not listed:
                raise OptionError(f"{url} lists no model; name one with --endpoint-model")
            model = str(listed[0]["id"])
        return cls(base, model)

    def complete(self, prompt: str, **settings: Any) -> dict[str, Any]:
        """One completion: its choice, with `text`."""
        body = {"model": self.model, "prompt": prompt, **settings}
        return dict(_ask(f"{self.url}/completions", body)["choices"][0])

    def text(self, prompt: str, **settings: Any) -> str:
        return str(self.complete(prompt, **settings)["text"])


def _ask(url: str, body: dict[str, Any] | None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as error:
        raise OptionError(f"{url} answered {error.code}: {error.read(300).decode(errors='replace')}") from error
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise EngineClosed(f"{url} cannot be reached or does not speak OpenAI's API: {error}") from error


@dataclass(frozen=True, slots=True)
class EndpointPlan:
    prompts: list[str]
    max_tokens: int = 48
    temperatures: tuple[float, ...] = (1.0,)
    draws: int = 200
    drawn_tokens: int = 2
    alpha: float = 0.001


def compare_endpoints(one: Endpoint, reference: Endpoint, plan: EndpointPlan) -> Iterator[Check]:
    """Greedy equality, then the two-sample tests, yielding each check as it is done."""
    yield _greedy(one, reference, plan)
    jobs = [(temperature, prompt) for temperature in plan.temperatures if temperature > 0 for prompt in plan.prompts]
    threshold = plan.alpha / max(len(jobs), 1)
    for temperature, prompt in jobs:
        yield _sampled(one, reference, plan, temperature, prompt, threshold)


def _greedy(one: Endpoint, reference: Endpoint, plan: EndpointPlan) -> Check:
    started = time.perf_counter()
    settings = {"max_tokens": plan.max_tokens, "temperature": 0}
    same, ties, bugs = 0, 0, []
    for prompt in plan.prompts:
        a, b = one.text(prompt, **settings), reference.text(prompt, **settings)
        if a == b:
            same += 1
        elif _near_tie(reference, prompt, a, b):
            ties += 1
        else:
            bugs.append(_parting(a, b))
    detail = f"{same} of {len(plan.prompts)} texts equal, {ties} part at a near-tie"
    detail += f"; {bugs[0]}" if bugs else ""
    outcome = Outcome.FAILED if bugs else Outcome.PASSED
    return Check("greedy endpoint = reference", "greedy", outcome, detail, time.perf_counter() - started)


def _near_tie(reference: Endpoint, prompt: str, a: str, b: str) -> bool:
    """Ask the reference for its two best tokens where the texts part; a server without logprobs explains nothing."""
    choice = reference.complete(prompt + _common(a, b), max_tokens=1, temperature=0, logprobs=2)
    top = ((choice.get("logprobs") or {}).get("top_logprobs") or [{}])[0]
    values = sorted(top.values(), reverse=True)
    return len(values) > 1 and values[0] - values[1] < NEAR_TIE


def _parting(a: str, b: str) -> str:
    common = _common(a, b)
    return f"after {common[-30:]!r}: {a[len(common) :][:20]!r}, not {b[len(common) :][:20]!r}"


def _common(a: str, b: str) -> str:
    count = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    return a[:count]


def _sampled(
    one: Endpoint, reference: Endpoint, plan: EndpointPlan, temperature: float, prompt: str, threshold: float
) -> Check:
    started = time.perf_counter()
    ours, theirs = (_drawn(server, plan, temperature, prompt) for server in (one, reference))
    fit = two_samples(ours, theirs)
    # Two samples of n each see as much as one of n/2 against the exact distribution.
    visible = visible_distance(fit.draws // 2, fit.freedom, threshold)
    outcome = Outcome.FAILED if fit.p_value < threshold else Outcome.PASSED
    detail = _explained(fit, ours, theirs, visible)
    name = f"sampled endpoint = reference T={temperature:g} {prompt[:24]!r}"
    return Check(name, "sampled", outcome, detail, time.perf_counter() - started, fit.p_value, fit.draws, visible)


def _explained(fit: Fit, ours: Counter[str], theirs: Counter[str], visible: float) -> str:
    n, m = sum(ours.values()), sum(theirs.values())
    worst = max(ours | theirs, key=lambda text: abs(ours[text] / n - theirs[text] / m))
    return (
        f"p = {fit.p_value:.2g} over {n} and {m} draws; furthest apart is {worst!r}: {ours[worst] / n:.1%} and "
        f"{theirs[worst] / m:.1%}; a distance of {visible:.2f} would be found with 95% certainty"
    )


def _drawn(server: Endpoint, plan: EndpointPlan, temperature: float, prompt: str) -> Counter[str]:
    def draw(seed: int) -> str:
        return server.text(prompt, max_tokens=plan.drawn_tokens, temperature=temperature, seed=seed)

    # Other seeds for each server: with the same ones, two servers might agree or differ for the wrong reason.
    first = zlib.crc32(f"{server.url} {prompt}".encode())
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return Counter(pool.map(draw, range(first, first + plan.draws)))
