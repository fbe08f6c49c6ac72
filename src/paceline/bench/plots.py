"""The plots of a report, each as one SVG that needs nothing from outside: letters are drawn as shapes."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.errors import MissingExtra

# Told apart by people who see colours differently, on white and when printed in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6B6B6B", "#882255")
MARKERS = "osD^vPX*"
SIZE = (5.2, 3.5)  # inches: small, so that letters stay large on a telephone
MOST_LINES = 8
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plot:
    """A titled picture, and one sentence that says how to read it."""

    title: str
    reading: str
    svg: str


def plots_of(run: Record) -> list[Plot]:
    """Every plot this run has data for. Raises MissingExtra without matplotlib."""
    drawn: list[Plot] = []
    for title, reading, draw in PLOTS:
        svg = _drawn(draw, run)
        if svg is not None:
            drawn.append(Plot(title, reading, svg))
    return drawn


def _drawn(draw: Callable[[Any, Record], bool], run: Record) -> str | None:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", "report") from error
    style: Any = {
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#E3E3E3",
        "axes.axisbelow": True,
        "svg.fonttype": "path",
        "svg.hashsalt": "paceline",
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=SIZE, layout="constrained")
        if not draw(figure, run):
            return None
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]  # without the XML head, which has no place inside HTML


def _guessing(run: Record) -> list[Record]:
    return [one for one in run["settings"] if one["tally"]["drafted"]]


def _groups(run: Record) -> dict[str, list[Record]]:
    """Fixed-k settings by method and temperature, by rising k."""
    found: dict[str, list[Record]] = {}
    for one in _guessing(run):
        if isinstance(one["num_draft_tokens"], int):
            warm = f" T={one['temperature']:g}" if one["temperature"] else ""
            found.setdefault(one["method"] + warm, []).append(one)
    return {name: sorted(rows, key=lambda row: row["num_draft_tokens"]) for name, rows in list(found.items())[:MOST_LINES]}


def _style(number: int) -> dict[str, Any]:
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)], "markersize": 5.5}


def _acceptance_against_k(figure: Any, run: Record) -> bool:
    groups = _groups(run)
    axes = figure.subplots()
    for number, (name, rows) in enumerate(groups.items()):
        ks = [row["num_draft_tokens"] for row in rows]
        axes.plot(ks, [100 * row["tally"]["acceptance_rate"] for row in rows], label=name, **_style(number))
    axes.set(xlabel="draft tokens k", ylabel="guesses that stood, %", ylim=(0, 102))
    _ticks(axes, [row["num_draft_tokens"] for rows in groups.values() for row in rows])
    _legend(figure)
    return bool(groups)


def _speed_against_k(figure: Any, run: Record) -> bool:
    groups = _groups(run)
    axes = figure.subplots()
    for number, (name, rows) in enumerate(groups.items()):
        speeds = [row["tokens_per_second"] for row in rows]
        ks, middle = [row["num_draft_tokens"] for row in rows], [speed["median"] for speed in speeds]
        axes.plot(ks, middle, label=name, **_style(number))
        low, high = [speed["low"] for speed in speeds], [speed["high"] for speed in speeds]
        axes.fill_between(ks, low, high, color=COLOURS[number % len(COLOURS)], alpha=0.15, linewidth=0)
    for one in run["settings"]:
        if one["method"] == "none":
            speed = one["tokens_per_second"]["median"]
            dashes = "--" if not one["temperature"] else ":"
            axes.axhline(speed, color="#333333", linestyle=dashes, linewidth=1.2, label=one["name"])
    axes.set(xlabel="draft tokens k", ylabel="tokens per second")
    axes.set_ylim(bottom=0)
    _ticks(axes, [row["num_draft_tokens"] for rows in groups.values() for row in rows])
    _legend(figure)
    return bool(groups)


def _by_position(figure: Any, run: Record) -> bool:
    """Of each method the setting with the largest k shows the most positions."""
    axes = figure.subplots()
    groups = _groups(run)
    for number, (name, rows) in enumerate(groups.items()):
        rates = rows[-1]["tally"]["acceptance_by_position"]
        places = range(1, len(rates) + 1)
        axes.plot(
            places, [100 * rate for rate in rates], label=f"{name} k={rows[-1]['num_draft_tokens']}", **_style(number)
        )
    axes.set(xlabel="position of the guess in its round", ylabel="stood, %", ylim=(0, 102))
    longest = max((len(rows[-1]["tally"]["acceptance_by_position"]) for rows in groups.values()), default=1)
    _ticks(axes, list(range(1, longest + 1)))
    _legend(figure)
    return bool(groups)


def _running(figure: Any, run: Record) -> bool:
    axes = figure.subplots()
    rows = _best_of_each_method(run)
    for number, one in enumerate(rows):
        points = [point for point in one["running_acceptance"] if point["offered"]]
        places = [point["position"] for point in points]
        rates = [100 * point["accepted"] / point["offered"] for point in points]
        axes.plot(places, rates, label=one["name"], **_style(number))
    axes.set(xlabel="tokens of the answer written so far", ylabel="guesses that stood, %", ylim=(0, 102))
    _legend(figure)
    return bool(rows)


def _domains(figure: Any, run: Record) -> bool:
    rows = [one for one in _best_of_each_method(run) if any(part["speedup"] for part in one["by_domain"].values())]
    names = list(dict.fromkeys(domain for one in rows for domain in one["by_domain"]))
    axes = figure.subplots()
    width = 0.8 / max(len(rows), 1)
    for number, one in enumerate(rows):
        gains = [one["by_domain"].get(name, {}).get("speedup") or 0.0 for name in names]
        places = [place + (number - (len(rows) - 1) / 2) * width for place in range(len(names))]
        axes.bar(places, gains, width=0.92 * width, label=one["name"], color=COLOURS[number % len(COLOURS)])
    axes.axhline(1.0, color="#333333", linewidth=1.2, linestyle="--")
    axes.set_xticks(range(len(names)), names, rotation=18 if len(names) > 4 else 0)
    axes.set(ylabel="speed-up over plain decoding")
    axes.grid(axis="x", visible=False)
    _legend(figure)
    return bool(rows and names)


def _predicted(figure: Any, run: Record) -> bool:
    rows = [one for one in run["settings"] if one.get("predicted_speedup") and one["speedup"]]
    axes = figure.subplots()
    methods = list(dict.fromkeys(one["method"] for one in rows))
    for number, method in enumerate(methods):
        mine = [one for one in rows if one["method"] == method]
        style = {**_style(number), "linestyle": "none"}
        axes.plot(
            [one["predicted_speedup"] for one in mine],
            [one["speedup"]["median"] for one in mine],
            label=method,
            **style,
        )
    edge = 1.08 * max([1.0, *(max(one["predicted_speedup"], one["speedup"]["median"]) for one in rows)])
    axes.plot([0, edge], [0, edge], color="#333333", linewidth=1.0, linestyle="--")
    axes.fill_between([0, edge], [0, 0.85 * edge], [0, 1.15 * edge], color="#333333", alpha=0.07, linewidth=0)
    axes.set(xlabel="predicted speed-up", ylabel="measured speed-up", xlim=(0, edge), ylim=(0, edge))
    _legend(figure)
    return bool(rows)


def _time(figure: Any, run: Record) -> bool:
    rows = [one for one in run["settings"] if one["method"] == "none" and one["time"]["verify"]] + _best_of_each_method(
        run
    )
    axes = figure.subplots()
    left = [0.0] * len(rows)
    parts = (("verify", "target: reading and judging"), ("draft", "guessing"), ("other", "prompt and bookkeeping"))
    for number, (part, label) in enumerate(parts):
        share = [1000 * one["time"][part] / max(one["tally"]["new_tokens"], 1) for one in rows]
        axes.barh(range(len(rows)), share, left=left, label=label, color=COLOURS[number], height=0.62)
        left = [start + more for start, more in zip(left, share)]
    axes.set_yticks(range(len(rows)), [one["name"] for one in rows])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(xlabel="milliseconds per token written")
    _legend(figure)
    return bool(rows)


def _best_of_each_method(run: Record) -> list[Record]:
    """The fastest setting of every method and temperature, so that plots by setting stay legible."""
    best: dict[tuple[str, float], Record] = {}
    for one in _guessing(run):
        key = (one["method"], one["temperature"])
        if key not in best or one["tokens_per_second"]["median"] > best[key]["tokens_per_second"]["median"]:
            best[key] = one
    return list(best.values())[:MOST_LINES]


def _ticks(axes: Any, places: list[int]) -> None:
    """Only whole numbers that were measured, thinned where there are many; room for a single one."""
    found = sorted(set(places))
    if found:
        axes.set_xticks(found[:: max(1, len(found) // 10)])
        axes.set_xlim(found[0] - 0.5, found[-1] + 0.5)


def _legend(figure: Any) -> None:
    """Below the plot, where it covers no line."""
    if any(axes.get_legend_handles_labels()[0] for axes in figure.axes):
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8.5, columnspacing=1.2)


PLOTS: tuple[tuple[str, str, Callable[[Any, Record], bool]], ...] = (
    (
        "Speed by k",
        "Above the dashed line guessing pays. The band runs from the slowest to the fastest repeat.",
        _speed_against_k,
    ),
    ("Acceptance by k", "The more is guessed at once, the smaller the share that stands.", _acceptance_against_k),
    (
        "Acceptance by position",
        "A guess can only stand if all before it stood; each method at its largest k.",
        _by_position,
    ),
    ("Acceptance over an answer", "Guesses made while the answer grows; methods that look back get better.", _running),
    ("Speed-up by domain", "The fastest setting of each method. 1 is plain decoding.", _domains),
    (
        "Predicted and measured",
        "On the dashed line theory and stopwatch agree; the band is 15% either way.",
        _predicted,
    ),
    ("Where the time goes", "Time of each token, by what it was spent on.", _time),
)
