"""Many streaming clients, a third of them disconnecting at random, against one server: does anything leak or mix?

    python benchmarks/soak.py --clients 64 --seconds 120

Every prompt's greedy output is first generated alone; every output that a client reads must equal it, or be a prefix
of it where the client disconnected early. At the end no KV block may be in use, and memory must not have grown. The
last line is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from dataclasses import asdict, dataclass, field

import httpx
from server_process import Server, server, stream_chunks

PATH = "/v1/completions"
PROMPTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "1, 2, 3, 4, 5, 6, 7,",
    "def add(a, b):\n    return",
    "The days of the week are Monday,",
    "Once upon a time there was",
    "The opposite of hot is",
    "A triangle has three",
    "import numpy as np\n\ndef mean(values):\n",
    "The sun rises in the",
    "To make bread you need flour,",
    "Roses are red, violets are",
]


@dataclass
class SoakResult:
    """What the clients saw."""

    finished: int = 0
    disconnected: int = 0
    chunks: int = 0
    errors: list[str] = field(default_factory=list)
    mixed: list[str] = field(default_factory=list)  # outputs that differ from those of their prompts alone


def body(prompt: str, max_tokens: int) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}


async def sequential_outputs(running: Server, max_tokens: int) -> dict[str, str]:
    """The output of every prompt, one at a time."""
    outputs: dict[str, str] = {}
    async with httpx.AsyncClient(base_url=running.url, timeout=300) as client:
        for prompt in PROMPTS:
            response = await client.post(PATH, json=body(prompt, max_tokens))
            outputs[prompt] = response.json()["choices"][0]["text"]
    return outputs


class Soak:
    """Clients of one server until a deadline, and what they see."""

    def __init__(self, running: Server, max_tokens: int, expected: dict[str, str], deadline: float) -> None:
        self._running, self._max_tokens, self._expected, self._deadline = running, max_tokens, expected, deadline
        self.result = SoakResult()

    async def client(self, index: int) -> None:
        """Send one request after another; disconnect from a third of them."""
        rng = random.Random(index)
        while time.monotonic() < self._deadline:
            prompt = rng.choice(PROMPTS)
            max_chunks = rng.randrange(1, self._max_tokens) if rng.random() < 1 / 3 else None
            try:
                await self._request(prompt, max_chunks)
            except (httpx.HTTPError, RuntimeError) as error:
                self.result.errors.append(f"{type(error).__name__}: {error}")

    async def _request(self, prompt: str, max_chunks: int | None) -> None:
        """Read one stream. max_chunks: disconnect after so many; None: read to the end."""
        text, num_chunks, finished = "", 0, True
        async with httpx.AsyncClient(base_url=self._running.url, timeout=300) as client:
            async for chunk in stream_chunks(client, PATH, body(prompt, self._max_tokens)):
                text += chunk["choices"][0]["text"]
                num_chunks += 1
                if max_chunks is not None and num_chunks > max_chunks:
                    finished = False
                    break
        self.result.chunks += num_chunks
        self.result.finished += finished
        self.result.disconnected += not finished
        self._compare(prompt, text, finished)

    def _compare(self, prompt: str, text: str, finished: bool) -> None:
        expected = self._expected[prompt]
        if text != expected if finished else not expected.startswith(text):
            self.result.mixed.append(f"{prompt!r}: {text!r} is not {expected!r}")

    async def sample_memory(self, samples: list[float]) -> None:
        while time.monotonic() < self._deadline:
            await asyncio.sleep(5)
            samples.append(self._running.megabytes())


async def soak(running: Server, clients: int, seconds: float, max_tokens: int) -> dict[str, object]:
    """Run the clients and return what they and the server's metrics show."""
    expected = await sequential_outputs(running, max_tokens)
    before, memory = running.metrics(), [running.megabytes()]
    work = Soak(running, max_tokens, expected, time.monotonic() + seconds)
    await asyncio.gather(work.sample_memory(memory), *(work.client(index) for index in range(clients)))
    after = await idle_metrics(running)
    settled = memory[len(memory) // 3 :]
    return {
        **asdict(work.result),
        "clients": clients,
        "seconds": seconds,
        "kv_blocks_before": kv_blocks(before),
        "kv_blocks_after": kv_blocks(after),
        "preemptions": total(after, "paceline_preemptions_total"),
        "prefix_cache_hits": total(after, "paceline_prefix_cache_hits_total"),
        "failed_steps": total(after, "paceline_failed_steps_total"),
        "megabytes": {"first": memory[0], "after_a_third": settled[0], "last": settled[-1], "max": max(memory)},
    }


def kv_blocks(metrics: dict[str, float]) -> dict[str, float]:
    return {state: total(metrics, "paceline_kv_blocks", f'state="{state}"') for state in ("used", "cached", "free")}


def total(metrics: dict[str, float], name: str, label: str = "") -> float:
    """The sum of a metric over its labels."""
    return sum(value for key, value in metrics.items() if key.partition("{")[0] == name and label in key)


async def idle_metrics(running: Server) -> dict[str, float]:
    """The metrics once no request is in progress."""
    for _ in range(200):
        metrics = running.metrics()
        if not total(metrics, "paceline_requests_running") and not total(metrics, "paceline_requests_waiting"):
            break
        await asyncio.sleep(0.1)
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("serve", nargs="*", help="further arguments of `paceline serve`, after --")
    args = parser.parse_args()
    with server(args.serve) as running:
        result = asyncio.run(soak(running, args.clients, args.seconds, args.max_tokens))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
