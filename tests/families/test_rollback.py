"""Drafts that are right, wrong, right, … on models with windows and recurrent states: plain decoding's text, always."""

from __future__ import annotations

from functools import cache
from itertools import cycle
from typing import Any

import pytest
import torch

from paceline import SpeculativeDecoder
from paceline.core import draft_tree
from paceline.core.draft_tree import DraftTree
from paceline.core.protocols import Drafter
from paceline.core.sequence import Sequence
from paceline.kv.block_manager import BLOCK_SIZE
from tests.support.families import VOCABULARY, Variant, tiny_family
from tests.support.tiny import byte_tokenizer

PROMPTS = [[(7 * place + length) % 200 for place in range(length)] for length in (3, 19, 40)]
PATTERNS = {
    "right, wrong": [1, 0],
    "all lengths": [0, 1, 2, 3, 4, 5],
    "mostly right": [5, 5, 5, 0, 5, 2],
    "always wrong": [0],
}
STEPS = 200
NATIVE = ("qwen3_5_text",)  # kinds that run natively here; all others through transformers


class Foretold(Drafter):
    """Knows what plain decoding writes, and makes the first `right` of every five draft tokens right, by a pattern."""

    def __init__(self, texts: dict[tuple[int, ...], list[int]], pattern: list[int]) -> None:
        self._texts, self._right = texts, cycle(pattern)

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        return [self._draft(seq, k) for seq, k in zip(seqs, num_draft_tokens)]

    def _draft(self, seq: Sequence, k: int) -> DraftTree:
        right = next(self._right)
        [text] = [text for prompt, text in self._texts.items() if tuple(seq.ids[: len(prompt)]) == prompt]
        known = text[seq.num_new_tokens : seq.num_new_tokens + k]
        drafted = [token if place < right else (token + 1) % VOCABULARY for place, token in enumerate(known)]
        return draft_tree.chain(drafted)


def texts_of(model: Any, num_tokens: int, **options: Any) -> list[list[int]]:
    with SpeculativeDecoder(model, tokenizer=byte_tokenizer(), **options) as decoder:
        results = decoder.generate(PROMPTS, max_new_tokens=num_tokens, ignore_eos=True)
    return [result.token_ids for result in results]


def runner_of(kind: str) -> dict[str, Any]:
    return {"runner": "native" if kind in NATIVE else "hf"}


def transformers_texts(model: Any, num_tokens: int, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    rows = [
        model.generate(torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None)[0]
        for prompt in prompts
    ]
    return [row[len(prompt) :].tolist() for row, prompt in zip(rows, prompts)]


def assert_turns_are_those_of_a_cold_start(target: Any, **options: Any) -> None:
    """Turns that go on from what was written, and one that was edited."""
    options |= {"method": "ngram", "num_draft_tokens": 4, "tokenizer": byte_tokenizer()}
    settings: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}
    history = [(11 * place) % 190 for place in range(140)]
    turns = []
    with SpeculativeDecoder(target, **options) as decoder:
        for question in ([5, 6, 7], [8, 9], [10] * 5):
            history = history + question
            turns.append((history, decoder.generate(history, **settings).token_ids))
            history = history + turns[-1][1]
        edited = history[:150] + [3, 4]
        turns.append((edited, decoder.generate(edited, **settings).token_ids))
        assert decoder.stats().prefix_hits >= 3
    with SpeculativeDecoder(target, prefix_cache_tokens=0, **options) as cold:
        assert [cold.generate(prompt, **settings).token_ids for prompt, _ in turns] == [text for _, text in turns]


def assert_preemption_changes_nothing(target: Any, model: Any, **options: Any) -> None:
    """target: what is decoded; model: the same for transformers. The cache holds two of three sequences."""
    plain = transformers_texts(model, 40)
    texts = {tuple(prompt): text for prompt, text in zip(PROMPTS, plain)}
    options |= {"tokenizer": byte_tokenizer(), "num_draft_tokens": 5, "kv_cache_tokens": 3 * BLOCK_SIZE}
    with SpeculativeDecoder(target, drafter=Foretold(texts, [3, 0, 5]), **options) as decoder:
        results = decoder.generate(PROMPTS, max_new_tokens=40, ignore_eos=True)
        assert decoder.stats().preemptions > 0
    assert [result.token_ids for result in results] == plain


CASES = [(kind, pattern) for kind in ("qwen3_next", *NATIVE) for pattern in PATTERNS] + [
    (kind, "all lengths") for kind in ("lfm2", "nemotron_h", "gemma3_text")
]


def tokens_of_steps(rights: list[int]) -> int:
    """Tokens that STEPS steps of a pattern write."""
    return STEPS * (len(rights) + sum(rights)) // len(rights)


@cache
def long_family(kind: str) -> Any:
    return tiny_family(Variant(kind, changes={"max_position_embeddings": 1024}))


@cache
def long_texts(kind: str) -> list[list[int]]:
    """What transformers writes, for all patterns of a kind: a greedy text begins as a shorter one does."""
    patterns = [pattern for known, pattern in CASES if known == kind]
    return transformers_texts(long_family(kind), max(tokens_of_steps(PATTERNS[pattern]) for pattern in patterns))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "pattern"), CASES)
def test_any_pattern_of_acceptance_leaves_the_text_as_it_is(kind: str, pattern: str) -> None:
    """200 steps of the longest text, three sequences at a time, each with its own acceptances."""
    rights = PATTERNS[pattern]
    num_tokens = tokens_of_steps(rights)
    plain = [text[:num_tokens] for text in long_texts(kind)]
    texts = {tuple(prompt): text for prompt, text in zip(PROMPTS, plain)}
    options = {"drafter": Foretold(texts, rights), "num_draft_tokens": 5, **runner_of(kind)}
    drafted = texts_of(long_family(kind), num_tokens, **options)
    assert drafted == plain


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mistral", "gemma3_text", "gpt_oss", "qwen3_next", *NATIVE])
def test_more_draft_tokens_than_a_window_holds(kind: str) -> None:
    changes = {} if kind.startswith("qwen3_") else {"sliding_window": 5}
    options = runner_of(kind)
    model = tiny_family(Variant(kind, changes=changes))
    plain = transformers_texts(model, 60)
    texts = {tuple(prompt): text for prompt, text in zip(PROMPTS, plain)}
    for rights in ([12], [7, 0, 12]):
        assert texts_of(model, 60, drafter=Foretold(texts, rights), num_draft_tokens=12, **options) == plain
    assert texts_of(model, 60, draft_model=model, num_draft_tokens=9, **options) == plain


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_next", "gemma3_text", "bamba", *NATIVE])
def test_a_conversation_goes_on_from_its_cache_as_from_the_beginning(kind: str) -> None:
    assert_turns_are_those_of_a_cold_start(tiny_family(Variant(kind)), **runner_of(kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_next", "mistral", *NATIVE])
def test_a_full_cache_preempts_and_reads_again_without_changing_a_text(kind: str) -> None:
    model = tiny_family(Variant(kind))
    assert_preemption_changes_nothing(model, model, **runner_of(kind))
