"""Can this draft guess for this target?

    paceline check --target default --draft path/to/draft

Compares the two vocabularies token by token (equal sizes say nothing), the special tokens and the chat template. No
weights are loaded. Exit status 0: they fit together; 2: they do not, and the message names the first tokens that
differ. Differences in special tokens or template cost speed at most, never correctness, and are only shown. A draft of
another vocabulary can still guess by `--method foreign`: the last line says which way its guesses take, and the price.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from paceline.errors import PairError

if TYPE_CHECKING:
    from paceline.hub.vocabulary import Comparison, Pairing


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", required=True, metavar="MODEL", help="`default`, a Hub id, a directory or a .gguf")
    parser.add_argument("--draft", required=True, metavar="MODEL", help="the model that shall guess")
    parser.add_argument("--json", action="store_true", help="end with one JSON document on one line")


def main(args: argparse.Namespace) -> int:
    from paceline.hub.vocabulary import compare, pairing

    ours, theirs = tokenizers(args.target, args.draft)
    found, pair = compare(ours, theirs), pairing(ours, theirs)
    if args.json:
        ways = {"greedy": pair.greedy, "sampled": pair.sampled, "share": pair.share, "cost": pair.cost}
        print(json.dumps({"target": args.target, "draft": args.draft, "same": found.same, **asdict(found), **ways}))
    else:
        for line in described(found, pair):
            print(line)
    if not found.same:
        raise PairError(found.explained(args.target, args.draft))
    return 0


def tokenizers(target: str, draft: str) -> tuple[Any, Any]:
    from paceline.cli.arguments import quiet_transformers
    from paceline.hub import locate
    from paceline.hub.tokenizer import load_tokenizer

    ours, theirs = locate(target), locate(draft)
    quiet_transformers()
    return load_tokenizer(ours.folder, ours.name), load_tokenizer(theirs.folder, theirs.name)


def described(found: Comparison, pair: Pairing) -> list[str]:
    common = min(found.target_size, found.draft_size)
    return [
        f"vocabulary      {found.target_size} and {found.draft_size} tokens; {found.differing} of {common} differ",
        f"shared strings  {found.shared_strings}",
        f"special tokens  {'; '.join(found.special) or 'the same'}",
        f"chat template   {'the same' if found.same_template else 'another'}",
        f"verdict         {'they fit together' if found.same else 'they do not fit together'}",
        f"guesses         {pair.cost}{'' if found.same else ' (--method foreign)'}",
    ]
