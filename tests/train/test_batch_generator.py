"""The batch generator generates what the model does: greedy equals generate, questions end in their bridge."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.train.batch_generator import BatchGenerator, BatchGenerators
from paceline.train.sequence_writer import GenerationPlan, WriterLimits, answer_plan
from tests.train.conftest import greedy_sequences, random_prompts

MAX_LEN = 48


@pytest.mark.slow
def test_greedy_rows_equal_generate(target_model: Any) -> None:
    """More prompts than rows and of several lengths, so rows are reused before others finish."""
    prompts = [prompt[: 2 + number % 5] for number, prompt in enumerate(random_prompts(11, seed=4))]
    plans = [answer_plan(prompt, 0.0, MAX_LEN, tag) for tag, prompt in enumerate(prompts)]
    writer = BatchGenerator(target_model, WriterLimits(4, MAX_LEN))
    generated = {seq.plan.tag: seq for seq in writer.write(iter(plans), lambda: False)}
    assert sorted(generated) == list(range(11))
    for tag, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        expected = target_model.generate(
            ids, attention_mask=torch.ones_like(ids), max_length=MAX_LEN, do_sample=False, pad_token_id=258
        )
        assert generated[tag].tokens == expected[0].tolist()
        assert generated[tag].start == len(prompt)


def test_the_models_own_attention_is_restored(target_model: Any) -> None:
    before = target_model.config._attn_implementation
    greedy_sequences(target_model, random_prompts(2), 16)
    assert target_model.config._attn_implementation == before


def test_a_question_ends_in_its_bridge_and_the_answer_starts_behind(target_model: Any) -> None:
    bridge = (257, 10, 11)
    plans = [GenerationPlan((1, 2, 3), 12, 8, bridge, temperature, 40) for temperature in (0.0, 0.8)]
    writer = BatchGenerator(target_model, WriterLimits(2, 40, len(bridge)))
    generated = list(writer.write(iter(plans), lambda: False))
    assert len(generated) == 2
    for seq in generated:
        assert tuple(seq.tokens[:3]) == (1, 2, 3)
        assert tuple(seq.tokens[seq.start - 3 : seq.start]) == bridge
        assert 8 <= seq.start - 3 <= 12
        assert len(seq.tokens) <= 40 and 257 not in seq.tokens[seq.start : -1]


def test_the_same_seed_generates_the_same_sequences(target_model: Any) -> None:
    def generate() -> list[list[int]]:
        torch.manual_seed(3)
        plans = [answer_plan([5, number], 1.0, 32, number) for number in range(4)]
        writer = BatchGenerator(target_model, WriterLimits(4, 32))
        return [seq.tokens for seq in writer.write(iter(plans), lambda: False)]

    with torch.random.fork_rng():
        assert generate() == generate()


def test_answers_under_way_are_yielded_when_the_writer_is_stopped(target_model: Any) -> None:
    stops = iter([False, False, True])
    writer = BatchGenerator(target_model, WriterLimits(2, MAX_LEN))
    plans = [answer_plan([1, 2], 0.0, MAX_LEN), answer_plan([3], 0.0, MAX_LEN)]
    generated = list(writer.write(iter(plans), lambda: next(stops)))
    assert len(generated) == 2 and all(len(seq.tokens) < MAX_LEN for seq in generated)


def test_writers_of_a_model_know_its_sizes(target_model: Any) -> None:
    writers = BatchGenerators(target_model)
    assert writers.sizes.num_layers == 4
    assert writers.num_seqs_that_fit(64) == 32, "few on a CPU"
