"""The result of a plan, as one JSON document or as a picture on the terminal."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from paceline.plan.fit import FitOutcome, MemoryFit
from paceline.plan.hardware import GIB, Accelerator
from paceline.plan.memory import Deployment, MemoryPlan, StageMemory
from paceline.plan.model_sizes import ModelSizes
from paceline.plan.pairs import listed_pair
from paceline.plan.precision import Precision
from paceline.plan.predict import SpeedEstimate
from paceline.plan.support import NATIVE, TRANSFORMERS

if TYPE_CHECKING:
    from rich.console import Console

_BAR_WIDTH = 60
RUNNERS = {NATIVE: "paceline's own code", TRANSFORMERS: "the code of transformers"}
_COLOURS = ("cyan", "blue", "magenta", "bright_magenta", "yellow", "green")


@dataclass(frozen=True, slots=True)
class PlanReport:
    """All results of one run. Without an accelerator there is no fit; without its data sheet no speed.

    engine, runner  what would run it, and with whose code; None: nothing that is installed
    """

    plan: MemoryPlan
    accelerator: Accelerator | None
    fit: MemoryFit | None
    speed: SpeedEstimate | None
    notes: tuple[str, ...]
    engine: str | None
    runner: str | None


def as_json(report: PlanReport) -> dict[str, Any]:
    deployment = report.plan.deployment
    return {
        "target": _sizes_json(deployment.target, deployment.precision),
        "draft": _sizes_json(drafter, deployment.drafter_precision) if (drafter := deployment.drafter) else None,
        "method": deployment.method.name,
        "num_draft_tokens": deployment.num_draft_tokens,
        "max_seq_len": deployment.max_seq_len,
        "max_num_seqs": deployment.max_num_seqs,
        "num_gpus": deployment.num_gpus,
        "tensor_parallel_size": deployment.tensor_parallel_size,
        "pipeline_parallel_size": deployment.pipeline_parallel_size,
        "stages": [_stage_json(stage) for stage in report.plan.stages],
        "engine": report.engine,
        "runner": report.runner,
        "parts": [{"name": p.name, "bytes": p.bytes, "fullest_bytes": p.fullest} for p in report.plan.parts],
        "total_bytes": report.plan.total_bytes,
        "fullest_bytes": report.plan.fullest_bytes,
        "hardware": _accelerator_json(report.accelerator) if report.accelerator else None,
        "fit": _fit_json(report.fit) if report.fit else None,
        "speed": _speed_json(report.speed) if report.speed else None,
        "published_speedup": pair.published.speedup if (pair := listed_pair(deployment)) else None,
        "notes": list(report.notes),
    }


def _stage_json(memory: StageMemory) -> dict[str, Any]:
    stage = memory.stage
    return {
        "num_gpus": memory.num_gpus,
        "layers": [stage.first_layer, stage.first_layer + stage.num_layers - 1],
        "bytes_each": memory.bytes_each,
        "parts": dict(memory.parts),
    }


def _sizes_json(sizes: ModelSizes, precision: Precision) -> dict[str, Any]:
    return {"name": sizes.name, "parameters": sizes.parameters, "precision": precision.name}


def _accelerator_json(accelerator: Accelerator) -> dict[str, Any]:
    return {
        "name": accelerator.name,
        "kind": accelerator.kind.value,
        "memory_bytes": accelerator.memory_bytes,
        "usable_bytes": accelerator.usable_bytes,
        "bandwidth_gbs": accelerator.bandwidth_gbs,
    }


def _fit_json(fit: MemoryFit) -> dict[str, Any]:
    return {
        "outcome": fit.outcome.value,
        "free_bytes": fit.free_bytes,
        "longest_seq_len": fit.longest_seq_len,
        "changes": [asdict(change) for change in fit.changes],
    }


def _speed_json(speed: SpeedEstimate) -> dict[str, Any]:
    return {
        "is_estimate": True,
        "plain_tokens_per_second": round(speed.plain_tokens_per_second, 2),
        "tokens_per_step": [round(speed.tokens_per_step_low, 3), round(speed.tokens_per_step_high, 3)],
        "speedup": [round(speed.speedup_low, 3), round(speed.speedup_high, 3)],
        "basis": speed.basis,
    }


def print_report(report: PlanReport) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    _print_heading(console, report.plan.deployment)
    if report.engine and report.runner:
        console.print(f"runs with engine {report.engine}, {RUNNERS[report.runner]}\n", style="dim")
    _print_parts(console, report)
    if report.fit and report.accelerator:
        _print_fit(console, report.fit, report.accelerator)
    else:
        console.print("\nName the hardware (--hardware rtx-4090, or --memory 24) to see whether it fits.", style="dim")
    if report.speed and report.plan.deployment.num_nodes:
        _print_speed(console, report.speed)
    if (pair := listed_pair(report.plan.deployment)) and pair.published.speedup is not None:
        console.print(
            f"Published for this pair: {pair.published.speedup:.2f}x, {pair.published.hardware} ({pair.source})"
        )
    for note in report.notes:
        console.print(f"note: {note}", style="dim")


def _print_heading(console: Console, deployment: Deployment) -> None:
    heading = _model_label(deployment.target, deployment.precision)
    if deployment.drafter:
        heading += f" + {_model_label(deployment.drafter, deployment.drafter_precision)}"
    elif deployment.method.drafts:
        heading += f" + [bold]{deployment.method.name}[/bold]"
    count = deployment.max_num_seqs
    seqs = "one sequence" if count == 1 else f"{count} sequences"
    length, k = deployment.max_seq_len, deployment.num_draft_tokens
    console.print(f"{heading}, {seqs} of up to {length:,} tokens, k = {k}")


def _model_label(sizes: ModelSizes, precision: Precision) -> str:
    return f"[bold]{sizes.name}[/bold] ({_count(sizes.parameters)}, {precision.name})"


def _print_parts(console: Console, report: PlanReport) -> None:
    """One bar over the accelerator's memory, then a line for each part."""
    plan = report.plan
    console.print(_bar(plan, max(report.accelerator.usable_bytes if report.accelerator else 0, plan.fullest_bytes)))
    several = plan.deployment.num_gpus > 1
    for index, part in enumerate(plan.parts):
        on_fullest = f"   {_gib(part.fullest):>10} on the fullest" if several else ""
        console.print(f"  [{_COLOURS[index % 6]}]■[/] {part.name:<20} {_gib(part.bytes):>10}{on_fullest}")
    on_fullest = f"   {_gib(plan.fullest_bytes):>10} on the fullest" if several else ""
    console.print(f"    {'in all':<20} [bold]{_gib(plan.total_bytes):>10}[/bold]{on_fullest}")
    if len(plan.stages) > 1:
        _print_stages(console, plan)


def _print_stages(console: Console, plan: MemoryPlan) -> None:
    """What each GPU holds, by pipeline stage."""
    for memory in plan.stages:
        stage, gpus = memory.stage, "1 GPU" if memory.num_gpus == 1 else f"{memory.num_gpus} GPUs"
        layers = f"layers {stage.first_layer} to {stage.first_layer + stage.num_layers - 1}"
        console.print(f"    stage {stage.number + 1}: {gpus}, {layers}, {_gib(memory.bytes_each)} on each")


def _bar(plan: MemoryPlan, memory_bytes: int) -> str:
    bar, end, filled_bytes = "", 0, 0
    for index, part in enumerate(plan.parts):
        start, filled_bytes = end, filled_bytes + part.fullest
        end = round(filled_bytes / memory_bytes * _BAR_WIDTH)
        bar += f"[{_COLOURS[index % 6]}]{'█' * (end - start)}[/]"
    return f"  {bar}[dim]{'░' * (_BAR_WIDTH - end)}[/dim]"


def _print_fit(console: Console, fit: MemoryFit, accelerator: Accelerator) -> None:
    usable = f"{_gib(accelerator.usable_bytes)} usable of {accelerator.memory_gib:g} GiB on {accelerator.name}"
    if fit.outcome is FitOutcome.FITS:
        console.print(f"\n[bold green]Fits.[/] {_gib(fit.free_bytes)} free ({usable}).")
        console.print(f"Longest sequence that fits: {fit.longest_seq_len:,} tokens.")
        return
    with_change = fit.outcome is FitOutcome.FITS_IF_CHANGED
    outcome = "[bold yellow]Fits with a change.[/]" if with_change else "[bold red]Does not fit.[/]"
    console.print(f"\n{outcome} {_gib(-fit.free_bytes)} are missing ({usable}).")
    for change in fit.changes:
        free = _gib(change.free_bytes)
        console.print(f"  with {change.description}: [bold]{change.options}[/bold] leaves {free} free")
    if not fit.changes:
        console.print("  not even with the fewest bits or short sequences")


def _print_speed(console: Console, speed: SpeedEstimate) -> None:
    gain = _range(speed.speedup_low, speed.speedup_high, "x")
    console.print(f"\nExpected speed-up, [bold]an estimate[/bold]: [bold]{gain}[/bold] over plain decoding", end="")
    console.print(f" at about {speed.plain_tokens_per_second:,.0f} tokens/s")
    tokens = _range(speed.tokens_per_step_low, speed.tokens_per_step_high, "")
    console.print(f"  {tokens} tokens a step ({speed.basis})", style="dim")
    if speed.speedup_high < 1.0:
        console.print("  [bold red]Do not speculate here[/]: even a good workload would lose.")
    elif speed.speedup_low < 1.0:
        console.print("  It may lose on a bad workload: leave k on auto, or measure with `paceline tune`.")


def _range(low: float, high: float, unit: str) -> str:
    return f"{low:.2f}{unit}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f}{unit} to {high:.2f}{unit}"


def _gib(size: int) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 10 else f"{size / (1 << 20):,.1f} MiB"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"
