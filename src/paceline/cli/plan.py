"""Will it fit, and will it pay? Answered from sizes alone, before anything is downloaded or loaded.

    paceline plan llama-3.1-70b --draft-model llama-3.2-1b --hardware h100
    paceline plan qwen2.5-coder-32b --draft-model qwen2.5-coder-0.5b --hardware rtx-4090 --dtype int4
    paceline plan ./my-model --method eagle --hardware "RTX 3090" --max-seq-len 16384
    paceline plan llama-3.1-70b --hardware h100 --num-gpus 4 --pipeline-parallel-size 2
    paceline plan model.gguf --memory 12             any accelerator, by its memory in GiB
    paceline plan --advise                           questions, then a recommendation with its command
    paceline plan --advise apple                     the recommendation for one situation
    paceline plan --list models                      the catalogue; also hardware, precisions

MODEL is a name of the catalogue, a directory, a config.json, a .gguf file or a Hub id; without one, the default model.
Weights and caches are exact arithmetic. The speed-up is an ESTIMATE from data sheets and published acceptance:
`paceline tune` measures it. Only what the installed engines can run is recommended. With --json the last line on stdout
is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from typing import Any

from paceline.cli.runnable import support
from paceline.config import AUTO, DRAFT_MODEL, KV_CACHE_DTYPES, LOSSY_FP8
from paceline.drafting import registry as drafters
from paceline.errors import OptionError, PairError
from paceline.hub import DEFAULT
from paceline.plan.advise import Question, Recommendation, Situation, advise, first_question, situation_of
from paceline.plan.catalogue import catalogue, find_model
from paceline.plan.fit import FitLimits, memory_fit
from paceline.plan.hardware import (
    GIB,
    Accelerator,
    AcceleratorKind,
    accelerators,
    find_accelerator,
    unnamed_accelerator,
)
from paceline.plan.locate import find_sizes
from paceline.plan.memory import Deployment, kv_bytes, plan_memory
from paceline.plan.methods import PLAIN, DraftMethod, DraftWeights, draft_method, known_weights
from paceline.plan.model_sizes import ModelSizes
from paceline.plan.pairs import expectation_for, expectation_from_rate, pairing_note
from paceline.plan.precision import PRECISIONS, Precision, find_precision
from paceline.plan.predict import SpeedEstimate, estimate_speed
from paceline.plan.report import PlanReport, as_json, print_report
from paceline.plan.support import FLOAT_DTYPES, Support

_DEFAULT_SEQ_LEN = 4096
_LISTS = ("models", "hardware", "precisions")


def draft_methods() -> list[str]:
    """Every method that can be planned. A method that chooses among others cannot."""
    return [name for name in drafters.names() if name != AUTO]


def weights_of(method: str) -> DraftWeights:
    """The weights a method needs beside the target. The table's answers need no torch."""
    if method == DRAFT_MODEL:
        return DraftWeights.MODEL
    if (weights := known_weights(method)) is not None:
        return weights
    by_need = {drafters.WeightsNeeded.MODEL: DraftWeights.MODEL, drafters.WeightsNeeded.HEAD: DraftWeights.HEAD}
    return by_need.get(drafters.spec(method).weights, DraftWeights.NONE)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="the target model (default: the default model)")
    _add_models(parser.add_argument_group("models"))
    _add_sizes(parser.add_argument_group("sizes"))
    _add_hardware(parser.add_argument_group("hardware"))
    situations = [situation.value for situation in Situation]
    parser.add_argument("--advise", nargs="?", const="ask", choices=["ask", *situations], help="what to do, and how")
    parser.add_argument("--list", choices=_LISTS, help="show a catalogue and stop")
    parser.add_argument("--json", action="store_true", help="end with one JSON document on one line")


def _add_models(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--draft-model", metavar="MODEL", help="the small model that drafts")
    group.add_argument("--method", choices=draft_methods(), help="how draft tokens are made")
    group.add_argument("--dtype", metavar="P", help="weights of the target: fp32, bf16, fp16, int8, int4, fp8")
    group.add_argument("--draft-dtype", metavar="P", help="weights of the draft model or head")


def _add_sizes(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-seq-len", type=int, metavar="N", help="longest sequence, prompt and answer together")
    group.add_argument("--max-num-seqs", type=int, default=1, metavar="N", help="sequences at once")
    group.add_argument("-k", "--num-draft-tokens", type=int, default=5, metavar="N", help="draft tokens per step")
    group.add_argument(
        "--kv-cache-dtype", choices=KV_CACHE_DTYPES, default=AUTO, help="lossy-fp8: keys and values in eight bits"
    )
    group.add_argument("--tree-nodes", type=int, metavar="N", help="draft tokens verified per step, in a draft tree")
    group.add_argument("--acceptance-rate", type=float, metavar="RATE", help="predict with this rate, 0 to 1")


def _add_hardware(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--hardware", metavar="NAME", help="the GPU, Apple chip or kind of CPU")
    group.add_argument("--memory", type=float, metavar="GIB", help="its memory, where that differs from the catalogue")
    group.add_argument("--num-gpus", type=int, default=1, metavar="N", help="how many of these GPUs")
    group.add_argument(
        "--pipeline-parallel-size", type=int, default=1, metavar="N",
        help="stages of layers that they form; those of a stage share each layer; default: 1",
    )  # fmt: skip
    group.add_argument(
        "--draft-tensor-parallel-size", type=int, metavar="N",
        help="GPUs that share the draft: 1, or as many as share the target, the default",
    )  # fmt: skip


def main(args: argparse.Namespace) -> int:
    if args.list:
        return _print_list(args.list, args.json)
    if args.advise:
        return _print_advice(args)
    report = _report(args)
    if args.json:
        print(json.dumps(as_json(report)))
    else:
        print_report(report)
    return 0


def _report(args: argparse.Namespace) -> PlanReport:
    installed, accelerator = support(), _accelerator(args)
    deployment = _deployment(args, installed, accelerator)
    on_cpu = accelerator is not None and accelerator.kind is AcceleratorKind.CPU
    engine = installed.engine(
        num_gpus=deployment.num_gpus,
        packs=lambda engine: engine.packs(deployment.precision, deployment.target, on_cpu=on_cpu),
    )
    deployment = replace(deployment, bounded_windows=engine is not None and engine.bounds_windows)
    plan = plan_memory(deployment)
    limits = FitLimits((*installed.dtypes(deployment.target), *_gguf_names(installed)), installed.max_gpus)
    fit = memory_fit(plan, accelerator, limits) if accelerator else None
    runner = installed.runner_of(deployment.target)
    speed, notes = _speed(args, deployment, accelerator), _notes(deployment, installed)
    return PlanReport(plan, accelerator, fit, speed, notes, engine.name if engine and runner else None, runner)


def _deployment(args: argparse.Namespace, installed: Support, accelerator: Accelerator | None) -> Deployment:
    _check_num_gpus(args.num_gpus, installed)
    target = find_sizes(args.model or DEFAULT)
    draft = find_sizes(args.draft_model) if args.draft_model else None
    method = _method(args.method, draft)
    if (refusal := installed.pair_refusal(target, draft, method.name)) and not installed.model_refusal(target):
        raise PairError(refusal)
    on_cpu = accelerator is not None and accelerator.kind is AcceleratorKind.CPU
    precision = _precision(args.dtype, target, installed, on_cpu=on_cpu)
    return Deployment(
        target=target,
        precision=precision,
        method=method,
        draft=draft,
        draft_precision=_precision(args.draft_dtype, draft or target, installed) if args.draft_dtype else None,
        kv_precision=find_precision("fp8") if args.kv_cache_dtype == LOSSY_FP8 else None,
        max_seq_len=min(_DEFAULT_SEQ_LEN, target.max_seq_len) if args.max_seq_len is None else args.max_seq_len,
        max_num_seqs=args.max_num_seqs,
        num_draft_tokens=args.num_draft_tokens,
        tree_nodes=args.tree_nodes,
        num_gpus=args.num_gpus,
        pipeline_parallel_size=args.pipeline_parallel_size,
        draft_tensor_parallel_size=args.draft_tensor_parallel_size,
    )


def _check_num_gpus(num_gpus: int, installed: Support) -> None:
    """Raise OptionError where no engine divides a model over so many GPUs."""
    if num_gpus > installed.max_gpus:
        engines = ", ".join(f"{engine.name}: {engine.max_gpus}" for engine in installed.engines)
        raise OptionError(
            f"--num-gpus {num_gpus}: no engine that is installed divides a model over so many GPUs ({engines}); plan "
            "for one GPU, or install an engine with tensor parallelism"
        )


def _gguf_names(installed: Support) -> list[str]:
    return [scheme.name for scheme in PRECISIONS.values() if scheme.gguf] if installed.packs_gguf else []


def _method(name: str | None, draft: ModelSizes | None) -> DraftMethod:
    """The named method; without a name, a draft model if there is one, or plain decoding."""
    if name is None:
        name = DRAFT_MODEL if draft else PLAIN
    return draft_method(name, weights_of(name))


def _precision(name: str | None, sizes: ModelSizes, installed: Support, *, on_cpu: bool = False) -> Precision:
    """The named precision; else the one that the model would run in: that of its weight format, or by device."""
    if name is None:
        stored = PRECISIONS.get((sizes.stored_precision or "").lower())
        if stored is not None and stored.name not in FLOAT_DTYPES and installed.packs(stored, sizes, on_cpu=on_cpu):
            return stored
        return PRECISIONS["fp32" if on_cpu else "bf16"]
    precision = find_precision(name)
    choices = (*installed.dtypes(sizes), *_gguf_names(installed))
    if precision.name not in choices:
        raise OptionError(f"{sizes.name} cannot run in {precision.name} with what is installed: {', '.join(choices)}")
    return precision


def _accelerator(args: argparse.Namespace) -> Accelerator | None:
    if args.hardware:
        return find_accelerator(args.hardware, args.memory)
    return None if args.memory is None else unnamed_accelerator(args.memory)


def _speed(args: argparse.Namespace, deployment: Deployment, accelerator: Accelerator | None) -> SpeedEstimate | None:
    if args.acceptance_rate is None:
        expectation = expectation_for(deployment)
    else:
        expectation = expectation_from_rate(args.acceptance_rate, deployment.num_draft_tokens)
    return estimate_speed(deployment, accelerator, expectation) if accelerator else None


def _notes(deployment: Deployment, installed: Support) -> tuple[str, ...]:
    target, draft = deployment.target, deployment.draft
    notes = [*target.notes, *(draft.notes if draft else ())]
    if refusal := installed.model_refusal(target):
        notes.append(f"{refusal}; code that comes with it may (--trust-remote-code)")
    if draft and (warning := pairing_note(target, draft)):
        notes.append(warning)
    if deployment.max_seq_len > target.max_seq_len:
        notes.append(f"{target.name} supports {target.max_seq_len:,} tokens, not {deployment.max_seq_len:,}")
    if target.sliding_window:
        notes.append(_window_note(deployment))
    if target.state_values or target.conv_values:
        notes.append(f"{target.name} has recurrent layers: their state does not grow with the sequence")
    if target.stored_precision and not deployment.precision.gguf and _is_gguf(target.stored_precision):
        notes.append(
            f"no engine that is installed keeps {target.stored_precision} weights packed: they are converted to "
            f"{deployment.precision.name}, and that is what is counted; --dtype int8 or int4 is smaller"
        )
    if deployment.method.weights is DraftWeights.HEAD and not _has_head(target, deployment.method.name, installed):
        notes.append(_head_note(deployment.method.name))
    if deployment.num_gpus > 1:
        notes.append(_division_note(deployment))
    return tuple(notes)


def _head_note(method: str) -> str:
    """Where a head comes from that paceline does not bring."""
    from paceline.train.registry import trainer_names

    if method in trainer_names():
        return f"no head comes with paceline for it: train one with `paceline train {method}`"
    return f"method {method} needs a checkpoint that was published with such a head; paceline does not train one"


def _window_note(deployment: Deployment) -> str:
    if deployment.bounded_windows:
        return "layers with a sliding window are counted with no more tokens than it"
    bounded = replace(deployment, bounded_windows=True)
    saved = kv_bytes(deployment.target, deployment) - kv_bytes(bounded.target, bounded)
    return (
        "layers with a sliding window are counted at full length, an upper bound; an engine that drops what has "
        f"left the window needs {saved / GIB:.1f} GiB less"
    )


def _division_note(deployment: Deployment) -> str:
    tensor, pipeline = deployment.tensor_parallel_size, deployment.pipeline_parallel_size
    note = f"--tensor-parallel-size {tensor} --pipeline-parallel-size {pipeline}; sampling is on the last stage"
    if deployment.drafter is None:
        return note
    shared = f"shared by {deployment.draft_gpus} GPUs" if deployment.draft_gpus > 1 else "whole on one GPU"
    return f"{note}, and so is the draft, {shared}"


def _is_gguf(name: str) -> bool:
    scheme = PRECISIONS.get(name.lower())
    return scheme is not None and scheme.gguf


def _has_head(target: ModelSizes, method: str, installed: Support) -> bool:
    entry = find_model(target.name)
    return any(installed.has_head(method, name) for name in (entry.short_names if entry else {target.name}))


def _print_list(which: str, as_json: bool) -> int:
    rows = {"models": _model_rows, "hardware": _hardware_rows, "precisions": _precision_rows}[which]()
    if as_json:
        print(json.dumps({which: rows}))
        return 0
    for row in rows:
        print("  ".join(f"{value:<22}" if isinstance(value, str) else f"{value:>10g}" for value in row.values()))
    return 0


def _model_rows() -> list[dict[str, Any]]:
    return [
        {"name": entry.name, "billions": round(entry.sizes.parameters / 1e9, 3), "tokenizer": entry.sizes.tokenizer}
        for entry in catalogue()
    ]


def _hardware_rows() -> list[dict[str, Any]]:
    return [
        {
            "name": accelerator.name,
            "memory_gib": accelerator.memory_gib,
            "bandwidth_gbs": accelerator.bandwidth_gbs,
            "kind": accelerator.kind.value,
        }
        for accelerator in accelerators()
    ]


def _precision_rows() -> list[dict[str, Any]]:
    return [{"name": scheme.name, "bits": scheme.body.bits} for scheme in PRECISIONS.values()]


def _print_advice(args: argparse.Namespace) -> int:
    recommendations = [advise(situation, args.model, support()) for situation in _situations(args)]
    if args.json:
        print(json.dumps({"advice": [_recommendation_json(entry) for entry in recommendations]}))
        return 0
    for recommendation in recommendations:
        _print_recommendation(recommendation)
    return 0


def _situations(args: argparse.Namespace) -> list[Situation]:
    """The named situation; else the one the other options imply; else the one the answers lead to; else all."""
    if args.advise != "ask":
        return [Situation(args.advise)]
    if args.model is not None or args.hardware or args.num_gpus > 1:
        return [situation_of(_accelerator(args), args.num_gpus, args.model, support())]
    if sys.stdin.isatty() and not args.json:
        return [_answered(first_question())]
    return list(Situation)


def _answered(question: Question | Situation) -> Situation:
    """Ask until the answers lead to a situation."""
    while isinstance(question, Question):
        answers = list(question.answers)
        print(question.text)
        for number, answer in enumerate(answers, 1):
            print(f"  {number}  {answer}")
        reply = input("> ").strip()
        if reply.isdecimal() and 1 <= int(reply) <= len(answers):
            question = question.answers[answers[int(reply) - 1]]
        else:
            print(f"Please type a number from 1 to {len(answers)}.")
    return question


def _recommendation_json(recommendation: Recommendation) -> dict[str, Any]:
    return {**asdict(recommendation), "situation": recommendation.situation.value}


def _print_recommendation(recommendation: Recommendation) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(f"[bold]{recommendation.situation.value}[/bold]: {recommendation.title}")
    console.print(f"{recommendation.why}", style="dim")
    for command in recommendation.commands:
        console.print(f"  {command}", soft_wrap=True, markup=False, style="bold")
    console.print()
