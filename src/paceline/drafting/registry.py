"""Drafting methods. A method is one file of this room that ends in its `SPEC`; modules are imported when needed.

Everything that depends on the list of methods (config, --help, bench, tune, plan, contract tests) reads it here:

names                 all methods
spec, specs           what a method is and needs
names_needing         methods that need no weights, a draft model or a trained head
head_names            methods that read a trained head, also where they work without one
per_request_names     methods a request may choose for itself
build_drafter         a drafter from its name and a context
register              adds a method at run time; installed packages use the entry point group `paceline.drafters`
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, get_type_hints

from paceline.errors import OptionError

if TYPE_CHECKING:  # the list of methods must not load torch
    import torch

    from paceline.core.protocols import Drafter, Runner
    from paceline.hub.tokenizer import Tokenizer
    from paceline.hub.vocabulary import VocabularyComparison
    from paceline.kv.prefix_cache import PrefixCache

LOG = logging.getLogger(__name__)
ENTRY_POINTS = "paceline.drafters"
NAMES: dict[str, str] = {
    "none": "paceline.drafting.no_draft",
    "draft_model": "paceline.drafting.draft_model",
    "cross_vocab": "paceline.drafting.cross_vocab",
    "ngram": "paceline.drafting.ngram",
    "suffix": "paceline.drafting.suffix",
    "lookahead": "paceline.drafting.lookahead",
    "layerskip": "paceline.drafting.layerskip",
    "medusa": "paceline.drafting.medusa",
    "eagle": "paceline.drafting.eagle",
    "dflash": "paceline.drafting.dflash",
    "mtp": "paceline.drafting.mtp",
    "prediction": "paceline.drafting.prediction",
    "auto": "paceline.drafting.auto",
}


class WeightsNeeded(Enum):
    """What a method cannot work without beside the target."""

    NONE = "no weights"
    MODEL = "a draft model"
    HEAD = "a trained head"


@dataclass(frozen=True, slots=True)
class DrafterOption:
    """One option of a method."""

    name: str
    type: Any  # of its values, as the constructor annotates it
    default: Any

    def check(self, method: str, value: Any) -> None:
        """Raise OptionError for a value of another type."""
        if not _is_a(value, self.type):
            expected = TYPE_NAMES.get(self.type, str(self.type))
            raise OptionError(f"method {method}: {self.name} must be {expected}, not {value!r}")


TYPE_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    int | None: "a whole number",
    str | None: "a string",
    tuple[int, ...]: "a list of whole numbers",
}


def _is_a(value: Any, expected: Any) -> bool:
    if expected == tuple[int, ...]:
        return isinstance(value, list | tuple) and all(_is_a(part, int) for part in value)
    if expected is bool or isinstance(value, bool):
        return expected is bool and isinstance(value, bool)
    return isinstance(value, int | float if expected is float else expected)


def options_of(make: Callable[..., Any]) -> tuple[DrafterOption, ...]:
    """Options of a constructor: the parameters with a default and a plain type."""
    hints = get_type_hints(make.__init__ if inspect.isclass(make) else make)
    return tuple(
        DrafterOption(name, hints.get(name), parameter.default)
        for name, parameter in inspect.signature(make).parameters.items()
        if parameter.default is not parameter.empty and hints.get(name) in TYPE_NAMES
    )


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """What a drafter is built from.

    draft_model    a name, a path or a loaded model; the directory or Hub id of a head where the method needs one
    head_in_int8   the products of a head may be rounded to 8 bits: the target's weights are rounded too
    options        of the method, checked against its spec
    open_runner    opens the draft model; open_tokenizer opens its tokenizer
    compare_tokenizers  of target and draft model; None: they are known to have the same vocabulary
    """

    target: Runner
    tokenizer: Tokenizer
    draft_model: Any
    device: str
    head_dtype: torch.dtype
    head_in_int8: bool
    options: dict[str, Any]
    prefix_cache: PrefixCache
    open_runner: Callable[[Any], Runner]
    open_tokenizer: Callable[[Any], Tokenizer]
    compare_tokenizers: Callable[[Any], VocabularyComparison | None]


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """One drafting method.

    summary      one line for --help
    weights      what it cannot work without
    build        makes the drafter; raises OptionError, PairError or ModelError
    options      names, types and defaults
    reference    paper and link
    per_request  whether a request may choose it; None: methods that need no weights
    head_kind    the kind of head it reads (heads/registry.py), where it reads one
    other_kinds  further kinds that it reads
    one_pass     its head drafts any number of tokens in one pass
    reads_prediction  it drafts from the output that a request expects
    takes_draft_model  a draft model or a head that is named beside it changes what it drafts
    """

    name: str
    summary: str
    weights: WeightsNeeded
    build: Callable[[DrafterContext], Drafter]
    options: tuple[DrafterOption, ...] = ()
    reference: str = ""
    per_request: bool | None = None
    head_kind: str | None = None
    other_kinds: tuple[str, ...] = ()
    one_pass: bool = False
    reads_prediction: bool = False
    takes_draft_model: bool = True

    @property
    def offered_per_request(self) -> bool:
        return self.weights is WeightsNeeded.NONE if self.per_request is None else self.per_request

    def check_options(self, options: dict[str, Any]) -> None:
        """Raise OptionError for an unknown option, naming the known ones, or for a value of the wrong type."""
        by_name = {option.name: option for option in self.options}
        for name, value in options.items():
            if name not in by_name:
                listed = f"it has {', '.join(by_name)}" if by_name else "it has none"
                raise OptionError(f"method {self.name} has no option {name!r}; {listed}")
            by_name[name].check(self.name, value)

    def check_weights(self, draft_model: Any) -> None:
        """Raise OptionError where the method needs a draft model and there is none."""
        if self.weights is WeightsNeeded.MODEL and draft_model is None:
            raise OptionError(
                f"method {self.name} needs a draft model: name one with draft_model=... "
                f"(on the command line --draft-model)"
            )


_registered: dict[str, DrafterSpec] = {}


def register(spec: DrafterSpec) -> None:
    """Add a method, or replace one of the same name."""
    _registered[spec.name] = spec


@cache
def _installed() -> dict[str, EntryPoint]:
    """Entry points of other packages, by the name of their method."""
    return {point.name: point for point in entry_points(group=ENTRY_POINTS) if point.name not in NAMES}


def names() -> tuple[str, ...]:
    """All methods. Imports none of them."""
    return tuple(dict.fromkeys((*NAMES, *_installed(), *_registered)))


def spec(name: str) -> DrafterSpec:
    """The method of this name. Raises OptionError for an unknown one."""
    if name in _registered:
        return _registered[name]
    if name in NAMES:
        built_in: DrafterSpec = import_module(NAMES[name]).SPEC
        return built_in
    if name not in _installed():
        raise OptionError(f"there is no method {name!r}; the methods are {', '.join(names())}")
    return _loaded(_installed()[name])


def reads_prediction(name: str) -> bool:
    """Whether a method drafts from the output that a request expects. One that is not registered may: nothing is known
    of a drafter of one's own."""
    return name not in names() or spec(name).reads_prediction


def takes_draft_model(name: str) -> bool:
    """Whether a method drafts from a draft model or a head that is named. One that is not registered may."""
    return name not in names() or spec(name).takes_draft_model


def _loaded(point: EntryPoint) -> DrafterSpec:
    """The method of another package. Raises OptionError that names what is wrong with it."""
    try:
        installed = point.load()
    except Exception as error:  # importing it runs anyone's code
        raise OptionError(f"method {point.name} cannot be loaded from {point.value}: {error}") from error
    if not isinstance(installed, DrafterSpec) or installed.name != point.name:
        raise OptionError(f"method {point.name}: {point.value} must be a DrafterSpec with name={point.name!r}")
    return installed


def specs() -> Iterator[DrafterSpec]:
    """All methods, each imported when it is reached. One of another package that does not load is left out."""
    for name in names():
        try:
            yield spec(name)
        except OptionError as error:
            LOG.warning("%s", error)


def names_needing(weights: WeightsNeeded) -> tuple[str, ...]:
    """Methods that need no weights, a draft model, or a trained head."""
    return tuple(method.name for method in specs() if method.weights is weights)


def head_names() -> tuple[str, ...]:
    """Methods that read a trained head, also where they work without one."""
    return tuple(method.name for method in specs() if method.head_kind is not None)


def method_of_head(kind: str) -> str:
    """The method that drafts with heads of a kind. Raises OptionError where there is none."""
    for method in specs():
        if kind == method.head_kind or kind in method.other_kinds:
            return method.name
    raise OptionError(f"no method drafts with heads of the kind {kind}")


def per_request_names() -> tuple[str, ...]:
    """Methods a request may choose beside the engine's own."""
    return tuple(method.name for method in specs() if method.offered_per_request)


def build_drafter(name: str, context: DrafterContext) -> Drafter:
    """The drafter of a method. Raises OptionError, PairError or ModelError before any sequence starts."""
    method = spec(name)
    method.check_options(context.options)
    method.check_weights(context.draft_model)
    return method.build(context)
