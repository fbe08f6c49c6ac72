"""Verification on the device gives what verification on the host gives. Here it runs eagerly, on the CPU."""

from __future__ import annotations

import pytest
import torch

from paceline.core import draft_tree
from paceline.core.draft_tree import DraftTree
from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence, SequenceParams
from paceline.core.stopping import StopRules
from paceline.core.types import ModelOutput
from paceline.core.verify import RULES
from paceline.device.graphs import EagerPool
from paceline.engines.local.verifier import Verifier
from paceline.engines.local.verifier_graphs import SEQS_AT_ONCE, GraphVerifier, can_verify_on_device
from tests.support.counting_pool import CountingPool

VOCAB, SEQS, STEPS = 23, SEQS_AT_ONCE + 3, 40  # more sequences than are verified at once
DEVICE_RULES = sorted(name for name, rule in RULES.items() if rule.on_device is not None)


def sequences(rule: str) -> list[Sequence]:
    """The same sequences every time, each with a temperature and a seed of its own."""
    samplings = [SamplingParams(temperature=0.5 + 0.2 * index, seed=index) for index in range(SEQS)]
    return [Sequence([1, 2, 3], SequenceParams(sampling, StopRules(99), RULES[rule])) for sampling in samplings]


def drafts(num_seqs: int, k: int) -> list[DraftTree]:
    """Chains drawn on the device: rows of one tensor, as a drafting graph returns them."""
    if k == 0:
        return [draft_tree.empty() for _ in range(num_seqs)]
    q = torch.softmax(torch.randn(num_seqs, k + 2, VOCAB), dim=-1)
    tokens = torch.multinomial(q.view(-1, VOCAB), 1).view(num_seqs, k + 2)
    return [draft_tree.chain(tokens[index, :k], q[index, :k]) for index in range(num_seqs)]


def output_of(k: int) -> ModelOutput:
    return ModelOutput(torch.randn(SEQS * (k + 1), VOCAB), [k + 1] * SEQS)


@pytest.mark.slow
@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("rule", DEVICE_RULES)
def test_both_verifiers_agree_step_after_step(rule: str, k: int) -> None:
    """Steps share the fixed tensors but not their contents: whatever is left from the step before would show."""
    torch.manual_seed(0)
    here, there = sequences(rule), sequences(rule)
    host, device = Verifier(), GraphVerifier(EagerPool())
    accepted: list[int] = []
    for _ in range(STEPS):
        trees, output = drafts(SEQS, k), output_of(k)
        expected = host.verify(here, trees, output)
        assert device.verify(there, trees, output) == expected
        accepted += [len(result.accepted) for result in expected]
    assert k == 0 or len(set(accepted)) > 1, "some draft tokens must be accepted and some rejected"


def test_drafts_from_anywhere_are_copied_together() -> None:
    torch.manual_seed(0)
    here, there = sequences("token"), sequences("token")
    trees = [draft_tree.chain(tree.tokens.clone(), tree.probs) for tree in drafts(SEQS, 3)]
    output = output_of(3)
    assert GraphVerifier(EagerPool()).verify(there, trees, output) == Verifier().verify(here, trees, output)


def test_a_verification_is_captured_once_for_its_size_and_few_are_kept() -> None:
    pool = CountingPool()
    device, seqs = GraphVerifier(pool), sequences("token")
    for _ in range(3):
        device.verify(seqs, drafts(SEQS, 2), output_of(2))
    assert pool.captured == 2  # one for the full group, one for the rest
    for k in range(GraphVerifier.MAX_GRAPHS + 4):
        device.verify(seqs, drafts(SEQS, k), output_of(k))
    assert device._graphs is not None and len(device._graphs) == GraphVerifier.MAX_GRAPHS


def test_on_a_cpu_the_host_verifies() -> None:
    assert not can_verify_on_device(sequences("token"), drafts(SEQS, 0), output_of(0))
