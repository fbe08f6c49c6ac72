"""Constraints on reasoning: which tokens may follow along a path, and that asking changes nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.sequence import Constraint
from paceline.core.types import ModelInfo, ReasoningSpan
from paceline.engines.local.reasoning import ReasoningConstraint

BEGIN, END, EOS, OTHER, ANSWER = 0, 1, 2, 3, 4
TEXTS = {BEGIN: "<b>", END: "<e>", EOS: "", OTHER: "x", ANSWER: "y"}
INFO = ModelInfo("toy", 5, frozenset({EOS}), 64, 1, 1, "cpu", "fp32")
ALL = [BEGIN, END, EOS, OTHER, ANSWER]


class OnlyAnswers(Constraint):
    """The answer is the token ANSWER again and again. It remembers what it was told."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def allowed(self, path: list[int]) -> Tensor:
        mask = torch.zeros(5, dtype=torch.bool)
        mask[ANSWER] = True
        return mask

    def advance(self, tokens: list[int]) -> None:
        self.tokens += tokens


def constraint(
    answer: Constraint | None, *, is_open: bool, most: int | None = None, opening: tuple[int, ...] = (BEGIN,)
) -> ReasoningConstraint:
    span = ReasoningSpan("<b>", "<e>", opening, (END,), is_open, most)
    return ReasoningConstraint(span, answer, INFO, lambda ids: "".join(TEXTS[token] for token in ids))


def allowed(rule: ReasoningConstraint, *path: int) -> list[int]:
    tokens: list[int] = rule.allowed(list(path)).nonzero().flatten().tolist()
    return tokens


def test_reasoning_is_free_until_its_limit_and_then_closed() -> None:
    rule = constraint(None, is_open=True, most=2)
    assert allowed(rule) == allowed(rule, OTHER) == ALL
    assert allowed(rule, OTHER, EOS) == [END]
    assert allowed(rule, OTHER, OTHER, END) == ALL
    rule.advance([OTHER, OTHER])
    assert allowed(rule) == [END]


def test_the_answer_obeys_its_grammar_and_the_reasoning_does_not() -> None:
    answer = OnlyAnswers()
    rule = constraint(answer, is_open=True)
    assert allowed(rule) == [BEGIN, END, OTHER, ANSWER], "a sequence that owes an answer does not end before it"
    assert allowed(rule, OTHER, END) == [ANSWER]
    rule.advance([OTHER, END, ANSWER])
    assert answer.tokens == [ANSWER] and allowed(rule) == [ANSWER]


def test_reasoning_may_begin_or_not_where_the_prompt_has_not_opened_it() -> None:
    rule = constraint(OnlyAnswers(), is_open=False, most=1)
    assert allowed(rule) == [BEGIN, ANSWER]
    assert allowed(rule, BEGIN) == [BEGIN, END, OTHER, ANSWER] and allowed(rule, BEGIN, OTHER) == [END]
    assert allowed(rule, ANSWER) == [ANSWER]
    rule.advance([ANSWER])
    assert allowed(rule) == [ANSWER], "an answer that has begun does not turn into reasoning"


def test_a_mark_of_several_tokens_begins_reasoning_before_an_answer_too() -> None:
    rule = constraint(OnlyAnswers(), is_open=False, opening=(OTHER, BEGIN))
    assert allowed(rule) == [OTHER, ANSWER]
    assert allowed(rule, OTHER) == [BEGIN], "what is half a mark is no answer"
    assert allowed(rule, OTHER, BEGIN) == [BEGIN, END, OTHER, ANSWER]
    assert allowed(rule, OTHER, BEGIN, OTHER, END) == [ANSWER]
    rule.advance([OTHER])
    rule.advance([BEGIN, END])
    assert allowed(rule) == [ANSWER]


def test_a_token_that_begins_the_mark_may_begin_the_answer() -> None:
    answer = OnlyAnswers()
    rule = constraint(answer, is_open=False, opening=(ANSWER, BEGIN))
    assert allowed(rule) == [ANSWER] and allowed(rule, ANSWER) == [BEGIN, ANSWER]
    rule.advance([ANSWER])
    assert allowed(rule) == [BEGIN, ANSWER], "neither is decided yet"
    rule.advance([ANSWER])
    assert answer.tokens == [ANSWER, ANSWER] and allowed(rule) == [ANSWER]


def test_without_reasoning_a_limit_changes_nothing() -> None:
    rule = constraint(None, is_open=False, most=1)
    assert allowed(rule) == allowed(rule, OTHER, OTHER, OTHER) == ALL


def test_asking_along_a_path_changes_nothing() -> None:
    rule = constraint(OnlyAnswers(), is_open=True, most=3)
    before = allowed(rule)
    for path in ([OTHER, END, ANSWER], [OTHER] * 5, [END]):
        rule.allowed(path)
    assert allowed(rule) == before
