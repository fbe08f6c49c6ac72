"""bench --against: one model's weights beside another's, such as a GGUF file beside the original.

Speed and memory of both, plainly decoded, in turns; and how far the distributions are apart over a text.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
    from paceline.bench.engine_pool import EnginePool
    from paceline.bench.memory_use import MemoryUse
    from paceline.bench.results import LosslessResult, Measurements
    from paceline.bench.sweep import SweepPlan
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
    """One model that is open: its engine, its prompts, and the memory it took."""

    pool: EnginePool
    info: ModelInfo
    plan: SweepPlan
    memory: MemoryUse


@dataclass(frozen=True, slots=True)
class BothSides:
    """The tested model and the original, measured in turns."""

    tested: Side
    original: Side
    measurements: Measurements


def compare_weights(args: argparse.Namespace, make_plan: MakePlan) -> dict[str, Any]:
    """The record of a run: plain decoding of the tested model, the original as a baseline, and `against`.

    make_plan: the sweep of plain decoding, by the tokenizer of the tested model.
    """
    from paceline.bench.environment import new_run, versions
    from paceline.bench.results import setting_record
    from paceline.engines.registry import spec

    configs = _configs(args)
    text = read_text(args.text)
    sides = _measured(configs, make_plan, args.against)
    distance = _distance(args, configs, text)
    run = new_run(["paceline", *sys.argv[1:]], sides.tested.info, None)
    run |= {"engine": args.engine, "versions": versions(spec(args.engine).packages), "pass_seconds": {}}
    run["complete"] = True
    names = sides.measurements.by_name
    run["settings"] = [setting_record(sides.measurements, name, _not_compared, None) for name in names]
    rates = [setting["tokens_per_second"]["median"] for setting in run["settings"]]
    run["against"] = _record(args, sides, distance, rates)
    return run


@dataclass(frozen=True, slots=True)
class ConfigPair:
    """The tested model with the user's options, and the original on paceline's own engine."""

    tested: EngineConfig
    original: EngineConfig


def _configs(args: argparse.Namespace) -> ConfigPair:
    tested = base_config(args, acceptance=None, prefix_cache_tokens=0, max_num_seqs=args.max_num_seqs)
    names = ("max_num_seqs", "device", "max_model_len", "trust_remote_code")
    own = {name: getattr(args, name) for name in names}
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


def _measured(configs: ConfigPair, make_plan: MakePlan, name: str) -> BothSides:
    """Both models stay open until both are measured: memory that one gave back would hide what the other takes."""
    from paceline.bench.engine_pool import measured_run
    from paceline.bench.results import Measurements

    with ExitStack() as stack:
        tested = _open_side(stack, configs.tested, make_plan)
        original = _open_side(stack, configs.original, make_plan)
        plan = tested.plan
        measurements = Measurements(plan)
        for turn in range(plan.repeats * len(plan.batches)):
            repeat, number = divmod(turn, len(plan.batches))
            for side in (tested, original) if turn % 2 == 0 else (original, tested):
                run = measured_run(side.pool, plan.settings[0], side.plan, repeat, number)
                own = run if side is tested else replace(run, name=f"against {name}", is_baseline=True)
                measurements.add(own)
        return BothSides(tested, original, measurements)


def _open_side(stack: ExitStack, config: EngineConfig, make_plan: MakePlan) -> Side:
    """Open a model and warm it up; its memory is what that added."""
    from paceline.bench.candidates import DecodeSetting
    from paceline.bench.memory_use import memory_use
    from paceline.bench.sweep import WARM_UP

    before = memory_use()
    pool = stack.enter_context(pool_of({NONE: config}, config.max_num_seqs))
    decoder = pool.decoder(DecodeSetting(NONE))
    plan = make_plan(decoder.tokenizer)
    plan = replace(plan, settings=plan.settings[:1])  # plain decoding at the first temperature
    pool.run(plan.settings[0], [plan.shortest_prompt], WARM_UP, plan.seed)
    return Side(pool, decoder.info, plan, memory_use().since(before))


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
    args: argparse.Namespace, sides: BothSides, distance: TextDistance, rates: list[float]
) -> dict[str, Any]:
    from paceline.bench.environment import model_record

    return {
        "model": model_record(sides.original.info),
        "tokens_per_second": rates[1],
        "speed_ratio": rates[0] / rates[1],
        "memory": {"tested": asdict(sides.tested.memory), "original": asdict(sides.original.memory)},
        "distance": distance.as_dict(),
        "sentence": sentence(args, sides, distance, rates),
    }


def sentence(args: argparse.Namespace, sides: BothSides, distance: TextDistance, rates: list[float]) -> str:
    """Speed, memory and distance in one sentence."""
    tested, original = sides.tested, sides.original
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
    """Raise OptionError for options that do not go with --against, or not without it."""
    if args.against is None:
        given = {"--against-dtype": args.against_dtype, "--text-tokens": args.text_tokens, "--text": args.text != TEXT}
        for flag in (flag for flag, value in given.items() if value):
            raise OptionError(f"{flag} goes with --against MODEL, the model to compare with")
        return
    if args.text_tokens is not None and args.text_tokens < 2:
        raise OptionError(f"--text-tokens must be 2 or more, not {args.text_tokens}")
    if args.baselines:
        raise OptionError("--against and --baselines do not go together: run bench twice")
