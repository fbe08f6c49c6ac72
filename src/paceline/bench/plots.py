"""The plots of a report, each as one SVG that loads nothing from outside: letters are drawn as shapes."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.errors import MissingExtra

# Distinct for people who see colours differently, on white and when printed in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6B6B6B", "#882255")
MARKERS = "osD^vPX*"
SIZE = (5.2, 3.5)  # inches: small, so that letters stay large on a telephone
MAX_LINES = 8
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plot:
    """A titled SVG, and one sentence on how to read it."""

    title: str
    caption: str
    svg: str


@dataclass(frozen=True, slots=True)
class PlotSpec:
    """draw: fills a figure from a run; False if the run has no data for it."""

    title: str
    caption: str
    draw: Callable[[Any, Record], bool]


def plots_of(run: Record) -> list[Plot]:
    """Every plot this run has data for. Raises MissingExtra without matplotlib."""
    plots = [(spec, _svg(spec, run)) for spec in PLOTS]
    return [Plot(spec.title, spec.caption, svg) for spec, svg in plots if svg is not None]


STYLE: Any = {
    "font.size": 11.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E3E3E3",
    "axes.axisbelow": True,
    "svg.fonttype": "path",
    "svg.hashsalt": "paceline",
}


def _svg(spec: PlotSpec, run: Record) -> str | None:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", "report") from error
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        if not spec.draw(figure, run):
            return None
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]  # without the XML head, which has no place inside HTML


def _drafting(run: Record) -> list[Record]:
    return [setting for setting in run["settings"] if setting["stats"]["drafted"]]


def _groups(run: Record) -> dict[str, list[Record]]:
    """Settings with a fixed k, by method and temperature, by rising k."""
    groups: dict[str, list[Record]] = {}
    for setting in _drafting(run):
        if isinstance(setting["num_draft_tokens"], int):
            temperature = f" T={setting['temperature']:g}" if setting["temperature"] else ""
            groups.setdefault(setting["method"] + temperature, []).append(setting)
    return {name: sorted(rows, key=_k) for name, rows in list(groups.items())[:MAX_LINES]}


def _k(setting: Record) -> int:
    return int(setting["num_draft_tokens"])


def _plain(run: Record) -> list[Record]:
    return [setting for setting in run["settings"] if setting["method"] == "none"]


def _style(number: int) -> dict[str, Any]:
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)], "markersize": 5.5}


def _acceptance_against_k(figure: Any, run: Record) -> bool:
    groups = _groups(run)
    axes = figure.subplots()
    for number, (name, rows) in enumerate(groups.items()):
        ks = [_k(row) for row in rows]
        axes.plot(ks, [100 * row["stats"]["acceptance_rate"] for row in rows], label=name, **_style(number))
    axes.set(xlabel="draft tokens k", ylabel="draft tokens accepted, %", ylim=(0, 102))
    _ticks(axes, [_k(row) for rows in groups.values() for row in rows])
    _legend(figure)
    return bool(groups)


def _speed_against_k(figure: Any, run: Record) -> bool:
    groups = _groups(run)
    axes = figure.subplots()
    for number, (name, rows) in enumerate(groups.items()):
        speeds = [row["tokens_per_second"] for row in rows]
        ks, middle = [_k(row) for row in rows], [speed["median"] for speed in speeds]
        axes.plot(ks, middle, label=name, **_style(number))
        low, high = [speed["low"] for speed in speeds], [speed["high"] for speed in speeds]
        axes.fill_between(ks, low, high, color=COLOURS[number % len(COLOURS)], alpha=0.15, linewidth=0)
    for plain in _plain(run):
        dashes = "--" if not plain["temperature"] else ":"
        speed = plain["tokens_per_second"]["median"]
        axes.axhline(speed, color="#333333", linestyle=dashes, linewidth=1.2, label=plain["name"])
    axes.set(xlabel="draft tokens k", ylabel="tokens per second")
    axes.set_ylim(bottom=0)
    _ticks(axes, [_k(row) for rows in groups.values() for row in rows])
    _legend(figure)
    return bool(groups)


def _by_position(figure: Any, run: Record) -> bool:
    """Of each method the setting with the largest k shows the most positions."""
    axes = figure.subplots()
    groups = _groups(run)
    for number, (name, rows) in enumerate(groups.items()):
        rates = rows[-1]["stats"]["acceptance_by_position"]
        places = range(1, len(rates) + 1)
        axes.plot(places, [100 * rate for rate in rates], label=f"{name} k={_k(rows[-1])}", **_style(number))
    axes.set(xlabel="position of the draft token in its step", ylabel="accepted, %", ylim=(0, 102))
    longest = max((len(rows[-1]["stats"]["acceptance_by_position"]) for rows in groups.values()), default=1)
    _ticks(axes, list(range(1, longest + 1)))
    _legend(figure)
    return bool(groups)


def _running_acceptance(figure: Any, run: Record) -> bool:
    axes = figure.subplots()
    rows = _best_of_each_method(run)
    for number, setting in enumerate(rows):
        points = [point for point in setting["running_acceptance"] if point["drafted"]]
        positions = [point["position"] for point in points]
        rates = [100 * point["accepted"] / point["drafted"] for point in points]
        axes.plot(positions, rates, label=setting["name"], **_style(number))
    axes.set(xlabel="output tokens generated so far", ylabel="draft tokens accepted, %", ylim=(0, 102))
    _legend(figure)
    return bool(rows)


def _domains(figure: Any, run: Record) -> bool:
    best = _best_of_each_method(run)
    rows = [setting for setting in best if any(part["speedup"] for part in setting["by_domain"].values())]
    names = list(dict.fromkeys(domain for setting in rows for domain in setting["by_domain"]))
    axes = figure.subplots()
    width = 0.8 / max(len(rows), 1)
    for number, setting in enumerate(rows):
        gains = [setting["by_domain"].get(name, {}).get("speedup") or 0.0 for name in names]
        places = [place + (number - (len(rows) - 1) / 2) * width for place in range(len(names))]
        axes.bar(places, gains, width=0.92 * width, label=setting["name"], color=COLOURS[number % len(COLOURS)])
    axes.axhline(1.0, color="#333333", linewidth=1.2, linestyle="--")
    axes.set_xticks(range(len(names)), names, rotation=18 if len(names) > 4 else 0)
    axes.set(ylabel="speed-up over plain decoding")
    axes.grid(axis="x", visible=False)
    _legend(figure)
    return bool(rows and names)


def _predicted(figure: Any, run: Record) -> bool:
    rows = [setting for setting in run["settings"] if setting.get("predicted_speedup") and setting["speedup"]]
    axes = figure.subplots()
    for number, method in enumerate(dict.fromkeys(setting["method"] for setting in rows)):
        own = [setting for setting in rows if setting["method"] == method]
        predicted = [setting["predicted_speedup"] for setting in own]
        style = {**_style(number), "linestyle": "none"}
        axes.plot(predicted, [setting["speedup"]["median"] for setting in own], label=method, **style)
    edge = 1.08 * max([1.0, *(max(row["predicted_speedup"], row["speedup"]["median"]) for row in rows)])
    axes.plot([0, edge], [0, edge], color="#333333", linewidth=1.0, linestyle="--")
    axes.fill_between([0, edge], [0, 0.85 * edge], [0, 1.15 * edge], color="#333333", alpha=0.07, linewidth=0)
    axes.set(xlabel="predicted speed-up", ylabel="measured speed-up", xlim=(0, edge), ylim=(0, edge))
    _legend(figure)
    return bool(rows)


def _time(figure: Any, run: Record) -> bool:
    rows = [setting for setting in _plain(run) if setting["time"]["verify"]] + _best_of_each_method(run)
    axes = figure.subplots()
    starts = [0.0] * len(rows)
    parts = {"verify": "target: pass and verification", "draft": "drafting", "other": "prefill and scheduling"}
    for number, (part, label) in enumerate(parts.items()):
        shares = [1000 * setting["time"][part] / max(setting["stats"]["new_tokens"], 1) for setting in rows]
        axes.barh(range(len(rows)), shares, left=starts, label=label, color=COLOURS[number], height=0.62)
        starts = [start + share for start, share in zip(starts, shares)]
    axes.set_yticks(range(len(rows)), [setting["name"] for setting in rows])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(xlabel="milliseconds per output token")
    _legend(figure)
    return bool(rows)


def _best_of_each_method(run: Record) -> list[Record]:
    """The fastest setting of every method and temperature, so that plots by setting stay legible."""
    best: dict[tuple[str, float], Record] = {}
    for setting in _drafting(run):
        key = (setting["method"], setting["temperature"])
        if key not in best or setting["tokens_per_second"]["median"] > best[key]["tokens_per_second"]["median"]:
            best[key] = setting
    return list(best.values())[:MAX_LINES]


def _ticks(axes: Any, places: list[int]) -> None:
    """Only whole numbers that were measured, thinned where there are many; room for a single one."""
    ticks = sorted(set(places))
    if ticks:
        axes.set_xticks(ticks[:: max(1, len(ticks) // 10)])
        axes.set_xlim(ticks[0] - 0.5, ticks[-1] + 0.5)


LEGEND_SIZE = 10
COLUMN, CHARACTER = 42, 0.47 * LEGEND_SIZE  # points: a handle with its gaps, and a letter of average width


def _legend(figure: Any) -> None:
    """Below the plot, where it covers no line, in as many columns as its longest label leaves room for."""
    labels = [label for axes in figure.axes for label in axes.get_legend_handles_labels()[1]]
    if labels:
        width = COLUMN + CHARACTER * max(map(len, labels))
        columns = max(1, min(3, int(72 * SIZE[0] / width)))
        figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=LEGEND_SIZE, columnspacing=1.2)


PLOTS = (
    PlotSpec(
        "Speed by k",
        "Above the dashed line speculation pays. The band runs from the slowest to the fastest repeat.",
        _speed_against_k,
    ),
    PlotSpec("Acceptance by k", "The longer the draft, the smaller the share accepted.", _acceptance_against_k),
    PlotSpec(
        "Acceptance by position",
        "A draft token can only be accepted if all before it are; each method at its largest k.",
        _by_position,
    ),
    PlotSpec(
        "Acceptance over an output",
        "Acceptance while the output grows; lookup methods get better.",
        _running_acceptance,
    ),
    PlotSpec("Speed-up by domain", "The fastest setting of each method. 1 is plain decoding.", _domains),
    PlotSpec(
        "Predicted and measured",
        "On the dashed line theory and stopwatch agree; the band is 15% either way.",
        _predicted,
    ),
    PlotSpec("Where the time goes", "Time of each token, by what it was spent on.", _time),
)
