"""What the linter found, as lines for a terminal and as one JSON document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.lint.run import Change, LintResult, TriedReading

NAME_WIDTH = 32


@dataclass(frozen=True, slots=True)
class TemplateNote:
    """Acceptance at position 1 of the same answers after the chat template and after the bare prompts."""

    with_template: float
    without: float
    z: float


def table_head(positions: int) -> str:
    """The line above the readings."""
    columns = "".join(f"position {position + 1:<7}" for position in range(positions))
    return f"{'reading':{NAME_WIDTH}}{columns}{'τ':8}against the files as they are"


def table_line(tried: TriedReading) -> str:
    """One reading: acceptance by position with its standard error, tokens per step, and the paired comparison."""
    if tried.error or tried.acceptance is None:
        return f"{tried.reading.name:{NAME_WIDTH}}does not load: {tried.error}"
    pairs = zip(tried.acceptance.by_position, tried.acceptance.errors)
    columns = "".join(f"{rate:.3f} ± {error:<8.3f}" for rate, error in pairs)
    places = tried.acceptance.num_anchors
    compared = f"τ {tried.gain:+.2f}, z = {tried.z:+.1f}, " if tried.reading.change else ""
    difference = f"{compared}{places} places"
    return f"{tried.reading.name:{NAME_WIDTH}}{columns}{tried.tokens_per_step:<8.2f}{difference}"


def result_lines(result: LintResult, template: TemplateNote | None) -> list[str]:
    """What the files were trained for, and what to change."""
    if result.correct:
        lines = [f"result   the files are read as they were trained ({result.kind}): no other reading is better"]
    else:
        names = " and ".join(change.tried.reading.name for change in result.changes)
        lines = [f"result   this head ({result.kind}) was trained for another reading: {names}"]
        lines += [line for change in result.changes for line in _change_lines(change, result.num_tested)]
    return [*lines, *([_template_line(template)] if template else [])]


def _change_lines(change: Change, num_tested: int) -> list[str]:
    tried = change.tried
    chance = f"{change.probability:.1g}" if change.probability > 1e-99 else "below 1e-99"
    return [
        f"change   {tried.reading.change}",
        f"         z = {tried.z:.1f}, error probability {chance} over {num_tested} readings; "
        f"{tried.tokens_per_step:.2f} tokens per step then",
    ]


def _template_line(note: TemplateNote) -> str:
    rates = f"position 1 {note.with_template:.3f} after the chat template, {note.without:.3f} after bare prompts"
    return f"template {rates} (z = {note.z:+.1f})"


def document(result: LintResult, template: TemplateNote | None) -> dict[str, Any]:
    """The same for programs."""
    return {
        "kind": result.kind,
        "correct": result.correct,
        "num_tested": result.num_tested,
        "readings": [_reading(entry) for entry in (result.as_given, *result.tried)],
        "changes": [
            {**_reading(change.tried), "change": change.tried.reading.change, "error_probability": change.probability}
            for change in result.changes
        ],
        "template": None if template is None else {
            "with_template": template.with_template, "without": template.without, "z": template.z
        },
    }  # fmt: skip


def _reading(tried: TriedReading) -> dict[str, Any]:
    measured = tried.acceptance
    loaded = measured is not None and not tried.error
    return {
        "reading": tried.reading.name,
        "error": tried.error or None,
        "num_anchors": measured.num_anchors if measured is not None and loaded else 0,
        "acceptance": measured.by_position if measured is not None and loaded else [],
        "standard_error": measured.errors if measured is not None and loaded else [],
        "tokens_per_step": round(tried.tokens_per_step, 4),
        "gain": round(tried.gain, 4),
        "z": finite(tried.z),
    }


def finite(z: float) -> float:
    """JSON has no infinity."""
    return max(-1e6, min(1e6, z))
