"""Every causal language model of transformers gives transformers' own text, or is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.families.page import PAGE, README, page, read_results, readme_block
from tests.support.families import K, Outcome, Variant, outcome, variants, write_family

RESULTS = read_results()
FEW = ("mistral", "qwen3_next", "bloom")  # of the fast lane: a window, a recurrent state, alibi
ALL = {variant.id: variant for variant in variants()}


def check(variant: Variant, folder: Path) -> None:
    result = outcome(write_family(variant, folder), variant)
    assert result == RESULTS[variant.id]
    assert "differs" not in result.result and "\n" not in result.result


@pytest.mark.parametrize("name", FEW)
def test_a_few_families_give_the_text_of_transformers(name: str, tmp_path: Path) -> None:
    assert RESULTS[name].result == "same"
    check(ALL[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ALL if name not in FEW])
def test_every_family_gives_the_text_of_transformers_or_says_why_not(name: str, tmp_path: Path) -> None:
    check(ALL[name], tmp_path)


def test_the_page_is_made_of_the_results() -> None:
    assert set(RESULTS) == set(ALL), "run python -m tests.families.page"
    assert PAGE.read_text() == page(RESULTS), "run python -m tests.families.page"


def test_the_readme_lists_what_the_registries_and_the_results_say() -> None:
    block = readme_block(RESULTS)
    assert block in README.read_text(), "run python -m tests.families.page"


def test_a_family_that_is_registered_runs_natively_and_an_unknown_one_does_not() -> None:
    from paceline.models import registry

    native = {name.partition("-")[0] for name, entry in RESULTS.items() if entry.way == "native"}
    tried = {variant.model_type for variant in ALL.values()}
    assert native == set(registry.model_types()) & tried, "run python -m tests.families.page"


def test_every_draft_that_is_the_model_itself_is_accepted_whole() -> None:
    rates = {entry.tokens_per_step for entry in RESULTS.values() if entry.result == "same" and entry.way != "plain"}
    assert rates == {K + 1}


def test_nothing_in_the_results_differs_and_little_is_refused() -> None:
    differs = [name for name, entry in RESULTS.items() if "differs" in entry.result]
    refused = [name for name, entry in RESULTS.items() if entry.result != "same"]
    families = {name.partition("-")[0] for name, entry in RESULTS.items() if entry.result == "same"}
    assert differs == [] and len(families) >= 140
    assert set(refused) <= {"bert-not_causal", "cpmant", "moshi", "xlm", "xlnet"}
    assert all(isinstance(entry, Outcome) and "\n" not in entry.result for entry in RESULTS.values())
