"""Tokens per second of a whole server, speculation auto against off, under several loads, in one run.

    python benchmarks/serving.py --loads 1 8 32 --seconds 20 --repeats 2

Clients send one request after another and read the streams; tokens that arrive inside the window count. The two sides
take turns, so that a busy moment of the machine hits both. Two workloads: chat questions, and code edits that bring a
`prediction`: what the model answers, but for one line, as the file before an edit is. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import dataclass
from statistics import mean
from typing import Any

import httpx
from server_process import Server, server, streamed

PATH = "/v1/chat/completions"
QUESTIONS = [
    "Explain how a bicycle stays upright.",
    "Write a short story about a lighthouse keeper.",
    "What are the main causes of inflation?",
    "Describe the water cycle for a child.",
    "Give three tips for learning a language.",
    "Why is the sky blue?",
]
CODE = '''def mean(values):
    """The mean of a list of numbers."""
    total = 0
    for value in values:
        total += value
    return total / len(values)


def median(values):
    """The middle of a sorted list."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2
'''


@dataclass(frozen=True, slots=True)
class Cell:
    """One workload under one load on one side."""

    workload: str
    clients: int
    side: str


def body(cell: Cell, number: int, tokens: int, before: dict[int, str]) -> dict[str, Any]:
    """What one request of a cell asks for. before: by client, the text before its edit."""
    k: str | int = "auto" if cell.side == "auto" else 0
    asked: dict[str, Any] = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    words = QUESTIONS[number % len(QUESTIONS)]
    if cell.workload == "edits":
        words = f"Rename the function mean to average_{number} and repeat the whole file:\n{CODE}"
    asked |= {"messages": [{"role": "user", "content": words}], "speculative": {"num_draft_tokens": k}}
    if number in before and cell.side == "auto":
        asked["prediction"] = {"type": "content", "content": before[number]}
    return asked


async def texts_before(served: Server, clients: int, tokens: int) -> dict[int, str]:
    """Each client's answer with one line in its middle changed: what it would have had in its editor."""

    async def answer(number: int) -> str:
        async with httpx.AsyncClient(base_url=served.url, timeout=600) as line:
            output = await line.post(PATH, json=body(Cell("edits", clients, "off"), number, tokens, {}))
            found: str = output.json()["choices"][0]["message"]["content"]
            return found

    found = await asyncio.gather(*(answer(number) for number in range(clients)))
    return {number: edited(text) for number, text in enumerate(found)}


def edited(text: str) -> str:
    lines = text.split("\n")
    lines[len(lines) // 2] = "    pass  # to do"
    return "\n".join(lines)


class Window:
    """Counts tokens from the moment every client is past its first text, which is of another length for each: texts
    then begin and end at all moments, and no window holds one more reading of prompts than another."""

    def __init__(self, clients: int, seconds: float) -> None:
        self._waiting, self._seconds = set(range(clients)), seconds
        self.opened: float | None = None
        self.tokens = 0

    def warmed_up(self, client: int) -> None:
        self._waiting.discard(client)
        if self.opened is None and not self._waiting:
            self.opened = time.monotonic()

    def add(self, tokens: int) -> None:
        if self.opened is not None and not self.over:
            self.tokens += tokens

    @property
    def over(self) -> bool:
        return self.opened is not None and time.monotonic() > self.opened + self._seconds


async def measured(served: Server, cell: Cell, seconds: float, tokens: int, before: dict[int, str]) -> float:
    """Tokens per second that the clients of one cell receive."""
    window = Window(cell.clients, seconds)

    async def client(number: int) -> None:
        length = max(1, tokens * (number + 1) // cell.clients)  # of the first text
        async with httpx.AsyncClient(base_url=served.url, timeout=300) as line:
            while not window.over:
                async for document in streamed(line, PATH, {**body(cell, number, length, before), "x_paceline": True}):
                    about = document["choices"][0].get("x_paceline") or {}
                    window.add(about.get("tokens", 0))
                    if window.over:
                        break
                window.warmed_up(number)
                length = tokens

    await asyncio.gather(*(client(number) for number in range(cell.clients)))
    return window.tokens / seconds


def guessing(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What became of the guesses between two readings of /metrics."""

    def risen(name: str) -> float:
        return sum(value - before.get(key, 0.0) for key, value in after.items() if key.startswith(name))

    drafted, steps = risen("paceline_drafted_tokens_total"), risen("paceline_steps_total")
    accepted = risen("paceline_accepted_tokens_total")
    return {"acceptance": accepted / drafted if drafted else 0.0, "tokens_per_step": 1 + accepted / max(1.0, steps)}


async def compare(served: Server, args: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for workload in args.workloads:
        texts = await texts_before(served, max(args.loads), args.tokens) if workload == "edits" else {}
        for clients in args.loads:
            rates: dict[str, list[float]] = {"off": [], "auto": []}
            before = served.metrics()
            for turn in range(args.repeats + 1):
                for side in ("off", "auto") if turn % 2 else ("auto", "off"):
                    seconds = args.seconds if turn else args.seconds / 2
                    rate = await measured(served, Cell(workload, clients, side), seconds, args.tokens, texts)
                    if turn:  # the first turn warms up
                        rates[side].append(rate)
            row = {"workload": workload, "clients": clients, **{side: mean(each) for side, each in rates.items()}}
            row |= {"ratio": row["auto"] / row["off"], **guessing(before, served.metrics())}
            found.append({**row, "each": rates})
            print(
                f"{workload:6} {clients:3} clients: off {row['off']:6.1f}, auto {row['auto']:6.1f} tokens/s, "
                f"ratio {row['auto'] / row['off']:.2f}",
                flush=True,
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--workloads", nargs="+", default=["chat", "edits"], choices=("chat", "edits"))
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("serve", nargs="*", help="further arguments of `paceline serve`, after --")
    args = parser.parse_args()
    with server(["--batch", "32", *args.serve]) as served:
        found = asyncio.run(compare(served, args))
    print(json.dumps({"cells": found}))


if __name__ == "__main__":
    main()
