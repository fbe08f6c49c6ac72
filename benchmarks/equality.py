"""Does greedy speculative decoding generate token for token what transformers generates?

    python benchmarks/equality.py --prompts DIR                 every *.jsonl of DIR, fields "id" and "prompt"
    python benchmarks/equality.py --prompts DIR --limit 5 --methods draft_model   five of each file

For every prompt: AutoModelForCausalLM.generate(do_sample=False) on the default model in float32, then the same by the
methods none, ngram and draft_model (the model's own copy, rounded to 4 bits), alone and eight at a time. A difference
is a near-tie if the two best logits are closer than 1e-3 where the outputs differ: there, another order of additions
decides. Any other difference is a bug, and the exit status is 1. The last line on stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from paceline import SpeculativeDecoder

NEAR_TIE = 1e-3  # between the two best logits
METHODS = ("none", "ngram", "draft_model")
BATCHES = (1, 8)
NUM_DRAFT_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Difference:
    """The index of the first different token, and the gap between the target's two best logits there."""

    index: int
    gap: float

    @property
    def near_tie(self) -> bool:
        return self.gap < NEAR_TIE


def rounded_copy(model: Any, bits: int) -> Any:
    """A draft model made of the model itself: every matrix of its layers rounded, row by row, to 2^bits levels."""
    twin = copy.deepcopy(model)
    levels = 2 ** (bits - 1) - 1
    with torch.no_grad():
        for layer in twin.model.layers:
            for weight in (parameter for parameter in layer.parameters() if parameter.dim() == 2):
                step = weight.abs().amax(dim=1, keepdim=True) / levels
                weight.copy_((weight / step).round() * step)
    return twin


def compared(model: Any, prompt: list[int], expected: list[int], output: list[int]) -> list[Difference]:
    """No difference, or the first one: after it the contexts differ."""
    if expected == output:
        return []
    index = next((n for n, (a, b) in enumerate(zip(expected, output)) if a != b), min(len(expected), len(output)))
    with torch.no_grad():
        row = model(torch.tensor([prompt + expected[:index]])).logits[0, -1]
    best = row.topk(2).values
    return [Difference(index, float(best[0] - best[1]))]


def prompts_of(folder: Path, limit: int | None) -> Iterator[str]:
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text().splitlines()[:limit]:
            yield json.loads(line)["prompt"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="a folder of .jsonl files")
    parser.add_argument("--limit", type=int, help="prompts a file")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("model", nargs="?", default="default", metavar="MODEL")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--runner", default="auto", help="auto, native or hf")
    args = parser.parse_args()
    report = _report(args)
    print(json.dumps(report))
    return 1 if report["bugs"] else 0


def _report(args: argparse.Namespace) -> dict[str, Any]:
    """Every method and batch size against transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from paceline import SpeculativeDecoder
    from paceline.hub import locate
    from paceline.hub.tokenizer import Tokenizer

    folder = locate(args.model).folder
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = Tokenizer(AutoTokenizer.from_pretrained(folder))
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts_of(args.prompts, args.limit)]
    prompts = [tokenizer.encode(chat) for chat in chats]
    expected = [_transformers_output(model, prompt, args.new_tokens) for prompt in prompts]
    draft = rounded_copy(model, bits=4)
    options: dict[str, dict[str, Any]] = {
        "none": {},
        "ngram": {"method": "ngram"},
        "draft_model": {"draft_model": draft},
    }
    rows: list[dict[str, Any]] = []
    print(f"{'method':<12}{'batch':>6}{'equal':>12}{'near-ties':>11}{'bugs':>6}{'accepted':>10}{'τ':>7}")
    for method in args.methods:
        for batch in BATCHES:
            with SpeculativeDecoder(
                model,
                num_draft_tokens=NUM_DRAFT_TOKENS,
                tokenizer=tokenizer.hf_tokenizer,
                max_num_seqs=batch,
                runner=args.runner,
                prefix_cache_tokens=0,
                **options[method],
            ) as decoder:
                rows.append(_row(decoder, model, prompts, expected, args.new_tokens))
            print(_shown(rows[-1]), flush=True)
    near = sum(row["near_ties"] for row in rows)
    return {"prompts": len(prompts), "near_ties": near, "bugs": sum(row["bugs"] for row in rows), "rows": rows}


def _transformers_output(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    whole = model.generate(torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False)
    tokens: list[int] = whole[0, len(prompt) :].tolist()
    return tokens


def _row(
    decoder: SpeculativeDecoder, model: Any, prompts: list[list[int]], expected: list[list[int]], new_tokens: int
) -> dict[str, Any]:
    from paceline.core.stats import SpecStats

    total, differences = SpecStats(), []
    for prompt, tokens, result in zip(prompts, expected, decoder.generate(prompts, max_new_tokens=new_tokens)):
        total.add(result.stats)
        differences += compared(model, prompt, tokens, result.token_ids)
    near = sum(difference.near_tie for difference in differences)
    return {
        "method": decoder.config.speculative.method,
        "batch": decoder.config.max_num_seqs,
        "outputs": len(prompts),
        "equal": len(prompts) - len(differences),
        "near_ties": near,
        "bugs": len(differences) - near,
        "acceptance_rate": total.acceptance_rate,
        "tokens_per_step": total.tokens_per_step,
    }


def _shown(row: dict[str, Any]) -> str:
    equal = f"{row['equal']}/{row['outputs']}"
    rates = f"{row['acceptance_rate']:>10.1%}{row['tokens_per_step']:>7.2f}"
    return f"{row['method']:<12}{row['batch']:>6}{equal:>12}{row['near_ties']:>11}{row['bugs']:>6}{rates}"


if __name__ == "__main__":
    sys.exit(main())
