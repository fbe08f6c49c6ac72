"""Files beside the weights: a README, and the curve of the training."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.train.atomic import write_text
from paceline.train.loop import TrainingHistory

README = "README.md"
CURVE = "curve.png"
SMOOTHED = 50


@dataclass(frozen=True, slots=True)
class DrafterFacts:
    """What the README says about a drafter.

    settings  every option of the training
    scores    results beyond the held-out slice, by name
    """

    kind: str
    target: str
    data: str
    parameters: int
    settings: dict[str, Any]
    scores: dict[str, Any]


def write_readme(folder: Path, facts: DrafterFacts, history: TrainingHistory) -> None:
    """The README that model hubs show: the data, the training, the acceptance."""
    lines = [*_introduction(facts), "", "## Training", *_training(facts, history), "", *_acceptance(history)]
    if facts.scores:
        lines += ["", "## Further results", "```json", json.dumps(facts.scores, indent=1), "```"]
    write_text(folder / README, "\n".join(lines) + "\n")


def _introduction(facts: DrafterFacts) -> list[str]:
    return [
        "---",
        "library_name: paceline",
        "tags: [speculative-decoding]",
        "---",
        f"# A drafter for {facts.target} (`{facts.kind}`)",
        "",
        f"Drafts tokens for {facts.target}; the target verifies every one, so its output does not change.",
        f"{facts.parameters / 1e6:.2f} million weights.",
        "",
        "## Data",
        facts.data,
    ]


def _training(facts: DrafterFacts, history: TrainingHistory) -> list[str]:
    last = history.losses[-1] if history.losses else float("nan")
    return [
        f"{history.step} steps, {history.tokens / 1e6:.2f} million tokens, {history.seconds / 60:.1f} minutes; "
        f"last loss {last:.4f}.",
        "",
        "```json",
        json.dumps(facts.settings, indent=1),
        "```",
    ]


def _acceptance(history: TrainingHistory) -> list[str]:
    lines = ["## Acceptance on held-out sequences"]
    if history.measurements:
        best = history.best
        lines += [f"{best.tokens_per_step:.3f} tokens per step, after {best.step} training steps."]
        lines += ["", "| draft token | accepted |", "|---|---|"]
        lines += [f"| {position} | {share:.1%} |" for position, share in enumerate(best.by_position, start=1)]
    return lines


def plot(history: TrainingHistory, path: Path) -> bool:
    """Draw loss and tokens per step over the training. False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(_smooth(history.losses), color="tab:blue")
    axes.set_xlabel("training step")
    axes.set_ylabel(f"loss (mean of {SMOOTHED} steps)", color="tab:blue")
    right_axes = axes.twinx()
    steps = [measurement.step for measurement in history.measurements]
    right_axes.plot(
        steps, [measurement.tokens_per_step for measurement in history.measurements], "o-", color="tab:orange"
    )
    right_axes.set_ylabel("tokens per step, held out", color="tab:orange")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return True


def _smooth(values: list[float]) -> list[float]:
    out, total = [], 0.0
    for index, value in enumerate(values):
        total += value - (values[index - SMOOTHED] if index >= SMOOTHED else 0.0)
        out.append(total / min(index + 1, SMOOTHED))
    return out
