"""What is left beside the weights: the model card, and the curve of the training."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.train.atomic import write_text
from paceline.train.loop import History

CARD = "README.md"
CURVE = "curve.png"
SMOOTHED = 50


@dataclass(frozen=True, slots=True)
class Facts:
    """What a card tells about a drafter.

    settings  every option of the training, as words
    scores    results beyond the held-out slice, by name
    """

    word: str
    target: str
    data: str
    parameters: int
    settings: dict[str, Any]
    scores: dict[str, Any]


def write_card(folder: Path, facts: Facts, history: History) -> None:
    """A model card that others' tools show: what data, how long, how often guesses stand."""
    lines = [*_introduction(facts), "", "## Training", *_training(facts, history), "", *_acceptance(history)]
    if facts.scores:
        lines += ["", "## Further results", "```json", json.dumps(facts.scores, indent=1), "```"]
    write_text(folder / CARD, "\n".join(lines) + "\n")


def _introduction(facts: Facts) -> list[str]:
    return [
        "---",
        "library_name: paceline",
        "tags: [speculative-decoding]",
        "---",
        f"# A drafter for {facts.target} (`{facts.word}`)",
        "",
        f"Guesses what {facts.target} will say next; the target checks every guess, so its text does not change.",
        f"{facts.parameters / 1e6:.2f} million weights.",
        "",
        "## Data",
        facts.data,
    ]


def _training(facts: Facts, history: History) -> list[str]:
    last = history.losses[-1] if history.losses else float("nan")
    return [
        f"{history.step} steps, {history.tokens / 1e6:.2f} million tokens, {history.seconds / 60:.1f} minutes; "
        f"last loss {last:.4f}.",
        "",
        "```json",
        json.dumps(facts.settings, indent=1),
        "```",
    ]


def _acceptance(history: History) -> list[str]:
    lines = ["## Acceptance on texts that were held out"]
    if history.measured:
        last = history.measured[-1]
        lines += [f"{last.tokens_per_step:.3f} tokens a pass of the target.", "", "| guess | stands |", "|---|---|"]
        lines += [f"| {place} | {share:.1%} |" for place, share in enumerate(last.by_position, start=1)]
    return lines


def plot(history: History, path: Path) -> bool:
    """Draw loss and tokens a pass over the steps. False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(_smooth(history.losses), color="tab:blue")
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss (mean of {SMOOTHED} steps)", color="tab:blue")
    other = axes.twinx()
    steps = [measured.step for measured in history.measured]
    other.plot(steps, [measured.tokens_per_step for measured in history.measured], "o-", color="tab:orange")
    other.set_ylabel("tokens a pass, held out", color="tab:orange")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return True


def _smooth(values: list[float]) -> list[float]:
    out, total = [], 0.0
    for index, value in enumerate(values):
        total += value - (values[index - SMOOTHED] if index >= SMOOTHED else 0.0)
        out.append(total / min(index + 1, SMOOTHED))
    return out
