"""Admission, chunked prefill, preemption, prefix reuse, fairness, failure: on the toy, step by step."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from paceline.config import EngineConfig
from paceline.core.draft_length import FixedDraftLength
from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence
from paceline.core.stopping import StopRules
from paceline.core.types import ModelOutput, Request, Row
from paceline.engines.local.engine import LocalEngine
from paceline.engines.local.scheduler import LOOP_STEPS
from paceline.errors import OptionError, OutOfMemory, StepFailed
from paceline.kv.block_manager import BLOCK_SIZE
from paceline.runners.native import NativeRunner
from tests.runners.native.models import tiny
from tests.support.build import add, finish, plain_tokens, sequence, toy_engine
from tests.support.toy import ToyRunner, random_prompts

SMALL_BLOCKS = 24  # of four tokens


def small_engine(runner: ToyRunner, **options: int) -> LocalEngine:
    """Four sequences at a time over 96 tokens of cache, prompts read eight tokens at a time."""
    return toy_engine(runner, **{"max_num_seqs": 4, "prefill_chunk_tokens": 8, **options})


@pytest.mark.slow
@pytest.mark.parametrize("shares_blocks", [True, False])
def test_sequences_that_do_not_fit_together_come_out_as_if_generated_alone(shares_blocks: bool) -> None:
    engine = small_engine(ToyRunner(SMALL_BLOCKS, shares_blocks=shares_blocks))
    prompts = random_prompts(9)
    requests = [add(engine, sequence(prompt, 30)) for prompt in prompts]
    finish(engine)
    assert engine.stats().preemptions > 0, "96 tokens of cache must not hold four sequences of fifty"
    assert [request.tokens for request in requests] == [plain_tokens(prompt, 30) for prompt in prompts]
    assert all(request.finish_reason == "length" for request in requests)


def test_blocks_and_sequence_caches_are_given_back() -> None:
    runner = ToyRunner(SMALL_BLOCKS)
    engine = small_engine(runner)
    requests = [add(engine, sequence(prompt, 25)) for prompt in random_prompts(8)]
    for _ in range(12):
        engine.step()
    for request in requests[::3]:  # a third of the readers leave
        engine.abort(request.state)
    finish(engine)
    stats = engine.stats()
    assert stats.blocks_used == 0 and stats.blocks_free + stats.blocks_cached == SMALL_BLOCKS
    assert len(runner.open_caches) == len(engine.parts.prefix_cache)
    engine.abort_all()
    assert runner.blocks.free == SMALL_BLOCKS and engine.stats().blocks_cached == 0
    assert not runner.open_caches


def test_a_long_prompt_is_read_in_chunks_while_others_are_generated() -> None:
    runner = ToyRunner()
    engine = small_engine(runner, prefix_cache_tokens=0)
    short = add(engine, sequence(random_prompts(1)[0][:4], 200))
    engine.step()
    long = add(engine, sequence(random_prompts(1, 200)[0], 4))
    before = len(short.outputs)
    while not long.outputs:
        engine.step()
    assert len(short.outputs) - before > 10, "the short sequence must go on while the long prompt is read"
    assert not short.finish_reason and max(max(widths) for widths in runner.passes) <= 8


def test_a_long_prompt_alone_is_read_in_few_passes() -> None:
    runner = ToyRunner()
    engine = small_engine(runner)
    engine.run([sequence(random_prompts(1, 200)[0], 1)])
    assert len(runner.passes) == 2, "one pass for the prompt, one for the token"


def test_the_next_turn_of_a_conversation_reads_only_what_is_new() -> None:
    runner = ToyRunner()
    engine = small_engine(runner)
    first = sequence(random_prompts(1)[0], 20)
    engine.run([first])
    runner.passes.clear()
    prompt = [*first.ids, 1, 2, 3, 4, 5]
    turn = add(engine, sequence(prompt, 10))
    finish(engine)
    assert runner.passes[0] == [5], "all but the last of the five new tokens, and the last token generated before"
    assert turn.tokens == plain_tokens(prompt, 10)
    assert engine.stats().prefix_hits == 1 and len(runner.open_caches) == 1


def test_sequences_with_one_prompt_read_it_once() -> None:
    runner = ToyRunner()
    engine = toy_engine(runner, prefill_chunk_tokens=512)
    [prompt] = random_prompts(1, 150)
    requests = [add(engine, sequence(prompt, 12)) for _ in range(4)]
    finish(engine)
    stats = engine.stats()
    assert (stats.prefix_hits, stats.prompt_tokens) == (3, 4 * len(prompt))
    assert sum(width for widths in runner.passes for width in widths if width > 10) == len(prompt) - 1
    assert {tuple(request.tokens) for request in requests} == {tuple(plain_tokens(prompt, 12))}


def test_no_sequence_is_overtaken_for_ever() -> None:
    engine = small_engine(ToyRunner(SMALL_BLOCKS))
    for prompt in random_prompts(3, 10):
        add(engine, sequence(prompt, 20))
    large = add(engine, sequence(random_prompts(1, 60)[0], 20))
    for _ in range(200):
        add(engine, sequence(random_prompts(1, 8)[0], 10))  # small ones keep coming
        engine.step()
        if large.finish_reason:
            return
    raise AssertionError("the large sequence starved")


def test_an_aborted_sequence_is_not_generated_any_more() -> None:
    engine = small_engine(ToyRunner(SMALL_BLOCKS))
    aborted, other = (add(engine, sequence(prompt, 30)) for prompt in random_prompts(2))
    for _ in range(8):
        engine.step()
    emitted = len(aborted.outputs)
    engine.abort(aborted.state)
    engine.step()
    assert len(aborted.outputs) == emitted and aborted.state.seq.seq_cache is None
    finish(engine)
    assert other.finish_reason == "length"
    engine.abort(other.state)  # ended long ago: harmless


def test_a_waiting_sequence_can_be_aborted() -> None:
    engine = small_engine(ToyRunner(SMALL_BLOCKS), max_num_seqs=1)
    first, waiting = (add(engine, sequence(prompt, 10)) for prompt in random_prompts(2))
    engine.step()
    assert engine.stats().waiting == 1
    engine.abort(waiting.state)
    finish(engine)
    assert first.finish_reason == "length" and not waiting.outputs


@pytest.mark.parametrize("error", [ValueError("broken kernel"), OutOfMemory("no memory left")])
def test_a_pass_that_raises_costs_its_own_sequences_and_no_other(error: Exception) -> None:
    runner = ToyRunner(SMALL_BLOCKS)
    engine = small_engine(runner)
    failed = add(engine, sequence(random_prompts(1)[0], 30))
    for _ in range(6):
        engine.step()
    # Out of memory is tried again, without drafts and after making room, until nothing more can be freed.
    runner.errors = [error] * (1 if isinstance(error, ValueError) else 4)
    engine.step()
    [failure] = failed.errors
    assert isinstance(failure, OutOfMemory if isinstance(error, OutOfMemory) else StepFailed)
    assert "broken kernel" in str(failure) or isinstance(failure, OutOfMemory)
    runner.errors = []
    [prompt] = random_prompts(1, seed=5)
    later = add(engine, sequence(prompt, 10))
    finish(engine)
    assert later.tokens == plain_tokens(prompt, 10)
    stats = engine.stats()
    assert stats.blocks_used == 0 and stats.failures == 1


@pytest.mark.parametrize("k", [0, 3])
def test_a_sequence_that_ends_in_a_step_that_raises_fails_with_it_and_is_not_generated_on(k: int) -> None:
    """Its last tokens were never handed out: without an error its reader would miss them, and get another."""
    engine = toy_engine(ToyRunner(), draft_length=FixedDraftLength(k))
    ended = add(engine, sequence(random_prompts(1)[0], 5))
    raising = add(engine, sequence(random_prompts(1)[0], 9, stopping=StopRules(9, ends=raise_after_four)))
    finish(engine)
    assert all(isinstance(request.errors[0].__cause__, ZeroDivisionError) for request in (ended, raising))
    assert ended.finish_reason is None and len(ended.tokens) < 5 and ended.state.seq.num_new_tokens == 5
    assert engine.stats().blocks_used == 0 and engine.stats().running == 0


def raise_after_four(generated: list[int]) -> bool:
    return 1 // (len(generated) < 5) == 0


def test_a_prefill_that_raises_costs_its_own_sequences() -> None:
    runner = ToyRunner()
    engine = small_engine(runner)
    prompts = random_prompts(2)
    runner.errors = [ValueError("broken kernel")]
    failed = add(engine, sequence(prompts[0], 10))
    engine.step()
    assert isinstance(failed.errors[0], StepFailed) and isinstance(failed.errors[0].__cause__, ValueError)
    later = add(engine, sequence(prompts[1], 10))
    finish(engine)
    assert later.tokens == plain_tokens(prompts[1], 10)


def test_memory_that_runs_out_once_costs_drafts_or_a_preemption_and_no_sequence() -> None:
    runner = ToyRunner()
    engine = small_engine(runner)
    prompts = random_prompts(3)
    requests = [add(engine, sequence(prompt, 30)) for prompt in prompts]
    for _ in range(10):
        engine.step()
    runner.errors = [OutOfMemory("no memory left")] * 2
    finish(engine)
    assert [request.tokens for request in requests] == [plain_tokens(prompt, 30) for prompt in prompts]
    assert engine.stats().failures == 0


def test_abort_all_ends_all() -> None:
    runner = ToyRunner(SMALL_BLOCKS)
    engine = small_engine(runner)
    requests = [add(engine, sequence(prompt, 30)) for prompt in random_prompts(7)]
    for _ in range(9):
        engine.step()
    engine.abort_all()
    assert not engine.has_work and not runner.open_caches
    assert all(request.finish_reason in ("abort", "length") for request in requests)


def test_draft_tokens_are_dropped_before_a_neighbour_is_preempted() -> None:
    """Two sequences of eight tokens each fill four blocks to the last token: no block is free for drafts."""
    runner = ToyRunner(num_blocks=4)
    engine = small_engine(runner, prefix_cache_tokens=0)
    requests = [add(engine, sequence([0, 1, 0, 1, 0], 3)) for _ in range(2)]
    finish(engine)
    assert engine.stats().preemptions == 0
    assert all(request.tokens == plain_tokens([0, 1, 0, 1, 0], 3) for request in requests)


@pytest.mark.parametrize(
    "wrong", [{"max_num_seqs": 0}, {"kv_cache_tokens": 0}, {"prefix_cache_tokens": -1}, {"prefill_chunk_tokens": 0}]
)
def test_impossible_options_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        EngineConfig.create("toy", **wrong)


class NarrowRunner(ToyRunner):
    """A pass over more than two sequences does not fit its memory."""

    def forward(self, rows: list[Row], *, last_only: bool = False) -> ModelOutput:
        if len(rows) > 2:
            raise OutOfMemory("three sequences do not fit a pass")
        return super().forward(rows, last_only=last_only)


def test_a_pass_that_does_not_fit_is_not_tried_again_with_as_many_sequences() -> None:
    engine = toy_engine(NarrowRunner(), draft_length=FixedDraftLength(0), max_num_seqs=3)
    prompts = [[0, 1, index] for index in range(4)]
    requests = [add(engine, sequence(prompt, 10)) for prompt in prompts]
    finish(engine, 60)
    assert [request.tokens for request in requests] == [plain_tokens(prompt, 10) for prompt in prompts]
    assert 1 <= engine.stats().preemptions <= len(prompts)


@pytest.mark.slow
def test_sequences_that_share_a_block_and_cannot_all_have_one_of_their_own_come_to_an_end() -> None:
    """Two prompts are the same and their last block is not full: each must copy it, and a third leaves no room."""
    runner = NativeRunner.of_model(tiny("llama"), "llama", kv_cache_tokens=4 * BLOCK_SIZE)
    engine = toy_engine(runner, draft_length=FixedDraftLength(0), max_num_seqs=3)
    prompts = [[factor * place % 101 for place in range(BLOCK_SIZE + 5)] for factor in (3, 3, 5)]
    requests = [add(engine, sequence(prompt, 10)) for prompt in prompts]
    finish(engine, 100)
    assert [len(request.tokens) for request in requests] == [10] * 3 and requests[0].tokens == requests[1].tokens


@dataclass
class Probing(FixedDraftLength):
    """Plans a probe of as many draft tokens as ever, from the second plan on."""

    k: int
    plans: int = 0

    def plan(self, seqs: list[Sequence]) -> list[int]:
        self.plans += 1
        return super().plan(seqs)

    @property
    def is_probing(self) -> bool:
        return self.plans > 1


def test_a_probe_that_is_planned_during_steps_in_a_row_ends_them() -> None:
    """It is then begun as one, and takes few steps."""
    policy = Probing(3)
    engine = toy_engine(draft_length=policy)
    add(engine, sequence([0, 1, 2], 400))
    engine.step()
    batch = engine._scheduler.schedule()
    policy.plans = 1
    assert not engine._scheduler.ends_loop(batch, LOOP_STEPS - 1), "it is not asked yet"
    assert engine._scheduler.ends_loop(batch, LOOP_STEPS)


def test_draft_lengths_count_what_was_drafted_and_every_step() -> None:
    engine = toy_engine(draft_length=FixedDraftLength(3))
    engine.run([sequence(prompt, 30) for prompt in random_prompts(3)])
    stats = engine.stats()
    assert sum(stats.draft_lengths.values()) == stats.spec.steps
    assert sum(length * steps for length, steps in stats.draft_lengths.items()) >= stats.spec.drafted > 0
    assert stats.draft_lengths[0] > 0, "n-grams have nothing to draft in the first step"


def test_a_request_that_is_refused_leaves_nothing_of_those_before_it() -> None:
    engine = toy_engine()
    with pytest.raises(OptionError, match="max_new_tokens"):
        engine.run([Request([1, 2, 3], SamplingParams(), 4), Request([1, 2, 3], SamplingParams(), 0)])
    assert not engine.has_work
