"""Many short sequences from one context, generated speculatively, against the exact distribution of the target.

The first NUM_TOKENS tokens after a context are one outcome. Its exact probability is a product of the target's own
next-token probabilities, so every acceptance, rejection, residual and bonus token of a step shows in the counts.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from paceline.bench.candidates import Candidate, Candidates, DecodeSetting
from paceline.bench.memoized_runner import MemoizedRunner, TokenPath
from paceline.bench.statistics import GoodnessOfFit, against_exact
from paceline.config import EngineConfig
from paceline.core.protocols import Drafter
from paceline.core.sampling import SamplingParams, distribution
from paceline.core.stats import SpecStats
from paceline.core.types import Capability, Request
from paceline.engines.local.engine import LocalEngine

INNER_STATE = frozenset({Capability.HIDDEN_STATES, Capability.EARLY_EXIT})
NUM_TOKENS = 3  # of an outcome
TOP_K = 4  # tokens that may follow, on large vocabularies: keeps the number of possible outcomes small
SMALL_VOCABULARY = 16
RESTRICTED_VOCABULARY = 256  # tokens, about, that a large vocabulary is restricted to
FIRST_BATCH, MAX_BATCH = 4, 32  # sequences together: few at first, so that a slow machine can stop in time


@dataclass(slots=True)
class Samples:
    """Outcomes counted so far, the counts of the steps behind them, and the seconds it took to draw them."""

    counts: Counter[TokenPath] = field(default_factory=Counter)
    stats: SpecStats = field(default_factory=SpecStats)
    seconds: float = 0.0

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def frequency(self, path: TokenPath) -> float:
        return self.counts[path] / self.total


@dataclass(frozen=True, slots=True)
class SampleLimit:
    """When to stop drawing. The clock does not depend on the outcomes, so stopping by it does not bias the test."""

    draws: int = 2000
    seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class SamplingResult:
    """A goodness of fit, the steps it rests on, the outcome furthest off, in words, and the seconds of drawing."""

    fit: GoodnessOfFit
    stats: SpecStats
    furthest: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class AuditContext:
    """How one method draws from one context: the memoized target, the drafter's configuration, the context's tokens.

    token_ids  the model's own id of each token, where the vocabulary is restricted
    """

    config: EngineConfig
    target: MemoizedRunner
    prompt: list[int]
    token_ids: list[int] | None = None

    def model_ids(self, path: TokenPath) -> list[int]:
        return list(path) if self.token_ids is None else [self.token_ids[token] for token in path]


def sampling_for(vocab_size: int, temperature: float) -> SamplingParams:
    """The settings an audit draws with. On a large vocabulary only the likeliest few tokens take part."""
    return SamplingParams(temperature=temperature, top_k=0 if vocab_size <= SMALL_VOCABULARY else TOP_K)


class SamplingAudit:
    """Draws for all candidates. Models compute each prefix once; drafting and verification run for every draw.

    Drafters that have a model or read the target's hidden states run over the whole vocabulary, with their models
    memoized; all others depend on token ids alone and run over a small vocabulary.
    """

    def __init__(self, candidates: Candidates) -> None:
        self._candidates = candidates
        has_states = Capability.HIDDEN_STATES in candidates.target.capabilities
        self._target = MemoizedRunner(candidates.target, states=has_states)
        self._configs: dict[str, EngineConfig] = {}  # of methods over the whole vocabulary
        self._small_targets: dict[TokenPath, MemoizedRunner] = {}  # by context
        self._small_vocabularies: dict[TokenPath, list[int]] = {}

    # --- where draws are made -----------------------------------------------------------------------------------------

    def context(self, method: str, prompt: list[int]) -> AuditContext:
        """The cheapest context in which this method drafts as it does outside of an audit."""
        candidate = self._candidates.candidate(method)
        if not slow_to_draw(candidate.drafter) and self._candidates.target.info.vocab_size > RESTRICTED_VOCABULARY:
            return self._small_context(candidate, prompt)
        if method not in self._configs:
            drafter = candidate.drafter.with_runner(MemoizedRunner)
            self._configs[method] = candidate.config.with_options(drafter=drafter)
        return AuditContext(self._configs[method], self._target, prompt)

    def _small_context(self, candidate: Candidate, prompt: list[int]) -> AuditContext:
        """The configuration names no drafter, so each engine builds its own: these token ids mean nothing elsewhere."""
        key = tuple(prompt)
        if key not in self._small_targets:
            tokens = self._small_vocabularies[key] = self._likely_tokens(prompt)
            self._small_targets[key] = MemoizedRunner(self._candidates.target, tokens)
        tokens = self._small_vocabularies[key]
        numbers = {token: number for number, token in enumerate(tokens)}
        return AuditContext(candidate.config, self._small_targets[key], [numbers[token] for token in prompt], tokens)

    def _likely_tokens(self, prompt: list[int]) -> list[int]:
        """The tokens of the context and those likely to follow it: a small vocabulary close to the real one."""
        likely = self._target.after(tuple(prompt)).topk(RESTRICTED_VOCABULARY // 2).indices.tolist()
        tokens = dict.fromkeys([*prompt, *likely])
        for token in likely[:TOP_K]:
            logits = self._target.after((*prompt, token))
            tokens.update(dict.fromkeys(logits.topk(RESTRICTED_VOCABULARY // 8).indices.tolist()))
        return list(tokens)

    # --- drawing and testing ------------------------------------------------------------------------------------------

    def exact(
        self, context: AuditContext, sampling: SamplingParams, num_tokens: int = NUM_TOKENS
    ) -> dict[TokenPath, float]:
        """The probability of every continuation of `num_tokens` tokens that can occur."""
        probabilities: dict[TokenPath, float] = {(): 1.0}
        for _ in range(num_tokens):
            longer: dict[TokenPath, float] = {}
            for path, probability in probabilities.items():
                p = distribution(context.target.after((*context.prompt, *path)), sampling).double()
                p = p / p.sum()
                for token in torch.nonzero(p).flatten().tolist():
                    longer[(*path, token)] = probability * float(p[token])
            probabilities = longer
        return probabilities

    def draw(
        self, setting: DecodeSetting, context: AuditContext, sampling: SamplingParams, limit: SampleLimit, seed: int = 0
    ) -> Samples:
        """Generate the same few tokens many times, each time with another seed."""
        engine = self._candidates.build(setting.applied_to(context.config, MAX_BATCH), context.target)
        samples, started, batch_size = Samples(), time.perf_counter(), FIRST_BATCH
        rng = torch.Generator().manual_seed(seed)
        while samples.total < limit.draws and (not samples.total or time.perf_counter() - started < limit.seconds):
            count = min(batch_size, limit.draws - samples.total)
            _draw_batch(engine, context.prompt, sampling, torch.randint(1 << 62, (count,), generator=rng), samples)
            batch_size = min(2 * batch_size, MAX_BATCH)
        samples.seconds = time.perf_counter() - started
        return samples

    def test(
        self,
        setting: DecodeSetting,
        prompt: list[int],
        limit: SampleLimit,
        seed: int = 0,
        describe: Callable[[list[int]], str] = str,
    ) -> SamplingResult:
        """Draw, and test the draws against the exact distribution."""
        sampling = sampling_for(self._candidates.target.info.vocab_size, setting.temperature)
        context = self.context(setting.method, prompt)
        exact = self.exact(context, sampling)
        samples = self.draw(setting, context, sampling, limit, seed)
        worst = max(exact | samples.counts, key=lambda path: abs(samples.frequency(path) - exact.get(path, 0.0)))
        sentence = (
            f"{describe(context.model_ids(worst))} came {samples.frequency(worst):.1%} of the time, "
            f"its probability under the target is {exact.get(worst, 0.0):.1%}"
        )
        return SamplingResult(against_exact(samples.counts, exact), samples.stats, sentence, samples.seconds)


def _draw_batch(
    engine: LocalEngine, prompt: list[int], sampling: SamplingParams, seeds: torch.Tensor, samples: Samples
) -> None:
    requests = [Request(prompt, replace(sampling, seed=seed), NUM_TOKENS, ignore_eos=True) for seed in seeds.tolist()]
    for seq in engine.run(requests):
        samples.counts[tuple(seq.generated)] += 1
        samples.stats.add(seq.stats)


def slow_to_draw(drafter: Drafter) -> bool:
    """Whether a draw runs more than a lookup: a head, an early exit or a draft model."""
    return drafter.draft_runner is not None or bool(drafter.needs & INNER_STATE)
