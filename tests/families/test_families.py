"""Every causal language model of transformers gives transformers' own text, or is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.families.page import PAGE, page, read_results
from tests.support.families import Outcome, Variant, outcome, variants, write_family

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


def test_nothing_in_the_results_differs_and_little_is_refused() -> None:
    differs = [name for name, entry in RESULTS.items() if "differs" in entry.result]
    refused = [name for name, entry in RESULTS.items() if entry.result != "same"]
    assert differs == [] and len(RESULTS) >= 142
    assert set(refused) <= {"bert-not_causal", "cpmant", "moshi", "xlm", "xlnet"}
    assert all(isinstance(entry, Outcome) and "\n" not in entry.result for entry in RESULTS.values())
