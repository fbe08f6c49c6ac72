"""The engine writer generates what the model does: greedy equals generate, questions end in their bridge."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.engines.local.engine import LocalEngine
from paceline.errors import OutOfMemory
from paceline.train.collect import CollectOptions
from paceline.train.engine_writer import MIN_P, engine_config
from paceline.train.sequence_writer import GenerationPlan, WriterLimits, answer_plan
from tests.support import chi2
from tests.support.tiny import byte_tokenizer, tiny_llama
from tests.train.conftest import engine_writers

MAX_LEN = 48
EOS = 257
FALSE_ALARM = 1e-6


def stop_after(calls: int) -> Callable[[], bool]:
    counter = itertools.count()
    return lambda: next(counter) >= calls


def test_greedy_and_sampled_sequences_take_turns_where_greedy_steps_need_no_host(target_model: Any) -> None:
    """Every plan is generated; while greedy answers run, nothing else does."""
    writers = engine_writers(target_model, 2)
    writers.engine.parts.target.decode_steps = 4
    plans = [GenerationPlan((1, 2, tag), 8, 6, (EOS, 10), float(tag % 2), 24, tag) for tag in range(7)]
    writer = writers.open(WriterLimits(2, 24, 2))
    kinds: list[set[bool]] = []

    def never() -> bool:
        kinds.append({state.seq.sampling.greedy for state in writer._active})
        return False

    generated = list(writer.write(iter(plans), never))
    assert sorted(seq.plan.tag for seq in generated) == list(range(7))
    assert all(len(kind) <= 1 for kind in kinds) and {True} in kinds and {False} in kinds


@pytest.fixture(scope="module")
def ending_model() -> Any:
    """Its layers add nothing and its embeddings are all the same, so it always prefers the end-of-sequence token."""
    model = tiny_llama()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.get_input_embeddings().weight.fill_(1.0)
        model.lm_head.weight.zero_()
        model.lm_head.weight[EOS] = 1.0
    return model


def test_the_bridge_replaces_the_end_of_a_question_that_is_long_enough(ending_model: Any) -> None:
    """The model ends every sequence at once, so the least length decides."""
    plan = GenerationPlan((1, 2, 3), 20, 9, (7, 8), 0.0, 40)
    (seq,) = engine_writers(ending_model, 1).open(WriterLimits(1, 40, 2)).write(iter([plan]), lambda: False)
    assert seq.start == 9 + 2 and seq.tokens[9:11] == [7, 8], "6 new tokens, then the bridge in place of the end"
    assert EOS not in seq.tokens[: seq.start]
    assert seq.tokens[seq.start :] == [EOS], "the answer keeps its end-of-sequence token"


def test_a_question_without_a_bridge_goes_on_past_end_of_sequence_tokens(ending_model: Any) -> None:
    plan = GenerationPlan((1, 2, 3), 7, 3, (), 0.0, 40)
    (seq,) = engine_writers(ending_model, 1).open(WriterLimits(1, 40)).write(iter([plan]), lambda: False)
    assert seq.tokens == [1, 2, 3, EOS, EOS, EOS, EOS, EOS] and seq.start == 7


def test_a_question_that_leaves_no_room_for_an_answer_is_dropped(target_model: Any) -> None:
    plan = GenerationPlan((1, 2, 3), 12, 12, (10, 11), 0.0, 13)
    writer = engine_writers(target_model, 1).open(WriterLimits(1, 13, 2))
    assert not list(writer.write(iter([plan]), lambda: False))


@pytest.mark.slow
def test_the_same_seed_generates_the_same_sequences(target_model: Any) -> None:
    def generate(seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        plans = [answer_plan([5, number], 1.0, 32, number) for number in range(4)]
        writer = engine_writers(target_model, 4).open(WriterLimits(4, 32))
        return [seq.tokens for seq in writer.write(iter(plans), lambda: False)]

    with torch.random.fork_rng():
        assert generate(3) == generate(3) != generate(4)


@pytest.mark.slow
def test_sampled_tokens_have_the_models_distribution_without_its_tail(target_model: Any) -> None:
    """2000 first tokens against softmax(logits / temperature) cut at MIN_P of the best."""
    temperature, count = 0.8, 2000
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        plans = (answer_plan([5, 9], temperature, 3) for _ in range(count))
        writer = engine_writers(target_model, 64).open(WriterLimits(64, 3))
        tokens = Counter(seq.tokens[2] for seq in writer.write(plans, lambda: False))
        probs = torch.softmax(target_model(torch.tensor([[5, 9]])).logits[0, -1] / temperature, dim=-1)
    probs[probs < MIN_P * probs.max()] = 0.0
    expected = (probs / probs.sum() * count).double()
    inside = expected > 0
    assert set(tokens) <= set(inside.nonzero().flatten().tolist()) and int(inside.sum()) > 1
    observed = torch.tensor([tokens[token] for token in range(len(probs))], dtype=torch.float64)
    statistic = float(((observed - expected)[inside] ** 2 / expected[inside]).sum())
    freedom = int(inside.sum()) - 1
    limit = float(chi2.isf(FALSE_ALARM, freedom))
    print(f"chi² {statistic:.1f}, limit {limit:.1f}; correct code fails this with probability {FALSE_ALARM:g}")
    assert statistic < limit


def test_answers_under_way_are_yielded_when_the_writer_is_stopped(target_model: Any) -> None:
    writers = engine_writers(target_model, 2)
    plans = [answer_plan([1, 2], 0.0, MAX_LEN), answer_plan([3], 0.0, MAX_LEN)]
    generated = list(writers.open(WriterLimits(2, MAX_LEN)).write(iter(plans), stop_after(20)))
    assert len(generated) == 2 and all(len(seq.tokens) < MAX_LEN for seq in generated)
    assert not writers.engine.has_work, "the rest is aborted"


def test_answers_of_a_few_tokens_and_questions_are_dropped_when_the_writer_is_stopped(target_model: Any) -> None:
    plans = [answer_plan([1, 2], 0.0, MAX_LEN), GenerationPlan((1, 2), 30, 30, (10,), 0.0, MAX_LEN)]
    writer = engine_writers(target_model, 2).open(WriterLimits(2, MAX_LEN, 1))
    assert not list(writer.write(iter(plans), stop_after(10)))


def test_a_closed_iterator_leaves_no_work_behind(target_model: Any) -> None:
    writers = engine_writers(target_model, 2)
    plans = (answer_plan([1, number % 30], 0.0, 8 + number % 9) for number in itertools.count())
    sequences = writers.open(WriterLimits(2, MAX_LEN)).write(plans, lambda: False)
    next(sequences)
    sequences.close()  # type: ignore[attr-defined]
    assert not writers.engine.has_work


@pytest.mark.slow
def test_no_more_sequences_run_than_fit_the_blocks(target_model: Any) -> None:
    """Blocks for two sequences of 96 tokens; 5 plans at most 5 at a time: nothing is preempted."""
    writers = engine_writers(target_model, 2)
    assert writers.num_seqs_that_fit(96) == 2
    plans = [answer_plan([1, number], 0.0, 96) for number in range(5)]
    assert len(list(writers.open(WriterLimits(5, 96)).write(iter(plans), lambda: False))) == 5
    assert writers.engine.stats().preemptions == 0


def test_memory_that_runs_out_names_the_option_to_change(target_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    writers = engine_writers(target_model, 1)

    def forward(*args: Any, **options: Any) -> Any:
        raise OutOfMemory("a pass does not fit")

    monkeypatch.setattr(writers.engine.parts.target, "forward", forward)
    with pytest.raises(OutOfMemory, match="--max-num-seqs"):
        list(writers.open(WriterLimits(1, 32)).write(iter([answer_plan([1, 2], 0.0, 32)]), lambda: False))


def test_writers_of_a_model_know_its_sizes(target_model: Any) -> None:
    writers = engine_writers(target_model)
    assert writers.sizes.num_layers == 4
    assert writers.num_seqs_that_fit(96) == 32, "few on a CPU"
    assert isinstance(writers.engine, LocalEngine)


@pytest.mark.slow
def test_an_architecture_that_is_not_native_runs_as_it_is(target_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = CollectOptions(max_seq_len=96)
    assert engine_config(target_model, byte_tokenizer(), options).model.runner == "native"
    monkeypatch.setattr("paceline.train.engine_writer.is_native", lambda config: False)
    assert engine_config(target_model, byte_tokenizer(), options).model.runner == "auto"
    writers = engine_writers(target_model)
    assert writers.num_seqs_that_fit(96) == 32, "its pool only counts, so the memory decides"
    plan = answer_plan([1, 2, 3], 0.0, 24)
    (seq,) = writers.open(WriterLimits(1, 24)).write(iter([plan]), lambda: False)
    assert len(seq.tokens) == 24
