"""What every Drafter owes its callers, in a batch whose texts have budgets of 3, 0 and 2."""

from __future__ import annotations

import pytest

from paceline.core.budget import FixedBudget
from paceline.core.distribution import SamplingParams
from paceline.core.protocols import Drafter
from paceline.core.sequence import Sequence
from paceline.core.stopping import StopRules
from paceline.decode.generate import run
from paceline.decode.judge import Judge
from paceline.decode.step import Machinery, check_abilities, prefill, step
from paceline.runners.table import TableRunner
from tests.contracts.implementations import DRAFTERS

BUDGETS = (3, 0, 2)
PROMPTS = ([0, 1, 2, 0, 1, 2, 0], [4, 4], [3, 1, 3, 1, 3])


@pytest.fixture
def target() -> TableRunner:
    return TableRunner(vocab_size=5, order=2, seed=21)


@pytest.fixture(params=list(DRAFTERS))
def drafter(request: pytest.FixtureRequest, target: TableRunner) -> Drafter:
    return DRAFTERS[request.param](target)


def batch(length: int = 40, temperature: float = 0.0, ends: frozenset[int] = frozenset()) -> list[Sequence]:
    texts = []
    for number, (prompt, budget) in enumerate(zip(PROMPTS, BUDGETS)):
        text = Sequence(prompt, SamplingParams(temperature, seed=number), StopRules(length, ends))
        text.draft_tokens = budget
        texts.append(text)
    return texts


def machinery(target: TableRunner, drafter: Drafter, rule: str = "token") -> Machinery:
    return Machinery(target, drafter, FixedBudget(3), Judge(rule))


def written(texts: list[Sequence], with_: Machinery) -> list[list[int]]:
    for _ in run(texts, with_):
        pass
    return [text.written for text in texts]


def plainly(target: TableRunner, texts: list[Sequence]) -> list[list[int]]:
    return written(texts, machinery(target, DRAFTERS["nothing"](target)))


def test_it_needs_what_the_target_has(target: TableRunner, drafter: Drafter) -> None:
    check_abilities(target, drafter)


def test_no_more_guesses_than_the_budget(target: TableRunner, drafter: Drafter) -> None:
    with_, texts = machinery(target, drafter), batch()
    prefill(texts, with_)
    for _ in range(6):
        for done, budget in zip(step(texts, with_), BUDGETS):
            assert done.tree.guesses <= budget
            assert all(0 <= token < target.card.vocab_size for token in done.tree.tokens.tolist())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drawn_guess_carries_its_distribution(target: TableRunner, drafter: Drafter, temperature: float) -> None:
    with_, texts = machinery(target, drafter), batch(temperature=temperature)
    prefill(texts, with_)
    for tree in drafter.propose(texts, list(BUDGETS)):
        if tree.probs is not None:
            assert tree.probs.shape == (len(tree), target.card.vocab_size)
            assert tree.probs.sum(-1).tolist() == pytest.approx([1.0] * len(tree))
            assert all(float(tree.probs[node, token]) > 0 for node, token in enumerate(tree.tokens.tolist()))


def test_a_greedy_text_is_unchanged(target: TableRunner, drafter: Drafter) -> None:
    assert written(batch(), machinery(target, drafter)) == plainly(target, batch())


def test_a_coupled_text_is_unchanged(target: TableRunner, drafter: Drafter) -> None:
    """Under `coupled` a text is a function of its seed alone, sampled or not, guessed or not."""
    plain = written(batch(temperature=1.0), machinery(target, DRAFTERS["nothing"](target), "coupled"))
    assert written(batch(temperature=1.0), machinery(target, drafter, "coupled")) == plain


def test_neighbours_do_not_show(target: TableRunner, drafter: Drafter) -> None:
    """A text's random numbers and its drafter's state are its own: alone or in a batch, it is the same."""
    together = written(batch(temperature=1.0), machinery(target, drafter))
    alone = [written([text], machinery(target, drafter))[0] for text in batch(temperature=1.0)]
    assert together == alone


def test_an_end_inside_an_accepted_run(target: TableRunner, drafter: Drafter) -> None:
    end = frozenset({plainly(target, batch())[0][7]})
    texts = batch(ends=end)
    assert written(texts, machinery(target, drafter)) == plainly(target, batch(ends=end))
    assert texts[0].finish_reason == "stop" and texts[0].ids[-1] in end


def test_a_text_may_come_and_go(target: TableRunner, drafter: Drafter) -> None:
    """Texts that end make room for others; ending twice, or before the beginning, is harmless."""
    with_, texts = machinery(target, drafter), batch(length=9)
    drafter.end(texts[0])
    assert written(texts, with_) == plainly(target, batch(length=9))
    for text in texts:
        drafter.end(text)
    again = batch(length=9) + batch(length=9)
    for _ in run(again, with_, largest_batch=2):
        pass
    assert [text.written for text in again[:3]] == [text.written for text in again[3:]]


def test_the_invariant_holds_between_rounds(target: TableRunner, drafter: Drafter) -> None:
    with_, texts = machinery(target, drafter), batch(length=20)
    prefill(texts, with_)
    for _ in range(8):
        running = [text for text in texts if not text.finished]
        step(running, with_)
        for text in running:
            assert text.slot is not None and text.slot.length == len(text.ids) - 1
            assert text.slot.tokens == text.ids[:-1]  # type: ignore[attr-defined]


def test_draft_is_target_accepts_everything(target: TableRunner) -> None:
    """τ = k + 1 exactly, greedy and sampled: the guesses are drawn from the very distribution they are judged by."""
    for temperature in (0.0, 1.0):
        with_ = machinery(target, DRAFTERS["draft-is-target"](target))
        text = batch(length=40, temperature=temperature)[0]
        written([text], with_)
        assert text.tally.acceptance_rate == 1.0
        assert (text.tally.tokens_per_step, text.tally.steps) == (4.0, 10)
