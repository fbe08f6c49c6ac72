"""The never-lose rule under a made-up clock.

What a step costs and which draft tokens are accepted is fixed, so every figure here is the same on every machine. A
sequence is generated under a policy, and its seconds are compared with plain decoding (never lose) and with the best
fixed k (close to the best)."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from paceline.core.cost_model import CostCurve, CostModel, StepTiming
from paceline.core.draft_length import AdaptiveDraftLength, DraftLengthPolicy, FixedDraftLength
from paceline.core.draft_tree import DraftTree
from paceline.core.sequence import Sequence
from paceline.core.types import RowOutput, StepResult, VerifyResult
from tests.support.build import sequence

NO_OUTPUT = RowOutput(torch.empty(0, 0))


@dataclass(frozen=True, slots=True)
class Machine:
    """Milliseconds of a pass by the tokens in it, of a draft token, and of a token the drafter has to catch up with."""

    verify: dict[int, float]
    draft: float = 0.0
    catch_up: float = 0.0
    noise: float = 0.05

    def curve(self) -> CostCurve:
        return CostCurve(self.verify)

    def costs(self) -> CostModel:
        one = self.draft
        return CostModel(self.curve(), CostCurve({0: 0.0, 1: one, 8: 8 * one}, unknown=0.0))


GPU = Machine({1: 5.0, 2: 5.1, 5: 5.2, 9: 5.4, 17: 6.0}, draft=0.6, catch_up=0.02)
CPU = Machine({1: 48.0, 2: 100.0, 5: 110.0, 9: 120.0, 17: 160.0}, draft=0.1)
INT8 = Machine({1: 26.0, 4: 28.0, 8: 30.0, 17: 45.0}, draft=4.0, catch_up=0.8)

Rate = Callable[[int, int], float]  # (token number, depth) -> the probability that a draft token there is accepted


def simulate(
    policy: DraftLengthPolicy,
    machine: Machine,
    rate: Rate,
    tokens: int,
    *,
    seqs: int = 1,
    offers: float = 1.0,
    nodes_a_depth: int = 1,
) -> float:
    """Milliseconds a token while `seqs` sequences run together, until the first has its `tokens` tokens."""
    dice = random.Random(7)
    # How predictable a token is depends on its place in the sequence, so every policy sees the same sequence.
    luck = [random.Random(11 + seq_id).choices(range(1000), k=tokens + 32) for seq_id in range(seqs)]
    curve = machine.curve()
    running = [sequence([1], tokens) for _ in range(seqs)]
    luck_of = {seq.seq_id: numbers for seq, numbers in zip(running, luck)}
    num_unread = {seq.seq_id: 0 for seq in running}
    clock = 0.0
    while not any(seq.finished for seq in running):
        ks = policy.plan(running)
        ks = [k if dice.random() < offers else 0 for k in ks]
        results = [_step(seq, k, rate, luck_of[seq.seq_id], nodes_a_depth) for seq, k in zip(running, ks)]
        catch_up = sum(machine.catch_up * num_unread[seq.seq_id] for seq, k in zip(running, ks) if k)
        draft = catch_up + machine.draft * max(ks)
        for seq, k, result in zip(running, ks, results):
            num_unread[seq.seq_id] = 0 if k else num_unread[seq.seq_id] + len(result.emitted)
        verify = curve.at(len(running) + sum(ks)) * (1 + machine.noise * dice.gauss(0, 1))
        clock += draft + verify
        drafting = sum(k > 0 for k in ks)
        timing = StepTiming(draft, verify, len(running) + sum(ks), max(ks), len(running), drafting)
        policy.observe(running, results, timing)
    return clock / sum(seq.num_new_tokens for seq in running)


def _step(seq: Sequence, k: int, rate: Rate, luck: list[int], nodes_a_depth: int) -> StepResult:
    depth_of = [node // nodes_a_depth for node in range(k)]
    parents = [(depth - 1) * nodes_a_depth if depth else -1 for depth in depth_of]
    accepted = 0
    while accepted < len(set(depth_of)):
        if luck[seq.num_new_tokens + accepted] >= 1000 * rate(seq.num_new_tokens, accepted):
            break
        accepted += 1
    path = [depth * nodes_a_depth for depth in range(accepted)]
    emitted = seq.extend([2] * (accepted + 1), accepted)
    tree = DraftTree(torch.zeros(k, dtype=torch.int64), parents)
    return StepResult(tree, VerifyResult(path, 2), NO_OUTPUT, emitted, min(accepted, len(emitted)))


def plain(machine: Machine, tokens: int, seqs: int = 1) -> float:
    return simulate(FixedDraftLength(0), machine, lambda *_: 0.0, tokens, seqs=seqs)


def best_fixed(machine: Machine, rate: Rate, tokens: int, *, seqs: int = 1, nodes_a_depth: int = 1) -> float:
    """The best k of all, tried in hindsight; with trees only whole levels."""
    return min(
        simulate(FixedDraftLength(k), machine, rate, tokens, seqs=seqs, nodes_a_depth=nodes_a_depth)
        for k in range(0, 17, nodes_a_depth)
    )


HOPELESS: Rate = lambda place, depth: 0.0  # noqa: E731
NEARLY_HOPELESS: Rate = lambda place, depth: 0.04  # noqa: E731


@pytest.mark.slow
@pytest.mark.parametrize("machine", [GPU, CPU, INT8], ids=["gpu", "cpu", "int8"])
@pytest.mark.parametrize("rate", [HOPELESS, NEARLY_HOPELESS], ids=["hopeless", "nearly"])
@pytest.mark.parametrize("tokens", [256, 2000])
def test_hopeless_input_costs_at_most_three_percent(machine: Machine, rate: Rate, tokens: int) -> None:
    spent = simulate(AdaptiveDraftLength(machine.costs()), machine, rate, tokens)
    ratio = plain(machine, tokens) / spent
    print(f"{ratio:.4f}x of plain")
    assert ratio >= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("machine", [GPU, CPU, INT8], ids=["gpu", "cpu", "int8"])
@pytest.mark.parametrize("a", [0.6, 0.8, 0.9, 0.97])
def test_good_input_is_within_five_percent_of_the_best_fixed_k(machine: Machine, a: float) -> None:
    rate: Rate = lambda place, depth: a  # noqa: E731
    spent = simulate(AdaptiveDraftLength(machine.costs()), machine, rate, 1500)
    best = best_fixed(machine, rate, 1500)
    print(f"adaptive {spent:.2f}, best fixed {best:.2f}: {best / spent:.3f}")
    assert best / spent >= 0.95


@pytest.mark.slow
def test_a_sequence_that_turns_good_is_drafted_for_again() -> None:
    rate: Rate = lambda place, depth: 0.0 if place < 800 else 0.9  # noqa: E731
    spent = simulate(AdaptiveDraftLength(GPU.costs()), GPU, rate, 2400)
    foresight = (plain(GPU, 800) + 2 * best_fixed(GPU, lambda *_: 0.9, 1600)) / 3
    assert foresight / spent >= 0.92


@pytest.mark.slow
def test_a_sequence_that_turns_hopeless_is_decoded_plainly() -> None:
    rate: Rate = lambda place, depth: 0.9 if place < 400 else 0.0  # noqa: E731
    spent = simulate(AdaptiveDraftLength(CPU.costs()), CPU, rate, 2400)
    foresight = (best_fixed(CPU, lambda *_: 0.9, 400) + 5 * plain(CPU, 2000)) / 6
    assert foresight / spent >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize("period", [3, 10, 40])
def test_input_that_alternates_between_good_and_hopeless_does_not_lose(period: int) -> None:
    rate: Rate = lambda place, depth: 0.85 if place // period % 2 else 0.0  # noqa: E731
    for machine in (GPU, CPU, INT8):
        ratio = plain(machine, 2000) / simulate(AdaptiveDraftLength(machine.costs()), machine, rate, 2000)
        assert ratio >= 0.97


def test_a_lookup_that_rarely_matches_costs_nothing_in_between() -> None:
    ratio = plain(CPU, 1000) / simulate(AdaptiveDraftLength(CPU.costs()), CPU, HOPELESS, 1000, offers=0.2)
    assert ratio >= 0.97


@pytest.mark.slow
def test_costs_that_were_measured_wrongly_are_corrected() -> None:
    """The short measurement at the start found draft tokens nearly free. They are not."""
    wrong = CostModel(CostCurve({1: 48.0, 2: 49.0, 9: 50.0, 17: 52.0}))
    rate: Rate = lambda place, depth: 0.45  # noqa: E731
    ratio = plain(CPU, 1500) / simulate(AdaptiveDraftLength(wrong), CPU, rate, 1500)
    assert ratio >= 0.97


@pytest.mark.slow
def test_plain_decoding_measured_too_expensive_at_the_start_is_corrected() -> None:
    wrong = CostModel(CostCurve({1: 105.0, 2: 106.0, 9: 120.0, 17: 160.0}))
    rate: Rate = lambda place, depth: 0.45  # noqa: E731
    ratio = plain(CPU, 3000) / simulate(AdaptiveDraftLength(wrong), CPU, rate, 3000)
    assert ratio >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize("seqs", [2, 8])
def test_a_batch_neither_loses_on_hopeless_sequences_nor_wastes_good_ones(seqs: int) -> None:
    # By total tokens: wide passes of a batch cost more, as on a machine that is bound by arithmetic.
    machine = Machine({1: 10.0, 8: 11.0, 16: 12.0, 64: 30.0, 136: 60.0}, draft=0.5, catch_up=0.02)
    good: Rate = lambda place, depth: 0.8  # noqa: E731
    hopeless = plain(machine, 600, seqs) / simulate(
        AdaptiveDraftLength(machine.costs()), machine, HOPELESS, 600, seqs=seqs
    )
    best = best_fixed(machine, good, 600, seqs=seqs)
    spent = simulate(AdaptiveDraftLength(machine.costs()), machine, good, 600, seqs=seqs)
    print(f"hopeless {hopeless:.3f}, good {best / spent:.3f} of the best fixed k")
    assert hopeless >= 0.97
    assert best / spent >= 0.95


@pytest.mark.slow
def test_draft_lengths_of_trees_count_nodes() -> None:
    """Three nodes a depth: what a draft token adds is a third of a depth, and the policy learns that."""
    rate: Rate = lambda place, depth: 0.8  # noqa: E731
    policy = AdaptiveDraftLength(GPU.costs())
    spent = simulate(policy, GPU, rate, 1500, nodes_a_depth=3)
    best = best_fixed(GPU, rate, 1500, nodes_a_depth=3)
    assert best / spent >= 0.95
    hopeless = plain(GPU, 1500) / simulate(AdaptiveDraftLength(GPU.costs()), GPU, HOPELESS, 1500, nodes_a_depth=3)
    assert hopeless >= 0.97
