"""The one loop, step by step: plain, with drafts, and several plain steps in a row."""

from __future__ import annotations

import time

import pytest
import torch

from paceline.core.cost_model import StepTiming
from paceline.core.draft_length import FixedDraftLength
from paceline.core.draft_tree import DraftTree, chain
from paceline.core.protocols import Drafter
from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence
from paceline.core.stopping import StopRules
from paceline.core.types import Capability, Request, StepResult
from paceline.drafting.draft_model import DraftModel
from paceline.drafting.ngram import Ngram
from paceline.drafting.router import DrafterRouter
from paceline.engines.local.engine import LocalEngine
from paceline.errors import StepFailed
from tests.support.build import add, finish, plain_tokens, sequence, toy_engine
from tests.support.toy import ToyRunner, random_prompts

PROMPT = [0, 1, 2, 0, 1]


def perfect_drafter() -> Drafter:
    """The target itself: every draft token is accepted."""
    twin = ToyRunner()
    return DraftModel(twin, twin.info.vocab_size)


def check_invariant(engine: LocalEngine, seq: Sequence) -> None:
    """Between steps a sequence cache holds every token of the sequence but the last."""
    if seq.seq_cache is not None and not seq.finished:
        assert seq.seq_cache.tokens == seq.ids[:-1]  # type: ignore[attr-defined]


def test_a_plain_step_reads_the_last_token_and_emits_one() -> None:
    runner = ToyRunner()
    engine = toy_engine(runner, draft_length=FixedDraftLength(0))
    request = add(engine, sequence(PROMPT, 3))
    engine.step()
    assert runner.passes == [[4], [1]], "the prompt but its last token, then the last token"
    assert len(request.tokens) == 1
    assert engine.step() == [request.state]
    assert runner.passes[-1] == [1] and len(request.tokens) == 2
    check_invariant(engine, request.state.seq)


def test_a_step_with_drafts_verifies_all_of_them_in_one_pass() -> None:
    runner = ToyRunner()
    engine = toy_engine(runner, perfect_drafter(), FixedDraftLength(3))
    request = add(engine, sequence(PROMPT, 8))
    engine.step()
    assert runner.passes == [[4], [4]], "the last token and three draft tokens"
    assert [output.from_draft for output in request.outputs] == [True, False]
    assert [len(output.token_ids) for output in request.outputs] == [3, 1]
    assert request.outputs[-1].num_drafted == 3
    check_invariant(engine, request.state.seq)
    finish(engine)
    stats = request.outputs[-1].stats
    assert stats is not None and (stats.steps, stats.accepted, stats.tokens_per_step) == (2, 6, 4.0)
    assert request.tokens == plain_tokens(PROMPT, 8)


@pytest.mark.parametrize("k", [0, 1, 5])
def test_the_invariant_holds_after_every_step(k: int) -> None:
    engine = toy_engine(draft_length=FixedDraftLength(k), max_num_seqs=3)
    requests = [add(engine, sequence(prompt, 25)) for prompt in random_prompts(5)]
    while engine.has_work:
        engine.step()
        for request in requests:
            check_invariant(engine, request.state.seq)
    assert all(request.finish_reason == "length" for request in requests)


def test_an_end_inside_an_accepted_run_cuts_the_sequence_and_the_counts() -> None:
    expected = plain_tokens(PROMPT, 8)
    end = expected[1]
    stopping = StopRules(8, frozenset({end}))
    cut = expected[: expected.index(end) + 1]
    engine = toy_engine(ToyRunner(), perfect_drafter(), FixedDraftLength(6))
    [seq] = engine.run([sequence(PROMPT, 8, stopping=stopping)])
    assert (seq.generated, seq.finish_reason) == (cut, "stop")
    assert seq.stats.new_tokens == seq.stats.accepted == len(cut)


class SlowChoice(Ngram):
    """Chooses when it is asked for a loop, and makes none."""

    def draft_loop(self, *_: object) -> None:
        time.sleep(0.05)


class Timings(FixedDraftLength):
    """Keeps what steps took."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.timings: list[StepTiming] = []

    def observe(self, seqs: list[Sequence], results: list[StepResult], timing: StepTiming) -> None:
        self.timings.append(timing)


def test_what_a_drafter_chooses_before_it_drafts_is_no_part_of_the_pass() -> None:
    policy = Timings(2)
    engine = toy_engine(drafter=SlowChoice(), draft_length=policy)
    add(engine, sequence(PROMPT, 12))
    engine.step()
    assert policy.timings[0].draft_seconds > 0.05 > policy.timings[0].verify_seconds


def test_drafts_that_do_not_fit_into_memory_are_left_out() -> None:
    from paceline.errors import OutOfMemory

    runner = ToyRunner()
    engine = toy_engine(runner, perfect_drafter(), FixedDraftLength(3))
    request = add(engine, sequence(PROMPT, 6))
    engine.step()
    runner.errors = [OutOfMemory("no memory left")]
    engine.step()
    assert runner.passes[-1] == [1] and not request.errors
    finish(engine)
    assert request.tokens == plain_tokens(PROMPT, 6)


# --- several plain steps in a row -------------------------------------------------------------------------------------


def test_plain_steps_are_taken_several_at_a_time_where_the_runner_can() -> None:
    runner = ToyRunner(decode_steps=4)
    engine = toy_engine(runner, draft_length=FixedDraftLength(0))
    request = add(engine, sequence(PROMPT, 10))
    steps = finish(engine)
    assert runner.decodes == [4, 4, 2] and steps == 3
    assert request.tokens == plain_tokens(PROMPT, 10)
    stats = request.outputs[-1].stats
    assert stats is not None and (stats.steps, stats.new_tokens, stats.tokens_per_step) == (10, 10, 1.0)


def test_tokens_past_the_end_of_a_sequence_are_dropped() -> None:
    expected = plain_tokens(PROMPT, 8)
    runner = ToyRunner(decode_steps=4)
    engine = toy_engine(runner, draft_length=FixedDraftLength(0))
    ending = add(engine, sequence(PROMPT, 8, stopping=StopRules(8, frozenset({expected[1]}))))
    others = [add(engine, sequence(prompt, 11)) for prompt in random_prompts(2)]
    finish(engine)
    assert ending.tokens == expected[: expected.index(expected[1]) + 1] and ending.finish_reason == "stop"
    assert [other.tokens for other in others] == [plain_tokens(prompt, 11) for prompt in random_prompts(2)]
    assert engine.stats().blocks_used == 0


def test_requests_that_choose_their_method_take_several_plain_steps_too() -> None:
    """As in the server: a router over several drafters, and every request says method none."""
    runner = ToyRunner(decode_steps=4)
    router = DrafterRouter({"ngram": Ngram(), "none": Ngram()}, "ngram")
    engine = toy_engine(runner, router, FixedDraftLength(3), ("ngram", "none"), per_request=True)
    requests = [
        add(engine, Request(prompt, SamplingParams(), 9, method="none", ignore_eos=True))
        for prompt in random_prompts(3)
    ]
    finish(engine)
    assert runner.decodes and set(runner.decodes) <= {4, 1, 2, 3}
    assert [request.tokens for request in requests] == [plain_tokens(prompt, 9) for prompt in random_prompts(3)]


@pytest.mark.parametrize(
    "params",
    [{"sampling": SamplingParams(1.0, seed=1)}, {"logprobs": 1}, {"sampling": SamplingParams(presence_penalty=1.0)}],
    ids=["sampled", "logprobs", "penalty"],
)
def test_what_needs_more_than_the_argmax_is_decoded_one_step_at_a_time(params: dict[str, object]) -> None:
    runner = ToyRunner(decode_steps=4)
    engine = toy_engine(runner, draft_length=FixedDraftLength(0))
    engine.run([sequence(PROMPT, 8, **params)])  # type: ignore[arg-type]
    assert not runner.decodes


def test_a_drafter_that_reads_hidden_states_gets_every_pass() -> None:
    class NeedsStates(Ngram):
        needs = frozenset({Capability.HIDDEN_STATES})

    runner = ToyRunner(decode_steps=4)
    engine = toy_engine(runner, NeedsStates(), FixedDraftLength(0))
    engine.run([sequence(PROMPT, 8)])
    assert not runner.decodes
    engine.run([sequence(PROMPT, 8, num_draft_tokens=0)])
    assert runner.decodes, "a sequence that never drafts needs none"


# --- run, and what it raises ------------------------------------------------------------------------------------------


def test_run_returns_the_sequences_in_order() -> None:
    engine, prompts = toy_engine(max_num_seqs=2), random_prompts(5)
    seqs = engine.run([sequence(prompt, 4 + index) for index, prompt in enumerate(prompts)])
    assert [seq.generated for seq in seqs] == [plain_tokens(prompt, 4 + index) for index, prompt in enumerate(prompts)]
    assert not engine.has_work


def test_run_raises_the_first_error_and_leaves_no_work() -> None:
    runner = ToyRunner()
    engine = toy_engine(runner)
    runner.errors = [RuntimeError("broken")]
    with pytest.raises(StepFailed, match="broken"):
        engine.run([sequence(PROMPT, 4)])
    assert not engine.has_work and engine.run([sequence(PROMPT, 4)])[0].generated == plain_tokens(PROMPT, 4)


def test_greedy_output_is_the_same_with_trees_chains_and_none() -> None:
    class TwoBranches(Drafter):
        """The right token and a wrong one, as siblings."""

        def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
            trees = []
            for seq, k in zip(seqs, num_draft_tokens):
                following = plain_tokens(seq.ids, 1)[0]
                siblings = DraftTree(torch.tensor([(following + 1) % 6, following]), [-1, -1])
                trees.append(siblings if k >= 2 else chain([following][:k]))
            return trees

    outputs = {tuple(toy_engine(drafter=drafter).run([sequence(PROMPT, 12)])[0].generated)
               for drafter in (TwoBranches(), Ngram(), perfect_drafter())}  # fmt: skip
    assert outputs == {tuple(plain_tokens(PROMPT, 12))}
    seq = toy_engine(drafter=TwoBranches()).run([sequence(PROMPT, 12)])[0]
    assert seq.stats.tokens_per_step > 1.5


@pytest.mark.parametrize("k", [1, 3, 5])
def test_min_new_tokens_give_the_same_greedy_output_with_and_without_drafts(k: int) -> None:
    """The drafter proposes end-of-sequence tokens that are not allowed yet: it does not know the least length."""
    least, eos = 7, frozenset({plain_tokens(PROMPT, 3)[-1]})
    request = Request(PROMPT, SamplingParams(), 20, min_new_tokens=least)
    [plain] = toy_engine(ToyRunner(eos_token_ids=eos), draft_length=FixedDraftLength(0)).run([request])
    assert plain.num_new_tokens > least and not eos & set(plain.generated[:least])
    [early] = toy_engine(ToyRunner(eos_token_ids=eos)).run([Request(PROMPT, SamplingParams(), 20)])
    assert early.num_new_tokens < least, "without it the sequence ends early"
    for drafter in (perfect_drafter(), Ngram()):
        [drafted] = toy_engine(ToyRunner(eos_token_ids=eos), drafter, FixedDraftLength(k)).run([request])
        assert (drafted.generated, drafted.finish_reason) == (plain.generated, plain.finish_reason)
