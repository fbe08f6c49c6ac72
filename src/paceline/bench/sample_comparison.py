"""Sampled outputs of two sides that should follow one distribution, and what comparing them shows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from paceline.bench.audit import AuditCheck
from paceline.bench.outcome import Evidence, Outcome
from paceline.bench.two_samples import TwoSampleResult, compare_samples, detectable_share, disjoint_would_be_found


@dataclass(slots=True)
class PairedSamples:
    """Outputs of the side under test, and of the side that is taken to be right."""

    tested: Counter[str] = field(default_factory=Counter)
    reference: Counter[str] = field(default_factory=Counter)

    @property
    def draws(self) -> int:
        """Of the side that has fewer."""
        return min(self.tested.total(), self.reference.total())


@dataclass(frozen=True, slots=True)
class SampleConclusion:
    """What two samples show. share: of the commonest output, more or less, that is found with 95% certainty."""

    outcome: Outcome
    detail: str
    p_value: float
    draws: int
    share: float

    def check(self, name: str, subject: str, seconds: float) -> AuditCheck:
        return AuditCheck(
            name, "sampled", self.outcome, self.detail, seconds, self.p_value, self.draws, self.share, subject
        )


def conclude(
    samples: PairedSamples, level: float, evidence: Evidence, shortfall: str | None = None
) -> SampleConclusion:
    """Different below `level`, lossless above it with enough evidence, else not shown.

    shortfall: why these samples show nothing however alike they are, such as a side that drafted nothing.
    """
    result = compare_samples(samples.tested, samples.reference, level)
    share = detectable_share(samples.tested, samples.reference, level, result.num_testable)
    missing = shortfall or evidence.missing(samples.draws, share) or _too_diverse(samples, level)
    outcome = Outcome.NOT_SHOWN if missing else Outcome.LOSSLESS
    if result.p_value < level:
        outcome, missing = Outcome.DIFFERENT, None
    power = f"{share:.2f} more or less of the commonest output would be found with 95% certainty"
    detail = _explained(samples, result, missing or power)
    return SampleConclusion(outcome, detail, result.p_value, samples.draws, share)


def _too_diverse(samples: PairedSamples, level: float) -> str | None:
    if disjoint_would_be_found(samples.tested, samples.reference, level):
        return None
    return "the outputs hardly ever repeat, so even two sides with none in common would not be found"


def _explained(samples: PairedSamples, result: TwoSampleResult, remark: str) -> str:
    event = result.furthest
    shares = (event.first / samples.tested.total(), event.second / samples.reference.total())
    return (
        f"p = {result.p_value:.2g} over {samples.draws} draws each; furthest apart is {event.name} {event.value!r}: "
        f"{shares[0]:.1%} and {shares[1]:.1%}; {remark}"
    )
