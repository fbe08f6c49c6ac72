"""paceline chat, in this process with a tiny model, and as a process on a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import chat
from paceline.core.types import RequestOutput
from paceline.decoder import SpeculativeDecoder
from tests.support.tiny import LONGEST_TEXT, write_tiny_model

SHORT = ("--method", "none", "--max-new-tokens", "8")


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


@pytest.fixture
def conversations(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, str]]]:
    """The messages of every turn, as the decoder gets them."""
    turns: list[list[dict[str, str]]] = []
    stream = SpeculativeDecoder.stream

    def recorded(decoder: SpeculativeDecoder, messages: Any, **settings: Any) -> Any:
        turns.append(list(messages))
        return stream(decoder, messages, **settings)

    monkeypatch.setattr(SpeculativeDecoder, "stream", recorded)
    return turns


@pytest.mark.slow
def test_a_turn_reads_only_what_is_new(run_command: Any, prefix_tokens: list[int]) -> None:
    first = "a rather long first turn that should be read once and not again"
    command = ("chat", "TINY", "--method", "none", "--max-new-tokens", "5")
    result = run_command(*command, stdin=f"{first}\nagain\n/clear\nagain\n/exit\nnever\n")
    assert result.status == 0 and result.out.count("\n") == 3
    assert len(prefix_tokens) == 3 and prefix_tokens[0] == 0
    assert prefix_tokens[1] > len(first), "the second turn finds the first one in the prefix cache"
    assert prefix_tokens[2] - prefix_tokens[1] < len(first), "/clear starts over"


@pytest.mark.slow
def test_a_system_message_changes_the_answer(run_command: Any) -> None:
    command = ("chat", "-m", "TINY", *SHORT)
    plain, instructed = (run_command(*command, *flags, stdin="hi\n").out for flags in ((), ("--system", "Be brief.")))
    assert plain and instructed and plain != instructed


@pytest.mark.slow
def test_a_full_context_forgets_the_oldest_turns_and_not_the_system_message(
    run_command: Any, conversations: list[list[dict[str, str]]]
) -> None:
    lines = [f"{number} " + "x" * 100 for number in range(9)]
    result = run_command("chat", "TINY", *SHORT, "--system", "Be brief.", stdin="\n".join(lines))
    assert result.status == 0, "the program goes on"
    assert len(conversations) == 9 and "the context is full: forgot the oldest 1 of the turns" in result.err
    last = conversations[-1]
    assert last[0] == {"role": "system", "content": "Be brief."} and last[-1]["content"] == lines[-1]
    assert [message["role"] for message in last[1:]] == ["user", "assistant"] * (len(last) // 2 - 1) + ["user"]
    assert last[1]["content"] not in lines[:5] and 3 < len(last) < 12


@pytest.mark.slow
def test_a_kv_cache_smaller_than_the_context_forgets_turns_too(
    run_command: Any, conversations: list[list[dict[str, str]]]
) -> None:
    lines = [f"{number} " + "x" * 60 for number in range(5)]
    result = run_command("chat", "TINY", *SHORT, "--kv-cache-tokens", "256", stdin="\n".join(lines))
    assert result.status == 0, result.err
    assert conversations[-1][-1]["content"] == lines[-1] and "forgot" in result.err


def test_a_message_too_long_for_the_model_is_refused_and_the_next_one_answered(
    run_command: Any, conversations: list[list[dict[str, str]]]
) -> None:
    result = run_command("chat", "TINY", *SHORT, stdin=f"first\n{'x' * LONGEST_TEXT}\nnext\n")
    assert f"reads at most {LONGEST_TEXT - 1}" in result.err and "Traceback" not in result.err
    assert result.status == 2, "a line of a pipe that got no answer shows in the exit status"
    assert conversations[-1][-1]["content"] == "next" and len(conversations[-1]) == 1


def test_commands_are_listed_and_an_unknown_one_is_not_sent(
    run_command: Any, conversations: list[list[dict[str, str]]]
) -> None:
    result = run_command("chat", "TINY", *SHORT, stdin="/help\n/nonsense\n/etc/hosts is a file\n/quit\nnever\n")
    assert result.status == 0 and all(name in result.err for name in chat.COMMANDS)
    assert "there is no command /nonsense" in result.err
    assert [turn[-1]["content"] for turn in conversations] == ["/etc/hosts is a file"]


@pytest.mark.slow
def test_an_answer_that_is_cut_says_by_what(run_command: Any) -> None:
    cut = run_command("chat", "TINY", "--ignore-eos", "--method", "none", "--max-new-tokens", "5", stdin="hi\n")
    assert "; cut by --max-new-tokens" in cut.err
    full = run_command("chat", "TINY", "--ignore-eos", "--method", "none", "--max-new-tokens", "9999", stdin="hi\n")
    assert "; cut: the context is full" in full.err


def test_a_model_without_a_chat_template_is_refused_before_the_first_line(run_command: Any, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    result = run_command("chat", str(folder), *SHORT, stdin="hi\n")
    assert result.status == 2 and "has no chat template; `paceline generate` continues a prompt" in result.err


def test_an_interrupted_answer_is_what_was_generated(capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupted:
        def stream(self, messages: Any, **settings: Any) -> Any:
            yield RequestOutput("half", (1,))
            raise KeyboardInterrupt

    assert chat.answer(Interrupted(), [], {}, color=False) == "half"  # type: ignore[arg-type]
    assert capsys.readouterr().out == "half\n"


# --- on a terminal ----------------------------------------------------------------------------------------------------


class TerminalProcess:
    """A command whose standard streams are a terminal."""

    def __init__(self, *arguments: str) -> None:
        self._terminal, end = pty.openpty()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "TERM": "dumb"}
        command = [sys.executable, "-m", "paceline", *arguments]
        # Workers of the test runner ignore SIGINT, and what they start would inherit that.
        take_interrupts = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731
        self.popen = subprocess.Popen(
            command, stdin=end, stdout=end, stderr=end, env=environment, start_new_session=True,
            preexec_fn=take_interrupts,
        )  # fmt: skip
        os.close(end)
        self.screen = ""

    def type(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def wait_for(self, pattern: str, seconds: float = 60) -> None:
        """Read until the pattern is on the screen, then forget what was before it."""
        deadline = time.monotonic() + seconds
        while not (match := re.search(pattern, self.screen)):
            assert time.monotonic() < deadline, f"{pattern!r} is not on the screen: {self.screen[-2000:]!r}"
            if select.select([self._terminal], [], [], 0.1)[0]:
                self.screen += os.read(self._terminal, 65536).decode("utf-8", "replace")
        self.screen = self.screen[match.end() :]

    def interrupt_until(self, pattern: str, attempts: int = 30) -> None:
        """Press Ctrl-C as a user does: again when nothing happens. An interrupt that falls between the printing of
        the prompt and readline's select() is kept by Python until the next key."""
        for attempt in range(attempts):
            self.popen.send_signal(signal.SIGINT)
            try:
                return self.wait_for(pattern, 4)
            except AssertionError:
                if attempt == attempts - 1:
                    raise

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait(20)
        os.close(self._terminal)


@contextmanager
def on_a_terminal(*arguments: str) -> Iterator[TerminalProcess]:
    process = TerminalProcess(*arguments)
    try:
        yield process
    finally:
        process.close()


@pytest.mark.slow
def test_a_terminal_has_history_and_ctrl_c_stops_the_answer_alone(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", max_position_embeddings=40_000)
    flags = ("--method", "none", "--ignore-eos", "--max-new-tokens", "30000", "--logit-bias", "257=-100")
    with on_a_terminal("chat", str(folder), *flags) as process:
        process.wait_for(r"/help lists the commands")
        process.wait_for(r"> ")
        process.type("/hel\n")
        process.wait_for(r"there is no command /hel\r")
        process.wait_for(r"> ")
        process.type("\x1b[Apq\x7f\n")  # the arrow key recalls the line, and it can be edited
        process.wait_for(r"/clear +start over")
        process.wait_for(r"> ")
        process.type("hello\n")
        process.wait_for(r"hello[\s\S]{40}")
        process.popen.send_signal(signal.SIGINT)
        process.wait_for(r"\n> $", 60)
        process.interrupt_until(r"/exit or Ctrl-D ends")
        process.wait_for(r"> ")
        process.type("\x04")
        assert process.popen.wait(60) == 0
