"""The adaptive draft length finds the best k, keeps it through hiccups, starts well, and never loses.

Costs and acceptance are made up and every die is seeded, so each figure here is the same on every machine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline import SpeculativeDecoder
from paceline.core.cost_model import CostModel
from paceline.core.draft_length import AdaptiveDraftLength, FixedDraftLength
from paceline.core.draft_tree import DraftTree, chain
from paceline.core.protocols import Drafter
from paceline.core.sequence import Sequence
from paceline.device.graphs import note_one_off_work
from tests.support import simulated_steps
from tests.support.simulated_steps import MAX_K, Hiccup, Simulation, TrueCosts, affine, stepped

STEPS, SETTLED = 600, 200
PLAIN_SECONDS = (0.005, 0.03, 0.25)  # of machines that are quick and slow
HICCUPS = (0, 1, 2, 3, 5, 10, 17, 40, 63, 64, 65, 100, 150, 300)  # steps at which one comes
START = 5  # plain steps that the first probes may lose, besides the drafter's first reading of a prompt
GPU_PAIR = TrueCosts(affine(0.01), draft=0.15, acceptance=0.75, catch_up=0.002)
MACHINES = {
    "gpu pair": GPU_PAIR,
    "lookup": TrueCosts(affine(0.03), 0.0005, 0.6, 0.0, 0.05),
    "cpu grain": TrueCosts(stepped(8, 0.6), 0.2, 0.8, 0.01, 0.05),
    "steep": TrueCosts(affine(0.15), 0.02, 0.9, 0.001, 0.05),
    "hopeless": TrueCosts(affine(0.3), 0.3, 0.2, 0.002, 0.05),
}


def random_costs(count: int, seed: int) -> Iterator[TrueCosts]:
    dice = random.Random(seed)
    for _ in range(count):
        slope, edge, rise = dice.choice((0.002, 0.01, 0.03, 0.1, 0.3, 1.0)), dice.choice((2, 4, 6, 8)), dice.random()
        verify = affine(slope) if dice.random() < 0.5 else stepped(edge, rise)
        draft = dice.choice((0.0, 0.02, 0.05, 0.15, 0.3, 0.6))
        yield TrueCosts(verify, draft, dice.uniform(0.2, 0.95), 0.01 * draft, dice.choice((0.0, 0.05)))


def adaptive(costs: TrueCosts, seed: int = 0) -> AdaptiveDraftLength:
    return AdaptiveDraftLength(costs.measured(random.Random(seed)))


def check_regret(costs: TrueCosts, seed: int) -> None:
    """Under 3% once it has settled; and where nothing pays, under 2% in all, the start excepted."""
    run = Simulation(adaptive(costs, seed), costs, seed).generate(100_000, 200, STEPS)
    regret = 1 - run.rate(SETTLED) / costs.best_rate
    assert regret < 0.03, f"{costs}: {regret:.3f}, {run.ks[SETTLED::20]}"
    if costs.best_rate == 1.0:
        lost = sum(run.costs) - sum(run.tokens)
        assert lost < 0.02 * STEPS + START + 200 * costs.catch_up, f"{costs}: {lost:.1f} plain steps"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_the_best_k_is_found_for_random_costs(seed: int) -> None:
    check_regret(next(random_costs(1, 1000 + seed)), seed)


@pytest.mark.slow
def test_the_best_k_is_found_for_many_random_costs() -> None:
    for seed, costs in enumerate(random_costs(60, 3)):
        check_regret(costs, seed)


def check_recovery(costs: TrueCosts, hiccup: Hiccup, start: CostModel) -> None:
    """64 steps after the hiccup the k is the one that the true costs imply, or one within 3% of it."""
    run = Simulation(AdaptiveDraftLength(start), costs, hiccup.step, hiccup).generate(100_000, 200, hiccup.step + 160)
    ratio = run.rate(hiccup.step + 64) / costs.best_rate
    assert ratio > 0.97, f"{hiccup}: {ratio:.3f} of the best rate, k = {run.ks[hiccup.step + 64 :]}"


@pytest.mark.parametrize("observed", ["draft", "verify", "catch_up"])
@pytest.mark.parametrize("step", [0, 70])
def test_a_hiccup_of_half_a_second_does_not_matter(observed: str, step: int) -> None:
    check_recovery(GPU_PAIR, Hiccup(step, observed), GPU_PAIR.measured(random.Random(step)))


@pytest.mark.slow
@pytest.mark.parametrize("speed", range(len(PLAIN_SECONDS)))
@pytest.mark.parametrize("machine", MACHINES)
def test_a_hiccup_anywhere_does_not_matter(machine: str, speed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each machine meets every step and every speed, and each speed a third of the steps."""
    monkeypatch.setattr(simulated_steps, "PLAIN_SECONDS", PLAIN_SECONDS[speed])
    costs = MACHINES[machine]
    for observed in ("draft", "verify", "catch_up"):
        for step in HICCUPS[speed :: len(PLAIN_SECONDS)]:
            check_recovery(costs, Hiccup(step, observed), costs.measured(random.Random(step)))


@pytest.mark.parametrize("step", [0, 1, 2, 30])
def test_a_hiccup_does_not_matter_where_drafting_was_never_measured(step: int) -> None:
    """The very first draft of all is held up: nothing else is known of the drafter's cost."""
    check_recovery(GPU_PAIR, Hiccup(step, "draft"), CostModel(GPU_PAIR.measured(random.Random(0)).verify))


@pytest.mark.slow
def test_the_first_texts_are_as_quick_as_with_the_best_fixed_k() -> None:
    def seconds(policy: AdaptiveDraftLength | FixedDraftLength, texts: int) -> float:
        simulation = Simulation(policy, GPU_PAIR)
        for _ in range(texts):
            simulation.generate(256, 200)
        return 1 / simulation.run.rate()

    likely = sorted(range(MAX_K + 1), key=GPU_PAIR.rate)[-3:]
    for texts in (1, 6):
        best = min(seconds(FixedDraftLength(k), texts) for k in likely)
        share = best / seconds(adaptive(GPU_PAIR), texts)
        print(f"{texts} texts: {share:.3f} of the best fixed k")
        assert share >= 0.95


def test_a_step_that_captured_graphs_teaches_no_cost_but_its_acceptance() -> None:
    """Captures take seconds; counted as the cost of drafting they would end it. They are marked, not guessed."""
    costs = GPU_PAIR.measured(random.Random(0))
    before = (costs.draft.as_dict(), costs.verify.as_dict(), costs.catch_up)
    policy = AdaptiveDraftLength(costs)
    simulation = Simulation(policy, GPU_PAIR, unclean_steps=60)
    run = simulation.generate(100_000, 200, 60)
    assert (costs.draft.as_dict(), costs.verify.as_dict(), costs.catch_up) == before
    assert run.ks[-1] >= 3 and run.ks[0] < 3, "acceptance was learned: three times in four, more than was assumed"
    assert simulation.generate(256, 200).rate(60) > 0.95 * GPU_PAIR.best_rate


@pytest.mark.slow
def test_texts_after_a_start_full_of_captures_are_drafted_for() -> None:
    """Eight first steps of two seconds each. Booked as costs they left every later text at plain speed."""
    simulation = Simulation(adaptive(GPU_PAIR), GPU_PAIR, unclean_steps=8)
    for _ in range(6):
        run = simulation.generate(256, 200)
    assert run.rate() > 0.95 * GPU_PAIR.best_rate


@pytest.mark.slow
def test_no_rest_is_endless_whatever_the_estimates_say() -> None:
    """Every cost was measured a thousand times too high; each rest ends, and the next clean steps put it right."""
    wrong = TrueCosts(affine(0.01), draft=150.0, acceptance=0.75, catch_up=0.002)
    policy = AdaptiveDraftLength(wrong.measured(random.Random(0)))
    run = Simulation(policy, GPU_PAIR).generate(100_000, 200, STEPS)
    assert run.rate(STEPS - 200) > 0.95 * GPU_PAIR.best_rate


class Oracle(Drafter):
    """Drafts what the target will generate. Its first draft takes half a second."""

    def __init__(self, tokens: list[int], *, captures: bool) -> None:
        self.tokens, self.captures, self.num_drafts = tokens, captures, 0

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        if not self.num_drafts and any(num_draft_tokens):
            time.sleep(0.5)
            if self.captures:
                note_one_off_work()
        self.num_drafts += any(num_draft_tokens)
        return [chain(self.tokens[seq.num_new_tokens :][:k]) for seq, k in zip(seqs, num_draft_tokens)]


@pytest.mark.slow
@pytest.mark.parametrize("captures", [True, False], ids=["captures", "hiccup"])
def test_a_decoder_drafts_although_its_first_draft_took_half_a_second(captures: bool, tiny_folder: Path) -> None:
    prompt = "to be or not to be, " * 3
    with SpeculativeDecoder(tiny_folder) as plain:
        expected = plain.generate(prompt, max_new_tokens=200, ignore_eos=True)
    with SpeculativeDecoder(tiny_folder, drafter=Oracle(expected.token_ids, captures=captures)) as decoder:
        result = decoder.generate(prompt, max_new_tokens=200, ignore_eos=True)
    assert result.token_ids == expected.token_ids
    assert result.stats.tokens_per_step > 1.5  # 1.0 where it never drafts again; how many tokens pay is measured
