"""Verification on the device gives what verification on the host gives. Here it runs launch by launch, on the CPU."""

from __future__ import annotations

import pytest
import torch

from paceline.core import draft_tree
from paceline.core.draft_tree import DraftTree
from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence
from paceline.core.types import ModelOutput
from paceline.core.verify import RULES
from paceline.engines.local.verifier import Verifier
from paceline.engines.local.verifier_graphs import SEQS_AT_ONCE, GraphVerifier, can_verify_on_device
from tests.support.build import sequence

VOCAB, NUM_SEQS, STEPS = 23, SEQS_AT_ONCE + 3, 40  # more sequences than are verified at once
DEVICE_RULES = sorted(name for name, rule in RULES.items() if rule.on_device is not None)


def sequences(rule: str) -> list[Sequence]:
    """The same sequences every time, each with a temperature and a seed of its own."""
    return [
        sequence([1, 2, 3], 99, SamplingParams(temperature=0.5 + 0.2 * index, seed=index), rule=rule)
        for index in range(NUM_SEQS)
    ]


def drafts(seqs: list[Sequence], k: int) -> list[DraftTree]:
    """Chains drawn on the device: rows of one tensor, as a drafting graph leaves them."""
    if k == 0:
        return [draft_tree.empty() for _ in seqs]
    q = torch.softmax(torch.randn(len(seqs), k + 2, VOCAB), dim=-1)
    tokens = torch.multinomial(q.view(-1, VOCAB), 1).view(len(seqs), k + 2)
    return [draft_tree.chain(tokens[index, :k], q[index, :k]) for index in range(len(seqs))]


def random_output(k: int) -> ModelOutput:
    return ModelOutput(torch.randn(NUM_SEQS * (k + 1), VOCAB), [k + 1] * NUM_SEQS)


def test_the_rules_with_a_twin_are_token_and_coupled() -> None:
    assert DEVICE_RULES == ["coupled", "token"]


@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("rule", DEVICE_RULES)
def test_both_verifiers_agree_step_after_step(rule: str, k: int) -> None:
    """Steps share the captured tensors but not their contents: whatever stayed from the step before would show."""
    torch.manual_seed(0)
    on_host, on_device = sequences(rule), sequences(rule)
    host, device = Verifier(), GraphVerifier(capture=lambda work: work)
    accepted: set[int] = set()
    for _ in range(STEPS):
        trees, output = drafts(on_host, k), random_output(k)
        expected = host.verify(on_host, trees, output)
        assert device.verify(on_device, trees, output) == expected
        accepted |= {len(result.accepted) for result in expected}
    assert k == 0 or len(accepted) > 1, "some draft tokens must be accepted and some not, or nothing was compared"


def test_drafts_in_separate_tensors_are_brought_together() -> None:
    torch.manual_seed(0)
    on_host, on_device = sequences("token"), sequences("token")
    trees = [draft_tree.chain(tree.tokens.clone(), tree.probs) for tree in drafts(on_host, 3)]
    output = random_output(3)
    device = GraphVerifier(capture=lambda work: work)
    assert device.verify(on_device, trees, output) == Verifier().verify(on_host, trees, output)


def test_a_verification_is_captured_once_for_its_size_and_few_are_kept() -> None:
    captures: list[int] = []
    device = GraphVerifier(capture=lambda work: captures.append(1) or work)  # type: ignore[func-returns-value]
    seqs = sequences("token")
    for _ in range(3):
        device.verify(seqs, drafts(seqs, 2), random_output(2))
    assert len(captures) == 2  # one for the full group, one for the rest
    for k in range(GraphVerifier.MAX_GRAPHS + 4):
        device.verify(seqs, drafts(seqs, k), random_output(k))
    assert len(device._graphs) == GraphVerifier.MAX_GRAPHS


def test_on_a_cpu_nothing_is_verified_this_way() -> None:
    seqs = sequences("token")
    assert not can_verify_on_device(seqs, drafts(seqs, 0), random_output(0))
