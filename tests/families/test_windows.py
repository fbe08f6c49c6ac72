"""Models with sliding windows on the fast path: rollback, sampled texts, turns, preemption; a wrong rollback is found.

Windows of 16 tokens, or fewer than the draft tokens of a step. A test of sampled texts fails correct code with
probability 1e-5.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scipy.stats import chi2

from paceline import SpeculativeDecoder
from paceline.core.types import SequenceCache
from paceline.kv.window_blocks import window_pool_tokens
from paceline.runners.native.kv_cache import own
from paceline.runners.native.runner import NativeRunner
from tests.families.test_rollback import (
    PATTERNS,
    PROMPTS,
    Foretold,
    assert_preemption_changes_nothing,
    assert_turns_are_those_of_a_cold_start,
    tokens_of_steps,
    transformers_texts,
)
from tests.families.test_sampled import BINS, FALSE_ALARM, LOSSLESS, NEW_TOKENS, near, uniformity
from tests.families.test_sampled import PROMPTS as SAMPLED_PROMPTS
from tests.runners.native.test_windowed_cache import shrink_pools
from tests.support.families import Variant, tiny_family
from tests.support.tiny import byte_tokenizer

WINDOWED = ("mistral", "gemma2", "gemma3_text", "gpt_oss")
K = 3



def saved(model: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def texts_of(folder: str, num_tokens: int, **options: Any) -> list[list[int]]:
    with SpeculativeDecoder(folder, runner="native", **options) as decoder:
        results = decoder.generate(PROMPTS, max_new_tokens=num_tokens, ignore_eos=True)
    return [result.token_ids for result in results]


@pytest.mark.slow
@pytest.mark.parametrize("kind", WINDOWED)
def test_any_pattern_of_acceptance_leaves_the_text_as_it_is(kind: str, tmp_path: Path) -> None:
    """200 steps and more, three sequences at a time: windows are crossed dozens of times."""
    model = tiny_family(Variant(kind, changes={"max_position_embeddings": 1024}))
    rights = PATTERNS["all lengths"]
    num_tokens = tokens_of_steps(rights)
    plain = transformers_texts(model, num_tokens)
    texts = {tuple(prompt): text for prompt, text in zip(PROMPTS, plain)}
    folder = saved(model, tmp_path)
    assert texts_of(folder, num_tokens, drafter=Foretold(texts, rights), num_draft_tokens=5) == plain


@pytest.mark.slow
@pytest.mark.parametrize("kind", WINDOWED)
def test_more_draft_tokens_than_a_window_holds(kind: str, tmp_path: Path) -> None:
    model = tiny_family(Variant(kind, changes={"sliding_window": 5}))
    plain = transformers_texts(model, 60)
    texts = {tuple(prompt): text for prompt, text in zip(PROMPTS, plain)}
    folder = saved(model, tmp_path)
    for rights in ([12], [7, 0, 12]):
        assert texts_of(folder, 60, drafter=Foretold(texts, rights), num_draft_tokens=12) == plain
    assert texts_of(folder, 60, draft_model=folder, num_draft_tokens=9) == plain


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss"])
def test_turns_go_on_from_the_prefix_cache_as_from_the_beginning(kind: str, tmp_path: Path) -> None:
    assert_turns_are_those_of_a_cold_start(saved(tiny_family(Variant(kind)), tmp_path), runner="native")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss"])
def test_a_full_cache_preempts_and_reads_again_without_changing_a_text(kind: str, tmp_path: Path) -> None:
    model = tiny_family(Variant(kind))
    assert_preemption_changes_nothing(saved(model, tmp_path), model, runner="native")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss"])
def test_a_text_longer_than_all_that_windows_keep_is_that_of_transformers(kind: str, tmp_path: Path) -> None:
    """A prompt of 5,000 tokens where windows keep 4,672; then its next turn, and one that parts from it early on."""
    model = tiny_family(Variant(kind, changes={"max_position_embeddings": 8192}))
    prompt = [(11 * place + place // 7) % 200 for place in range(5000)]
    assert window_pool_tokens(8192, 16) < len(prompt)
    options: dict[str, Any] = {"runner": "native", "num_draft_tokens": 4, "kv_cache_tokens": 8192, "method": "ngram"}
    with SpeculativeDecoder(saved(model, tmp_path), **options) as decoder:
        for ids in (prompt, [*prompt, 5, 6, 7], prompt[:1000]):
            [expected] = transformers_texts(model, 12, [ids])
            [result] = decoder.generate([ids], max_new_tokens=12, ignore_eos=True)
            assert result.token_ids == expected


@pytest.mark.slow
def test_sixteen_sequences_share_room_for_two_windows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Prompts share a prefix: windows are given up and read again, and sequences are preempted."""
    shrink_pools(monkeypatch)
    model = tiny_family(Variant("gemma3_text"))
    shared = [(7 * place) % 200 for place in range(70)]
    prompts = [[*shared, *((3 * place + length) % 200 for place in range(5 * length))] for length in range(16)]
    texts = transformers_texts(model, 20, prompts)
    options: dict[str, Any] = {"runner": "native", "num_draft_tokens": 4, "kv_cache_tokens": 4096, "max_num_seqs": 16}
    with SpeculativeDecoder(saved(model, tmp_path), method="ngram", **options) as decoder:
        for _ in range(2):
            results = decoder.generate(prompts, max_new_tokens=20, ignore_eos=True)
            assert [result.token_ids for result in results] == texts
        assert decoder.stats().preemptions > 0


# --- sampled texts ----------------------------------------------------------------------------------------------------


def statistic(kind: str, rule: str, folder: Path) -> float:
    model = tiny_family(Variant(kind))
    target, draft = saved(model, folder / "target"), saved(near(model), folder / "draft")
    options: dict[str, Any] = {"draft_model": draft, "num_draft_tokens": K, "runner": "native", "acceptance": rule}
    with SpeculativeDecoder(target, **options) as decoder:
        results = decoder.generate(SAMPLED_PROMPTS, max_new_tokens=NEW_TOKENS, ignore_eos=True, temperature=1.0, seed=3)
    return uniformity(model, results)


@pytest.mark.slow
@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("kind", ["mistral", "gemma3_text"])
def test_sampled_texts_have_the_law_of_the_target(kind: str, rule: str, tmp_path: Path) -> None:
    value = statistic(kind, rule, tmp_path)
    assert value < chi2.isf(FALSE_ALARM, BINS - 1), f"chi² {value:.1f}: p = {chi2.sf(value, BINS - 1):.2g}"


@pytest.mark.slow
def test_a_cache_that_keeps_a_rejected_token_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The mutant takes back one token too few and drops the first instead: all that a step keeps is one place off."""
    right = NativeRunner.commit

    def wrong(runner: NativeRunner, seq_cache: SequenceCache, nodes: list[int]) -> None:
        width = seq_cache.length - own(seq_cache).last_row_start
        right(runner, seq_cache, [node + 1 for node in nodes] if len(nodes) < width <= K + 1 else nodes)

    monkeypatch.setattr(NativeRunner, "commit", wrong)
    assert statistic("mistral", "token", tmp_path) > chi2.isf(FALSE_ALARM, BINS - 1)
