"""Which small model goes with which large one, with sources.

    paceline pairs                       every pair in the catalogue
    paceline pairs llama-3.1-70b         those for one target
    paceline pairs --max-draft 1         drafts of at most a billion weights
    paceline pairs --json                the same for a program; the last line is one JSON document

Only pairs that the installed engines can run are listed. Numbers are as published, on the hardware named; a pair
without one is listed because the two share a tokenizer. Your own number comes from `paceline tune MODEL --draft-model
…`.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from paceline.cli.runnable import support
from paceline.errors import ModelNotFound, OptionError
from paceline.plan.catalogue import find_model, near_names
from paceline.plan.pairs import ModelPair, PublishedResult, pairs, pairs_for
from paceline.plan.support import Support


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="show only the pairs of this target")
    parser.add_argument("--max-draft", type=float, metavar="BILLIONS", help="largest draft, in billions of weights")
    parser.add_argument("--json", action="store_true", help="end with one JSON document on one line")


def main(args: argparse.Namespace) -> int:
    installed = support()
    candidates = _listed(args.model, args.max_draft)
    refused = {pair: why for pair in candidates if (why := pair.refusal(installed))}
    listed = tuple(pair for pair in candidates if pair not in refused)
    if args.json:
        refusals = [{"target": pair.target.name, "method": pair.method, "why": why} for pair, why in refused.items()]
        print(json.dumps({"pairs": [_as_json(pair, installed) for pair in listed], "refused": refusals}))
    else:
        _print_table(listed, args.model, installed)
        for why in refused.values():
            print(f"not listed: {why}")
    return 0


def _listed(model: str | None, max_draft: float | None) -> tuple[ModelPair, ...]:
    if max_draft is not None and not max_draft > 0:
        raise OptionError(f"--max-draft is a size in billions of weights and must be above 0, not {max_draft:g}")
    if model is not None and find_model(model) is None:
        near = near_names(model)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise ModelNotFound(f"the catalogue of pairs has no model called '{model}'.{hint}")
    candidates = pairs() if model is None else pairs_for(model)
    limit = float("inf") if max_draft is None else max_draft * 1e9
    return tuple(pair for pair in candidates if pair.draft is None or pair.draft.sizes.parameters <= limit)


def _as_json(pair: ModelPair, installed: Support) -> dict[str, Any]:
    published = {key: getattr(pair.published, key) for key in PublishedResult.__slots__}
    return {
        "target": pair.target.name,
        "draft": pair.draft.name if pair.draft else None,
        "method": pair.method,
        "suits": pair.suits,
        "published": published,
        "warning": pair.is_warning,
        "source": pair.source,
        "engine": _engine_name(installed),
        "runner": installed.runner_of(pair.target.sizes),
        "command": " && ".join(pair.commands(installed)),
    }


def _print_table(listed: tuple[ModelPair, ...], model: str | None, installed: Support) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not listed:
        console.print(f"No pair is listed{f' for {model}' if model else ''}: try --method ngram, or train a head.")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("target", "drafter", "runs with", "published", "good for", "source"):
        table.add_column(heading, overflow="fold")
    for pair in listed:
        drafter = pair.draft.name if pair.draft else f"({pair.method})"
        style = "yellow" if pair.is_warning else ""
        published = _published_figures(pair.published)
        runner = f"{_engine_name(installed)}, {installed.runner_of(pair.target.sizes)}"
        table.add_row(pair.target.name, drafter, runner, published, pair.suits, pair.source, style=style)
    console.print(table)
    console.print("\nPublished numbers come from other hardware; `paceline tune` measures yours.", style="dim")
    if model is not None:
        commands = " && ".join(listed[0].commands(installed))
        console.print(f"Run the first: [bold]{commands}[/bold]", soft_wrap=True)


def _engine_name(installed: Support) -> str:
    engine = installed.engine()
    return engine.name if engine else "no engine"


def _published_figures(published: PublishedResult) -> str:
    figures = []
    if published.speedup is not None:
        figures.append(f"{published.speedup:.2f}x")
    if published.tokens_per_step is not None:
        figures.append(f"{published.tokens_per_step:.2f} tokens a step")
    if published.acceptance is not None:
        figures.append(f"{published.acceptance:.0%} accepted")
    if published.hardware is not None:
        figures.append(f"({published.hardware})")
    return " ".join(figures) or "-"
