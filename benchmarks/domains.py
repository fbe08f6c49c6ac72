"""`auto` against each method alone, by domain: code, chat, maths, summaries, and edits with a prediction.

    python benchmarks/domains.py --dtype int4,int8                         the default model, about 12 minutes
    python benchmarks/domains.py --dtype bf16 --device cuda --model BIG --draft SMALL --rows plain,draft:auto,auto

Every row is a fresh process that meets all prompts for the first time, as in fresh.py, whose rows it takes. The
processes of all rows take turns: each meets the first prompt, each the second, and so on, so that a machine that gets
slower slows all of them alike. All of it runs --repeats times. --apart runs one process after another instead, where
the models do not fit side by side.

Each cell is tokens per second over the prompts of a domain, prefill included; the last line is `auto` over the best of
the others. The text that is edited is the prediction, for the rows `auto` and `prediction`. Texts that differ from
plain decoding's are counted, and make the exit status 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a program, it knows only its own folder
from benchmarks.fresh import row_options
from benchmarks.fresh_process import AUTO, PLAIN, FreshResult, Job, in_fresh_process, in_turns

PREDICTION, EDITS = "prediction", "edits"
DOMAINS = ("code", "chat", "maths", "summarising")
ROWS = f"{PLAIN},ngram:auto,suffix:auto,dflash:3,dflash:auto,{PREDICTION}:auto,{AUTO}"
EDITED = {
    "Rename the variable total to amount": '''def average(values):
    total = 0
    count = 0
    for value in values:
        if value is None:
            continue
        total += value
        count += 1
    if count == 0:
        return 0
    return total / count''',
    "Change the default port to 9000": '''class Connection:
    def __init__(self, host, port=8080, timeout=30):
        self.host = host
        self.port = port
        self.timeout = timeout
        self.socket = None

    def address(self):
        return f"{self.host}:{self.port}"''',
    "Replace the word river by the word lake": '''The old road follows the river for ten miles, then climbs to the pass.
In spring the river floods the lower fields, and the farmers wait until May before they bring out the cattle.
Nobody has counted the bridges, but the people of the valley say that there is one for every family.''',
    "Add a docstring to the function": '''def merge(left, right):
    result = []
    while left and right:
        if left[0] <= right[0]:
            result.append(left.pop(0))
        else:
            result.append(right.pop(0))
    return result + left + right''',
    "Rename the method area to surface": '''class Rectangle:
    def __init__(self, width, height):
        self.width = width
        self.height = height

    def area(self):
        return self.width * self.height

    def scaled(self, factor):
        return Rectangle(self.width * factor, self.height * factor)''',
    "Change the discount from ten to twenty percent": '''def price(order):
    total = sum(item.price * item.quantity for item in order.items)
    if order.customer.is_member:
        total = total * 0.9
    if total > 100:
        return total
    return total + order.shipping''',
    "Replace the name Anna by the name Maria": '''Anna opened the shop at seven, as she had done for twenty years.
The first customer wanted bread, the second a newspaper, and the third only to talk about the weather.
At noon Anna closed the door, counted the coins, and wrote the sum into the green book.''',
    "Add the field email after name": '''{
  "users": [
    {"id": 1, "name": "Ada", "role": "admin"},
    {"id": 2, "name": "Grace", "role": "editor"},
    {"id": 3, "name": "Alan", "role": "reader"}
  ]
}''',
    "Change the timeout to sixty seconds": '''server:
  host: 0.0.0.0
  port: 8443
  timeout: 30
database:
  host: localhost
  pool: 16
logging:
  level: info
  file: server.log''',
    "Correct the spelling": '''The comittee will meet on Wensday to discuss the new libary.
Every member recieves the agenda a week before. Questions can be send to the secretary until Monday evening.''',
    "Sort in descending order instead": '''def top_scores(scores, limit=10):
    ranked = sorted(scores.items(), key=lambda item: item[1])
    names = []
    for name, score in ranked[:limit]:
        names.append(f"{name}: {score}")
    return names''',
    "Use the past tense": '''The train leaves the station at six and crosses the bridge.
The passengers look out of the windows. Nobody speaks.
A child draws a ship on the glass, and the rain takes it away.''',
}


@dataclass(frozen=True, slots=True)
class DomainPrompt:
    """One prompt. prediction: the output that its client expects."""

    domain: str
    text: str
    prediction: str | None = None


@dataclass(slots=True)
class DomainRow:
    """One row over all its processes: tokens and seconds by domain, and prompts whose text differs from plain's."""

    name: str
    tokens: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    different: int = 0
    error: str | None = None

    def add(self, result: FreshResult, prompts: list[DomainPrompt], expected: list[Any]) -> None:
        self.error = self.error or result.error
        for prompt, output, seconds in zip(prompts, result.first.outputs, result.first.each):
            self.tokens[prompt.domain] = self.tokens.get(prompt.domain, 0) + len(output)
            self.seconds[prompt.domain] = self.seconds.get(prompt.domain, 0.0) + seconds
        self.different += sum(output != plain for output, plain in zip(result.first.outputs, expected))

    def rate(self, domain: str) -> float:
        return self.tokens.get(domain, 0) / self.seconds[domain] if domain in self.seconds else 0.0


def domain_prompts(limit: int) -> list[DomainPrompt]:
    """So many of each domain."""
    from paceline.bench.workloads import load_prompts

    prompts: list[DomainPrompt] = []
    for domain in DOMAINS:
        prompts += [DomainPrompt(domain, prompt.text) for prompt in load_prompts(f"builtin:{domain}")[:limit]]
    for task, text in list(EDITED.items())[:limit]:
        prompt = f"{task} in this text. Answer with the whole text and nothing else.\n\n{text}"
        prompts.append(DomainPrompt(EDITS, prompt, text))
    return prompts


def job_of(name: str, dtype: str, args: argparse.Namespace, prompts: list[DomainPrompt]) -> Job:
    options = row_options(name, args.draft)
    predicts = options["method"] in (AUTO, PREDICTION)
    return Job(
        name,
        1,
        [prompt.text for prompt in prompts],
        args.model,
        dtype=dtype,
        device=args.device,
        max_new_tokens=args.max_new_tokens,
        predictions=[prompt.prediction for prompt in prompts] if predicts else None,
        once=True,
        **options,
    )


def measured_rows(dtype: str, args: argparse.Namespace, prompts: list[DomainPrompt]) -> list[DomainRow]:
    """Every row, in both orders."""
    rows = [DomainRow(name) for name in dict.fromkeys((PLAIN, *args.rows.split(",")))]
    expected: list[Any] = []
    for repeat in range(args.repeats):
        ordered = rows[:: -1 if repeat % 2 else 1]
        jobs = [job_of(row.name, dtype, args, prompts) for row in ordered]
        results = [in_fresh_process(job) for job in jobs] if args.apart else in_turns(jobs)
        expected = expected or results[0].first.outputs  # plain is first
        for row, result in zip(ordered, results):
            row.add(result, prompts, expected)
    return rows


def table(dtype: str, rows: list[DomainRow]) -> list[list[str]]:
    """The rows, and `auto` over the best of the others by domain."""
    domains = [*DOMAINS, EDITS]
    lines = [[dtype, *domains, "different texts"], ["---"] * (2 + len(domains))]
    for row in rows:
        cells = [f"{row.rate(domain):.1f}" if row.rate(domain) else "-" for domain in domains]
        lines.append([row.name, *cells, row.error or str(row.different)])
    ratios = [auto_over_best(rows, domain) for domain in domains]
    lines.append(["auto / best single", *(f"{ratio:.3f}" if ratio else "-" for ratio in ratios), ""])
    return lines


def auto_over_best(rows: list[DomainRow], domain: str) -> float | None:
    auto = next((row.rate(domain) for row in rows if row.name == AUTO), 0.0)
    best = max((row.rate(domain) for row in rows if row.name != AUTO), default=0.0)
    return auto / best if auto and best else None


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--draft", help="a draft model or a trained head")
    parser.add_argument("--dtype", default="int4,int8", help="one table each (int4,int8)")
    parser.add_argument("--device")
    parser.add_argument("--rows", default=ROWS, help=f"default: {ROWS}")
    parser.add_argument("--limit-prompts", type=int, default=4, metavar="N", help="of each domain (4)")
    parser.add_argument("--max-new-tokens", type=int, default=96, metavar="N")
    parser.add_argument("--repeats", type=int, default=2, metavar="N", help="processes of each row (2)")
    parser.add_argument("--apart", action="store_true", help="one process after another, not all in turns")
    parser.add_argument("--json", metavar="OUT", help="write everything measured to this file")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    prompts = domain_prompts(args.limit_prompts)
    print(f"{len(prompts)} prompts, up to {args.max_new_tokens} new tokens, greedy, {args.model}, tokens/s")
    measured = {}
    for dtype in args.dtype.split(","):
        rows = measured[dtype] = measured_rows(dtype, args, prompts)
        print("\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in table(dtype, rows)), flush=True)
    if args.json:
        document = {dtype: [_as_dict(row) for row in rows] for dtype, rows in measured.items()}
        Path(args.json).write_text(json.dumps(document, indent=1))
    return 1 if any(row.error or row.different for rows in measured.values() for row in rows) else 0


def _as_dict(row: DomainRow) -> dict[str, Any]:
    return {"row": row.name, "tokens": row.tokens, "seconds": row.seconds, "different": row.different,
            "error": row.error}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
