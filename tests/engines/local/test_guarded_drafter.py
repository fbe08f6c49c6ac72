"""A drafter can cost its drafts and never the output: every way to break one, and the same tokens as without it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from paceline.core.draft_tree import DraftTree, chain, empty
from paceline.core.sequence import Sequence
from paceline.drafting.ngram import Ngram
from paceline.engines.local.guarded_drafter import GuardedDrafter
from tests.support.build import plain_tokens, sequence, toy_engine
from tests.support.toy import random_prompts

METHODS = ("begin", "propose", "observe", "end")


class Broken(Ngram):
    """Raises in one of its methods, each time with another message."""

    def __init__(self, method: str) -> None:
        super().__init__(shortest=1)
        self.calls = 0
        setattr(self, method, self._raise)

    def _raise(self, *args: Any) -> None:
        self.calls += 1
        raise KeyError(f"call {self.calls}")


class Wrong(Ngram):
    """Returns what it must not."""

    def __init__(self, kind: str) -> None:
        super().__init__(shortest=1)
        self.kind = kind

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        wrong: dict[str, Any] = {
            "too few trees": [empty()] * (len(seqs) - 1),
            "too many trees": [empty()] * (len(seqs) + len(seqs[0].ids)),
            "too many tokens": [chain([0] * (k + 1 + len(seqs[0].ids))) for k in num_draft_tokens],
            "a token too large": [chain([6][:k]) for k in num_draft_tokens],
            "a negative token": [chain([-1][:k]) for k in num_draft_tokens],
            "distributions of another vocabulary": [
                chain([0], torch.ones(1, 9) / 9) if k else empty() for k in num_draft_tokens
            ],
            "no trees": None,
            "no tree": [None for _ in seqs],
        }
        trees: list[DraftTree] = wrong[self.kind]
        return trees


KINDS = ("too few trees", "too many trees", "too many tokens", "a token too large", "a negative token",
         "distributions of another vocabulary", "no trees", "no tree")  # fmt: skip


def check_output_and_log(drafter: Ngram, caplog: pytest.LogCaptureFixture) -> None:
    prompts = random_prompts(3)
    with caplog.at_level(logging.WARNING):
        seqs = toy_engine(drafter=drafter).run([sequence(prompt, 20) for prompt in prompts])
    assert [seq.generated for seq in seqs] == [plain_tokens(prompt, 20) for prompt in prompts]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1, messages
    assert type(drafter).__name__ in messages[0]


@pytest.mark.parametrize("method", METHODS)
def test_a_drafter_that_raises_costs_its_drafts_and_is_logged_once(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    check_output_and_log(Broken(method), caplog)


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_that_returns_nonsense_costs_its_drafts_and_is_logged_once(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    check_output_and_log(Wrong(kind), caplog)


def test_a_sound_drafter_is_passed_through(caplog: pytest.LogCaptureFixture) -> None:
    guarded = GuardedDrafter(Ngram(shortest=1), 6)
    seq = sequence([0, 1, 0, 1], 9)
    guarded.begin(seq, None)
    [tree] = guarded.propose([seq], [2])
    assert tree.tokens.tolist() == [0, 1]
    assert guarded.needs == Ngram().needs and not caplog.records
