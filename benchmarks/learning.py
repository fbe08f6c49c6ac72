"""Learning from traffic, simulated: a server meets a language that the shipped head never saw.

    PYTHONPATH=src python3 benchmarks/learning.py --out OUT                       2,000 requests, about 20 minutes
    PYTHONPATH=src python3 benchmarks/learning.py --out OUT --requests 60 --round 20 --kills 1

Two servers run side by side, `paceline serve` without and with --learn. Traffic comes in rounds: the same requests go
from --clients clients to one server and then to the other, in turns which is first; the one that does not answer is
stopped, and its trainer with it. After each round nobody asks for --rest seconds: the trainer's time. In between the
server that learns is killed (kill -9) --kills times, at rest or in the middle of its answers, and started again.

Printed at the end, and as one JSON line: acceptance at position 1 of the first and the last tenth of the requests,
latencies (median, p99) with and without learning, how many texts differ, and what each kill lost. OUT keeps the answers
and the learning folder. Exit status 1: one of the four claims in the last lines does not hold.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a program, it knows only its own folder
from benchmarks.learning_sides import Answer, Killing, Side

LEAST_RISE = 0.08
MOST_P99 = 1.05  # of p99 without learning
RESAMPLES = 1000
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


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    with both_sides(args, out) as (without, learning):
        killings = Traffic(args, without, learning).run()
    for side in (without, learning):
        lines = [json.dumps(asdict(answer), ensure_ascii=False) + "\n" for answer in side.answers]
        (out / f"{side.name}.jsonl").write_text("".join(lines), encoding="utf-8")
    result = summary(without.answers, learning.answers, killings)
    history = out / "learn" / "history.jsonl"
    result["history"] = [json.loads(line) for line in history.read_text().splitlines()] if history.is_file() else []
    report(result)
    print(json.dumps(result))
    return 0 if all(result["claims"].values()) else 1


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--model", default="default")
    parser.add_argument("--head", help="the head to start from (the shipped one)")
    parser.add_argument("--dtype", default="int8")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--round", type=int, default=50, help="requests of a round")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--draft-tokens", type=int, default=3)
    parser.add_argument("--rest", type=float, default=10.0, help="seconds without requests after each round")
    parser.add_argument("--learn-steps", type=int, default=16)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=40.0, help="begin no round after this long")
    return parser.parse_args(argv)


@contextmanager
def both_sides(args: argparse.Namespace, out: Path) -> Iterator[tuple[Side, Side]]:
    flags = [args.model, "--method", "eagle", "-k", str(args.draft_tokens), "--generation-config", "none"]
    flags += ["--dtype", args.dtype, *(["--draft-model", args.head] if args.head else [])]
    learn = ["--learn", str(out / "learn"), "--learn-consent", "--learn-steps", str(args.learn_steps)]
    body = {"model": args.model, "max_tokens": args.new_tokens, "temperature": 0, "x_paceline": True}
    with ThreadPoolExecutor(args.clients) as pool:
        sides = Side("without", flags, body, pool), Side("learning", [*flags, *learn], body, pool)
        try:
            for side in sides:
                side.start()
            yield sides
        finally:
            for side in sides:
                side.close()


def prompts() -> list[str]:
    """2,000 different ones; neighbours differ in topic and task."""
    every = [task.format(topic + more) for more, topic, task in product(DETAILS, TOPICS, TASKS)]
    return [every[number * 733 % len(every)] for number in range(len(every))]


@dataclass(slots=True, eq=False)
class Traffic:
    """Round after round of the same requests to both servers."""

    args: argparse.Namespace
    without: Side
    learning: Side

    def run(self) -> list[Killing]:
        size, texts, killings = self.args.round, prompts(), list[Killing]()
        count = -(-self.args.requests // size)
        kills = {(1 + number) * count // (1 + self.args.kills): number for number in range(self.args.kills)}
        began = time.monotonic()
        for turn in range(count):
            if time.monotonic() - began > 60 * self.args.minutes:
                break
            numbers = range(turn * size, min(self.args.requests, (turn + 1) * size))
            killings += self._round(turn, {number: texts[number % len(texts)] for number in numbers}, kills.get(turn))
            self._say(turn, count, time.monotonic() - began)
        return killings

    def _round(self, turn: int, requests: dict[int, str], kill: int | None) -> list[Killing]:
        """Kills of even numbers come in the middle of answers, the others at rest."""
        killings, sides = [], (self.without, self.learning)
        for side in sides if turn % 2 else sides[::-1]:
            other = self.learning if side is self.without else self.without
            other.pause()
            if side is self.learning and kill is not None and kill % 2 == 0:
                answers, killing = side.killed_block(requests, turn)
                killings.append(killing)
            else:
                answers = side.block(requests, turn)
            side.answers += answers
            other.resume()
        time.sleep(self.args.rest)
        return [*killings, *([self.learning.killed_at_rest()] if kill is not None and kill % 2 else [])]

    def _say(self, turn: int, count: int, seconds: float) -> None:
        latest = rate([answer for answer in self.learning.answers if answer.round == turn])
        plain = rate([answer for answer in self.without.answers if answer.round == turn])
        head = self.learning.metric("head")
        line = f"round {turn + 1} of {count}, {seconds:.0f} s: head {head}, acceptance {latest:.3f} against {plain:.3f}"
        print(line, file=sys.stderr, flush=True)


# --- figures ----------------------------------------------------------------------------------------------------------


def summary(without: list[Answer], learning: list[Answer], killings: list[Killing]) -> dict[str, Any]:
    """Over the requests that both sides have answered; latencies without those that a kill touched."""
    other = {answer.number: answer for answer in without}
    both = sorted((answer for answer in learning if answer.number in other), key=lambda answer: answer.number)
    pairs = [(other[answer.number], answer) for answer in both]
    timed = [pair for pair in pairs if pair[1].timed]
    sides = {"without": figures([pair[0] for pair in pairs]), "with": figures([pair[1] for pair in pairs])}
    p99 = [percentile([pair[side].seconds for pair in timed]) for side in (0, 1)]
    low, high = ratio_interval(timed)
    result = {
        "requests": len(both),
        "different_texts": sum(plain.text != answer.text for plain, answer in pairs),
        **sides,
        "p99_seconds": {"without": round(p99[0], 4), "with": round(p99[1], 4)},
        "p99_ratio": {"ratio": round(p99[1] / p99[0], 4), "low": round(low, 4), "high": round(high, 4)},
        "kills": [{**asdict(killing), "lost": killing.lost} for killing in killings],
    }
    return {**result, "claims": claims(result)}


def claims(result: dict[str, Any]) -> dict[str, bool]:
    rise = result["with"]["last_acceptance"] - result["with"]["first_acceptance"]
    kills = result["kills"]
    return {
        f"acceptance at position 1 rises by {LEAST_RISE} or more": rise >= LEAST_RISE,
        f"p99 is at most {MOST_P99} of that without learning": result["p99_ratio"]["ratio"] <= MOST_P99,
        "no text differs": result["different_texts"] == 0,
        "a kill keeps the head in use": all(kill["head_after"] >= kill["head_before"] for kill in kills),
    }


def figures(side: list[Answer]) -> dict[str, float]:
    tenth = max(1, len(side) // 10)
    return {
        "first_acceptance": rate(side[:tenth]),
        "last_acceptance": rate(side[-tenth:]),
        "median_seconds": round(median(answer.seconds for answer in side if answer.timed), 4),
    }


def percentile(seconds: list[float], share: float = 0.99) -> float:
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def ratio_interval(pairs: list[tuple[Answer, Answer]]) -> tuple[float, float]:
    """95% of the ratio of p99 with and without learning, by drawing whole rounds again (their requests wait for each
    other)."""
    rounds: dict[int, list[tuple[Answer, Answer]]] = {}
    for pair in pairs:
        rounds.setdefault(pair[1].round, []).append(pair)
    rng, ratios = random.Random(0), []
    for _ in range(RESAMPLES):
        drawn = [pair for part in rng.choices(list(rounds.values()), k=len(rounds)) for pair in part]
        ratios.append(percentile([pair[1].seconds for pair in drawn]) / percentile([pair[0].seconds for pair in drawn]))
    return percentile(ratios, 0.025), percentile(ratios, 0.975)


def rate(side: list[Answer]) -> float:
    return round(sum(answer.accepted for answer in side) / max(1, sum(answer.offered for answer in side)), 4)


def report(result: dict[str, Any]) -> None:
    lines = [f"{result['requests']} requests, {result['different_texts']} texts differ"]
    for side in ("without", "with"):
        numbers, p99 = result[side], result["p99_seconds"][side]
        rates = f"{numbers['first_acceptance']:.3f} -> {numbers['last_acceptance']:.3f}"
        times = f"median {numbers['median_seconds']:.3f} s, p99 {p99:.3f} s"
        lines.append(f"{side:8} learning: acceptance at position 1 {rates}, {times}")
    ratio = result["p99_ratio"]
    lines.append(f"p99 with / without {ratio['ratio']:.3f} (95%: {ratio['low']:.3f} to {ratio['high']:.3f})")
    for kill in result["kills"]:
        heads = f"head {kill['head_before']} -> {kill['head_after']}"
        lines.append(f"kill -9 after {kill['answered']} answers: {kill['lost']} lost from the ring, {heads}")
    lines += [f"{'holds' if holds else 'DOES NOT HOLD'}: {claim}" for claim, holds in result["claims"].items()]
    print("\n".join(lines), file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
