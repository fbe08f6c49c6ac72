"""The two servers of benchmarks/learning.py: they take turns, and one of them can be killed."""

from __future__ import annotations

import os
import signal
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a program, it knows only its own folder
from benchmarks.server_process import Server, started, stop

LEARNING = "paceline_learning_"


@dataclass(frozen=True, slots=True)
class Answer:
    """One request, as the client saw it. timed: the server had not been killed while it ran."""

    number: int
    round: int
    text: str
    seconds: float
    accepted: int  # first draft tokens
    offered: int
    timed: bool = True


@dataclass(frozen=True, slots=True)
class Killing:
    """What a killed server had answered, and what the next one found."""

    answered: int
    kept: int
    head_before: int
    head_after: int
    seconds: float  # until it answered again

    @property
    def lost(self) -> int:
        """Sequences that are not in the ring any more."""
        return self.answered - self.kept


@dataclass(slots=True, eq=False)
class Side:
    """A server that answers while the other one stands still: stopped, and its trainer with it."""

    name: str
    flags: list[str]
    body: dict[str, Any]
    pool: ThreadPoolExecutor
    server: Server | None = None
    client: httpx.Client | None = None
    answers: list[Answer] = field(default_factory=list)

    def start(self) -> None:
        self.server = started(self.flags)
        self.client = httpx.Client(base_url=self.server.url, timeout=600)

    def close(self) -> None:
        if self.server is not None:
            self.resume()
            stop(self.server.process)

    # --- turns --------------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """The server first: it would let its trainer go on."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self.server is not None
        server = self.server.process.pid
        for pid in (server, *children(server)):
            os.kill(pid, number)

    def metric(self, name: str) -> int:
        """A value of learning from traffic; 0 where the server does not learn."""
        assert self.server is not None
        values = [value for key, value in self.server.metrics().items() if key.startswith(LEARNING + name)]
        return int(values[0]) if values else 0

    # --- requests -----------------------------------------------------------------------------------------------------

    def ask(self, number: int, prompt: str, round_number: int, timed: bool = True) -> Answer:
        assert self.client is not None
        body = {**self.body, "messages": [{"role": "user", "content": prompt}]}
        began = time.perf_counter()
        response = self.client.post("/v1/chat/completions", json=body)
        seconds = time.perf_counter() - began
        document: dict[str, Any] = response.raise_for_status().json()
        counts = document["metrics"]["speculative_decoding"]
        accepted, text = sum(counts["acceptance_histogram"][1:]), document["choices"][0]["message"]["content"]
        return Answer(number, round_number, text, seconds, accepted, counts["num_spec_steps"], timed)

    def block(self, prompts: dict[int, str], round_number: int) -> list[Answer]:
        """One request of each client at a time, until all are answered."""
        futures = [self.pool.submit(self.ask, number, text, round_number) for number, text in prompts.items()]
        return [future.result() for future in futures]

    def killed_block(self, prompts: dict[int, str], round_number: int) -> tuple[list[Answer], Killing]:
        """The same, but after half of the answers comes kill -9; a new server answers the rest."""
        futures = [self.pool.submit(self.ask, number, text, round_number, False) for number, text in prompts.items()]
        head, answers = self.metric("head"), list[Answer]()
        for count, future in enumerate(as_completed(futures), start=1):
            if count == len(futures) // 2:
                self._kill()
            answers += _answered(future)
        killing = self._restart(head, len(self.answers) + len(answers))
        missing = prompts.keys() - {answer.number for answer in answers}
        again = [self.pool.submit(self.ask, number, prompts[number], round_number, False) for number in sorted(missing)]
        return [*answers, *(future.result() for future in again)], killing

    def killed_at_rest(self) -> Killing:
        """kill -9 while the trainer works."""
        head = self.metric("head")
        self._kill()
        return self._restart(head, len(self.answers))

    def _kill(self) -> None:
        assert self.server is not None
        self.server.process.kill()
        self.server.process.wait()

    def _restart(self, head: int, answered: int) -> Killing:
        began = time.monotonic()
        self.start()
        seconds = time.monotonic() - began
        return Killing(answered, self.metric("ring_sequences"), head, self.metric("head"), round(seconds, 1))


def _answered(future: Future[Answer]) -> list[Answer]:
    """Nothing where the server died meanwhile."""
    try:
        return [future.result()]
    except httpx.TransportError:
        return []


def children(pid: int) -> list[int]:
    """Processes that a server has started from its main thread: its trainer."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
