"""How many draft tokens a server has verified and accepted, from whatever it says.

One answer:  vLLM's `metrics.speculative_decoding`, llama.cpp's `timings`, SGLang's `spec_…` fields.
All answers: the counters of vLLM's and llama.cpp's /metrics, which have the same names after the colon.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paceline.core.stats import SpecStats

COUNTER = re.compile(r'^\w+:spec_decode_(\w+?)(?:_total)?(?:\{([^}]*)\})? ([0-9.e+]+)$', re.MULTILINE)
POSITION = re.compile(r'position="(\d+)"')
PER_POSITION = "num_accepted_tokens_per_pos"
# Accepted and drafted of one answer, as SGLang's versions have named them.
SGLANG_NAMES = (
    ("spec_num_correct_drafts", "spec_num_proposed_drafts"),
    ("spec_accept_token_num", "spec_draft_token_num"),
)


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Draft tokens of one answer, or of all since a server started.

    drafts       steps with draft tokens; 0: not known
    accepted_at  accepted draft tokens by position; empty: not known
    """

    drafted: int
    accepted: int
    drafts: int = 0
    accepted_at: tuple[int, ...] = ()

    def minus(self, earlier: DraftCounts) -> DraftCounts:
        """What was done since."""
        before = [*earlier.accepted_at, *[0] * len(self.accepted_at)]
        return DraftCounts(
            self.drafted - earlier.drafted,
            self.accepted - earlier.accepted,
            self.drafts - earlier.drafts,
            tuple(count - old for count, old in zip(self.accepted_at, before)),
        )

    def stats(self, new_tokens: int) -> SpecStats:
        """As paceline counts: a step emits its accepted draft tokens and one more."""
        stats = SpecStats(new_tokens, max(0, new_tokens - self.accepted), self.drafted, self.accepted)
        if self.drafts and self.accepted_at:
            even = self.drafted % self.drafts == 0  # every step drafted as many; else only position 1 is known
            length = self.drafted // self.drafts if even else 1
            stats.offered_at = [self.drafts] * length
            stats.accepted_at = [*self.accepted_at, *[0] * length][:length]
        return stats


def counts_in_event(event: dict[str, Any]) -> DraftCounts | None:
    """What an event of an answer says of its draft tokens, or None."""
    metrics = event.get("metrics")
    if isinstance(metrics, dict) and isinstance(summary := metrics.get("speculative_decoding"), dict):
        return _vllm(summary)
    timings = event.get("timings")
    if isinstance(timings, dict) and "predicted_n" in timings:
        return DraftCounts(int(timings.get("draft_n", 0)), int(timings.get("draft_n_accepted", 0)))
    for document in _documents(event):
        for accepted, drafted in SGLANG_NAMES:
            if accepted in document and drafted in document:
                steps = int(document.get("spec_verify_ct") or 0)
                return DraftCounts(int(document[drafted]), int(document[accepted]), steps)
    return None


def _vllm(summary: dict[str, Any]) -> DraftCounts:
    """acceptance_histogram[i]: steps in which i draft tokens were accepted."""
    histogram = summary.get("acceptance_histogram") or []
    accepted_at = tuple(int(sum(histogram[position + 1 :])) for position in range(len(histogram) - 1))
    return DraftCounts(
        int(summary.get("num_draft_tokens", 0)),
        int(summary.get("num_accepted_draft_tokens", 0)),
        int(summary.get("num_spec_steps", 0)),
        accepted_at,
    )


def _documents(value: Any) -> Iterator[dict[str, Any]]:
    """Every object inside a document, at any depth."""
    if isinstance(value, dict):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _documents(part)


def counts_in_metrics(text: str) -> DraftCounts | None:
    """The counters of a server since it started, or None where it has none."""
    totals: dict[str, float] = {}
    positions: dict[int, float] = {}
    for name, labels, value in COUNTER.findall(text):
        if name == PER_POSITION and (position := POSITION.search(labels)):
            positions[int(position[1])] = positions.get(int(position[1]), 0.0) + float(value)
        else:
            totals[name] = totals.get(name, 0.0) + float(value)
    if "num_draft_tokens" not in totals:
        return None
    accepted_at = tuple(int(positions[position]) for position in sorted(positions))
    drafted, accepted, drafts = (
        int(totals.get(name, 0)) for name in ("num_draft_tokens", "num_accepted_tokens", "num_drafts")
    )
    return DraftCounts(drafted, accepted, drafts, accepted_at)
