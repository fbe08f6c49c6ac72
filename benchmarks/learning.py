"""Learning from traffic, simulated: a server meets a language that the shipped head never saw.

    PYTHONPATH=src python3 benchmarks/learning.py --out OUT --requests 2000 --minutes 60

The same requests, in the same order and with the same pauses, go one after another to `paceline serve` without and with
--learn. Printed at the end, and as one JSON line: acceptance at position 1 of the first and the last tenth of the
requests, latencies (median, p99) with and without learning, and how many texts differ. OUT keeps every answer and the
learning folder, so a second call goes on where the first stopped: it skips what is answered, until --minutes are over.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from server_process import server

BEGAN = time.monotonic()
TOPICS = """la mer|l'hiver|un marché|le pain|les trains|mon chien|une bibliothèque|la lune|le jardin|la pluie|le vin
une école|la montagne|un bateau|la musique|le théâtre|une lettre|le printemps|la cuisine|un voyage|le désert|la neige
une forêt|le feu|un musée|la danse|le soleil|une rivière|le fromage|un pont|la nuit|le vent|une fleur|un oiseau
la ville|le village|une horloge|le cinéma|un livre|la santé|le travail|une usine|la ferme|un cheval|le café|la plage
un roi|une reine|le temps|l'histoire""".replace("\n", "|").split("|")
DETAILS = ("", " en Provence", " à Paris", " dans mon enfance", " au Moyen Âge", " de demain", " pour les enfants",
           " et l'amitié")  # fmt: skip
TASKS = (
    "Écris un court texte en français sur {}.",
    "Raconte une petite histoire en français sur {}.",
    "Explique en français pourquoi {} est important.",
    "Donne trois idées en français à propos de {}.",
    "Écris un poème en français sur {}.",
)


@dataclass(frozen=True, slots=True)
class Answer:
    """One request, as the client saw it."""

    number: int
    text: str
    seconds: float
    accepted: int  # first draft tokens
    offered: int


def main() -> int:
    args = parse()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    sides = {"plain": [], "learning": ["--learn", str(out / "learn"), "--learn-consent"]}
    for name, flags in sides.items():
        extra = ["--learn-steps", str(args.learn_steps)] if flags else []
        run(args, out / f"{name}.jsonl", flags + extra)
    result = summary(*(read(out / f"{name}.jsonl") for name in sides))
    history = out / "learn" / "history.jsonl"
    result["history"] = [json.loads(line) for line in history.read_text().splitlines()] if history.is_file() else []
    report(result)
    print(json.dumps(result))
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--model", default="default")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--draft-tokens", type=int, default=3)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds without requests after each answer")
    parser.add_argument("--learn-steps", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after this long; half of it for each side")
    return parser.parse_args()


def prompts() -> list[str]:
    """2,000 different ones; neighbours differ in topic and task."""
    every = [task.format(topic + more) for more, topic, task in product(DETAILS, TOPICS, TASKS)]
    return [every[number * 733 % len(every)] for number in range(len(every))]


def run(args: argparse.Namespace, path: Path, flags: list[str]) -> None:
    """Send the requests that have no answer yet, in order."""
    end = BEGAN + args.minutes * 60 * (0.5 if path.stem == "plain" else 1.0)
    done = {answer.number for answer in read(path)}
    missing = [number for number in range(args.requests) if number not in done]
    if not missing or time.monotonic() > end:
        return
    common = [args.model, "--method", "eagle", "-k", str(args.draft_tokens), "--generation-config", "none"]
    with server([*common, *flags]) as running, path.open("a", encoding="utf-8") as sink:
        for answer in answers(running.url, args, missing):
            sink.write(json.dumps(asdict(answer), ensure_ascii=False) + "\n")
            sink.flush()
            if time.monotonic() > end:
                return


def answers(url: str, args: argparse.Namespace, numbers: list[int]) -> Iterator[Answer]:
    texts = prompts()
    with httpx.Client(base_url=url, timeout=600) as client:
        for number in numbers:
            yield ask(client, args, number, texts[number % len(texts)])
            time.sleep(args.pause)


def ask(client: httpx.Client, args: argparse.Namespace, number: int, prompt: str) -> Answer:
    body = {
        "model": args.model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": args.new_tokens,
        "temperature": 0,
        "x_paceline": True,
    }
    began = time.perf_counter()
    response = client.post("/v1/chat/completions", json=body)
    seconds = time.perf_counter() - began
    document: dict[str, Any] = response.raise_for_status().json()
    choice = document["choices"][0]
    metrics = document["metrics"]["speculative_decoding"]
    histogram = metrics["acceptance_histogram"]
    return Answer(number, choice["message"]["content"], seconds, sum(histogram[1:]), metrics["num_spec_steps"])


def read(path: Path) -> list[Answer]:
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [Answer(**json.loads(line)) for line in lines if line.endswith("\n")]


# --- figures ----------------------------------------------------------------------------------------------------------


def summary(plain: list[Answer], learning: list[Answer]) -> dict[str, Any]:
    """Over the requests that both sides have answered."""
    other = {answer.number: answer for answer in plain}
    both = [answer for answer in learning if answer.number in other]
    return {
        "requests": len(both),
        "different_texts": sum(answer.text != other[answer.number].text for answer in both),
        "without": figures([other[answer.number] for answer in both]),
        "with": figures(both),
    }


def figures(side: list[Answer]) -> dict[str, float]:
    tenth = max(1, len(side) // 10)
    seconds = sorted(answer.seconds for answer in side) or [0.0]
    return {
        "first_acceptance": rate(side[:tenth]),
        "last_acceptance": rate(side[-tenth:]),
        "median_seconds": round(median(seconds), 4),
        "p99_seconds": round(seconds[min(len(seconds) - 1, int(0.99 * len(seconds)))], 4),
    }


def rate(side: list[Answer]) -> float:
    return round(sum(answer.accepted for answer in side) / max(1, sum(answer.offered for answer in side)), 4)


def report(result: dict[str, Any]) -> None:
    print(f"{result['requests']} requests, {result['different_texts']} texts differ", file=sys.stderr)
    for side in ("without", "with"):
        numbers = result[side]
        print(
            f"{side:8} learning: acceptance at position 1 {numbers['first_acceptance']:.3f} -> "
            f"{numbers['last_acceptance']:.3f}, median {numbers['median_seconds']:.3f} s, "
            f"p99 {numbers['p99_seconds']:.3f} s",
            file=sys.stderr,
        )


if __name__ == "__main__":
    raise SystemExit(main())
