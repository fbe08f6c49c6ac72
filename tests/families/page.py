"""docs/models.md and the results it is made of: `python -m tests.families.page` runs every variant and writes both.

Names after the command limit it to those model types; the results of all others stay as they are.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

from tests.support.families import LEFT_OUT, Outcome, Variant, outcome, variants, write_family

ROOT = Path(__file__).parent.parent.parent
PAGE, RESULTS = ROOT / "docs" / "models.md", Path(__file__).parent / "results.json"
INTRO = """# Models

Every causal language model of transformers, as far as it can be built small: a random checkpoint of each, decoded
plainly, and in a batch of three lengths with n-grams and with itself as the draft model. All but the refused ones
write, token for token, what transformers' own `generate(do_sample=False)` writes; windows of 16 tokens are crossed on
the way. The table is generated (`python -m tests.families.page`) and tested. A probe at load finds the way to run a
model:
"""
WAYS = {
    "native": "paceline's own code: batches, trees (chains where layers are recurrent), CUDA graphs.",
    "trees, batches": "Row buffers: many sequences a pass, draft trees.",
    "chains, batches": "Row buffers; the model reads trees wrongly, so methods that draft trees draft chains.",
    "chains, one sequence a pass": "The model's own cache, state or none; rejected tokens are taken back exactly.",
    "plain": "Several tokens a pass give another result than one at a time, so draft tokens are not used; a warning "
    "says so.",
}


def read_results() -> dict[str, Outcome]:
    return {name: Outcome(**entry) for name, entry in json.loads(RESULTS.read_text()).items()}


def page(results: dict[str, Outcome]) -> str:
    """The text of docs/models.md."""
    same = [name for name, entry in results.items() if entry.result == "same"]
    refused = {name: entry.result for name, entry in results.items() if entry.result != "same"}
    lines = [INTRO]
    for way, meaning in WAYS.items():
        names = sorted(name for name in same if results[name].way == way)
        lines.append(f"**{way}** ({len(names)}). {meaning}\n\n{', '.join(names)}\n")
    lines.append(
        f"## Refused\n\nOf {len(results)} checkpoints these {len(refused)} are refused, each with its reason:\n"
    )
    lines += [f"- {reason}" for _, reason in sorted(refused.items())]
    lines.append(
        "\n## Not tried\n\nTransformers itself does not build, load or run these from tokens alone, or not small:\n"
    )
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, reason in LEFT_OUT.items():
        by_reason[reason].append(name)
    lines += [f"- {', '.join(names)}: {reason}" for reason, names in sorted(by_reason.items())]
    return "\n".join(lines) + "\n"


def tried(variant: Variant) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        return outcome(write_family(variant, Path(folder)), variant)


def main(model_types: list[str]) -> None:
    earlier = read_results() if RESULTS.exists() else {}
    results: dict[str, Outcome] = {}
    for variant in variants():
        again = variant.id not in earlier or not model_types or variant.model_type in model_types
        results[variant.id] = tried(variant) if again else earlier[variant.id]
        if again:
            print(variant.id, results[variant.id].result, results[variant.id].way, flush=True)
            RESULTS.write_text(json.dumps({k: asdict(v) for k, v in {**earlier, **results}.items()}, indent=1) + "\n")
    RESULTS.write_text(json.dumps({name: asdict(entry) for name, entry in results.items()}, indent=1) + "\n")
    PAGE.write_text(page(results))


if __name__ == "__main__":
    main(sys.argv[1:])
