"""vLLM's outputs and counts become ours, without vLLM: its records are stood in for by objects with the same fields."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence, SequenceParams
from paceline.core.stats import SpecStats
from paceline.core.stopping import StopRules
from paceline.core.types import RequestOutput
from paceline.engines.vllm.steps import SequenceReader, Step, StepRecorder, draft_lengths, step_of
from paceline.hub.tokenizer import Tokenizer
from tests.support.tiny import byte_tokenizer

EOS = 257
TOKENIZER = Tokenizer(byte_tokenizer())


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def metrics(drafted: list[int], accepted: list[int]) -> SimpleNamespace:
    return SimpleNamespace(per_step_drafted=drafted, per_step_accepted=accepted)


class Reading:
    """A sequence that is read step by step."""

    def __init__(self, max_new_tokens: int = 100, stop: tuple[str, ...] = ()) -> None:
        self.seq = Sequence(
            [1], SequenceParams(SamplingParams(), StopRules(max_new_tokens, frozenset({EOS}), stop, TOKENIZER.decode))
        )
        self._reader = SequenceReader(self.seq, TOKENIZER.stream(stop))
        self.outputs: list[RequestOutput] = []

    def step(self, tokens: list[int], **fields: Any) -> None:
        self.outputs += self._reader.outputs(Step(tokens, **fields))

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)

    @property
    def from_draft(self) -> list[bool]:
        return [output.from_draft for output in self.outputs for _ in output.token_ids]


def test_all_tokens_of_a_step_but_the_last_were_drafted() -> None:
    reading = Reading(5)
    reading.step(ids("a"), drafted=0)
    reading.step(ids("bcd"), drafted=3)
    reading.step(ids("e"), drafted=2, finish_reason="length", metrics=metrics([3, 2], [2, 0]))
    assert reading.text == "abcde" and reading.from_draft == [False, True, True, False, False]
    assert [output.num_drafted for output in reading.outputs] == [0, None, 3, 2]
    stats = reading.outputs[-1].stats
    assert stats is not None and (stats.steps, stats.new_tokens, stats.drafted, stats.accepted) == (3, 5, 5, 2)
    assert (stats.offered_at, stats.accepted_at) == ([2, 2, 1], [1, 1, 0])
    assert reading.outputs[-1].finish_reason == "length"


def test_an_end_token_inside_an_accepted_run_was_drafted_too() -> None:
    reading = Reading()
    reading.step(ids("a"))
    reading.step([*ids("b"), EOS], finish_reason="stop", metrics=metrics([4], [4]))
    assert reading.from_draft == [False, True, True]
    stats = reading.outputs[-1].stats
    assert stats is not None and (stats.steps, stats.new_tokens, stats.accepted, stats.drafted) == (2, 3, 2, 2)
    assert reading.text == "ab" and reading.outputs[-1].stop_reason is None


def test_a_stop_string_ends_the_sequence_here_and_is_not_shown() -> None:
    reading = Reading(stop=("cd",))
    reading.step(ids("ab"), drafted=1)
    reading.step(ids("cdef"), drafted=3)
    assert reading.seq.finish_reason == "stop" and reading.text == "ab" and reading.outputs[-1].stop_reason == "cd"
    stats = reading.outputs[-1].stats
    assert stats is not None and (stats.new_tokens, stats.accepted, stats.drafted) == (4, 3, 3)
    assert reading.from_draft == [True, False, True, True]


def test_without_counts_of_its_own_a_sequence_has_its_share_of_the_passes() -> None:
    reading = Reading(stop=("d",))
    reading.step(ids("a"), drafted=0)
    reading.step(ids("bc"), share=3.0)
    reading.step(ids("d"), share=3.0)
    stats = reading.outputs[-1].stats
    assert stats is not None and (stats.steps, stats.accepted, stats.drafted) == (3, 1, 6)
    assert stats.acceptance_by_position == []


def test_an_aborted_sequence_ends_with_what_it_has() -> None:
    reading = Reading()
    reading.step(ids("a"), drafted=0)
    reading.step([], finish_reason="abort")
    last = reading.outputs[-1]
    assert last.finish_reason == "abort" and last.stats is not None and last.stats.new_tokens == 1


def test_log_probabilities_are_ordered_by_rank_and_the_token_is_found_whatever_its_rank() -> None:
    def entry(rank: int, logprob: float) -> SimpleNamespace:
        return SimpleNamespace(rank=rank, logprob=logprob)

    row = {9: entry(7, -4.0), 3: entry(2, -2.0), 5: entry(1, -1.0)}
    completion = SimpleNamespace(token_ids=[9], logprobs=[row], finish_reason=None, spec_decode_metrics=None)
    step = step_of(completion, 2)
    assert step.logprobs is not None and step.logprobs[0].logprob == -4.0
    assert step.logprobs[0].top == ((5, -1.0), (3, -2.0))
    assert step_of(completion, None).logprobs is None


def scheduler(drafted: int = 0, accepted: int = 0, offered_at: tuple[int, ...] = ()) -> SimpleNamespace:
    drafts = SimpleNamespace(
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
        num_draft_tokens_per_pos=list(offered_at),
        num_accepted_tokens_per_pos=[accepted, *[0] * (len(offered_at) - 1)],
    )
    return SimpleNamespace(
        spec_decoding_stats=drafts if drafted else None,
        prefix_cache_stats=SimpleNamespace(hits=16),
        num_waiting_reqs=1,
        kv_cache_usage=0.5,
    )


def test_steps_are_delivered_when_their_pass_is_complete_with_its_draft_tokens() -> None:
    recorder, delivered = StepRecorder(), list[Step]()
    recorder.began(7, first=True)
    recorder.add(Step([1]), delivered.append)
    assert not delivered
    recorder.record(scheduler(2, 1, (1, 1)), SimpleNamespace(num_preempted_reqs=1))
    recorder.add(Step([1, 2]), delivered.append)
    recorder.add(Step([3]), delivered.append)
    recorder.record(scheduler(3, 1, (2, 1)), None)
    assert [(step.drafted, step.share) for step in delivered] == [(2, 2.0), (None, 1.5), (None, 1.5)]
    stats = recorder.snapshot("ngram", 2, 10)
    assert (stats.spec.steps, stats.spec.new_tokens, stats.spec.drafted, stats.spec.accepted) == (3, 4, 5, 2)
    assert stats.draft_lengths == {1: 1, 2: 2} and stats.by_method == {"ngram": stats.spec}
    assert (stats.waiting, stats.running, stats.blocks_used, stats.blocks_free) == (1, 1, 5, 5)
    assert (stats.prompt_tokens, stats.preemptions, stats.prefix_tokens) == (7, 1, 32)


def test_an_idle_engine_holds_no_blocks() -> None:
    recorder = StepRecorder()
    recorder.record(scheduler(), None)
    stats = recorder.snapshot("none", 0, 10)
    assert (stats.waiting, stats.running, stats.blocks_used) == (0, 0, 0)


def test_steps_by_their_draft_tokens_follow_from_the_positions_offered() -> None:
    assert draft_lengths(SpecStats(steps=10, offered_at=[6, 4, 4])) == {0: 4, 1: 2, 3: 4}
    assert draft_lengths(SpecStats(steps=2)) == {0: 2}
