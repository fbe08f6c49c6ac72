"""Tokens per second of a server, speculation auto against off, with several numbers of clients, in one run.

    python benchmarks/serving.py --clients 1 8 32 --seconds 20 --repeats 2

Clients send one request after another and read the streams; tokens that arrive inside the window count. The two sides
take turns, so that a disturbance of the machine affects both. Two workloads: chat questions, and code edits with a
`prediction`: the model's answer with one line changed, like a file before an edit. The last line is JSON.
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
from server_process import Server, server, stream_chunks

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
    """One workload with one number of clients, with speculation auto or off."""

    workload: str
    clients: int
    speculation: str


def body(cell: Cell, client: int, max_tokens: int, predictions: dict[int, str]) -> dict[str, Any]:
    """A request of one client. predictions: by client, the file before its edit."""
    speculates = cell.speculation == "auto"
    prompt = QUESTIONS[client % len(QUESTIONS)]
    if cell.workload == "edits":
        prompt = f"Rename the function mean to average_{client} and repeat the whole file:\n{CODE}"
    params: dict[str, Any] = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "speculative": {"num_draft_tokens": "auto" if speculates else 0},
    }
    if client in predictions and speculates:
        params["prediction"] = {"type": "content", "content": predictions[client]}
    return params


async def edit_predictions(running: Server, clients: int, max_tokens: int) -> dict[int, str]:
    """Each client's answer with one line in its middle changed: the file in its editor."""

    async def answer(client: int) -> str:
        async with httpx.AsyncClient(base_url=running.url, timeout=600) as http:
            response = await http.post(PATH, json=body(Cell("edits", clients, "off"), client, max_tokens, {}))
            content: str = response.json()["choices"][0]["message"]["content"]
            return content

    answers = await asyncio.gather(*(answer(client) for client in range(clients)))
    return {client: with_changed_line(text) for client, text in enumerate(answers)}


def with_changed_line(text: str) -> str:
    lines = text.split("\n")
    lines[len(lines) // 2] = "    pass  # to do"
    return "\n".join(lines)


class Window:
    """Counts tokens from the moment every client has finished its first request.

    The first requests have different lengths, so that later ones begin and end at all moments and every window holds
    about the same number of prefills.
    """

    def __init__(self, clients: int, seconds: float) -> None:
        self._cold_clients, self._seconds = set(range(clients)), seconds
        self.start: float | None = None
        self.tokens = 0

    def mark_warm(self, client: int) -> None:
        self._cold_clients.discard(client)
        if self.start is None and not self._cold_clients:
            self.start = time.monotonic()

    def add(self, tokens: int) -> None:
        if self.start is not None and not self.is_over:
            self.tokens += tokens

    @property
    def is_over(self) -> bool:
        return self.start is not None and time.monotonic() > self.start + self._seconds


async def measure(running: Server, cell: Cell, seconds: float, max_tokens: int, predictions: dict[int, str]) -> float:
    """Tokens per second that the clients of one cell receive."""
    window = Window(cell.clients, seconds)

    async def run_client(client: int) -> None:
        length = max(1, max_tokens * (client + 1) // cell.clients)  # of the first request
        async with httpx.AsyncClient(base_url=running.url, timeout=300) as http:
            while not window.is_over:
                params = {**body(cell, client, length, predictions), "x_paceline": True}
                async for chunk in stream_chunks(http, PATH, params):
                    stats = chunk["choices"][0].get("x_paceline") or {}
                    window.add(stats.get("num_tokens", 0))
                    if window.is_over:
                        break
                window.mark_warm(client)
                length = max_tokens

    await asyncio.gather(*(run_client(client) for client in range(cell.clients)))
    return window.tokens / seconds


def speculation(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Acceptance rate and tokens per step between two readings of /metrics."""

    def increase(name: str) -> float:
        return sum(value - before.get(key, 0.0) for key, value in after.items() if key.startswith(name))

    drafted, steps = increase("paceline_spec_draft_tokens_total"), increase("paceline_steps_total")
    accepted = increase("paceline_spec_accepted_tokens_total")
    return {
        "acceptance_rate": accepted / drafted if drafted else 0.0,
        "tokens_per_step": 1 + accepted / max(1.0, steps),
    }


async def compare(running: Server, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each workload and number of clients."""
    rows = []
    for workload in args.workloads:
        predictions = {}
        if workload == "edits":
            predictions = await edit_predictions(running, max(args.clients), args.max_tokens)
        for clients in args.clients:
            rows.append(await compare_once(running, args, workload, clients, predictions))
    return rows


async def compare_once(
    running: Server, args: argparse.Namespace, workload: str, clients: int, predictions: dict[int, str]
) -> dict[str, Any]:
    """Both sides in turn. The first turn warms up and does not count."""
    rates: dict[str, list[float]] = {"off": [], "auto": []}
    before = running.metrics()
    for turn in range(args.repeats + 1):
        for side in ("off", "auto") if turn % 2 else ("auto", "off"):
            seconds = args.seconds if turn else args.seconds / 2
            rate = await measure(running, Cell(workload, clients, side), seconds, args.max_tokens, predictions)
            if turn:
                rates[side].append(rate)
    off, auto = mean(rates["off"]), mean(rates["auto"])
    print(
        f"{workload:6} {clients:3} clients: off {off:6.1f}, auto {auto:6.1f} tokens/s, ratio {auto / off:.2f}",
        flush=True,
    )
    row = {"workload": workload, "clients": clients, "off": off, "auto": auto, "ratio": auto / off}
    return {**row, **speculation(before, running.metrics()), "each": rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--workloads", nargs="+", default=["chat", "edits"], choices=("chat", "edits"))
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("serve", nargs="*", help="further arguments of `paceline serve`, after --")
    args = parser.parse_args()
    with server([*args.serve, "--max-num-seqs", str(max(args.clients))]) as running:
        rows = asyncio.run(compare(running, args))
    print(json.dumps({"cells": rows}))


if __name__ == "__main__":
    main()
