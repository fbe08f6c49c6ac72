"""A sequence: what it holds, how it grows and ends, and where its random numbers come from."""

from __future__ import annotations

from typing import Any

import torch

from paceline.core.sampling import SamplingParams
from paceline.core.sequence import MinNewTokens, Sequence, group_by_sampling
from paceline.core.stopping import StopRules
from paceline.core.types import SequenceCache
from tests.support.build import sequence


def started(**rules: Any) -> Sequence:
    return sequence([0, 1], 0, stopping=StopRules(**{"max_new_tokens": 9, **rules}))


def test_extend_keeps_what_belongs_to_the_sequence() -> None:
    seq = started(eos_token_ids=frozenset({7}))
    assert seq.extend([3, 7, 4], accepted=2) == [3, 7]
    assert (seq.finish_reason, seq.ids, seq.from_draft) == ("stop", [0, 1, 3, 7], [True, True])


def test_remaining_tokens_are_what_may_still_be_generated() -> None:
    seq = started()
    seq.extend([3, 4], accepted=1)
    assert (seq.remaining_tokens, seq.num_new_tokens, seq.generated, seq.from_draft) == (7, 2, [3, 4], [True, False])
    assert not seq.finished


def test_history_is_the_prompt_and_what_was_generated_with_the_path() -> None:
    seq = started()
    seq.extend([3], accepted=0)
    history = seq.history([4, 5])
    assert (history.prompt, history.generated) == ([0, 1], [3, 4, 5])


def test_a_sequence_without_a_seed_leaves_torchs_generator_in_charge() -> None:
    torch.manual_seed(5)
    first, after = started().rng.seed, torch.rand(())
    torch.manual_seed(5)
    again, after_again = started().rng.seed, torch.rand(())
    assert first == again and after == after_again
    assert started().rng.seed != started().rng.seed


def test_a_seeded_rule_gives_drafter_and_target_the_same_numbers_by_position() -> None:
    sampling = SamplingParams(1.0, seed=3)
    coupled = sequence([0], 9, sampling, rule="coupled")
    assert torch.equal(coupled.draft_uniforms(0, 3), coupled.verify_uniforms(3))
    assert torch.equal(coupled.draft_uniforms(1, 2), coupled.verify_uniforms(3)[1:])
    token = sequence([0], 9, sampling)
    assert not torch.equal(token.draft_uniforms(0, 3), token.verify_uniforms(3))


def test_end_of_sequence_tokens_are_masked_until_enough_tokens_are_new_along_each_path() -> None:
    constraint = MinNewTokens(3, frozenset({1, 4}), vocab_size=5)
    assert constraint.allowed([0, 0]).tolist() == [True, False, True, True, False]
    assert constraint.allowed([0, 0, 0]).all(), "a token after three new ones may end the sequence"
    seq = sequence([0], 9, constraint=constraint)
    seq.extend([2, 3], accepted=1)
    assert constraint.allowed([]).tolist() == [True, False, True, True, False]
    assert constraint.allowed([2]).all()
    seq.extend([2], accepted=0)
    assert constraint.allowed([]).all()


def test_a_released_cache_is_handed_over_once() -> None:
    seq, cache = started(), SequenceCache()
    cache.length = 1
    seq.start(cache)
    assert seq.num_cached_tokens == 1
    assert seq.release_cache() is cache and seq.release_cache() is None


def test_sequences_with_the_same_settings_are_grouped_and_those_with_a_history_are_not() -> None:
    warm, penalised = SamplingParams(0.7), SamplingParams(0.7, presence_penalty=1.0)
    seqs = [sequence([0], 9, sampling) for sampling in (warm, penalised, warm, penalised, SamplingParams())]
    assert group_by_sampling(seqs) == [[0, 2], [1], [3], [4]]
