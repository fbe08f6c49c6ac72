"""Find the fastest method and k on this machine, or learn that plain decoding is faster.

    paceline tune                                  the default model, methods that need no draft model
    paceline tune MODEL --draft-model SMALL        a pair
    paceline tune --prompts my-prompts.txt         on the prompts you really have
    paceline tune --max-num-seqs 8                 for eight sequences at a time
    paceline tune --engines local,llama_cpp        which engine is fastest here, and with which method

Measures what a pass costs by its width, what drafting costs and how much is accepted; predicts every method and k; runs
the best of them against plain decoding; writes paceline.toml, which generate, chat and serve use; and ends with one
sentence of advice. Other engines are measured as a whole, with speculation and without, on the same prompts; by default
those that are installed and can run the model. ENGINE=MODEL names another model for one of them, such as
llama_cpp=model.gguf. Takes a few minutes. With --json the last line on stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from paceline.cli.candidates import add_candidate_flags, add_workload_flags, check_counts, open_candidates
from paceline.cli.engine_comparison import LocalTuning, check_out, chosen_engines, compare_engines, write
from paceline.tuned import LOCAL

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.bench.candidates import Candidates
    from paceline.bench.tune import ConfirmedSpeedup, SpeedupEstimate, TunePlan, TuneResult
    from paceline.bench.workloads import WorkloadPrompt
    from paceline.tuned import TunedProfile

MAX_ROWS = 8  # predictions in the table


def configure(parser: argparse.ArgumentParser) -> None:
    add_candidate_flags(parser, skip=("engine",))
    parser.add_argument("--engines", metavar="E", help="separated by commas, ENGINE or ENGINE=MODEL; default: all")
    add_workload_flags(parser, limit=6, repeats=2)
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0, greedy")
    parser.add_argument("--out", default="paceline.toml", metavar="FILE", help="the profile; none: write nothing")
    parser.add_argument("--json", action="store_true", help="end with one JSON document on one line")


def main(args: argparse.Namespace) -> int:
    from paceline.bench.workloads import load_prompts
    from paceline.core.sampling import SamplingParams

    prompts = load_prompts(args.prompts, args.limit)
    check_counts(args)
    check_out(args)
    SamplingParams(temperature=args.temperature)
    choices = chosen_engines(args.engines, args.model)
    if [choice.engine for choice in choices] != [LOCAL]:
        return compare_engines(args, choices, prompts, _tune_local)
    tuned = _tune_local(args, prompts)
    print(json.dumps(_document(tuned.result)) if args.json else tuned.result.advice.sentence, flush=True)
    write(args, tuned.profile)
    return 0


def _tune_local(args: argparse.Namespace, prompts: list[WorkloadPrompt]) -> LocalTuning:
    """Costs, predictions and confirmation on paceline's own engine. The models are given back at the end."""
    from paceline.bench.tune import tune
    from paceline.hub.progress import track

    candidates = open_candidates(args, max_num_seqs=args.max_num_seqs)
    result = tune(candidates, _plan(args, candidates, prompts), track)
    if not args.json:
        _print(result, candidates)
    return LocalTuning(result, _profile(args, candidates, result))


def _plan(args: argparse.Namespace, candidates: Candidates, prompts: list[WorkloadPrompt]) -> TunePlan:
    from paceline.bench.measure import OutputLength
    from paceline.bench.tune import TunePlan

    ids = [prompt.encode(candidates.tokenizer) for prompt in prompts]
    return TunePlan(ids, OutputLength(args.max_new_tokens), args.temperature, args.max_num_seqs, args.repeats)


def _profile(args: argparse.Namespace, candidates: Candidates, result: TuneResult) -> TunedProfile:
    from paceline.tuned import TunedProfile

    advice = result.advice
    return TunedProfile(
        target=args.model,
        device=candidates.target.info.device,
        method=advice.method,
        num_draft_tokens=advice.num_draft_tokens,
        draft_model=candidates.candidate(advice.method).config.speculative.draft_model,
        dtype=_text_changing_dtype(args.dtype, candidates.target.info.device),
        draft_dtype=args.draft_dtype,
        advice=advice.sentence,
        predicted=advice.predicted,
        measured=advice.measured,
        shortest_output=advice.shortest_output,
        pass_seconds=result.verify.as_dict(),
        draft_seconds=result.draft.as_dict(),
    )


def _text_changing_dtype(name: str | None, device: str) -> str | None:
    """None for the dtype that a model has anyway on this device: commands then use the profile without being told."""
    from paceline.runners.loading import dtype_named

    return None if dtype_named(name, device) == dtype_named(None, device) else name


# --- output -----------------------------------------------------------------------------------------------------------


def _print(result: TuneResult, candidates: Candidates) -> None:
    from rich.console import Console

    console = Console()
    costs = result.verify.as_dict()
    plain = next(iter(costs.values()))
    relative = "  ".join(f"{width}: {seconds / plain:.2f}" for width, seconds in costs.items())
    console.print(f"a pass takes {1000 * plain:.1f} ms; by tokens in it, relative: {relative}", highlight=False)
    console.print(_table(result))
    for method, why in candidates.unavailable.items():
        console.print(f"not tried: {method} ({why})", markup=False, highlight=False, style="dim")


def _table(result: TuneResult) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("method", "k", "tokens per step", "predicted", "measured"):
        table.add_column(name, justify="left" if name == "method" else "right")
    measured = {(item.method, item.num_draft_tokens): _measured_cell(item) for item in result.confirmed}
    for item in _shown(result):
        cells = (f"{item.tokens_per_step:.2f}", f"{item.speedup:.2f}x", measured.get((item.method, item.k), ""))
        table.add_row(item.method, str(item.k), *cells)
    for confirmed in result.confirmed:
        if confirmed.predicted is None:
            table.add_row(confirmed.method, str(confirmed.num_draft_tokens), "", "", _measured_cell(confirmed))
    return table


def _measured_cell(item: ConfirmedSpeedup) -> str:
    return "noise" if item.is_noise else f"{item.measured:.2f}x"


def _shown(result: TuneResult) -> list[SpeedupEstimate]:
    """The predictions that were run, then the best of the others."""
    was_run = {(item.method, item.num_draft_tokens) for item in result.confirmed}
    rows = [item for item in result.estimates if (item.method, item.k) in was_run]
    return rows + [item for item in result.estimates if item not in rows][: MAX_ROWS - len(rows)]


def _document(result: TuneResult) -> dict[str, Any]:
    return {
        **asdict(result.advice),
        "predictions": [asdict(item) for item in result.estimates],
        "confirmed": [asdict(item) | {"is_noise": item.is_noise} for item in result.confirmed],
        "pass_seconds": result.verify.as_dict(),
        "draft_seconds": result.draft.as_dict(),
    }
