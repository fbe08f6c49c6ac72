"""The suffix automaton against brute force, and the drafter over it."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import pytest

from paceline.core.cost_model import CostCurve, CostModel
from paceline.core.draft_value import DraftValue
from paceline.core.sequence import Sequence
from paceline.drafting.ngram import Ngram
from paceline.drafting.suffix import MEGABYTE, OutputStore, Suffix
from paceline.drafting.suffix_automaton import Context, SuffixAutomaton
from paceline.errors import OptionError
from paceline.runners.huggingface import HuggingFaceRunner
from tests.support.build import sequence
from tests.support.drafter_exactness import assert_unchanged, check_greedy, check_sampled


def automaton_over(*seqs: list[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for seq in seqs:
        automaton.start_sequence()
        for token in seq:
            automaton.append(token)
    return automaton


def random_tokens(seed: int, length: int, alphabet: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(alphabet) for _ in range(length)]


def occurrences(seq: list[int], run: list[int]) -> int:
    return sum(seq[at : at + len(run)] == run for at in range(len(seq) - len(run) + 1))


def sequence_of(ids: list[int]) -> Sequence:
    return sequence(ids, 1000)


@pytest.mark.parametrize("alphabet", [1, 2, 3, 8])
def test_the_longest_repeated_run_is_found_after_every_token(alphabet: int) -> None:
    seq = random_tokens(alphabet, 120, alphabet)
    automaton = SuffixAutomaton()
    for end, token in enumerate(seq, start=1):
        automaton.append(token)
        seen = seq[:end]
        longest = max(size for size in range(end) if size == 0 or occurrences(seen, seen[end - size :]) > 1)
        assert automaton.repeated().length == longest


def test_counts_are_the_numbers_of_occurrences() -> None:
    seq = random_tokens(0, 300, 3)
    automaton = automaton_over(seq)
    for length in (1, 2, 3, 4):
        for at in range(0, len(seq) - length, 7):
            run = seq[at : at + length]
            context = Context()
            for token in run:
                context = automaton.follow(context, token)
            assert context.length == length
            assert automaton._count[context.state] == occurrences(seq, run)


@pytest.mark.slow
def test_a_position_in_the_store_is_the_longest_suffix_the_store_holds() -> None:
    stored = [random_tokens(1, 80, 3), random_tokens(2, 80, 3)]
    automaton, context, seq = automaton_over(stored[0]), Context(), random_tokens(3, 160, 3)
    for end, token in enumerate(seq, start=1):
        if end == 80:  # the store grows while a sequence has a position in it
            automaton.start_sequence()
            for other in stored[1]:
                automaton.append(other)
        context = automaton.follow(context, token)
        known = stored if end >= 80 else stored[:1]
        longest = max(size for size in range(end + 1) if any(occurrences(one, seq[end - size : end]) for one in known))
        assert context.length <= longest
        if end < 80 or context.length < end - 80:  # a run longer than the old store knew is met by new tokens only
            assert context.length == longest


def test_reading_takes_at_most_two_states_a_token() -> None:
    for seq in (random_tokens(4, 2000, 2), [7] * 2000, list(range(2000)), [0, 1] * 1000):
        assert len(automaton_over(seq)._next) <= 2 * len(seq) + 1


def test_the_memory_estimate_is_right() -> None:
    seq = random_tokens(5, 4000, 500)
    tracemalloc.start()
    automaton = automaton_over(seq)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 0.5 * used < automaton.memory < 2 * used


def test_a_steady_repetition_is_drafted_as_a_chain_and_a_fork_as_branches() -> None:
    drafter = Suffix()
    steady = drafter.propose([sequence_of([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3])], [5])[0]
    assert steady.tokens.tolist() == [4, 5, 6, 7, 8] and steady.is_chain
    forked = drafter.propose([sequence_of([1, 2, 3, 9, 1, 2, 4, 8, 1, 2])], [4])[0]
    first = [token for token, parent in zip(forked.tokens.tolist(), forked.parents) if parent == -1]
    assert first == [4, 3], "both ways are tried, the later one first"


def test_more_frequent_continuations_go_first() -> None:
    tree = Suffix().propose([sequence_of([1, 2, 5, 1, 2, 5, 1, 2, 6, 1, 2])], [2])[0]
    assert tree.tokens.tolist()[0] == 5


def test_nothing_is_drafted_where_nothing_occurred_before() -> None:
    assert len(Suffix().propose([sequence_of([1, 2, 3, 4])], [5])[0]) == 0


def test_length_follows_from_the_counts() -> None:
    ids = [1, 2, 3, 1, 2, 4, 1, 2, 5, 1, 2, 6, 1, 2]
    bold, shy = Suffix(least=0.01), Suffix(least=0.5)
    assert len(bold.propose([sequence_of(ids)], [8])[0]) > len(shy.propose([sequence_of(ids)], [8])[0])


def test_sequences_are_independent_without_a_shared_memory() -> None:
    for remember, expected in ((0, []), (1, [4, 5, 6])):
        drafter = Suffix(remember=remember)
        earlier = sequence_of([9])
        drafter.begin(earlier, None)
        earlier.ids += [1, 2, 3, 4, 5, 6]
        drafter.end(earlier)
        later = sequence_of([8, 1, 2, 3])
        drafter.begin(later, None)
        assert drafter.propose([later], [3])[0].tokens.tolist() == expected


def test_the_store_keeps_its_limit_and_its_latest_outputs() -> None:
    store = OutputStore(MEGABYTE // 4)
    for seq_id in range(40):
        store.add(random_tokens(seq_id, 200, 1000))
        assert store.memory <= MEGABYTE // 4 + 1000
    assert len(store.automata) == 2
    assert known_of(store, random_tokens(39, 200, 1000)[150:]) == 50
    assert known_of(store, random_tokens(0, 200, 1000)[150:]) < 5, "the oldest outputs are evicted"


def known_of(store: OutputStore, run: list[int]) -> int:
    """The length of the longest suffix of `run` that the store holds."""
    found = []
    for automaton in store.automata:
        context = Context()
        for token in run:
            context = automaton.follow(context, token)
        found.append(context.length)
    return max(found)


def test_ending_twice_or_never_begun_is_harmless() -> None:
    drafter, seq = Suffix(remember=1), sequence_of([1])
    drafter.end(seq)
    drafter.begin(seq, None)
    drafter.end(seq)
    drafter.end(seq)
    assert not drafter._states


@pytest.mark.parametrize("wrong", [{"least": 0.0}, {"least": 1.0}, {"remember": -1}])
def test_impossible_options_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(OptionError):
        Suffix(**wrong)


def test_greedy_outputs_are_unchanged() -> None:
    check_greedy(Suffix())
    check_greedy(Suffix(remember=1))


@pytest.mark.slow
def test_sampled_outputs_have_the_right_distribution() -> None:
    assert check_sampled(Suffix(remember=0.2), length=500, copies=20).tokens_per_step > 1.5


def test_more_is_found_than_by_ngrams() -> None:
    """A sequence of set phrases repeated with changes, like an edited file: 15% more tokens per step than n-gram
    lookup, which matches four tokens at most."""
    rng = random.Random(0)
    phrases = [[rng.randrange(60) for _ in range(4)] for _ in range(8)]
    prompt = [token for _ in range(100) for token in rng.choice(phrases)]
    written = [token if rng.random() < 0.95 else rng.randrange(60) for token in prompt]
    taus = []
    for drafter in (Ngram(), Suffix()):
        seq, at, steps = sequence_of(prompt), 0, 0
        drafter.begin(seq, None)
        while at < len(written):
            tree, node = drafter.propose([seq], [8])[0], -1
            for child, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents)):
                if parent == node and at < len(written) and token == written[at]:
                    seq.ids.append(token)
                    node, at = child, at + 1
            seq.ids += written[at : at + 1]
            at, steps = at + 1, steps + 1
        taus.append(len(written) / steps)
    assert taus[1] > 1.15 * taus[0]


@pytest.mark.slow
def test_a_transformers_model_reads_the_trees(tiny_model: Any) -> None:
    target = HuggingFaceRunner(tiny_model, "tiny")
    assert assert_unchanged(target, Suffix(), [[5, 7, 9, 5, 7, 9, 5, 7]], 80, 6).accepted > 0


def test_a_draft_that_would_not_be_sent_is_not_made_and_teaches_all_the_same() -> None:
    """A draft token costs six tenths of a step: one that is accepted every third time is not worth it, until it turns
    out to be right every time."""
    value = DraftValue(CostModel(CostCurve({width: 0.4 + 0.6 * width for width in range(1, 20)})))
    drafter, seq, drafts = Suffix(), sequence_of([1, 2, 3, 4]), list[int]()
    drafter.use_value(value, "suffix")
    drafter.begin(seq, None)
    for turn in range(40):  # two new tokens, something else, and the first of the two again
        first, second, other = range(100 + 3 * turn, 103 + 3 * turn)
        seq.ids += [first, second, other, first]
        drafts.append(len(drafter.propose([seq], [4])[0]))
        seq.ids.append(second)
    assert not drafts[0] and drafts[-1] and value.record(seq, "suffix").table.rate(0.33) > 0.5
