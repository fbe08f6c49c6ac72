"""The acceptance rules against theory, and the vectorised twins against the reference."""

from __future__ import annotations

import pytest
import scipy
import torch
from torch import Tensor

from paceline.core.draft_tree import DraftTree, chain, empty, merge
from paceline.core.rng import SequenceRng
from paceline.core.sampling import SamplingParams, distribution, draw_keyed
from paceline.core.types import VerifyResult
from paceline.core.verify import (
    RULES,
    LossyTypical,
    residual,
    verify_block,
    verify_chains,
    verify_chains_coupled,
    verify_coupled,
    verify_greedy,
    verify_tokens,
    verify_trees,
)

VOCABULARY = 7
FALSE_ALARM = 1e-7  # the probability that correct code fails one statistical test of this file


def random_rows(count: int, seed: int, sharp: float = 1.5) -> Tensor:
    logits = torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * sharp
    return torch.softmax(logits, dim=-1)


def drawn_chain(q: Tensor, rng: torch.Generator) -> DraftTree:
    return chain(torch.multinomial(q, 1, generator=rng)[:, 0], q)


def uniforms_for(tree: DraftTree, rng: torch.Generator | None = None) -> Tensor:
    """One number a draft token, and one for the last draw."""
    return torch.rand(tree.num_draft_tokens + 1, generator=rng or torch.Generator(), dtype=torch.float64)


def verified_with(tree: DraftTree, target: Tensor, rng: torch.Generator | None = None) -> VerifyResult:
    return verify_tokens(tree, target, uniforms_for(tree, rng))


def test_a_draft_token_is_accepted_with_probability_sum_of_min() -> None:
    p, q = random_rows(1, seed=1)[0], random_rows(1, seed=2)[0]
    expected = float(torch.minimum(p, q).sum())
    rng, steps = torch.Generator().manual_seed(0), 20_000
    uniforms = torch.rand(steps, 2, generator=rng, dtype=torch.float64)
    draft_tokens = torch.multinomial(q, steps, replacement=True, generator=rng)[:, None]
    target = p.expand(steps, 2, -1)
    accepted = int(verify_chains(draft_tokens, q.expand(steps, 1, -1), target, uniforms).counts.sum())
    assert scipy.stats.binomtest(accepted, steps, expected).pvalue > FALSE_ALARM
    assert expected == pytest.approx(1 - 0.5 * float((p - q).abs().sum()), abs=1e-6)


def test_tokens_a_step_follow_the_formula_for_equal_rates() -> None:
    """a = .8, k = 4: (1 - a^5) / (1 - a) = 3.3616, not the 1 + k·a = 4.2 of tutorials."""
    steps, k = 40_000, 4
    p = torch.tensor([0.8, 0.2, 0.0])
    q = torch.tensor([1.0, 0.0, 0.0])
    rng = torch.Generator().manual_seed(3)
    uniforms = torch.rand(steps, k + 1, generator=rng, dtype=torch.float64)
    draft_tokens = torch.zeros(steps, k, dtype=torch.int64)
    results = verify_chains(draft_tokens, q.expand(steps, k, -1), p.expand(steps, k + 1, -1), uniforms)
    per_step = 1 + float(results.counts.double().mean())
    assert per_step == pytest.approx((1 - 0.8**5) / (1 - 0.8), abs=0.04)  # 5.3 standard errors: 1e-7


def test_the_residual_is_what_p_has_more_than_q() -> None:
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.4, 0.1])
    assert residual(p, q, 1).tolist() == pytest.approx([1.0, 0.0, 0.0])
    assert residual(p, None, 0).tolist() == pytest.approx([0.0, 2 / 3, 1 / 3])


def test_where_p_equals_q_the_residual_is_p() -> None:
    p = torch.tensor([0.5, 0.5])
    assert torch.equal(residual(p, p, 0), p)
    assert torch.equal(residual(torch.tensor([1.0, 0.0]), None, 0), torch.tensor([1.0, 0.0]))


def test_a_drawn_token_that_the_target_excludes_is_never_accepted() -> None:
    """p(x) = 0 and a random number of exactly 0: strict inequality must reject."""
    tree = chain([0], torch.tensor([[1.0, 0.0]]))
    target = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    assert verify_tokens(tree, target, torch.zeros(2, dtype=torch.float64)).accepted == []
    assert verify_block(tree, target, torch.zeros(2, dtype=torch.float64)).accepted == []


@pytest.mark.slow
def test_draft_tokens_from_the_targets_own_distribution_are_all_accepted() -> None:
    rng = torch.Generator().manual_seed(4)
    for seed in range(200):
        target = random_rows(5, seed)
        for rule in (verify_tokens, verify_block):
            tree = drawn_chain(target[:4], rng)
            assert rule(tree, target, uniforms_for(tree, rng)).accepted == [0, 1, 2, 3]


def test_greedy_is_argmax_equality() -> None:
    target = distribution(torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0], [0.0, 0.0, 5.0]]), SamplingParams())
    rng = torch.Generator().manual_seed(0)
    assert verified_with(chain([1, 0]), target, rng) == verify_greedy([1, 0], [-1, 0], [1, 0, 2])
    assert verified_with(chain([1, 2]), target, rng) == verify_greedy([1, 2], [-1, 0], [1, 0, 2])
    verified = verified_with(chain([0, 0]), target, rng)
    assert (verified.accepted, verified.next_token) == ([], 1)


def test_no_draft_is_a_plain_draw() -> None:
    verified = verified_with(empty(), torch.tensor([[0.0, 0.0, 1.0]]))
    assert (verified.accepted, verified.next_token) == ([], 2)


def test_probes_cannot_be_accepted() -> None:
    tree = DraftTree(torch.tensor([1, 0]), [-1, 0], None, probes=1)
    target = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    verified = verified_with(tree, target)
    assert (verified.accepted, verified.next_token) == ([0], 0)


def test_a_second_branch_is_tried_after_the_first() -> None:
    tree = merge([[0, 2], [1, 2]], limit=4)
    target = torch.zeros(5, 3)
    target[0, 1] = target[3, 2] = target[4, 0] = 1.0
    target[1, 0] = target[2, 0] = 1.0
    verified = verified_with(tree, target)
    assert ([tree.tokens[node].item() for node in verified.accepted], verified.next_token) == ([1, 2], 0)


# --- twins ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("k", [0, 1, 4])
def test_the_twin_for_chains_equals_the_reference(k: int, one_hot: bool) -> None:
    rng, batch = torch.Generator().manual_seed(k), 300
    target = torch.stack([random_rows(k + 1, 1000 + seed) for seed in range(batch)])
    q = torch.stack([random_rows(max(k, 1), 9000 + seed) for seed in range(batch)])[:, :k]
    draft_tokens = torch.randint(VOCABULARY, (batch, k), generator=rng)
    uniforms = torch.rand(batch, k + 1, generator=rng, dtype=torch.float64)
    results = verify_chains(draft_tokens, None if one_hot else q, target, uniforms)
    for row in range(batch):
        tree = chain(draft_tokens[row], None if one_hot else q[row])
        verified = verify_tokens(tree, target[row], uniforms[row])
        assert results.nodes[row, : results.counts[row]].tolist() == verified.accepted
        assert int(results.tokens[row]) == verified.next_token


@pytest.mark.slow
@pytest.mark.parametrize("k", [0, 1, 4])
def test_the_twin_for_coupled_chains_equals_the_reference(k: int) -> None:
    rng, batch = torch.Generator().manual_seed(k), 300
    target = torch.stack([random_rows(k + 1, 1000 + seed) for seed in range(batch)])
    uniforms = torch.rand(batch, k + 1, generator=rng, dtype=torch.float64)
    matching = draw_keyed(target, uniforms)[:, :k]  # half of the draft tokens are what the target will draw
    draft_tokens = torch.where(
        torch.rand(batch, k, generator=rng) < 0.5, matching, torch.randint(VOCABULARY, (batch, k), generator=rng)
    )
    results = verify_chains_coupled(draft_tokens, None, target, uniforms)
    for row in range(batch):
        verified = verify_coupled(chain(draft_tokens[row]), target[row], uniforms[row])
        assert results.nodes[row, : results.counts[row]].tolist() == verified.accepted
        assert int(results.tokens[row]) == verified.next_token
    assert k == 0 or int(results.counts.max()) == k, "no chain was accepted as a whole: this shows little"


@pytest.mark.slow
@pytest.mark.parametrize("one_hot", [False, True])
def test_the_twin_for_trees_equals_the_reference(one_hot: bool) -> None:
    rng, batch, nodes = torch.Generator().manual_seed(8), 300, 6
    target = torch.stack([random_rows(nodes + 1, seed, sharp=0.7) for seed in range(batch)])
    q = torch.stack([random_rows(nodes, 5000 + seed) for seed in range(batch)])
    draft_tokens = torch.randint(VOCABULARY, (batch, nodes), generator=rng)
    fractions = torch.rand(batch, nodes, generator=rng)
    parents = (fractions * (torch.arange(nodes) + 1)).long() - 1  # anything from -1 to the node before
    uniforms = torch.rand(batch, nodes + 1, generator=rng, dtype=torch.float64)
    results = verify_trees(draft_tokens, parents, None if one_hot else q, target, uniforms)
    reached = 0
    for row in range(batch):
        tree = DraftTree(draft_tokens[row], parents[row].tolist(), None if one_hot else q[row])
        verified = verify_tokens(tree, target[row], uniforms[row])
        assert results.nodes[row, : results.counts[row]].tolist() == verified.accepted
        assert int(results.tokens[row]) == verified.next_token
        reached = max(reached, len(verified.accepted))
    assert reached > 1, "no deep path was accepted: this shows little"


# --- block ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_block_is_exact_for_two_tokens_by_enumeration() -> None:
    """Every chain the draft can make, weighed by its probability, with the random numbers on a fine grid."""
    p0, p1, p2 = torch.tensor([0.6, 0.4]), torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0.5, 0.5])
    q0, q1 = torch.tensor([0.3, 0.7]), torch.tensor([[0.5, 0.5], [0.6, 0.4]])
    grid = (torch.arange(12, dtype=torch.float64) + 0.5) / 12
    law = torch.zeros(2, 2)
    for first in range(2):
        for second in range(2):
            weight = float(q0[first] * q1[first, second])
            tree = chain([first, second], torch.stack([q0, q1[first]]))
            target = torch.stack([p0, p1[first], p2])
            for u0 in grid:
                for u1 in grid:
                    for last in grid:
                        verified = verify_block(tree, target, torch.stack([u0, u1, last]))
                        output = [[first, second][node] for node in verified.accepted] + [verified.next_token]
                        share = weight / len(grid) ** 3
                        if len(output) > 1:
                            law[output[0], output[1]] += share
                        else:  # the second token comes from the target itself, in the next step
                            law[output[0]] += share * p1[output[0]]
    assert torch.allclose(law, p0[:, None] * p1, atol=0.04)  # the grid's own coarseness


@pytest.mark.slow
def test_block_accepts_at_least_as_much_as_token() -> None:
    rng, total = torch.Generator().manual_seed(6), {"token": 0, "block": 0}
    for seed in range(3000):
        target, q = random_rows(5, seed % 40), random_rows(4, 7000 + seed % 40)
        tree = drawn_chain(q, rng)
        uniforms = uniforms_for(tree, rng)
        total["token"] += len(verify_tokens(tree, target, uniforms).accepted)
        total["block"] += len(verify_block(tree, target, uniforms).accepted)
    assert total["block"] > 1.02 * total["token"]


# --- coupled, lossy ---------------------------------------------------------------------------------------------------


def test_coupled_gives_the_same_tokens_whatever_was_drafted() -> None:
    target, uniforms = random_rows(3, seed=12), torch.tensor([0.3, 0.8, 0.1], dtype=torch.float64)
    plain = verify_coupled(empty(), target[:1], uniforms).next_token
    hit = verify_coupled(chain([plain]), torch.stack([target[0], target[1]]), uniforms)
    miss = verify_coupled(chain([(plain + 1) % VOCABULARY]), torch.stack([target[0], target[1]]), uniforms)
    assert hit.accepted == [0]
    assert (miss.accepted, miss.next_token) == ([], plain)


def test_coupled_accepts_most_of_what_a_near_drafter_draws_with_the_same_numbers() -> None:
    """Races with common noise agree with probability (1 - TV) / (1 + TV) or more; a binomial test of that bound."""
    p, q = random_rows(1, seed=1)[0], random_rows(1, seed=2)[0]
    q = 0.8 * p + 0.2 * q
    distance, count = 0.5 * float((p - q).abs().sum()), 20_000
    numbers = SequenceRng(9).at_positions(0, count)
    drafted = draw_keyed(q.expand(count, -1), numbers)[:, None]
    uniforms = torch.stack([numbers, numbers.roll(1)], dim=1)
    accepted = int(verify_chains_coupled(drafted, None, p.expand(count, 2, -1), uniforms).counts.sum())
    bound = (1 - distance) / (1 + distance)
    assert scipy.stats.binomtest(accepted, count, bound, alternative="less").pvalue > FALSE_ALARM
    assert accepted / count > 0.8


def test_typical_acceptance_accepts_a_likely_draft_token_without_a_draw() -> None:
    target = torch.tensor([[0.45, 0.55], [0.5, 0.5]])
    for seed in range(50):
        assert LossyTypical()(
            chain([0]), target, uniforms_for(chain([0]), torch.Generator().manual_seed(seed))
        ).accepted == [0]
    rare = torch.tensor([[0.01, 0.99], [0.5, 0.5]])
    assert LossyTypical()(chain([0]), rare, uniforms_for(chain([0]))).accepted == []


# --- tokens that do not exist -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("missing", [-1, VOCABULARY])
@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_a_draft_token_outside_the_vocabulary_is_no_draft_token(rule: str, one_hot: bool, missing: int) -> None:
    """-1 would be read as the last token of a row. The result is that of the draft up to there."""
    rng = torch.Generator().manual_seed(3)
    for seed in range(100):
        target, q = random_rows(4, seed), random_rows(3, 500 + seed)
        target[:, -1] += 2.0  # the token that -1 would stand for
        target = target / target.sum(-1, keepdim=True)
        first = int(target[0].argmax())
        uniforms = uniforms_for(chain([0]), rng)
        cut = chain([first], None if one_hot else q[:1])
        whole = chain([first, missing, 2], None if one_hot else q)
        expected = RULES[rule].verify(cut, target[:2], uniforms)
        numbers = torch.cat([uniforms[:1], uniforms[1:], uniforms[:1], uniforms[1:]])
        assert RULES[rule].verify(whole, target, numbers) == expected


def test_greedy_verification_never_accepts_a_token_outside_the_vocabulary() -> None:
    assert verify_greedy([-1, 2], [-1, 0], [6, 2, 1]) == VerifyResult([], 6, [])
    siblings = DraftTree(torch.tensor([-1, 6]), [-1, -1])
    target = distribution(torch.eye(VOCABULARY)[[6, 0, 3]], SamplingParams())
    assert verified_with(siblings, target) == VerifyResult([1], 3, [6])


# --- the rules by name ------------------------------------------------------------------------------------------------


def test_every_rule_carries_the_tokens_of_the_accepted_nodes() -> None:
    rng = torch.Generator().manual_seed(2)
    for seed in range(60):
        target = random_rows(4, seed, sharp=3.0)
        tree = drawn_chain(target[:3], rng)
        for rule in RULES.values():
            result = rule.verify(tree, target, uniforms_for(tree, rng))
            assert result.tokens == [int(tree.tokens[node]) for node in result.accepted]


def test_only_the_rule_named_lossy_is_lossy_and_only_coupled_is_seeded() -> None:
    assert [name for name, rule in RULES.items() if not rule.lossless] == ["lossy-typical"]
    assert [name for name, rule in RULES.items() if rule.seeded] == ["coupled"]
