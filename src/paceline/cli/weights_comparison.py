"""bench --against: one model's weights beside another's, such as a GGUF file beside the original.

Speed and memory of both, plainly decoded, one after the other; and how far the distributions are apart over a text.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli import loading
from paceline.cli.candidates import base_config, pool_of
from paceline.config import NONE, EngineConfig
from paceline.errors import OptionError, PairError, PromptError
from paceline.tuned import LOCAL

if TYPE_CHECKING:
    from paceline.bench.distance import TextDistance
    from paceline.bench.memory_use import MemoryUse
    from paceline.bench.results import LosslessResult, Measurements
    from paceline.bench.sweep import SettingRun, SweepPlan
    from paceline.build import OpenModel
    from paceline.core.protocols import Tokenizer
    from paceline.core.types import ModelInfo

TEXT = "builtin"
TEXT_DOMAINS = "builtin:summarising,technical,code"
TEXT_TOKENS, ENGINE_TEXT_TOKENS = 2048, 256  # an engine is asked at every position, a model reads them together
MakePlan = Callable[["Tokenizer"], "SweepPlan"]


def add_against_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("another model's weights")
    group.add_argument("--against", metavar="MODEL", help="the original: its speed, memory and distance instead")
    group.add_argument("--against-dtype", metavar="T", help="dtype of the original; default: by device")
    group.add_argument("--text", default=TEXT, metavar="FILE", help="the text of the distance; default: builtin")
    group.add_argument("--text-tokens", type=int, metavar="N", help=f"of it; default: {TEXT_TOKENS}")


@dataclass(frozen=True, slots=True)
class Side:
    """One model: what its engine measured, and the memory it took."""

    info: ModelInfo
    plan: SweepPlan
    runs: list[SettingRun]
    memory: MemoryUse


def compare_weights(args: argparse.Namespace, make_plan: MakePlan) -> dict[str, Any]:
    """The record of a run: plain decoding of the tested model, the original as a baseline, and `against`.

    make_plan: the sweep of plain decoding, by the tokenizer of the tested model.
    """
    from paceline.bench.environment import new_run, versions
    from paceline.bench.results import setting_record
    from paceline.engines.registry import spec

    configs = _configs(args)
    text = read_text(args.text)
    distance = _distance(args, configs, text)
    tested = _measured(configs.tested, make_plan)
    original = _measured(configs.original, make_plan)
    measurements = _measurements(tested, original, args.against)
    run = new_run(["paceline", *sys.argv[1:]], tested.info, None)
    run |= {"engine": args.engine, "versions": versions(spec(args.engine).packages), "pass_seconds": {}}
    run["complete"] = True
    run["settings"] = [setting_record(measurements, name, _not_compared, None) for name in measurements.by_name]
    rates = [setting["tokens_per_second"]["median"] for setting in run["settings"]]
    run["against"] = _record(args, tested, original, distance, rates)
    return run


@dataclass(frozen=True, slots=True)
class ConfigPair:
    """The tested model with the user's options, and the original on paceline's own engine."""

    tested: EngineConfig
    original: EngineConfig


def _configs(args: argparse.Namespace) -> ConfigPair:
    tested = base_config(args, prefix_cache_tokens=0)
    own = {"device": args.device, "max_model_len": args.max_model_len, "trust_remote_code": args.trust_remote_code}
    original = EngineConfig.create(
        args.against, method=NONE, num_draft_tokens=0, dtype=args.against_dtype, prefix_cache_tokens=0, **own
    )
    return ConfigPair(tested, original)


def read_text(source: str) -> str:
    """The text of a file, or passages of the built-in prompts. Raises PromptError."""
    from paceline.bench.workloads import load_prompts

    if source == TEXT:
        return "\n\n".join(prompt.text for prompt in load_prompts(TEXT_DOMAINS))
    try:
        return Path(source).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{source} cannot be read as text: {error}") from error


# --- speed and memory -------------------------------------------------------------------------------------------------


def _measured(config: EngineConfig, make_plan: MakePlan) -> Side:
    from paceline.bench.candidates import DecodeSetting
    from paceline.bench.engine_pool import engine_sweep
    from paceline.bench.memory_use import memory_use

    before = memory_use()
    with pool_of({NONE: config}, config.max_num_seqs) as pool:
        decoder = pool.decoder(DecodeSetting(NONE))
        plan = make_plan(decoder.tokenizer)
        plan = replace(plan, settings=plan.settings[:1])  # plain decoding at the first temperature
        runs = list(engine_sweep(pool, plan))
        return Side(decoder.info, plan, runs, memory_use().since(before))


def _measurements(tested: Side, original: Side, name: str) -> Measurements:
    """Both sides in one record; the original is a baseline."""
    from paceline.bench.results import Measurements

    measurements = Measurements(tested.plan)
    for run in tested.runs:
        measurements.add(run)
    for run in original.runs:
        measurements.add(replace(run, name=f"against {name}", is_baseline=True))
    return measurements


def _not_compared(measurements: Measurements, name: str) -> LosslessResult:
    from paceline.bench.outcome import Outcome
    from paceline.bench.results import LosslessResult

    if measurements.by_name[name][0].is_baseline:
        return LosslessResult(Outcome.NOT_SHOWN, "other weights: their distance is measured instead")
    return LosslessResult(Outcome.LOSSLESS, "plain decoding itself")


# --- distance ---------------------------------------------------------------------------------------------------------


def _distance(args: argparse.Namespace, configs: ConfigPair, text: str) -> TextDistance:
    """By logits where paceline runs the tested model itself, else by what its engine shows of its distribution."""
    from paceline.bench.distance import model_distance, text_windows

    with _opened(configs.original) as original:
        if configs.tested.engine != LOCAL:
            return _engine_distance(args, configs.tested, original, text)
        with _opened(configs.tested) as tested:
            _check_vocabulary(args, tested.tokenizer, original)
            windows = text_windows(tested.tokenizer.encode(text), args.text_tokens or TEXT_TOKENS)
            return model_distance(original.target, tested.target, windows)


def _engine_distance(args: argparse.Namespace, config: EngineConfig, original: OpenModel, text: str) -> TextDistance:
    """Each position continues the one before, so the engine's prefix cache reads a text once."""
    from paceline.bench.distance import engine_distance, text_windows
    from paceline.cli.flags import open_decoder

    decoder = open_decoder(config.with_options(prefix_cache_tokens=None))
    try:
        _check_vocabulary(args, decoder.tokenizer, original)
        windows = text_windows(decoder.tokenizer.encode(text), args.text_tokens or ENGINE_TEXT_TOKENS)
        return engine_distance(original.target, decoder, windows)
    finally:
        decoder.close()


@contextmanager
def _opened(config: EngineConfig) -> Iterator[OpenModel]:
    from paceline.build import open_model

    loading.begin(str(config.model.model))
    opened = open_model(config)
    loading.done()
    yield opened


def _check_vocabulary(args: argparse.Namespace, tokenizer: Tokenizer, original: OpenModel) -> None:
    from paceline.hub.vocabulary import compare

    compared = compare(tokenizer.hf_tokenizer, original.tokenizer.hf_tokenizer)
    if not compared.same:
        raise PairError(
            f"{args.model} and {args.against} have different vocabularies ({compared.differing} tokens differ), so "
            "their distributions cannot be compared; name the model that the weights were made from"
        )


# --- the record -------------------------------------------------------------------------------------------------------


def _record(
    args: argparse.Namespace, tested: Side, original: Side, distance: TextDistance, rates: list[float]
) -> dict[str, Any]:
    from paceline.bench.environment import model_record

    record = {
        "model": model_record(original.info),
        "tokens_per_second": rates[1],
        "speed_ratio": rates[0] / rates[1],
        "memory": {"tested": asdict(tested.memory), "original": asdict(original.memory)},
        "distance": distance.as_dict(),
    }
    return {**record, "sentence": sentence(args, tested, original, distance, rates)}


def sentence(
    args: argparse.Namespace, tested: Side, original: Side, distance: TextDistance, rates: list[float]
) -> str:
    """Speed, memory and distance in one sentence."""
    memory = [side.memory.total for side in (tested, original)]
    sizes = "" if None in memory else f" in {_mib(memory[0])} of memory beside {_mib(memory[1])}"
    best, divergence = distance.same_best, distance.divergence
    least = "at least " if distance.is_bound else ""
    names = [f"{name} ({side.info.dtype})" for name, side in ((args.model, tested), (args.against, original))]
    return (
        f"{names[0]} generates {rates[0]:.1f} tokens/s, {rates[0] / rates[1]:.2f}x {names[1]}{sizes}; "
        f"mean KL {least}{divergence.mean:.4f}{_error(divergence.error)} nats, the same likeliest token at "
        f"{best.mean:.1%}{_error(best.error, '.1%')} of {distance.positions:,} positions."
    )


def _mib(size: int | None) -> str:
    return f"{(size or 0) / (1 << 20):,.0f} MiB"


def _error(error: float | None, form: str = ".4f") -> str:
    return "" if error is None else f" ± {error:{form}}"


def check_against(args: argparse.Namespace) -> None:
    """Raise OptionError for options that do not go with --against."""
    if args.text_tokens is not None and args.text_tokens < 2:
        raise OptionError(f"--text-tokens must be 2 or more, not {args.text_tokens}")
    if args.baselines:
        raise OptionError("--against and --baselines do not go together: run bench twice")
