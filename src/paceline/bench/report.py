"""One HTML file with all figures, tables and plots. It loads nothing from outside and runs no script."""

from __future__ import annotations

import html
from typing import Any

from paceline.bench.plots import Plot, plots_of

Record = dict[str, Any]

STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; color: #1b1b1b;
  background: #fafafa; }
main { max-width: 1180px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 1.7rem; margin: 0 0 4px; } h2 { font-size: 1.15rem; margin: 36px 0 10px; }
p.lead { font-size: 1.08rem; margin: 6px 0 18px; } p.small, figcaption { color: #555; font-size: .9rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 18px; }
figure { margin: 0; background: #fff; border: 1px solid #e2e2e2; border-radius: 8px; padding: 14px; }
figure h3 { margin: 0 0 2px; font-size: 1rem; } figure svg { width: 100%; height: auto; display: block; }
.scroll { overflow-x: auto; background: #fff; border: 1px solid #e2e2e2; border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .93rem; }
th, td { padding: 7px 12px; text-align: right; border-bottom: 1px solid #eee; white-space: nowrap; }
th:first-child, td:first-child, td.text, th.text { text-align: left; }
td.text { white-space: normal; min-width: 260px; font-weight: 400; }
thead th { background: #f3f3f3; position: sticky; top: 0; }
tr.best td { background: #eef6fb; font-weight: 600; } .bad { color: #a4262c; font-weight: 600; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 0; font-size: .93rem; }
dt { color: #555; } dd { margin: 0; overflow-wrap: anywhere; }
"""


def build_report(run: Record) -> str:
    """The report of one run. Raises MissingExtra without matplotlib."""
    title = f"{run['target']['name']}: speculative decoding, measured"
    body = [
        f"<h1>{_safe(title)}</h1>",
        f'<p class="lead">{_safe(headline(run))}</p>',
        "" if run["complete"] else '<p class="bad">This run was interrupted; it shows what had been measured.</p>',
        "<h2>Settings</h2>",
        _settings_table(run),
        "<h2>Plots</h2>",
        f'<div class="plots">{"".join(map(_figure, plots_of(run)))}</div>',
        "<h2>How it was measured</h2>",
        _conditions(run),
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{_safe(title)}</title>'
        f"<style>{STYLE}</style></head><body><main>{''.join(body)}</main></body></html>\n"
    )


def headline(run: Record) -> str:
    """The result in one sentence."""
    if "against" in run:
        return str(run["against"]["sentence"])
    warning = _without_speedup(run)
    best = best_setting(run)
    if best is None:
        return f"No setting could be compared with plain decoding.{warning}"
    name, gain, speed = best["name"], best["speedup"]["median"], best["tokens_per_second"]["median"]
    if gain < 1.0:
        return f"Plain decoding is fastest here; the best method, {name}, reaches {gain:.2f}x of it.{warning}"
    return f"Fastest: {name} with {speed:.1f} tokens per second, {gain:.2f}x plain decoding.{warning}"


def _without_speedup(run: Record) -> str:
    """The settings that have no speed-up, and why."""
    names: dict[str, list[str]] = {}
    for setting in run["settings"]:
        names.setdefault(setting["lossless"]["outcome"], []).append(setting["name"])
    sentences = {"different": "Different output, so without a speed-up", "not shown": "Not shown to be lossless"}
    noisy = [f"{setting['name']} (measured {setting['noise']})" for setting in run["settings"] if setting.get("noise")]
    parts = [f" {text}: {', '.join(names[key])}." for key, text in sentences.items() if key in names]
    return "".join(parts + [f" Noise, so without a speed-up: {item}." for item in noisy])


def best_setting(run: Record) -> Record | None:
    """The lossless setting of our own with the highest speed-up."""
    rows = [setting for setting in run["settings"] if setting["speedup"] and not setting["is_baseline"]]
    return max(rows, key=lambda setting: setting["speedup"]["median"], default=None)


COLUMNS = ("setting", "tokens/s", "spread", "speed-up", "predicted", "τ", "accepted", "lossless")


def cells(setting: Record, dash: str = "-") -> list[str]:
    """The columns of one setting, all but the last."""
    speed, gain, stats = setting["tokens_per_second"], setting["speedup"], setting["stats"]
    predicted = setting["predicted_speedup"]
    return [
        setting["name"],
        f"{speed['median']:.1f}",
        f"{speed['low']:.1f}{dash}{speed['high']:.1f}",
        f"{gain['median']:.2f}x" if gain else "noise" if setting.get("noise") else dash,
        f"{predicted:.2f}x" if predicted else dash,
        f"{stats['tokens_per_step']:.2f}" if stats["steps"] else dash,
        f"{stats['acceptance_rate']:.0%}" if stats["drafted"] else dash,
    ]


def _settings_table(run: Record) -> str:
    head = "".join(f"<th{' class=text' if name == 'lossless' else ''}>{name}</th>" for name in COLUMNS)
    best = best_setting(run)
    rows = "".join(_row(setting, is_best=setting is best) for setting in run["settings"])
    region = 'class="scroll" tabindex="0" role="region" aria-label="Settings"'  # keys must scroll it too
    return f"<div {region}><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"


def _row(setting: Record, *, is_best: bool) -> str:
    kind = "text" if setting["lossless"]["passed"] else "text bad"
    columns = "".join(f"<td>{_safe(cell)}</td>" for cell in cells(setting, "–"))
    lossless = setting["lossless"]
    columns += f'<td class="{kind}">{_safe(lossless["outcome"])}: {_safe(lossless["detail"])}</td>'
    return f"<tr{' class=best' if is_best else ''}>{columns}</tr>"


def _figure(plot: Plot) -> str:
    return f"<figure><h3>{_safe(plot.title)}</h3>{plot.svg}<figcaption>{_safe(plot.caption)}</figcaption></figure>"


NOTE = (
    "Speeds are all tokens over all seconds of a repeat, prefill included; the median of the repeats is shown, with "
    "the slowest and the fastest. A speed-up compares with plain decoding in the same repeat. τ is tokens per pass "
    "of the target; accepted is accepted draft tokens of those verified."
)


def _conditions(run: Record) -> str:
    listed = "".join(f"<dt>{name}</dt><dd>{_safe(value)}</dd>" for name, value in _facts(run).items())
    return f'<dl>{listed}</dl><p class="small">{NOTE}</p>'


def _facts(run: Record) -> dict[str, str]:
    work, machine, target, draft = run["workload"], run["hardware"], run["target"], run["draft_model"]
    domains = ", ".join(work["domains"])
    return {
        "model": f"{target['name']}, {target['dtype']} on {target['device']}",
        "draft model": f"{draft['name']}, {draft['dtype']}" if draft else "none",
        "prompts": f"{work['prompts']} of {work['source']} ({domains}), {work['max_num_seqs']} at a time",
        "outputs": f"up to {work['max_new_tokens']} tokens, {work['repeats']} repeats, settings interleaved",
        "processor": f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads",
        "accelerators": ", ".join(machine["accelerators"]) or "none",
        "memory": f"{machine['memory_gib']} GiB",
        "versions": ", ".join(f"{name} {version}" for name, version in run["versions"].items()),
        "started": run["started"],
        "command": " ".join(run["command"]),
    }


def _safe(text: str) -> str:
    return html.escape(str(text))
