"""Speculation of one response as vLLM reports it (metrics.speculative_decoding)."""

from __future__ import annotations

from paceline.core.stats import SpecStats


def speculation_metrics(stats: SpecStats) -> dict[str, object]:
    """Figures over the steps that drafted. acceptance_histogram[n]: steps that accepted n draft tokens."""
    steps = stats.offered_at[0] if stats.offered_at else 0
    reached = [steps, *stats.accepted_at]  # steps that accepted at least so many
    return {
        "mean_acceptance_length": 1.0 + stats.accepted / steps if steps else 1.0,
        "draft_acceptance_rate": stats.acceptance_rate,
        "acceptance_histogram": [more - less for more, less in zip(reached, [*reached[1:], 0])],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": stats.accepted,
        "num_draft_tokens": stats.drafted,
        "num_spec_tokens": len(stats.offered_at),
    }
