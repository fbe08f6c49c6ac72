"""paceline chat, in this process with a tiny model."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.cli import chat
from paceline.core.types import RequestOutput
from paceline.decoder import SpeculativeDecoder


@pytest.fixture
def prefix_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens that the prefix cache has given back, after each turn."""
    totals: list[int] = []
    answer = chat.answer

    def counted(decoder: SpeculativeDecoder, *arguments: Any, **how: Any) -> str:
        text = answer(decoder, *arguments, **how)
        totals.append(decoder.stats().prefix_tokens)
        return text

    monkeypatch.setattr(chat, "answer", counted)
    return totals


def test_a_turn_reads_only_what_is_new(run_command: Any, prefix_tokens: list[int]) -> None:
    first = "a rather long first turn that should be read once and not again"
    command = ("chat", "TINY", "--method", "none", "--max-new-tokens", "5")
    result = run_command(*command, stdin=f"{first}\nagain\n/new\nagain\n/exit\nnever\n")
    assert result.status == 0 and result.out.count("\n") == 3
    assert len(prefix_tokens) == 3 and prefix_tokens[0] == 0
    assert prefix_tokens[1] > len(first), "the second turn finds the first one in the prefix cache"
    assert prefix_tokens[2] - prefix_tokens[1] < len(first), "/new starts over"


def test_a_system_message_changes_the_answer(run_command: Any) -> None:
    command = ("chat", "-m", "TINY", "--method", "none", "--max-new-tokens", "8")
    plain, instructed = (run_command(*command, *flags, stdin="hi\n").out for flags in ((), ("--system", "Be brief.")))
    assert plain and instructed and plain != instructed


def test_an_interrupted_answer_is_what_was_generated(capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupted:
        def stream(self, messages: Any, **sampling: Any) -> Any:
            yield RequestOutput("half", (1,))
            raise KeyboardInterrupt

    assert chat.answer(Interrupted(), [], {}, color=False) == "half"  # type: ignore[arg-type]
    assert capsys.readouterr().out == "half\n"
