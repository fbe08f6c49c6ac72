"""Admission, reading in chunks, preemption, prefix reuse, fairness, failure: on the toy model, round by round."""

from __future__ import annotations

import random

import pytest

from paceline.engines.local.scheduler import Scheduler
from paceline.engines.local.settings import EngineSettings
from paceline.errors import OptionError, OutOfMemory, StepFailed
from tests.support.engine_toy import WatchedRunner, alone, parts, text_of, ticket_of, tokens_of

SMALL = EngineSettings(max_num_seqs=4, kv_cache_tokens=96, block=4, prefill_chunk=8, residents=4)


def prompts(count: int, length: int = 20, seed: int = 0) -> list[list[int]]:
    uniforms = random.Random(seed)
    return [[uniforms.randrange(6) for _ in range(length + uniforms.randrange(6))] for _ in range(count)]


def finish(scheduler: Scheduler, limit: int = 2000) -> int:
    """Rounds until nothing is left to do."""
    for count in range(limit):
        if not scheduler.busy:
            return count
        scheduler.round()
    raise AssertionError("the scheduler never came to an end")


def test_texts_that_do_not_fit_together_come_out_as_if_written_alone() -> None:
    runner = WatchedRunner()
    scheduler = Scheduler(parts(runner), SMALL)
    asked = prompts(9)
    tickets = [ticket_of(text_of(prompt, 30)) for prompt in asked]
    for request_state, _ in tickets:
        scheduler.add(request_state)
    finish(scheduler)
    assert scheduler.load().preemptions > 0, "96 tokens of cache must not hold four texts of fifty"
    assert [tokens_of(told) for _, told in tickets] == [alone(prompt, 30) for prompt in asked]
    assert all(told[-1].finish_reason == "length" for _, told in tickets)


def test_pages_and_slots_are_given_back() -> None:
    runner = WatchedRunner()
    scheduler = Scheduler(parts(runner), SMALL)
    free = scheduler.memory.pool.free
    tickets = [ticket_of(text_of(prompt, 25))[0] for prompt in prompts(8)]
    for request_state in tickets:
        scheduler.add(request_state)
    for _ in range(12):
        scheduler.round()
    for request_state in tickets[::3]:  # a third leaves at some moment
        scheduler.drop(request_state)
    finish(scheduler)
    load = scheduler.load()
    assert load.blocks_used == 0 and load.blocks_free + load.blocks_cached == free
    assert len(runner.open_slots) == len(scheduler.memory._residents)
    scheduler.memory.drop_residents()
    assert scheduler.memory.pool.free == free and scheduler.memory.cached_blocks == 0
    assert not runner.open_slots


def test_a_long_prompt_is_read_in_chunks_while_others_are_written() -> None:
    runner = WatchedRunner()
    settings = EngineSettings(max_num_seqs=4, kv_cache_tokens=1024, block=4, prefill_chunk=8, residents=0)
    scheduler = Scheduler(parts(runner), settings)
    short, short_told = ticket_of(text_of(prompts(1)[0][:4], 40))
    long, long_told = ticket_of(text_of(prompts(1, 200)[0], 4))
    scheduler.add(short)
    scheduler.round()
    scheduler.add(long)
    before = len(short_told)
    while not long_told:
        scheduler.round()
    assert len(short_told) - before > 10, "the short text must go on while the long prompt is read"
    assert max(max(widths) for widths in runner.passes) <= 8


def test_a_next_turn_reads_only_what_is_new() -> None:
    runner = WatchedRunner()
    scheduler = Scheduler(parts(runner), EngineSettings(kv_cache_tokens=512, block=4, residents=4))
    first = text_of(prompts(1)[0], 20)
    scheduler.add(ticket_of(first)[0])
    finish(scheduler)
    runner.passes.clear()
    turn = [*first.ids, 1, 2, 3, 4, 5]
    request_state, told = ticket_of(text_of(turn, 10))
    scheduler.add(request_state)
    finish(scheduler)
    assert runner.passes[0] == [5], "all but the last of the five new tokens, and the last token written before"
    assert tokens_of(told) == alone(turn, 10)
    assert scheduler.load().prefix_hits == 1 and len(runner.open_slots) == 1


def test_texts_with_one_prompt_read_it_once() -> None:
    runner = WatchedRunner()
    scheduler = Scheduler(parts(runner), EngineSettings(kv_cache_tokens=4096, block=4, prefill_chunk=512, residents=4))
    prompt = prompts(1, 150)[0]
    tickets = [ticket_of(text_of(prompt, 12)) for _ in range(4)]
    for request_state, _ in tickets:
        scheduler.add(request_state)
    finish(scheduler)
    assert scheduler.load().prefix_hits == 3
    assert sum(width for widths in runner.passes for width in widths if width > 10) == len(prompt) - 1
    assert {tuple(tokens_of(told)) for _, told in tickets} == {tuple(alone(prompt, 12))}


def test_no_text_is_overtaken_for_ever() -> None:
    scheduler = Scheduler(parts(WatchedRunner()), SMALL)
    big, told = ticket_of(text_of(prompts(1, 60)[0], 20))
    for prompt in prompts(3, 10):
        scheduler.add(ticket_of(text_of(prompt, 20))[0])
    scheduler.add(big)
    for _ in range(200):
        scheduler.add(ticket_of(text_of(prompts(1, 8)[0], 10))[0])  # small ones keep coming
        scheduler.round()
        if told and told[-1].finish_reason:
            return
    raise AssertionError("the large text starved")


def test_a_dropped_text_is_not_written_any_more() -> None:
    scheduler = Scheduler(parts(WatchedRunner()), SMALL)
    (request_state, told), (other, other_told) = (ticket_of(text_of(prompt, 30)) for prompt in prompts(2))
    scheduler.add(request_state)
    scheduler.add(other)
    for _ in range(8):
        scheduler.round()
    written = len(told)
    scheduler.drop(request_state)
    scheduler.round()
    assert len(told) == written and request_state.seq.seq_cache is None
    finish(scheduler)
    assert other_told[-1].finish_reason == "length"
    scheduler.drop(other)  # long over: harmless


@pytest.mark.parametrize("error", [ValueError("broken kernel"), OutOfMemory("no memory left")])
def test_a_broken_pass_costs_its_own_texts_and_no_other(error: Exception) -> None:
    runner = WatchedRunner()
    scheduler = Scheduler(parts(runner), SMALL)
    lost, lost_told = ticket_of(text_of(prompts(1)[0], 30))
    scheduler.add(lost)
    for _ in range(6):
        scheduler.round()
    prompt = prompts(1, seed=5)[0]
    waiting, told = ticket_of(text_of(prompt, 10))
    runner.breaks = error
    scheduler.round()
    assert isinstance(lost_told[-1].error, OutOfMemory if isinstance(error, OutOfMemory) else StepFailed)
    scheduler.add(waiting)
    finish(scheduler)
    assert tokens_of(told) == alone(prompt, 10)
    assert scheduler.load().blocks_used == 0 and scheduler.load().failures == 1


def test_ending_all_ends_all() -> None:
    runner = WatchedRunner()
    scheduler = Scheduler(parts(runner), SMALL)
    tickets = [ticket_of(text_of(prompt, 30)) for prompt in prompts(7)]
    for request_state, _ in tickets:
        scheduler.add(request_state)
    for _ in range(9):
        scheduler.round()
    scheduler.abort_all()
    assert not scheduler.busy and not runner.open_slots
    assert all(told[-1].finish_reason in ("abort", "length") for _, told in tickets)


@pytest.mark.parametrize("wrong", [{"max_num_seqs": 0}, {"kv_cache_tokens": 8}, {"residents": -1}, {"page": 0}])
def test_impossible_settings_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(OptionError):
        EngineSettings(**wrong)
