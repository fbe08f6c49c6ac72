"""What bench, audit and tune measure: a loaded model with its methods, or an engine as a whole."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from paceline.cli import loading
from paceline.cli.flags import add_config_flags, config_from_args, open_decoder
from paceline.cli.terminal import quiet_transformers
from paceline.config import NONE, EngineConfig
from paceline.engines.registry import spec
from paceline.errors import OptionError

if TYPE_CHECKING:
    from paceline.bench.candidates import Candidates, EngineBuilder
    from paceline.bench.engine_pool import EnginePool
    from paceline.build import OpenModel
    from paceline.core.protocols import Runner
    from paceline.drafting.registry import WeightsNeeded

ALL = "all"
# Fields of the configuration for which these commands have flags of their own, or no use.
OWN_FLAGS = ("method", "num_draft_tokens", "acceptance", "max_num_seqs", "prefix_cache_tokens")


def add_candidate_flags(parser: argparse.ArgumentParser, *, skip: tuple[str, ...] = ()) -> None:
    """Which model and which methods; shared by bench, audit and tune."""
    add_config_flags(parser, positional_model=True, skip=(*OWN_FLAGS, *skip))
    parser.add_argument(
        "--methods", default=ALL, metavar="M", help="separated by commas; all: those that work here. {methods}"
    )


def add_workload_flags(parser: argparse.ArgumentParser, *, limit: int, repeats: int) -> None:
    """Which prompts, and how long and how often; shared by bench and tune."""
    workload = parser.add_argument_group("workload")
    workload.add_argument("--prompts", default="builtin", metavar="FILE", help="builtin, builtin:code,chat, or a file")
    workload.add_argument("--limit", type=int, default=limit, metavar="N", help="prompts, spread over the domains")
    workload.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="default: 64")
    workload.add_argument("--max-num-seqs", type=int, default=1, metavar="N", help="prompts run together; default: 1")
    workload.add_argument("--repeats", type=int, default=repeats, metavar="N", help=f"default: {repeats}")


def check_counts(args: argparse.Namespace) -> None:
    """Raise OptionError for numbers below 1."""
    for name, value in (("max-new-tokens", args.max_new_tokens), ("repeats", args.repeats)):
        if value < 1:
            raise OptionError(f"--{name} must be 1 or more, not {value}")


def open_candidates(args: argparse.Namespace, **overrides: Any) -> Candidates:
    """Load the model once and build the drafter of every method that works with it."""
    from paceline.bench import candidates
    from paceline.build import open_model

    methods = chosen_methods(args.methods)
    config = base_config(args, **overrides)
    quiet_transformers()
    loading.begin(str(config.model.model))
    opened = open_model(config)
    configs = method_configs(config, methods, args.draft_model)
    models = _HfModels(config, opened, args.draft_model)
    built = candidates.open_candidates(opened.target, opened.tokenizer, configs, builder(opened), cache(models.open))
    models.draft_runner = built.draft_runner
    loading.done()
    check_named(args.methods, built)
    return built


def base_config(args: argparse.Namespace, **overrides: Any) -> EngineConfig:
    """What the flags say, without a method. No profile: what is measured must not depend on an earlier measurement."""
    decided = {"method": NONE, "draft_model": None, "num_draft_tokens": 0, "acceptance": "token", "max_num_seqs": 1}
    return config_from_args(args, with_profile=False, **{**decided, **overrides})


def builder(opened: OpenModel) -> EngineBuilder:
    """build_engine for targets that take the place of the opened one."""
    from paceline.build import build_engine

    return lambda config, target: build_engine(config, replace(opened, target=target))


def chosen_methods(names: str) -> list[str]:
    """Methods of --methods. Raises OptionError for an unknown one."""
    from paceline.drafting import registry
    from paceline.drafting.router import PREDICTION

    known = list(registry.names())
    if names == ALL:
        return [name for name in known if name != PREDICTION]  # its drafts come with the requests of a client
    methods = [name.strip() for name in names.split(",") if name.strip()]
    for name in methods:
        if name not in known:
            raise OptionError(f"there is no method {name!r}; the methods are {', '.join(known)}")
    return methods


def method_configs(config: EngineConfig, methods: list[str], draft_model: Any) -> dict[str, EngineConfig]:
    """A configuration for each method, plain decoding first.

    What --draft-model names goes to the methods that need a model; where none of them is chosen, it is a head.
    """
    from paceline.drafting.registry import WeightsNeeded, takes_draft_model

    takers = [name for name in methods if weights_needed(name) is WeightsNeeded.MODEL]
    takers = takers or [name for name in methods if takes_draft_model(name)] or methods
    configs = {NONE: config.with_options(method=NONE, draft_options={})}
    for name in methods:
        own = draft_model if name in takers else None
        configs.setdefault(name, config.with_options(method=name, draft_model=own))
    return configs


def check_named(names: str, candidates: Candidates) -> None:
    """Raise OptionError where a method that the user named cannot be used."""
    if names != ALL and candidates.unavailable:
        raise OptionError("; ".join(f"method {name}: {why}" for name, why in candidates.unavailable.items()))


@dataclass(slots=True, eq=False)
class _HfModels:
    """The models under test as transformers runs them."""

    config: EngineConfig
    opened: OpenModel
    draft_model: Any
    draft_runner: Runner | None = None

    def open(self, role: str) -> Any | None:
        """The "target" or the "draft". None where there is none, or in a dtype that transformers does not have."""
        if role == "target":
            return self._load(self.opened.target, str(self.config.model.model))
        return None if self.draft_runner is None else self._load(self.draft_runner, str(self.draft_model))

    def _load(self, runner: Runner, name: str) -> Any | None:
        """The model that a runner runs, or else one loaded from the same files."""
        from paceline.hub import locate
        from paceline.runners.huggingface_model import TransformersRunner
        from paceline.runners.loading import DTYPES, load_model

        if isinstance(runner, TransformersRunner):
            return runner.model
        if runner.info.dtype not in DTYPES:
            return None
        files, trust = locate(name), self.config.model.trust_remote_code
        dtype = DTYPES[runner.info.dtype]
        return load_model(files.folder, files.name, dtype, self.opened.device, trust_remote_code=trust)


# --- an engine as a whole ---------------------------------------------------------------------------------------------


@contextmanager
def open_pool(args: argparse.Namespace) -> Iterator[EnginePool]:
    """The engine that the flags name, with every method it has here. Nothing is opened before it is used."""
    config = base_config(args)
    chosen = engine_methods(args.methods, config.engine, has_draft=bool(args.draft_model))
    with pool_of(method_configs(config, chosen.methods, args.draft_model), args_num_seqs(args)) as pool:
        pool.unavailable |= chosen.unavailable
        yield pool


@contextmanager
def pool_of(configs: dict[str, EngineConfig], max_num_seqs: int) -> Iterator[EnginePool]:
    """A pool that is closed at the end."""
    from paceline.bench.engine_pool import EnginePool

    quiet_transformers()
    pool = EnginePool(configs, open_decoder, max_num_seqs)
    try:
        yield pool
    finally:
        pool.close()


def check_measured(names: str, pool: EnginePool) -> None:
    """Raise OptionError where a method that the user named could not be opened."""
    for setting, why in pool.unavailable.items() if names != ALL else ():
        raise OptionError(f"method {setting}: {why}")


def args_num_seqs(args: argparse.Namespace) -> int:
    """--max-num-seqs of the commands that have it; audit draws a few sequences at a time."""
    from paceline.bench.engine_audit import CONCURRENCY

    return int(vars(args).get("max_num_seqs", CONCURRENCY))


@dataclass(frozen=True, slots=True)
class EngineMethods:
    """Methods of an engine to measure, and those that cannot be, with the reason."""

    methods: list[str]
    unavailable: dict[str, str]


def engine_methods(names: str, engine: str, *, has_draft: bool) -> EngineMethods:
    """Methods of --methods for an engine. Raises OptionError for one it does not have.

    Opening an engine takes long, so methods that need weights are left out where none are named.
    """
    from paceline.drafting.router import PREDICTION

    known = known_methods(engine)
    if names != ALL:
        methods = [name.strip() for name in names.split(",") if name.strip()]
        for name in methods:
            if name not in known:
                raise OptionError(f"the engine {engine} has no method {name!r}; it has {', '.join(known)}")
        return EngineMethods(methods, {})
    offered = [name for name in known if name not in (NONE, PREDICTION)]
    without = {} if has_draft else {name: "it needs weights: --draft-model" for name in offered if needs_weights(name)}
    return EngineMethods([name for name in offered if name not in without], without)


def known_methods(engine: str) -> tuple[str, ...]:
    """Names of the methods that an engine has, whether or not they can be used here."""
    methods = spec(engine).methods
    return tuple(chosen_methods(ALL)) if methods is None else methods


def needs_weights(method: str) -> bool:
    """Whether a method needs a draft model or a head. One that only its engine knows is taken to need none."""
    from paceline.drafting.registry import WeightsNeeded

    return weights_needed(method) is not WeightsNeeded.NONE


def weights_needed(method: str) -> WeightsNeeded:
    from paceline.drafting import registry

    return registry.spec(method).weights if method in registry.names() else registry.WeightsNeeded.NONE
