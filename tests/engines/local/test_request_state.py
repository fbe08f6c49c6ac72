"""What a reader of one request is handed."""

from __future__ import annotations

import torch

from paceline.core.draft_tree import chain, empty
from paceline.core.types import RequestOutput, RowOutput, StepResult, TokenLogprob, VerifyResult
from paceline.engines.local.request_state import RequestState
from paceline.errors import PacelineError, StepFailed
from tests.support.build import sequence

NO_OUTPUT = RowOutput(torch.empty(0, 0))


def recorded(state: RequestState) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    state.on_output = lambda output: outputs.append(output) if isinstance(output, RequestOutput) else None
    return outputs


def stepped(state: RequestState, accepted: list[int], own: int, drafted: int) -> StepResult:
    tree = chain(accepted + [9] * (drafted - len(accepted))) if drafted else empty()
    emitted = state.seq.extend([*accepted, own], len(accepted))
    verified = VerifyResult(list(range(len(accepted))), own, accepted)
    return StepResult(tree, verified, NO_OUTPUT, emitted, min(len(accepted), len(emitted)))


def test_a_step_is_at_most_two_outputs_the_accepted_tokens_and_the_targets_own() -> None:
    state = RequestState(sequence([0], 9))
    outputs = recorded(state)
    state.emit(stepped(state, [1, 2], 3, drafted=4))
    state.emit(stepped(state, [], 4, drafted=0))
    assert [(output.token_ids, output.from_draft) for output in outputs] == [
        ((1, 2), True), ((3,), False), ((4,), False)
    ]  # fmt: skip
    assert [output.num_drafted for output in outputs] == [None, 4, 0]
    assert all(output.finish_reason is None and output.stats is None for output in outputs)


def test_only_the_last_output_carries_reason_and_stats() -> None:
    state = RequestState(sequence([0], 3))
    outputs = recorded(state)
    state.emit(stepped(state, [1, 2], 3, drafted=2))
    assert [output.finish_reason for output in outputs] == [None, "length"]
    assert outputs[0].stats is None and outputs[1].stats is state.seq.stats


def test_a_run_that_ends_in_an_accepted_token_is_one_output() -> None:
    state = RequestState(sequence([0], 2))
    outputs = recorded(state)
    state.emit(stepped(state, [1, 2], 3, drafted=2))
    assert [(output.token_ids, output.from_draft, output.finish_reason) for output in outputs] == [
        ((1, 2), True, "length")
    ]


def test_logprobs_go_with_their_tokens() -> None:
    state = RequestState(sequence([0], 9, logprobs=0))
    outputs = recorded(state)
    state.seq.token_logprobs += [TokenLogprob(token, -float(token)) for token in (1, 2, 3)]
    state.emit(stepped(state, [1, 2], 3, drafted=2))
    assert [[logprob.token for logprob in output.logprobs or ()] for output in outputs] == [[1, 2], [3]]


def test_a_failure_is_kept_and_handed_on() -> None:
    handed: list[RequestOutput | PacelineError] = []
    state, error = RequestState(sequence([0], 9), handed.append), StepFailed("broken")
    state.fail(error)
    assert state.error is error and handed == [error]


def test_an_abort_keeps_a_reason_that_is_already_there() -> None:
    state = RequestState(sequence([0], 9))
    outputs = recorded(state)
    state.abort()
    assert state.seq.finish_reason == "abort" == outputs[0].finish_reason
    finished = RequestState(sequence([0], 1))
    stepped(finished, [], 1, drafted=0)
    finished.abort()
    assert finished.seq.finish_reason == "length"
