"""Can this draft model draft for this target?

    paceline check MODEL --draft-model DRAFT

Compares the two vocabularies token by token (equal sizes say nothing), the special tokens and the chat template. No
weights are loaded. Exit status 0: they fit together; 2: they do not, and the message names the first tokens that
differ. Differences in special tokens or template cost speed at most, never correctness, and are only shown. A draft
model of another vocabulary can still draft with `--method cross_vocab`: the last line says how, and at what cost.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from paceline.errors import PairError
from paceline.hub import DEFAULT

if TYPE_CHECKING:
    from paceline.hub.vocabulary import Pairing, VocabularyComparison


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=DEFAULT, metavar="MODEL", help="the target (the default model)")
    parser.add_argument("--draft-model", required=True, metavar="DRAFT", help="Hub id, directory or .gguf of the draft")
    parser.add_argument("--json", action="store_true", help="end with one JSON document on one line")


def main(args: argparse.Namespace) -> int:
    from paceline.hub.vocabulary import compare, pairing

    target, draft = _tokenizers(args.model, args.draft_model)
    comparison, pair = compare(target, draft), pairing(target, draft)
    if args.json:
        print(json.dumps({"model": args.model, "draft_model": args.draft_model, **_as_json(comparison, pair)}))
    else:
        print("\n".join(_lines(comparison, pair)))
    if not comparison.same:
        raise PairError(comparison.explained(args.model, args.draft_model))
    return 0


def _tokenizers(target: str, draft: str) -> tuple[Any, Any]:
    from paceline.cli.terminal import quiet_transformers
    from paceline.hub import locate
    from paceline.hub.tokenizer import load_tokenizer

    target_files, draft_files = locate(target), locate(draft)
    quiet_transformers()
    target_tokenizer = load_tokenizer(target_files.folder, target_files.name)
    return target_tokenizer, load_tokenizer(draft_files.folder, draft_files.name)


def _as_json(comparison: VocabularyComparison, pair: Pairing) -> dict[str, Any]:
    translation = {"greedy": pair.greedy, "sampled": pair.sampled, "share": pair.share, "cost": pair.cost}
    return {"same": comparison.same, **asdict(comparison), **translation}


def _lines(comparison: VocabularyComparison, pair: Pairing) -> list[str]:
    from paceline.drafting.cross_vocab import SPEC

    sizes = f"{comparison.target_size} and {comparison.draft_size} tokens"
    common = min(comparison.target_size, comparison.draft_size)
    return [
        f"vocabulary      {sizes}; {comparison.differing} of {common} differ",
        f"shared strings  {comparison.shared_strings}",
        f"special tokens  {'; '.join(comparison.special) or 'the same'}",
        f"chat template   {'the same' if comparison.same_template else 'another'}",
        f"result          {'they fit together' if comparison.same else 'they do not fit together'}",
        f"draft tokens    {pair.cost}{'' if comparison.same else f' (--method {SPEC.name})'}",
    ]
