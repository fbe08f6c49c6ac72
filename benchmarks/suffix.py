"""How much more a suffix automaton finds than n-gram lookup, in texts that repeat themselves.

    python benchmarks/suffix.py                      # greedy, k = 8, the default model
    python benchmarks/suffix.py --k 4 --new-tokens 256

Two kinds of built-in prompts: code to be edited, and reports to be retold with quotations. Every text is written by
the target itself, greedily; each method then drafts for that very text. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from typing import Any

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

METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
}


def measure(method: str, model: str, k: int, new_tokens: int) -> dict[str, SpecStats]:
    """Write every prompt's answer with one method; counts by kind of prompt."""
    decoder = SpeculativeDecoder(model, num_draft_tokens=k, **METHODS[method])
    found: dict[str, SpecStats] = defaultdict(SpecStats)
    for kind, prompts in PROMPTS.items():
        for prompt in prompts:
            output = decoder.generate([{"role": "user", "content": prompt}], max_new_tokens=new_tokens)
            found[kind].add(output.stats)
            found["all"].add(output.stats)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--k", type=int, default=8, help="guesses a round, the same for both methods")
    parser.add_argument("--new-tokens", type=int, default=320)
    args = parser.parse_args()
    taus: dict[str, dict[str, float]] = {}
    for method in METHODS:
        tallies = measure(method, args.model, args.k, args.new_tokens)
        taus[method] = {kind: round(stats.tokens_per_step, 3) for kind, stats in tallies.items()}
        print(f"{method:8}" + "".join(f"  {kind}: {tau:.2f}" for kind, tau in taus[method].items()), flush=True)
    gain = {kind: round(taus["suffix"][kind] / tau - 1, 3) for kind, tau in taus["ngram"].items()}
    print(json.dumps({"k": args.k, "new_tokens": args.new_tokens, "tokens_per_step": taus, "gain": gain}))


if __name__ == "__main__":
    main()
