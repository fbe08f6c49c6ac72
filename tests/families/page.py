"""docs/models.md and the results it is made of: `python -m tests.families.page` runs every variant and writes both.

Names after the command limit it to those model types; the results of all others stay as they are.
"""

from __future__ import annotations

import json
import sys
import tempfile
import textwrap
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

from tests.support.families import LEFT_OUT, Outcome, Variant, outcome, variants, write_family

ROOT = Path(__file__).parent.parent.parent
PAGE, RESULTS = ROOT / "docs" / "models.md", Path(__file__).parent / "results.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- models: python -m tests.families.page -->", "<!-- end of models -->"
INTRO = """# Models

Every causal language model of transformers, as far as it can be built small: a random checkpoint of each, decoded
plainly, with n-grams, with itself as the draft model (k = 4, so tau, the tokens a step, is 5 where nothing is ever
rejected), and in batches of three prompts of different lengths with both. All but the refused ones write, token for
token, what transformers' own `generate(do_sample=False)` writes; windows are of 16 tokens and crossed on the way, by
prompts and by what is written. The page is generated (`python -m tests.families.page`) and tested. A probe at load
finds the way to run a model:
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
    same = {name: entry for name, entry in results.items() if entry.result == "same"}
    refused = {name: entry.result for name, entry in results.items() if entry.result != "same"}
    lines = [INTRO, *_ways(same), *_table(same)]
    lines.append(
        f"\n## Refused\n\nOf {len(results)} checkpoints these {len(refused)} are refused, each with its reason:\n"
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


def _ways(same: dict[str, Outcome]) -> list[str]:
    counts = {way: sum(entry.way == way for entry in same.values()) for way in WAYS}
    return [f"- **{way}** ({counts[way]}): {meaning}" for way, meaning in WAYS.items()]


def _table(same: dict[str, Outcome]) -> list[str]:
    """A row for each checkpoint; every cell was compared with transformers' own text."""
    columns = ("checkpoint", "way", "plain", "n-gram", "draft = itself, tau", "batch of 3")
    lines = ["", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    places = list(WAYS)
    for name, entry in sorted(same.items(), key=lambda item: (places.index(item[1].way), item[0])):
        lines.append(f"| {name} | {entry.way} | same | same | same, {entry.tokens_per_step:g} | same |")
    return lines


def readme_block(results: dict[str, Outcome]) -> str:
    """README's list of models and formats, from the registries and the results."""
    from paceline.models import registry as models
    from paceline.quantization import registry as formats
    from paceline.quantization.packages import REQUIREMENTS

    native = {name.partition("-")[0] for name, entry in results.items() if entry.way == "native"}
    families = {name.partition("-")[0] for name, entry in results.items() if entry.result == "same"}
    fast = sorted(native & set(models.model_types()))
    titles = ", ".join(requirement.title for requirement in REQUIREMENTS.values())
    converted = ", ".join(sorted(formats.names()))
    lines = [
        BEGIN,
        f"On the fast path, paceline's own code, {len(fast)} families: {', '.join(fast)}.",
        f"Through transformers: {len(families - native)} more families, each compared token for token with",
        "transformers' output ([the table](docs/models.md)).",
        f"Weight formats on the fast path: fp32, bf16 and fp16; converted at load: {converted};",
        f"read from checkpoints as they are: {', '.join(sorted(formats.read_only_names()))}.",
        f"Formats that transformers reads, with its packages: {titles}.",
        END,
    ]
    return "\n".join(line for text in lines for line in _wrapped(text))


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 119, break_long_words=False, break_on_hyphens=False)


def write_readme(results: dict[str, Outcome]) -> None:
    text = README.read_text()
    before, _, rest = text.partition(BEGIN)
    README.write_text(before + readme_block(results) + rest.partition(END)[2])


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
    write_readme(results)


if __name__ == "__main__":
    main(sys.argv[1:])
