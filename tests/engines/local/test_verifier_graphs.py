"""The judge for the device says what the judge on the host says. Here it works launch by launch, on the CPU."""

from __future__ import annotations

import pytest
import torch

from paceline.core import draft_tree
from paceline.core.draft_tree import DraftTree
from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence
from paceline.core.stopping import StopRules
from paceline.core.types import ModelOutput, VerifyResult
from paceline.engines.local.verifier import Verifier
from paceline.engines.local.verifier_graphs import DEVICE_RULES, TOGETHER, GraphVerifier, can_judge

VOCAB, TEXTS, ROUNDS = 23, TOGETHER + 3, 40  # more texts than are judged at once


def texts_of(rule: str) -> list[Sequence]:
    """The same texts every time, each with a temperature and a seed of its own."""
    made = [
        Sequence([1, 2, 3], SamplingParams(temperature=0.5 + 0.2 * index, seed=index), StopRules(99))
        for index in range(TEXTS)
    ]
    for seq in made:
        seq.acceptance = rule
    return made


def guesses_of(seqs: list[Sequence], k: int) -> list[DraftTree]:
    """Chains drawn on the device: rows of one tensor, as a drafting loop leaves them."""
    if k == 0:
        return [draft_tree.empty() for _ in seqs]
    q = torch.softmax(torch.randn(len(seqs), k + 2, VOCAB), dim=-1)
    tokens = torch.multinomial(q.view(-1, VOCAB), 1).view(len(seqs), k + 2)
    return [draft_tree.chain(tokens[index, :k], q[index, :k]) for index in range(len(seqs))]


@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("rule", sorted(DEVICE_RULES))
def test_both_judges_agree_round_after_round(rule: str, k: int) -> None:
    """Rounds share the prepared tensors but not their contents: whatever stayed from the round before would show."""
    torch.manual_seed(0)
    here, there = texts_of(rule), texts_of(rule)
    host, device = Verifier(rule), GraphVerifier(capture=lambda work: work)
    stood: list[int] = []
    for _ in range(ROUNDS):
        trees = guesses_of(here, k)
        outputs = ModelOutput(torch.randn(TEXTS * (k + 1), VOCAB), [k + 1] * TEXTS)
        expected: list[VerifyResult] = host.verified_rows(here, trees, outputs)
        assert device.verified_rows(rule, there, trees, outputs) == expected
        stood += [len(verified.accepted) for verified in expected]
    assert k == 0 or len(set(stood)) > 1, "some guesses must stand and some fall, or nothing was compared"


def test_guesses_from_anywhere_are_brought_together() -> None:
    torch.manual_seed(0)
    here, there = texts_of("token"), texts_of("token")
    trees = [draft_tree.chain(one.tokens.clone(), one.probs) for one in guesses_of(here, 3)]
    outputs = ModelOutput(torch.randn(TEXTS * 4, VOCAB), [4] * TEXTS)
    device = GraphVerifier(capture=lambda work: work)
    assert device.verified_rows("token", there, trees, outputs) == Verifier("token").verified_rows(here, trees, outputs)


def test_a_judgement_is_captured_once_for_its_size_and_few_are_kept() -> None:
    captured: list[int] = []
    device = GraphVerifier(capture=lambda work: captured.append(1) or work)  # type: ignore[func-returns-value]
    seqs = texts_of("token")
    for _ in range(3):
        device.verified_rows("token", seqs, guesses_of(seqs, 2), ModelOutput(torch.randn(TEXTS * 3, VOCAB), [3] * TEXTS))
    assert len(captured) == 2  # one for the full group, one for the rest
    for k in range(GraphVerifier.LARGEST + 4):
        outputs = ModelOutput(torch.randn(TEXTS * (k + 1), VOCAB), [k + 1] * TEXTS)
        device.verified_rows("token", seqs, guesses_of(seqs, k), outputs)
    assert len(device._prepared) == GraphVerifier.LARGEST


def test_on_a_cpu_nothing_is_judged_this_way() -> None:
    seqs = texts_of("token")
    outputs = ModelOutput(torch.randn(TEXTS, VOCAB), [1] * TEXTS)
    assert not can_judge(seqs, guesses_of(seqs, 0), outputs)
