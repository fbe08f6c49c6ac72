"""What every Drafter owes its callers, in a batch whose sequences draft 3, 0 and 2 tokens."""

from __future__ import annotations

import pytest

from paceline.build import check_capabilities
from paceline.core.protocols import Drafter
from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence
from paceline.core.stopping import StopRules
from paceline.runners.table import TableRunner
from tests.contracts.implementations import DRAFTERS
from tests.support.build import sequence
from tests.support.drafter_exactness import engine_of, generated, prefill, steps

NUM_DRAFT_TOKENS = (3, 0, 2)
PROMPTS = ([0, 1, 2, 0, 1, 2, 0], [4, 4], [3, 1, 3, 1, 3])


@pytest.fixture
def target() -> TableRunner:
    return TableRunner(vocab_size=5, order=2, seed=21)


@pytest.fixture(params=list(DRAFTERS))
def drafter(request: pytest.FixtureRequest, target: TableRunner) -> Drafter:
    return DRAFTERS[request.param](target)


def batch(
    length: int = 40, temperature: float = 0.0, ends: frozenset[int] = frozenset(), rule: str = "token"
) -> list[Sequence]:
    return [
        sequence(
            list(prompt),
            length,
            SamplingParams(temperature, seed=seed),
            rule=rule,
            stopping=StopRules(length, ends),
            num_draft_tokens=num_draft_tokens,
        )
        for seed, (prompt, num_draft_tokens) in enumerate(zip(PROMPTS, NUM_DRAFT_TOKENS))
    ]


def plain(target: TableRunner, seqs: list[Sequence]) -> list[list[int]]:
    """The outputs without speculation."""
    return generated(seqs, engine_of(target, DRAFTERS["none"](target)))


def test_it_needs_what_the_target_has(target: TableRunner, drafter: Drafter) -> None:
    check_capabilities(target, drafter)


@pytest.mark.slow
def test_it_drafts_no_more_than_num_draft_tokens(target: TableRunner, drafter: Drafter) -> None:
    seqs = batch(length=20)
    for results in steps(seqs, target, drafter):
        for result in results:
            assert all(0 <= token < target.info.vocab_size for token in result.tree.tokens.tolist())
    assert seqs[1].stats.drafted == 0, "num_draft_tokens 0 drafts nothing"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drawn_draft_token_carries_its_distribution(
    target: TableRunner, drafter: Drafter, temperature: float
) -> None:
    seqs = batch(temperature=temperature)
    prefill(seqs, target, drafter)
    for tree in drafter.propose(seqs, list(NUM_DRAFT_TOKENS)):
        if tree.probs is not None:
            assert tree.probs.shape == (len(tree), target.info.vocab_size)
            assert tree.probs.sum(-1).tolist() == pytest.approx([1.0] * len(tree))
            assert all(float(tree.probs[node, token]) > 0 for node, token in enumerate(tree.tokens.tolist()))


@pytest.mark.slow
def test_a_greedy_output_is_unchanged(target: TableRunner, drafter: Drafter) -> None:
    assert generated(batch(), engine_of(target, drafter)) == plain(target, batch())


@pytest.mark.slow
def test_a_coupled_output_is_unchanged(target: TableRunner, drafter: Drafter) -> None:
    """Under `coupled` an output depends on its seed alone, drafted or not."""
    expected = plain(target, batch(temperature=1.0, rule="coupled"))
    assert generated(batch(temperature=1.0, rule="coupled"), engine_of(target, drafter)) == expected


@pytest.mark.slow
def test_an_output_does_not_depend_on_its_batch(target: TableRunner, drafter: Drafter) -> None:
    """The random numbers of a sequence and its drafter state are its own: the output is the same alone."""
    together = generated(batch(temperature=1.0), engine_of(target, drafter))
    alone = [generated([seq], engine_of(target, drafter))[0] for seq in batch(temperature=1.0)]
    assert together == alone


@pytest.mark.slow
def test_an_end_inside_an_accepted_run(target: TableRunner, drafter: Drafter) -> None:
    end = frozenset({plain(target, batch())[0][7]})
    seqs = batch(ends=end)
    assert generated(seqs, engine_of(target, drafter)) == plain(target, batch(ends=end))
    assert seqs[0].finish_reason == "stop" and seqs[0].ids[-1] in end


@pytest.mark.slow
def test_sequences_come_and_go(target: TableRunner, drafter: Drafter) -> None:
    """Sequences that end make room for others; ending twice, or before `begin`, is harmless."""
    engine, seqs = engine_of(target, drafter, max_num_seqs=2), batch(length=9)
    drafter.end(seqs[0])
    assert generated(seqs, engine) == plain(target, batch(length=9))
    for seq in seqs:
        drafter.end(seq)
    again = batch(length=9) + batch(length=9)
    outputs = generated(again, engine)
    assert outputs[:3] == outputs[3:]


@pytest.mark.slow
def test_the_invariant_holds_between_steps(target: TableRunner, drafter: Drafter) -> None:
    seqs = batch(length=20)
    for _ in steps(seqs, target, drafter):
        for seq in seqs:
            if seq.seq_cache is not None:
                assert seq.seq_cache.length == len(seq.ids) - 1
                assert seq.seq_cache.tokens == seq.ids[:-1]  # type: ignore[attr-defined]


@pytest.mark.slow
def test_proposing_nothing_changes_nothing(target: TableRunner, drafter: Drafter) -> None:
    """num_draft_tokens 0 proposes empty trees, at any time, and the next draft is as it would have been."""
    seqs = batch(length=12)
    for _ in steps(seqs, target, drafter):
        running = [seq for seq in seqs if seq.seq_cache is not None]
        assert [len(tree) for tree in drafter.propose(running, [0] * len(running))] == [0] * len(running)
    assert [seq.generated for seq in seqs] == plain(target, batch(length=12))


@pytest.mark.slow
def test_a_draft_that_is_never_verified_leaves_no_state(target: TableRunner, drafter: Drafter) -> None:
    """A step may fail after `propose`: the draft is dropped, and the outputs are what they are without the failure."""
    seqs = batch(length=12)
    for _ in steps(seqs, target, drafter):
        running = [seq for seq in seqs if seq.seq_cache is not None]
        drafter.propose(running, [3] * len(running))
    assert [seq.generated for seq in seqs] == plain(target, batch(length=12))


def test_draft_is_target_accepts_everything(target: TableRunner) -> None:
    """τ = k + 1 exactly, greedy and sampled: draft tokens are drawn from the target's own distribution."""
    for temperature in (0.0, 1.0):
        seq = batch(length=40, temperature=temperature)[0]
        generated([seq], engine_of(target, DRAFTERS["draft_model-is-target"](target)))
        assert seq.stats.acceptance_rate == 1.0
        assert (seq.stats.tokens_per_step, seq.stats.steps) == (4.0, 10)
