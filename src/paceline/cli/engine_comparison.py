"""tune over several engines: each measured as a whole, the fastest named, with the lines that start it."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.candidates import ALL, base_config, engine_methods, known_methods, method_configs, pool_of
from paceline.cli.flags import flag_name, named_values
from paceline.cli.terminal import note
from paceline.config import NONE, DistributedConfig, EngineConfig
from paceline.engines.registry import names, spec
from paceline.errors import OptionError, PacelineError
from paceline.tuned import LOCAL, TunedProfile, write_profile

if TYPE_CHECKING:
    from paceline.bench.candidates import DecodeSetting
    from paceline.bench.engine_tune import EngineAdvice, EngineRate
    from paceline.bench.tune import TunePlan, TuneResult
    from paceline.bench.workloads import WorkloadPrompt
    from paceline.core.protocols import Tokenizer


NO_PROFILE = "none"  # of --out


@dataclass(frozen=True, slots=True)
class LocalTuning:
    """What tuning paceline's own engine found, and the profile that records it."""

    result: TuneResult
    profile: TunedProfile


TuneLocal = Callable[[argparse.Namespace, "list[WorkloadPrompt]"], LocalTuning]


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """An engine, and the model that it runs. named: by the user, so that a failure of it is an error."""

    engine: str
    model: str
    named: bool = False


def chosen_engines(text: str | None, model: str) -> list[EngineChoice]:
    """Engines of --engines; without it, those that are installed and can run the model. Raises OptionError."""
    if text is None:
        able = {name: spec(name).model_for(model) for name in names() if spec(name).installed}
        found = [EngineChoice(name, own) for name, own in able.items() if own is not None]
        return sorted(found, key=lambda choice: choice.engine != LOCAL)
    return [_named(part.strip(), model) for part in text.split(",") if part.strip()]


def _named(part: str, model: str) -> EngineChoice:
    engine, _, given = part.partition("=")
    own = given or spec(engine).model_for(model)
    if own is None:
        raise OptionError(f"the engine {engine} cannot run {model}; name a model for it: --engines {engine}=MODEL")
    return EngineChoice(engine, own, named=True)


# --- measuring --------------------------------------------------------------------------------------------------------


def compare_engines(
    args: argparse.Namespace, choices: list[EngineChoice], prompts: list[WorkloadPrompt], tune_local: TuneLocal
) -> int:
    """Measure every engine, print and write what is fastest."""
    from paceline.bench.engine_tune import advise_engine

    _check_engine_options(args, choices)
    rates: list[EngineRate] = []
    local: LocalTuning | None = None
    for choice in choices:
        try:
            local = tune_local(args, prompts) if choice.engine == LOCAL else local
            rates += _rates(args, choice, prompts, local)
        except PacelineError as error:
            if choice.named:
                raise
            note(f"not tried: {choice.engine} ({error})")
    if not rates:
        raise OptionError(f"no engine can run {args.model} here; there are {', '.join(names())}")
    advice = advise_engine(rates)
    _print(args, advice, rates, command_lines(args, advice.best, rates))
    write(args, _profile(advice.best, local))
    return 0


def _rates(
    args: argparse.Namespace, choice: EngineChoice, prompts: list[WorkloadPrompt], local: LocalTuning | None
) -> list[EngineRate]:
    from paceline.bench.candidates import DecodeSetting
    from paceline.bench.engine_tune import measure_settings
    from paceline.hub.progress import track

    with pool_of(_configs(args, choice), args.max_num_seqs) as pool:
        plan = _plan(args, pool.decoder(DecodeSetting(NONE)).tokenizer, prompts)
        settings = _settings(args, choice, pool.drafting_methods, local)
        rates = measure_settings(pool, plan, settings, track)
        for setting, why in pool.unavailable.items():
            note(f"not tried: {choice.engine} {setting} ({why})")
        return rates


def _settings(
    args: argparse.Namespace, choice: EngineChoice, methods: list[str], local: LocalTuning | None
) -> list[DecodeSetting]:
    """Of paceline's own engine what tuning it advises; of others each method with a small and a large k."""
    from paceline.bench.candidates import DecodeSetting
    from paceline.bench.engine_tune import tried_settings

    if choice.engine != LOCAL or local is None:
        return tried_settings(methods, args.temperature)
    advice, plain = local.result.advice, DecodeSetting(NONE, 0, args.temperature)
    best = DecodeSetting(advice.method, advice.num_draft_tokens, args.temperature)
    return [plain] if best.is_plain else [plain, best]


def _plan(args: argparse.Namespace, tokenizer: Tokenizer, prompts: list[WorkloadPrompt]) -> TunePlan:
    from paceline.bench.measure import OutputLength
    from paceline.bench.tune import TunePlan

    ids = [prompt.encode(tokenizer) for prompt in prompts]
    return TunePlan(ids, OutputLength(args.max_new_tokens), args.temperature, args.max_num_seqs, args.repeats)


# --- configurations ---------------------------------------------------------------------------------------------------


def _configs(args: argparse.Namespace, choice: EngineChoice) -> dict[str, EngineConfig]:
    """By method. Options that another engine is meant to have are left out, and so is a draft model it cannot run.

    A dtype is for engines that read the model's files; where an engine opens them itself, the file decides.
    """
    chosen = spec(choice.engine)
    given = named_values("--engine-option", args.engine_options or ())
    options: dict[str, Any] = {name: value for name, value in given.items() if name in _option_names(choice.engine)}
    overrides: dict[str, Any] = {"engine": choice.engine, "model": choice.model, "engine_options": options}
    defaults = {item.name: item.default for item in fields(DistributedConfig) if item.name not in chosen.distributed}
    if not chosen.reads_files:
        overrides |= {"dtype": None, "draft_dtype": None}
    draft = chosen.model_for(args.draft_model) if args.draft_model else None
    return method_configs(base_config(args, **overrides, **defaults), _methods(args, choice.engine, draft), draft)


def _methods(args: argparse.Namespace, engine: str, draft_model: str | None) -> list[str]:
    if args.methods == ALL:
        return engine_methods(ALL, engine, has_draft=draft_model is not None).methods
    known = known_methods(engine)
    return [name.strip() for name in args.methods.split(",") if name.strip() in known]


def _option_names(engine: str) -> set[str]:
    return {option.name for option in spec(engine).options}


def _check_engine_options(args: argparse.Namespace, choices: list[EngineChoice]) -> None:
    """Raise OptionError for an engine option that none of the engines has."""
    known = {name for choice in choices for name in _option_names(choice.engine)}
    for name in named_values("--engine-option", args.engine_options or ()):
        if name not in known:
            raise OptionError(f"none of these engines has an option {name!r}; they have {', '.join(sorted(known))}")


# --- what is printed and written --------------------------------------------------------------------------------------


def check_out(args: argparse.Namespace) -> None:
    """Raise OptionError for a profile that could not be written, before anything is measured."""
    from paceline.bench.environment import check_writable

    if args.out != NO_PROFILE:
        check_writable(Path(args.out).expanduser(), "--out")


def write(args: argparse.Namespace, profile: TunedProfile) -> None:
    """The profile, and a line that says who uses it."""
    if args.out == NO_PROFILE:
        return
    path = Path(args.out).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_profile(profile, path)
    conditions = [f"--dtype {profile.dtype}"] if profile.dtype else []
    conditions += [f"--engine {profile.engine}"] if profile.engine != LOCAL else []
    condition = f" with {' '.join(conditions)}" if conditions else ""
    print(f"paceline: wrote {args.out}; generate, chat and serve use it{condition}", file=sys.stderr)


def _profile(best: EngineRate, local: LocalTuning | None) -> TunedProfile:
    if best.engine == LOCAL and local is not None:
        return local.profile
    return TunedProfile(
        target=best.model,
        device=best.device,
        method=best.setting.method,
        num_draft_tokens=best.setting.num_draft_tokens,
        draft_model=best.config.speculative.draft_model,
        dtype=best.config.model.dtype,
        engine=best.engine,
    )


@dataclass(frozen=True, slots=True)
class CommandLines:
    """How to start what is fastest: with paceline, and with the engine's own server where it has one."""

    paceline: str
    server: str | None = None


def command_lines(args: argparse.Namespace, best: EngineRate, rates: list[EngineRate]) -> CommandLines:
    """The exact lines. An engine that takes k by load gets the schedule that was measured."""
    from paceline.bench.engine_tune import k_by_load

    chosen, config = spec(best.engine), best.config.with_options(prefix_cache_tokens=None)
    if chosen.k_by_load is not None and args.max_num_seqs > 1 and not best.setting.is_plain:
        schedule = k_by_load(best, rates)
        config = config.with_options(
            num_draft_tokens=max(entry[2] for entry in schedule) or best.setting.num_draft_tokens,
            engine_options={**config.engine_options, **chosen.k_by_load(schedule)},
        )
    server = None if chosen.server_command is None else chosen.server_command(config)
    return CommandLines(serve_command(config), server)


def serve_command(config: EngineConfig) -> str:
    """`paceline serve` with what differs from its defaults."""
    speculative, model = config.speculative, config.model
    parts = ["paceline", "serve", str(model.model)]
    flags: dict[str, Any] = {
        "engine": None if config.engine == LOCAL else config.engine,
        "dtype": model.dtype,
        "device": model.device,
        "method": speculative.method,
        "draft_model": speculative.draft_model,
        "num_draft_tokens": None if speculative.method == NONE else speculative.num_draft_tokens,
        "max_num_seqs": config.max_num_seqs if config.max_num_seqs > 1 else None,
        **{name: getattr(config.distributed, name) for name in config.distributed.chosen},
    }
    for name, value in flags.items():
        parts += [] if value is None else [flag_name(name), str(value)]
    for name, value in config.engine_options.items():
        parts += ["--engine-option", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    return shlex.join(parts)


def _print(args: argparse.Namespace, advice: EngineAdvice, rates: list[EngineRate], lines: CommandLines) -> None:
    if args.json:
        document = {
            "sentence": advice.sentence,
            "engine": advice.best.engine,
            "best": advice.best.as_dict(),
            "command": lines.paceline,
            "server_command": lines.server,
            "rates": [rate.as_dict() for rate in rates],
        }
        print(json.dumps(document))
        return
    _print_table(rates)
    print(f"\n  {lines.paceline}")
    if lines.server:
        print(f"  {lines.server}")
    print(f"\n{advice.sentence}")


def _print_table(rates: list[EngineRate]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("engine", "setting", "tokens/s", "τ", "against its plain decoding"):
        table.add_column(name, justify="right" if name in ("tokens/s", "τ") else "left")
    for rate in sorted(rates, key=lambda rate: -rate.tokens_per_second):
        figures = (f"{rate.tokens_per_second:.1f}", f"{rate.tokens_per_step:.2f}")
        table.add_row(rate.engine, str(rate.setting), *figures, rate.outcome.value)
    Console().print(table)
