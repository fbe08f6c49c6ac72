"""How much more a suffix automaton drafts than n-gram lookup, in outputs that repeat themselves.

    python benchmarks/suffix.py                      # greedy, k = 8, the default model
    python benchmarks/suffix.py --k 4 --new-tokens 256

Two kinds of built-in prompts: code to edit, and reports to summarize with quotations. Outputs are greedy, so each
method drafts for the same output. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict

from paceline import SpeculativeDecoder
from paceline.core.stats import SpecStats

SHOP = """class Cart:
    def __init__(self, owner):
        self.owner = owner
        self.items = []

    def add_item(self, name, price, quantity):
        if price < 0:
            raise ValueError("price must not be negative")
        if quantity < 1:
            raise ValueError("quantity must be at least one")
        self.items.append({"name": name, "price": price, "quantity": quantity})

    def remove_item(self, name):
        self.items = [item for item in self.items if item["name"] != name]

    def total(self):
        result = 0
        for item in self.items:
            result += item["price"] * item["quantity"]
        return result
"""

READINGS = """import csv

def load_readings(path):
    readings = []
    with open(path) as handle:
        for row in csv.DictReader(handle):
            readings.append((row["station"], float(row["temperature"]), float(row["humidity"])))
    return readings

def mean_temperature(readings, station):
    values = [temperature for name, temperature, humidity in readings if name == station]
    return sum(values) / len(values)

def mean_humidity(readings, station):
    values = [humidity for name, temperature, humidity in readings if name == station]
    return sum(values) / len(values)
"""

BRIDGE = (
    "The old bridge over the river Lenn was closed on Monday after divers found cracks in two of its five piers. "
    "City engineer Marta Odell said: \"The bridge is not about to fall, but we will not take a risk with people's "
    'lives." About nine thousand cars cross the bridge on a working day. Buses will take the northern route until the '
    "repair is finished. The repair is expected to take eleven weeks and to cost 2.4 million. Shop owners on the "
    'eastern bank fear for their summer season. "If the bridge stays closed until August, half of us will not open '
    'again," said Piet Hale, who sells bicycles near the bridge.'
)

LIGHTHOUSE = (
    "The lighthouse at Cape Arden was lit for the first time in 1874. Its lamp burned rapeseed oil, and a keeper had "
    "to wind the clockwork every four hours. In 1931 the oil lamp was replaced by an electric lamp, and the clockwork "
    "by a motor. The last keeper, Ruth Amberley, left the lighthouse at Cape Arden in 1988. She wrote in her log book: "
    '"The light needs no one now, and yet I find it hard to go." Since 1995 the lighthouse has been a museum, and '
    "about forty thousand people visit it every year."
)

PROMPTS: dict[str, list[str]] = {
    "code edits": [
        f"Rename the method add_item to put and repeat the whole class.\n\n```python\n{SHOP}```",
        f"Add a docstring to every method of this class and show the complete code.\n\n```python\n{SHOP}```",
        f"Rewrite this code with type hints. Show all of it.\n\n```python\n{READINGS}```",
        f"Add a function median_temperature to this file and print the whole file again.\n\n```python\n{READINGS}```",
    ],
    "summaries that quote": [
        f"Summarize this report. Quote what was said word for word.\n\n{BRIDGE}",
        f"Make a list of the facts in this text, each with the sentence it stands in.\n\n{BRIDGE}",
        f"Summarize this text and quote its most important sentences.\n\n{LIGHTHOUSE}",
        f"Correct the spelling of this text and repeat it.\n\n{LIGHTHOUSE}",
    ],
}

METHODS = ("ngram", "suffix")


def measure(method: str, model: str, k: int, new_tokens: int) -> dict[str, SpecStats]:
    """Generate an output for every prompt with one method; counts by kind of prompt."""
    stats: dict[str, SpecStats] = defaultdict(SpecStats)
    with SpeculativeDecoder(model, method=method, num_draft_tokens=k, prefix_cache_tokens=0) as decoder:
        for kind, prompts in PROMPTS.items():
            for prompt in prompts:
                result = decoder.generate([{"role": "user", "content": prompt}], max_new_tokens=new_tokens)
                stats[kind].add(result.stats)
                stats["all"].add(result.stats)
    return stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--k", type=int, default=8, help="draft tokens a step, the same for both methods")
    parser.add_argument("--new-tokens", type=int, default=320)
    args = parser.parse_args()
    taus: dict[str, dict[str, float]] = {}
    for method in METHODS:
        by_kind = measure(method, args.model, args.k, args.new_tokens)
        taus[method] = {kind: round(stats.tokens_per_step, 3) for kind, stats in by_kind.items()}
        print(f"{method:8}" + "".join(f"  {kind}: {tau:.2f}" for kind, tau in taus[method].items()), flush=True)
    gain = {kind: round(taus["suffix"][kind] / tau - 1, 3) for kind, tau in taus["ngram"].items()}
    print(json.dumps({"k": args.k, "new_tokens": args.new_tokens, "tokens_per_step": taus, "gain": gain}))


if __name__ == "__main__":
    main()
