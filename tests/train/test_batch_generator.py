"""The batch generator generates what the model does: greedy equals generate, questions end in their bridge."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.build import build_engine
from paceline.train.batch_generator import BatchGenerator, BatchGenerators, can_generate
from paceline.train.collect import CollectOptions
from paceline.train.sequence_writer import WriterLimits, answer_plan
from paceline.train.writers import writers_of
from tests.support.families import tiny_family_config
from tests.support.tiny import byte_tokenizer
from tests.train.conftest import random_prompts

MAX_LEN = 48


def never() -> bool:
    return False


def tiny_model(family: str, **changes: Any) -> Any:
    config = tiny_family_config(family, {})
    config.update(changes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).eval()


def test_the_models_own_attention_is_restored(target_model: Any) -> None:
    before = target_model.config._attn_implementation
    writer = BatchGenerator(target_model, WriterLimits(2, 16))
    assert list(writer.write(iter([answer_plan([1, 2], 0.0, 16)]), lambda: False))
    assert target_model.config._attn_implementation == before


@pytest.mark.slow
def test_the_same_seed_generates_the_same_sequences(target_model: Any) -> None:
    def generate() -> list[list[int]]:
        torch.manual_seed(3)
        plans = [answer_plan([5, number], 1.0, 32, number) for number in range(4)]
        writer = BatchGenerator(target_model, WriterLimits(4, 32))
        return [seq.tokens for seq in writer.write(iter(plans), lambda: False)]

    with torch.random.fork_rng():
        assert generate() == generate()


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_families_it_claims_generate_their_own_text(family: str) -> None:
    model = tiny_model(family, sliding_window=None)
    assert can_generate(model)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    (seq,) = BatchGenerator(model, WriterLimits(1, 24)).write(iter([answer_plan(ids[0].tolist(), 0.0, 24)]), never)
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_length=24, do_sample=False, pad_token_id=0)
    assert seq.tokens == expected[0].tolist()


def test_models_with_other_attention_are_left_to_the_engine() -> None:
    assert not can_generate(tiny_model("gemma2"))


@pytest.mark.gpu
def test_on_a_gpu_training_data_comes_from_the_batch(target_model: Any) -> None:
    model = copy.deepcopy(target_model).cuda()
    writers = writers_of(build_engine, model, byte_tokenizer(), CollectOptions(max_seq_len=64))
    plans = [answer_plan(prompt, 0.0, 32, tag) for tag, prompt in enumerate(random_prompts(9))]
    generated = {seq.plan.tag: seq.tokens for seq in writers.open(WriterLimits(4, 32)).write(iter(plans), never)}
    assert isinstance(writers, BatchGenerators) and sorted(generated) == list(range(9))
