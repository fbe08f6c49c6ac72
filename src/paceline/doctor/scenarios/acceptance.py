"""How many draft tokens are accepted at each position, where an engine counts them."""

from __future__ import annotations

from paceline.doctor.check import Check
from paceline.doctor.engines import AcceptanceCounts
from paceline.doctor.examination import Examination
from paceline.doctor.near_ties import binomial_tail
from paceline.doctor.scenario import SAMPLED_ERROR, Scenario
from paceline.doctor.scenarios.speculation import queries

LEAST_DRAFTS = 50
COLLAPSE = 0.2  # a later position that is accepted less often than this share of the one before has broken


async def run(exam: Examination) -> None:
    check = exam.check("draft tokens are accepted, and later positions do not collapse")
    await exam.guarded(check, _measure(exam, check))


async def _counts(exam: Examination) -> AcceptanceCounts | None:
    engine = exam.server.engine
    if not engine.counts_path or engine.read_counts is None:
        return None
    text = await exam.server.client.fetch(engine.counts_path)
    return None if text is None else engine.read_counts(text)


async def _measure(exam: Examination, check: Check) -> None:
    """Counters before and after greedy answers to repetitive and plain prompts."""
    before = await _counts(exam) or AcceptanceCounts()
    for query in await queries(exam):
        await exam.ask(query)
    after = await _counts(exam)
    if after is None:
        check.missing("the server counts no draft tokens, or --engine is not the right one")
        return
    _examine(exam, check, after.since(before))


def _examine(exam: Examination, check: Check, counts: AcceptanceCounts) -> None:
    if counts.mean_tokens_per_step is not None:
        check.note(f"{counts.mean_tokens_per_step:.2f} tokens a step")
    drafts = counts.offered[0] if counts.offered else 0
    if drafts < LEAST_DRAFTS:
        check.missing(f"{drafts:.0f} drafts, at least {LEAST_DRAFTS} are needed")
        return
    check.passed(int(drafts))
    rates = [accepted / max(1.0, offered) for accepted, offered in zip(counts.accepted, counts.offered)]
    check.note("accepted by position: " + ", ".join(f"{rate:.0%}" for rate in rates))
    if not counts.accepted[0]:
        check.fault(f"none of {drafts:.0f} drafts was accepted, not even in text that repeats itself")
    for position in range(1, len(rates)):
        _collapsed(exam, check, counts, position)


def _collapsed(exam: Examination, check: Check, counts: AcceptanceCounts, position: int) -> None:
    """Given that all before it were accepted, a draft token is about as good as those before."""
    reached = min(counts.accepted[position - 1], counts.offered[position])
    rate = counts.accepted[position - 1] / max(1.0, counts.offered[position - 1])
    if position > 1:
        rate = counts.accepted[position - 1] / max(1.0, counts.accepted[position - 2])
    refused = int(reached - counts.accepted[position])
    if reached >= LEAST_DRAFTS and binomial_tail(refused, int(reached), 1 - COLLAPSE * min(1.0, rate)) < exam.level:
        check.fault(
            f"position {position + 1} is accepted {counts.accepted[position]:.0f} of {reached:.0f} times, "
            f"the position before it {rate:.0%}: the drafter reads a wrong state from there on"
        )


SCENARIO = Scenario(
    "acceptance", "acceptance by position is what a working drafter reaches", SAMPLED_ERROR, run, order=99
)
