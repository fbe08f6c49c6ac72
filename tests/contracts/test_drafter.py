"""What every Drafter owes its callers, in a batch whose texts have budgets of 3, 0 and 2."""

from __future__ import annotations

import pytest

from paceline.core.draft_length import FixedDraftLength
from paceline.core.protocols import Drafter
from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence
from paceline.core.stopping import StopRules
from paceline.engines.local.generate import run
from paceline.engines.local.step import EngineParts, check_capabilities, prefill, step
from paceline.engines.local.verifier import Verifier
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
    seqs = []
    for seq_id, (prompt, budget) in enumerate(zip(PROMPTS, BUDGETS)):
        seq = Sequence(prompt, SamplingParams(temperature, seed=seq_id), StopRules(length, ends))
        seq.num_draft_tokens = budget
        seqs.append(seq)
    return seqs


def parts_of(target: TableRunner, drafter: Drafter, rule: str = "token") -> EngineParts:
    return EngineParts(target, drafter, FixedDraftLength(3), Verifier(rule))


def written(seqs: list[Sequence], parts: EngineParts) -> list[list[int]]:
    for _ in run(seqs, parts):
        pass
    return [seq.generated for seq in seqs]


def plainly(target: TableRunner, seqs: list[Sequence]) -> list[list[int]]:
    return written(seqs, parts_of(target, DRAFTERS["nothing"](target)))


def test_it_needs_what_the_target_has(target: TableRunner, drafter: Drafter) -> None:
    check_capabilities(target, drafter)


def test_no_more_guesses_than_the_budget(target: TableRunner, drafter: Drafter) -> None:
    parts, seqs = parts_of(target, drafter), batch()
    prefill(seqs, parts)
    for _ in range(6):
        for result, budget in zip(step(seqs, parts), BUDGETS):
            assert result.tree.num_draft_tokens <= budget
            assert all(0 <= token < target.info.vocab_size for token in result.tree.tokens.tolist())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drawn_guess_carries_its_distribution(target: TableRunner, drafter: Drafter, temperature: float) -> None:
    parts, seqs = parts_of(target, drafter), batch(temperature=temperature)
    prefill(seqs, parts)
    for tree in drafter.propose(seqs, list(BUDGETS)):
        if tree.probs is not None:
            assert tree.probs.shape == (len(tree), target.info.vocab_size)
            assert tree.probs.sum(-1).tolist() == pytest.approx([1.0] * len(tree))
            assert all(float(tree.probs[node, token]) > 0 for node, token in enumerate(tree.tokens.tolist()))


def test_a_greedy_text_is_unchanged(target: TableRunner, drafter: Drafter) -> None:
    assert written(batch(), parts_of(target, drafter)) == plainly(target, batch())


def test_a_coupled_text_is_unchanged(target: TableRunner, drafter: Drafter) -> None:
    """Under `coupled` a text is a function of its seed alone, sampled or not, guessed or not."""
    plain = written(batch(temperature=1.0), parts_of(target, DRAFTERS["nothing"](target), "coupled"))
    assert written(batch(temperature=1.0), parts_of(target, drafter, "coupled")) == plain


def test_neighbours_do_not_show(target: TableRunner, drafter: Drafter) -> None:
    """A text's random numbers and its drafter's state are its own: alone or in a batch, it is the same."""
    together = written(batch(temperature=1.0), parts_of(target, drafter))
    alone = [written([seq], parts_of(target, drafter))[0] for seq in batch(temperature=1.0)]
    assert together == alone


def test_an_end_inside_an_accepted_run(target: TableRunner, drafter: Drafter) -> None:
    end = frozenset({plainly(target, batch())[0][7]})
    seqs = batch(ends=end)
    assert written(seqs, parts_of(target, drafter)) == plainly(target, batch(ends=end))
    assert seqs[0].finish_reason == "stop" and seqs[0].ids[-1] in end


def test_a_text_may_come_and_go(target: TableRunner, drafter: Drafter) -> None:
    """Texts that end make room for others; ending twice, or before the beginning, is harmless."""
    parts, seqs = parts_of(target, drafter), batch(length=9)
    drafter.end(seqs[0])
    assert written(seqs, parts) == plainly(target, batch(length=9))
    for seq in seqs:
        drafter.end(seq)
    again = batch(length=9) + batch(length=9)
    for _ in run(again, parts, max_num_seqs=2):
        pass
    assert [seq.generated for seq in again[:3]] == [seq.generated for seq in again[3:]]


def test_the_invariant_holds_between_rounds(target: TableRunner, drafter: Drafter) -> None:
    parts, seqs = parts_of(target, drafter), batch(length=20)
    prefill(seqs, parts)
    for _ in range(8):
        running = [seq for seq in seqs if not seq.finished]
        step(running, parts)
        for seq in running:
            assert seq.seq_cache is not None and seq.seq_cache.length == len(seq.ids) - 1
            assert seq.seq_cache.tokens == seq.ids[:-1]  # type: ignore[attr-defined]


def test_draft_is_target_accepts_everything(target: TableRunner) -> None:
    """τ = k + 1 exactly, greedy and sampled: the guesses are drawn from the very distribution they are judged by."""
    for temperature in (0.0, 1.0):
        parts = parts_of(target, DRAFTERS["draft-is-target"](target))
        seq = batch(length=40, temperature=temperature)[0]
        written([seq], parts)
        assert seq.stats.acceptance_rate == 1.0
        assert (seq.stats.tokens_per_step, seq.stats.steps) == (4.0, 10)
