"""Every writer generates what the model does: greedy equals generate, questions end in their bridge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.train.batch_generator import BatchGenerators
from paceline.train.sequence_writer import GenerationPlan, SequenceWriter, WriterLimits, answer_plan
from tests.train.conftest import engine_writers, random_prompts

MAX_LEN, EOS = 48, 257
OpenWriter = Callable[[Any, WriterLimits], SequenceWriter]


@pytest.fixture(params=["batch", "engine"])
def open_writer(request: pytest.FixtureRequest) -> OpenWriter:
    if request.param == "batch":
        return lambda model, limits: BatchGenerators(model).open(limits)
    return lambda model, limits: engine_writers(model, limits.num_seqs).open(limits)


@pytest.mark.slow
def test_greedy_sequences_equal_generate(open_writer: OpenWriter, target_model: Any) -> None:
    """More prompts than sequences at a time and of several lengths, so some start while others run."""
    prompts = [prompt[: 2 + number % 5] for number, prompt in enumerate(random_prompts(11, seed=4))]
    plans = [answer_plan(prompt, 0.0, MAX_LEN, tag) for tag, prompt in enumerate(prompts)]
    writer = open_writer(target_model, WriterLimits(4, MAX_LEN))
    generated = {seq.plan.tag: seq for seq in writer.write(iter(plans), lambda: False)}
    assert sorted(generated) == list(range(11))
    for tag, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        expected = target_model.generate(
            ids, attention_mask=torch.ones_like(ids), max_length=MAX_LEN, do_sample=False, pad_token_id=258
        )
        assert generated[tag].tokens == expected[0].tolist()
        assert generated[tag].start == len(prompt)


def test_a_question_ends_in_its_bridge_and_the_answer_starts_behind(open_writer: OpenWriter, target_model: Any) -> None:
    bridge = (EOS, 10, 11)
    plans = [GenerationPlan((1, 2, 3), 12, 8, bridge, temperature, 40) for temperature in (0.0, 0.8)]
    writer = open_writer(target_model, WriterLimits(2, 40, len(bridge)))
    generated = list(writer.write(iter(plans), lambda: False))
    assert len(generated) == 2
    for seq in generated:
        assert tuple(seq.tokens[:3]) == (1, 2, 3)
        assert tuple(seq.tokens[seq.start - 3 : seq.start]) == bridge
        assert 8 <= seq.start - 3 <= 12
        assert len(seq.tokens) <= 40 and EOS not in seq.tokens[seq.start : -1]
