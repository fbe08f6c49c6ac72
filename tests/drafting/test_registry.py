"""The methods: their names, what they need, their options; and a method that is added from one file at run time."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paceline.core import draft_tree
from paceline.core.draft_tree import DraftTree
from paceline.core.protocols import Drafter
from paceline.core.sequence import Sequence
from paceline.drafting import registry
from paceline.drafting.ngram import Ngram
from paceline.drafting.registry import (
    DrafterContext,
    DrafterSpec,
    WeightsNeeded,
    build_drafter,
    head_names,
    names,
    names_needing,
    options_of,
    per_request_names,
    register,
    spec,
    specs,
)
from paceline.errors import OptionError
from tests.support.drafter_exactness import assert_unchanged, context_for, toy


def test_methods_are_listed_by_what_they_need() -> None:
    assert names_needing(WeightsNeeded.MODEL) == ("draft_model", "cross_vocab")
    assert names_needing(WeightsNeeded.HEAD) == ("medusa", "eagle", "dflash", "mtp")
    assert head_names() == ("layerskip", "medusa", "eagle", "dflash", "mtp")
    assert per_request_names() == ("none", "ngram", "suffix", "lookahead", "prediction")


@pytest.mark.parametrize("name", names())
def test_every_method_has_a_spec_of_its_name_and_a_summary(name: str) -> None:
    method = spec(name)
    assert method.name == name and method.summary and "\n" not in method.summary
    assert "https://" in method.reference or name in ("none", "auto")
    assert all(option.type in registry.TYPE_NAMES for option in method.options)


@pytest.mark.slow
def test_listing_the_names_does_not_load_torch() -> None:
    program = "import sys; from paceline.drafting.registry import names; print(len(names()), 'torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == [str(len(names())), "False"]


def test_options_are_those_of_the_constructor() -> None:
    assert [(option.name, option.default) for option in spec("ngram").options] == [
        ("longest", 4),
        ("shortest", 2),
        ("branches", 1),
    ]
    assert [option.name for option in spec("layerskip").options] == ["layer", "adapter"]
    assert [option.name for option in spec("eagle").options] == ["nodes", "branches", "depth", "feature_layers"]
    drafter = build_drafter("ngram", context_for(toy(), longest=3, shortest=1))
    assert isinstance(drafter, Ngram) and drafter.longest == 3


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ngram", {"longst": 3}, "no option 'longst'; it has longest, shortest, branches"),
        ("none", {"longest": 3}, "no option 'longest'; it has none"),
        ("ngram", {"longest": "abc"}, "longest must be a whole number, not 'abc'"),
        ("ngram", {"longest": True}, "longest must be a whole number, not True"),
        ("ngram", {"longest": 2.5}, "longest must be a whole number, not 2.5"),
        ("suffix", {"least": "much"}, "least must be a number, not 'much'"),
        ("lookahead", {"window": 1}, "window must be true or false, not 1"),
        ("eagle", {"feature_layers": [1, "2"]}, "feature_layers must be a list of whole numbers"),
        ("layerskip", {"adapter": 3}, "adapter must be a string, not 3"),
    ],
)
def test_wrong_options_are_refused_in_words(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        build_drafter(name, context_for(toy(), **options))


@pytest.mark.parametrize("options", [{"least": 1}, {"least": 0.5}, {}])
def test_a_whole_number_is_a_number(options: dict[str, object]) -> None:
    spec("suffix").check_options(options)


def test_an_unknown_method_names_the_known_ones() -> None:
    with pytest.raises(OptionError, match="no method 'guess'; the methods are none, draft_model"):
        spec("guess")


class Repeat(Drafter):
    """A drafter of one file: it repeats the last token."""

    def __init__(self, times: int = 1) -> None:
        self.times = times

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        return [draft_tree.chain(seq.ids[-1:] * min(k, self.times)) for seq, k in zip(seqs, num_draft_tokens)]


def build_repeat(context: DrafterContext) -> Repeat:
    return Repeat(**context.options)


def test_a_method_is_added_from_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    register(
        DrafterSpec("repeat", "repeats the last token", WeightsNeeded.NONE, build_repeat, options=options_of(Repeat))
    )
    assert "repeat" in names() and "repeat" in per_request_names() and "repeat" in [each.name for each in specs()]
    drafter = build_drafter("repeat", context_for(toy(), times=2))
    assert isinstance(drafter, Repeat) and drafter.times == 2
    assert assert_unchanged(toy(), drafter, [[0, 1, 2]], 20, 3).drafted > 0
    with pytest.raises(OptionError, match="it has times"):
        build_drafter("repeat", context_for(toy(), count=2))


def test_specs_say_which_methods_read_a_prediction() -> None:
    assert {name for name in registry.names() if registry.reads_prediction(name)} == {"prediction", "auto"}
    assert registry.reads_prediction("a drafter of one's own")
