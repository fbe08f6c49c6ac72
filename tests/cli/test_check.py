"""paceline check, in this process with tiny tokenizers."""

from __future__ import annotations

from typing import Any

import pytest


def test_a_model_that_does_not_exist_is_an_error(run_command: Any) -> None:
    result = run_command("check", "TINY", "--draft-model", "nonsense")
    assert result.status == 2 and "no model is called" in result.err


def test_check_names_the_tokens_that_differ(run_command: Any, other_vocabulary: str) -> None:
    assert run_command("check", "TINY", "--draft-model", "TINY").status == 0
    result = run_command("check", "TINY", "--draft-model", other_vocabulary, "--json")
    assert result.status == 2 and "id 0 is" in result.err
    document = result.json()
    assert (document["same"], document["differing"], document["same_template"]) == (False, 6, True)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_check_says_how_draft_tokens_are_translated(run_command: Any, other_vocabulary: str) -> None:
    result = run_command("check", "TINY", "--draft-model", other_vocabulary)
    assert "two vocabularies" in result.out and "--method cross" in result.out
    result = run_command("check", "TINY", "--draft-model", "TINY", "--json")
    document = result.json()
    assert result.status == 0 and document["greedy"] == document["sampled"] == "same" and document["share"] == 1.0
