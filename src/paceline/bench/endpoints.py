"""Two OpenAI-compatible servers that should give the same outputs: one that speculates, one that does not.

Only their responses are used. Greedy outputs are compared as text; where they differ, the reference gives the
log-probabilities at that place. Sampled outputs are drawn from both and tested for coming from one distribution: some
with a seed and some without, since a server may verify draft tokens by another rule where a seed is given.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from paceline.bench.audit import AuditCheck
from paceline.bench.outcome import Evidence, Outcome
from paceline.bench.sample_comparison import PairedSamples, conclude
from paceline.errors import EngineClosed, OptionError

NEAR_TIE = 0.25  # difference of log-probabilities; servers round in 16 bits
CONCURRENCY = 8
TIMEOUT = 120.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server and one model on it."""

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)

    @classmethod
    def connect(cls, url: str, model: str | None = None, api_key: str | None = None) -> Endpoint:
        """Ask a server for its model. Raises EngineClosed when it cannot be reached, OptionError if it has none."""
        base = _base_url(url)
        if model is None:
            models = _fetch(f"{base}/models", None, api_key).get("data")
            if not isinstance(models, list) or not models or "id" not in models[0]:
                raise OptionError(f"{url} lists no model; name one with --endpoint-model")
            model = str(models[0]["id"])
        return cls(base, model, api_key)

    def complete(self, prompt: str, **settings: Any) -> dict[str, Any]:
        """One completion: its choice, with `text`."""
        body = {"model": self.model, "prompt": prompt, **settings}
        choices = _fetch(f"{self.url}/completions", body, self.api_key).get("choices")
        if not isinstance(choices, list) or not choices or "text" not in choices[0]:
            raise EngineClosed(f"{self.url}/completions answered without a completion; does it have OpenAI's API?")
        return dict(choices[0])

    def text(self, prompt: str, **settings: Any) -> str:
        return str(self.complete(prompt, **settings)["text"])


def _base_url(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise OptionError(f"{url!r} is not the address of a server; write one such as http://localhost:8000")
    base = url.rstrip("/")
    return base if base.endswith("/v1") else f"{base}/v1"


def _fetch(url: str, body: dict[str, Any] | None, api_key: str | None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    try:
        request = urllib.request.Request(url, data, headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            return _object(json.load(response))
    except urllib.error.HTTPError as error:
        raise _refused(url, error) from error
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        raise EngineClosed(f"{url} cannot be reached or does not have OpenAI's API: {error}") from error


def _object(document: Any) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise ValueError("it answered with something other than a JSON object")
    return document


def _refused(url: str, error: urllib.error.HTTPError) -> OptionError:
    answer = " ".join(error.read(300).decode(errors="replace").split())
    hint = "; pass --api-key or set OPENAI_API_KEY" if error.code in (401, 403) else ""
    return OptionError(f"{url} answered {error.code}{hint}: {answer}")


@dataclass(frozen=True, slots=True)
class EndpointPlan:
    """What to ask.

    draws         of each server for one sampled check; seconds: for all sampled checks together
    drawn_tokens  tokens of one sampled output: enough for a step with draft tokens after the first token
    alpha         the probability of a false alarm in all checks together
    """

    prompts: list[str]
    max_tokens: int = 48
    temperatures: tuple[float, ...] = (1.0,)
    draws: int = 400
    drawn_tokens: int = 4
    alpha: float = 0.001
    seconds: float = 600.0
    evidence: Evidence = field(default_factory=Evidence)


@dataclass(frozen=True, slots=True)
class _Case:
    """One sampled check. seeded: every request carries a seed of its own."""

    temperature: float
    prompt: str
    seeded: bool

    @property
    def subject(self) -> str:
        return f"sampled endpoint = reference T={self.temperature:g} {'with seeds' if self.seeded else 'without seeds'}"


@dataclass(frozen=True, slots=True)
class EndpointPair:
    """A server under test, and the one that is taken to be right."""

    tested: Endpoint
    reference: Endpoint


def compare_endpoints(pair: EndpointPair, plan: EndpointPlan) -> Iterator[AuditCheck]:
    """Greedy equality, then the two-sample tests, yielding each check as it is done."""
    yield _greedy_check(pair, plan)
    cases = [
        _Case(temperature, prompt, seeded)
        for temperature in plan.temperatures
        if temperature > 0
        for prompt in plan.prompts
        for seeded in (False, True)
    ]
    level = plan.alpha / max(len(cases), 1)
    began = time.perf_counter()
    for number, case in enumerate(cases):
        remaining = max(0.0, plan.seconds - (time.perf_counter() - began))
        yield _sampled_check(pair, plan, case, level, remaining / (len(cases) - number))


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
    outcome = Outcome.DIFFERENT if bugs else Outcome.LOSSLESS
    return AuditCheck("greedy endpoint = reference", "greedy", outcome, detail, time.perf_counter() - started)


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
    pair: EndpointPair, plan: EndpointPlan, case: _Case, level: float, seconds: float
) -> AuditCheck:
    started = time.perf_counter()
    conclusion = conclude(_draw(pair, plan, case, seconds), level, plan.evidence)
    return conclusion.check(f"{case.subject} {case.prompt[:24]!r}", case.subject, time.perf_counter() - started)


def _draw(pair: EndpointPair, plan: EndpointPlan, case: _Case, seconds: float) -> PairedSamples:
    """Both servers in turns. The clock is asked between turns only, so what an output is does not decide who counts."""
    samples, started = PairedSamples(), time.perf_counter()
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        while samples.draws < plan.draws and (not samples.draws or time.perf_counter() - started < seconds):
            numbers = range(samples.draws, min(samples.draws + CONCURRENCY, plan.draws))
            for server, counts in ((pair.tested, samples.tested), (pair.reference, samples.reference)):
                counts.update(pool.map(lambda number, server=server: _sampled(server, plan, case, number), numbers))
    return samples


def _sampled(server: Endpoint, plan: EndpointPlan, case: _Case, number: int) -> str:
    settings: dict[str, Any] = {"max_tokens": plan.drawn_tokens, "temperature": case.temperature}
    if case.seeded:
        # Other seeds for each server: with the same ones, two servers could agree or differ for the wrong reason.
        settings["seed"] = zlib.crc32(f"{server.url} {case.prompt}".encode()) + number
    return server.text(case.prompt, **settings)
