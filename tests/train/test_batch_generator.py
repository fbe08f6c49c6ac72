"""The writer says what the model says: greedy equals generate, questions and bridges stand where they belong."""

from __future__ import annotations

from typing import Any

import torch

from paceline.runners.loading import eos_token_ids_of
from paceline.train.batch_generator import Plan, Writer
from tests.train.conftest import greedy_texts, prompts

LENGTH = 48


def test_greedy_rows_equal_generate(target_model: Any) -> None:
    """More prompts than rows and of several lengths, so rows are handed on in the middle."""
    given = [prompt[: 2 + number % 5] for number, prompt in enumerate(prompts(11, seed=4))]
    plans = [Plan(tuple(prompt), 0, 0, (), 0.0, LENGTH, tag) for tag, prompt in enumerate(given)]
    writer = Writer(target_model, eos_token_ids_of(target_model), 4, LENGTH)
    written = {text.plan.tag: text for text in writer.write(iter(plans), lambda: False)}
    assert sorted(written) == list(range(11))
    for tag, prompt in enumerate(given):
        ids = torch.tensor([prompt])
        expected = target_model.generate(
            ids, attention_mask=torch.ones_like(ids), max_length=LENGTH, do_sample=False, pad_token_id=258
        )
        assert written[tag].tokens == expected[0].tolist()
        assert written[tag].start == len(prompt)


def test_the_models_own_attention_is_put_back(target_model: Any) -> None:
    before = target_model.config._attn_implementation
    greedy_texts(target_model, prompts(2), 16)
    assert target_model.config._attn_implementation == before


def test_a_question_ends_in_its_bridge_and_the_answer_starts_behind(target_model: Any) -> None:
    bridge = (257, 10, 11)
    plans = [Plan((1, 2, 3), 12, 8, bridge, heat, 40, tag) for tag, heat in enumerate((0.0, 0.8))]
    writer = Writer(target_model, eos_token_ids_of(target_model), 2, 40, len(bridge))
    for text in writer.write(iter(plans), lambda: False):
        assert tuple(text.tokens[:3]) == (1, 2, 3)
        assert tuple(text.tokens[text.start - 3 : text.start]) == bridge
        assert 8 <= text.start - 3 <= 12
        assert len(text.tokens) <= 40 and 257 not in text.tokens[text.start : -1]


def test_the_same_seed_writes_the_same_texts(target_model: Any) -> None:
    def write() -> list[list[int]]:
        torch.manual_seed(3)
        plans = [Plan((5, number), 0, 0, (), 1.0, 32, number) for number in range(4)]
        writer = Writer(target_model, eos_token_ids_of(target_model), 4, 32)
        return [text.tokens for text in writer.write(iter(plans), lambda: False)]

    with torch.random.fork_rng():
        assert write() == write()
