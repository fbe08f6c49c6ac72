"""Many streaming clients, a third of them leaving at random moments, against one server: does anything leak or mix?

    python benchmarks/soak.py --clients 64 --seconds 120

Every prompt's greedy text is first written alone; every text that a client reads must be that text, or the beginning
of it where the client left early. At the end the pages in use must be 0, and memory must not have grown. The last line
is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from dataclasses import asdict, dataclass, field

import httpx
from server_process import Server, server, streamed

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
class Findings:
    """What the clients saw."""

    finished: int = 0
    left_early: int = 0
    tokens: int = 0
    errors: list[str] = field(default_factory=list)
    mixed: list[str] = field(default_factory=list)  # texts that are not what their prompt gives alone


def body(prompt: str, tokens: int) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0}


async def alone(served: Server, tokens: int) -> dict[str, str]:
    """Every prompt's text, one at a time."""
    found: dict[str, str] = {}
    async with httpx.AsyncClient(base_url=served.url, timeout=300) as client:
        for prompt in PROMPTS:
            answer = await client.post(PATH, json=body(prompt, tokens))
            found[prompt] = answer.json()["choices"][0]["text"]
    return found


async def one_client(
    served: Server, number: int, tokens: int, until: float, expected: dict[str, str], findings: Findings
) -> None:
    uniforms = random.Random(number)
    while time.monotonic() < until:
        prompt = uniforms.choice(PROMPTS)
        leaves_after = uniforms.randrange(1, tokens) if uniforms.random() < 1 / 3 else None
        try:
            await one_text(served, prompt, tokens, leaves_after, expected[prompt], findings)
        except (httpx.HTTPError, RuntimeError) as error:
            findings.errors.append(f"{type(error).__name__}: {error}")


async def one_text(
    served: Server, prompt: str, tokens: int, leaves_after: int | None, expected: str, findings: Findings
) -> None:
    text, chunks = "", 0
    async with httpx.AsyncClient(base_url=served.url, timeout=300) as client:
        async for document in streamed(client, PATH, body(prompt, tokens)):
            text += document["choices"][0]["text"]
            chunks += 1
            if leaves_after is not None and chunks > leaves_after:
                break
    findings.tokens += chunks
    whole = leaves_after is None or chunks <= leaves_after
    if whole:
        findings.finished += 1
    else:
        findings.left_early += 1
    if text != expected if whole else not expected.startswith(text):
        findings.mixed.append(f"{prompt!r}: {text!r} is not {expected!r}")


async def soak(served: Server, clients: int, seconds: float, tokens: int) -> dict[str, object]:
    expected = await alone(served, tokens)
    before, memory = served.metrics(), [served.megabytes()]
    findings, until = Findings(), time.monotonic() + seconds

    async def watch() -> None:
        while time.monotonic() < until:
            await asyncio.sleep(5)
            memory.append(served.megabytes())

    work = [one_client(served, number, tokens, until, expected, findings) for number in range(clients)]
    await asyncio.gather(watch(), *work)
    after = await quiet(served)
    settled = memory[len(memory) // 3 :]
    pages = {state: after[f'paceline_cache_pages{{state="{state}"}}'] for state in ("used", "cached", "free")}
    start = {state: before[f'paceline_cache_pages{{state="{state}"}}'] for state in ("used", "cached", "free")}
    return {
        **asdict(findings),
        "clients": clients,
        "seconds": seconds,
        "pages_before": start,
        "pages_after": pages,
        "preemptions": after["paceline_preemptions_total"],
        "prefix_hits": after["paceline_prefix_hits_total"],
        "failed_rounds": after["paceline_failed_rounds_total"],
        "megabytes": {"first": memory[0], "after_a_third": settled[0], "last": settled[-1], "most": max(memory)},
    }


async def quiet(served: Server) -> dict[str, float]:
    """The metrics once nobody is being served."""
    for _ in range(200):
        found = served.metrics()
        if not found["paceline_running"] and not found["paceline_waiting"]:
            return found
        await asyncio.sleep(0.1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("serve", nargs="*", help="further arguments of `paceline serve`, after --")
    args = parser.parse_args()
    with server(args.serve) as served:
        found = asyncio.run(soak(served, args.clients, args.seconds, args.tokens))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
