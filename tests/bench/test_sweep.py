"""Interleaving and batching of settings and prompts."""

from __future__ import annotations

import pytest

from paceline.bench.sweep import grid, parse_num_draft_tokens, parse_numbers, prompt_batches, sweep
from paceline.errors import OptionError
from tests.support.bench_toys import toy_candidates, toy_plan


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4", [4]), ("2..5", [2, 3, 4, 5]), ("1,4..5,auto,4", [1, 4, 5, "auto"]), ("0", [0])],
)
def test_draft_tokens_are_numbers_ranges_and_auto(text: str, expected: list[int | str]) -> None:
    assert parse_num_draft_tokens(text) == expected


@pytest.mark.parametrize("text", ["", "x", "5..2", "-1", "1..999", "2.5", "auto5"])
def test_impossible_draft_tokens_are_refused(text: str) -> None:
    with pytest.raises(OptionError):
        parse_num_draft_tokens(text)


def test_numbers_and_batch_sizes_are_checked() -> None:
    assert parse_numbers("0,0.7,0", "--temperatures") == [0.0, 0.7]
    for text in ("warm", "-1", "nan", "inf"):
        with pytest.raises(OptionError, match="--temperatures"):
            parse_numbers(text, "--temperatures")
    with pytest.raises(OptionError, match="--max-num-seqs"):
        prompt_batches(["a"], [[1]], 0)
    with pytest.raises(OptionError, match="settings"):
        grid(["a", "b"], list(range(100)), [0.0, 1.0])


def test_a_grid_has_plain_decoding_first_at_every_temperature() -> None:
    settings = grid(["none", "ngram"], [2, "auto"], [0.0, 0.7])
    assert [str(setting) for setting in settings] == [
        "plain",
        "ngram k=2",
        "ngram k=auto",
        "plain T=0.7",
        "ngram k=2 T=0.7",
        "ngram k=auto T=0.7",
    ]


def test_batches_never_mix_domains() -> None:
    batches = prompt_batches(["a", "b", "a", "a"], [[1], [2], [3], [4]], 2)
    assert [(batch.domain, batch.prompts) for batch in batches] == [("a", [[1], [3]]), ("a", [[4]]), ("b", [[2]])]


@pytest.mark.slow
def test_settings_take_turns_and_the_order_rotates() -> None:
    plan = toy_plan()
    order = [(item.repeat, item.batch, item.name) for item in sweep(toy_candidates(), plan)]
    assert len(order) == plan.total
    first = [name for repeat, batch, name in order if (repeat, batch) == (0, 0)]
    second = [name for repeat, batch, name in order if (repeat, batch) == (0, 1)]
    assert sorted(first) == sorted(second)
    assert first[0] != second[0]
