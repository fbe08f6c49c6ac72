"""A second model guesses: its cache stays in step, its q is the one it drew from."""

from __future__ import annotations

import pytest
import torch

from paceline.core.draft_length import FixedDraftLength
from paceline.core.sampling import SamplingParams, distribution
from paceline.core.sequence import Sequence
from paceline.core.stopping import StopRules
from paceline.drafting.draft_model import DraftModel
from paceline.engines.local.step import EngineParts, prefill, step
from paceline.engines.local.verifier import Verifier
from paceline.runners.table import TableRunner


def setting(temperature: float, blur: float = 0.4) -> tuple[Sequence, DraftModel, EngineParts]:
    target = TableRunner(vocab_size=5, seed=2)
    drafter = DraftModel(TableRunner(vocab_size=5, seed=2, blur=blur), 5)
    seq = Sequence([1, 2, 3], SamplingParams(temperature, seed=1), StopRules(60))
    parts = EngineParts(target, drafter, FixedDraftLength(3), Verifier())
    prefill([seq], parts)
    return seq, drafter, parts


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_draft_holds_what_the_text_holds(temperature: float) -> None:
    """After a full acceptance it lacks its own last guess; after a rejection it is cut back."""
    seq, drafter, parts = setting(temperature)
    seen = set()
    for _ in range(12):
        result = step([seq], parts)[0]
        seq_cache = drafter._seq_caches[seq.seq_id]
        assert seq_cache.tokens == seq.ids[: seq_cache.length]  # type: ignore[attr-defined]
        lacking = len(seq.ids) - seq_cache.length
        assert lacking == (2 if result.accepted == 3 else 1)
        seen.add(result.accepted)
    assert len(seen) > 1, "all rounds were alike: this shows little"


def test_q_is_the_distribution_each_guess_was_drawn_from() -> None:
    seq, drafter, _ = setting(temperature=0.8)
    tree = drafter.propose([seq], [3])[0]
    assert tree.probs is not None
    path = list(seq.ids)
    for node, token in enumerate(tree.tokens.tolist()):
        row = drafter.runner.table[drafter.runner._context(path)]  # type: ignore[attr-defined]
        assert torch.allclose(tree.probs[node], distribution(row, seq.sampling))
        path.append(token)


def test_a_greedy_guess_was_chosen() -> None:
    seq, drafter, _ = setting(temperature=0.0)
    assert drafter.propose([seq], [3])[0].probs is None


def test_a_text_never_guessed_for_costs_the_draft_nothing() -> None:
    seq, drafter, parts = setting(temperature=0.0)
    seq.num_draft_tokens = 0
    step([seq], parts)
    assert drafter._seq_caches == {}


@pytest.mark.parametrize("size", [4, 9])
def test_another_head_size_is_cut_or_padded(size: int) -> None:
    drafter = DraftModel(TableRunner(vocab_size=size, seed=3), 5)
    seq = Sequence([1, 2, 3], SamplingParams(5.0, seed=0), StopRules(60))
    for _ in range(20):
        tree = drafter.propose([seq], [3])[0]
        assert tree.probs is not None and tree.probs.shape == (3, 5)
        assert int(tree.tokens.max()) < min(5, size)
        drafter.end(seq)
