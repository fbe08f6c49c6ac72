"""The acceptance rules against theory, and the vectorised twins against the reference."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import binomtest
from torch import Tensor

from paceline.core.draft_tree import DraftTree, chain, empty, merge
from paceline.core.rng import position_uniform
from paceline.core.sampling import SamplingParams, distribution, draw
from paceline.core.verify import (
    LossyTypical,
    accept,
    draw_uniforms,
    residual,
    verify_block,
    verify_block_rule,
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


def test_a_guess_stands_with_probability_sum_of_min() -> None:
    p, q = random_rows(1, seed=1)[0], random_rows(1, seed=2)[0]
    expected = float(torch.minimum(p, q).sum())
    rng, results = torch.Generator().manual_seed(0), 20_000
    uniforms = torch.rand(results, 2, generator=rng, dtype=torch.float64)
    draft_tokens = torch.multinomial(q, results, replacement=True, generator=rng)[:, None]
    target = p.expand(results, 2, -1)
    stood = int(verify_chains(draft_tokens, q.expand(results, 1, -1), target, uniforms).counts.sum())
    assert binomtest(stood, results, expected).pvalue > FALSE_ALARM
    assert expected == pytest.approx(1 - 0.5 * float((p - q).abs().sum()), abs=1e-6)


def test_tokens_a_step_follow_the_formula_for_equal_rates() -> None:
    """a = .8, k = 4: (1 - a^5) / (1 - a) = 3.3616, not the 1 + k·a = 4.2 of tutorials."""
    results, k = 40_000, 4
    p = torch.tensor([0.8, 0.2, 0.0])
    q = torch.tensor([1.0, 0.0, 0.0])
    rng = torch.Generator().manual_seed(3)
    uniforms = torch.rand(results, k + 1, generator=rng, dtype=torch.float64)
    draft_tokens = torch.zeros(results, k, dtype=torch.int64)
    found = verify_chains(draft_tokens, q.expand(results, k, -1), p.expand(results, k + 1, -1), uniforms)
    per_step = 1 + float(found.counts.double().mean())
    assert per_step == pytest.approx((1 - 0.8**5) / (1 - 0.8), abs=0.04)  # 5.3 standard errors: 1e-7


def test_the_residual_is_what_p_has_more_than_q() -> None:
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.4, 0.1])
    assert residual(p, q, 1).tolist() == pytest.approx([1.0, 0.0, 0.0])
    assert residual(p, None, 0).tolist() == pytest.approx([0.0, 2 / 3, 1 / 3])


def test_where_p_equals_q_the_residual_is_p() -> None:
    p = torch.tensor([0.5, 0.5])
    assert torch.equal(residual(p, p, 0), p)
    assert torch.equal(residual(torch.tensor([1.0, 0.0]), None, 0), torch.tensor([1.0, 0.0]))


def test_a_drawn_token_that_the_target_excludes_never_stands() -> None:
    """p(x) = 0 and a random number of exactly 0: strict inequality must refuse."""
    tree = chain([0], torch.tensor([[1.0, 0.0]]))
    target = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    assert verify_tokens(tree, target, torch.zeros(2, dtype=torch.float64)).path == []
    assert verify_block(tree, target, torch.zeros(2, dtype=torch.float64)).path == []


def test_guesses_from_the_targets_own_distribution_all_stand() -> None:
    rng = torch.Generator().manual_seed(4)
    for seed in range(200):
        target = random_rows(5, seed)
        for rule in (accept, verify_block_rule):
            assert rule(drawn_chain(target[:4], rng), target, rng).path == [0, 1, 2, 3]


def test_greedy_is_argmax_equality() -> None:
    target = distribution(torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0], [0.0, 0.0, 5.0]]), SamplingParams())
    rng = torch.Generator().manual_seed(0)
    assert accept(chain([1, 0]), target, rng) == verify_greedy([1, 0], [-1, 0], [1, 0, 2])
    assert accept(chain([1, 2]), target, rng) == verify_greedy([1, 2], [-1, 0], [1, 0, 2])
    verified = accept(chain([0, 0]), target, rng)
    assert (verified.accepted, verified.next_token) == ([], 1)


def test_no_guess_is_a_plain_draw() -> None:
    verified = accept(empty(), torch.tensor([[0.0, 0.0, 1.0]]), torch.Generator())
    assert (verified.accepted, verified.next_token) == ([], 2)


def test_probes_cannot_be_accepted() -> None:
    tree = DraftTree(torch.tensor([1, 0]), [-1, 0], None, probes=1)
    target = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    verified = accept(tree, target, torch.Generator())
    assert (verified.accepted, verified.next_token) == ([0], 0)


def test_a_second_branch_gets_its_chance() -> None:
    tree = merge([[0, 2], [1, 2]], limit=4)
    target = torch.zeros(5, 3)
    target[0, 1] = target[3, 2] = target[4, 0] = 1.0
    target[1, 0] = target[2, 0] = 1.0
    verified = accept(tree, target, torch.Generator())
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
    found = verify_chains(draft_tokens, None if one_hot else q, target, uniforms)
    for row in range(batch):
        tree = chain(draft_tokens[row], None if one_hot else q[row])
        verified = verify_tokens(tree, target[row], uniforms[row])
        assert found.nodes[row, : found.counts[row]].tolist() == verified.accepted
        assert int(found.tokens[row]) == verified.next_token


@pytest.mark.parametrize("k", [0, 1, 4])
def test_the_twin_for_coupled_chains_equals_the_reference(k: int) -> None:
    rng, batch = torch.Generator().manual_seed(k), 300
    target = torch.stack([random_rows(k + 1, 1000 + seed) for seed in range(batch)])
    uniforms = torch.rand(batch, k + 1, generator=rng, dtype=torch.float64)
    lucky = draw(target, uniforms)[:, :k]  # half of the guesses are what the target will draw
    draft_tokens = torch.where(
        torch.rand(batch, k, generator=rng) < 0.5, lucky, torch.randint(VOCABULARY, (batch, k), generator=rng)
    )
    found = verify_chains_coupled(draft_tokens, target, uniforms)
    for row in range(batch):
        verified = verify_coupled(chain(draft_tokens[row]), target[row], uniforms[row])
        assert found.nodes[row, : found.counts[row]].tolist() == verified.accepted
        assert int(found.tokens[row]) == verified.next_token
    assert k == 0 or int(found.counts.max()) == k, "no chain stood as a whole: this shows little"


@pytest.mark.parametrize("one_hot", [False, True])
def test_the_twin_for_trees_equals_the_reference(one_hot: bool) -> None:
    rng, batch, nodes = torch.Generator().manual_seed(8), 300, 6
    target = torch.stack([random_rows(nodes + 1, seed, sharp=0.7) for seed in range(batch)])
    q = torch.stack([random_rows(nodes, 5000 + seed) for seed in range(batch)])
    draft_tokens = torch.randint(VOCABULARY, (batch, nodes), generator=rng)
    ages = torch.rand(batch, nodes, generator=rng)
    parents = (ages * (torch.arange(nodes) + 1)).long() - 1  # anything from -1 to the node before
    uniforms = torch.rand(batch, nodes + 1, generator=rng, dtype=torch.float64)
    found = verify_trees(draft_tokens, parents, None if one_hot else q, target, uniforms)
    reached = 0
    for row in range(batch):
        tree = DraftTree(draft_tokens[row], parents[row].tolist(), None if one_hot else q[row])
        verified = verify_tokens(tree, target[row], uniforms[row])
        assert found.nodes[row, : found.counts[row]].tolist() == verified.accepted
        assert int(found.tokens[row]) == verified.next_token
        reached = max(reached, len(verified.accepted))
    assert reached > 1, "no deep path was accepted: this shows little"


# --- block ------------------------------------------------------------------------------------------------------------


def test_block_is_exact_for_two_tokens_by_enumeration() -> None:
    """Every chain the draft can make, weighed by its probability, with the random numbers on a fine grid."""
    p0, p1, p2 = torch.tensor([0.6, 0.4]), torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0.5, 0.5])
    q0, q1 = torch.tensor([0.3, 0.7]), torch.tensor([[0.5, 0.5], [0.6, 0.4]])
    grid = (torch.arange(12, dtype=torch.float64) + 0.5) / 12
    found = torch.zeros(2, 2)
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
                            found[output[0], output[1]] += share
                        else:  # the second token comes from the target itself, next round
                            found[output[0]] += share * p1[output[0]]
    assert torch.allclose(found, p0[:, None] * p1, atol=0.04)  # the grid's own coarseness


def test_block_accepts_at_least_as_much_as_token() -> None:
    rng, total = torch.Generator().manual_seed(6), {"token": 0, "block": 0}
    for seed in range(3000):
        target, q = random_rows(5, seed % 40), random_rows(4, 7000 + seed % 40)
        tree = drawn_chain(q, rng)
        uniforms = draw_uniforms(tree, rng)
        total["token"] += len(verify_tokens(tree, target, uniforms).path)
        total["block"] += len(verify_block(tree, target, uniforms).path)
    assert total["block"] > 1.02 * total["token"]


# --- coupled, lossy ---------------------------------------------------------------------------------------------------


def test_coupled_says_the_same_whatever_was_guessed() -> None:
    target, uniforms = random_rows(3, seed=12), torch.tensor([0.3, 0.8, 0.1], dtype=torch.float64)
    plain = verify_coupled(empty(), target[:1], uniforms).token
    hit = verify_coupled(chain([plain]), torch.stack([target[0], target[1]]), uniforms)
    miss = verify_coupled(chain([(plain + 1) % VOCABULARY]), torch.stack([target[0], target[1]]), uniforms)
    assert hit.path == [0]
    assert (miss.path, miss.token) == ([], plain)


def test_position_uniform_is_spread_evenly() -> None:
    numbers = [position_uniform(seed, place) for seed in range(40) for place in range(100)]
    assert len(set(numbers)) == len(numbers)
    assert min(numbers) >= 0 and max(numbers) < 1
    assert sum(numbers) / len(numbers) == pytest.approx(0.5, abs=0.025)  # 5.4 standard errors
    assert position_uniform(1, 2) != position_uniform(2, 1)


def test_typical_acceptance_takes_a_likely_guess_without_a_draw() -> None:
    target = torch.tensor([[0.45, 0.55], [0.5, 0.5]])
    for seed in range(50):
        assert LossyTypical()(chain([0]), target, torch.Generator().manual_seed(seed)).path == [0]
    rare = torch.tensor([[0.01, 0.99], [0.5, 0.5]])
    assert LossyTypical()(chain([0]), rare, torch.Generator()).path == []
