"""Can this draft model draft for this target? Is this head loaded with the settings it was trained with?

    paceline check MODEL --draft-model DRAFT        two vocabularies, token by token
    paceline check MODEL --head HEAD                every reading of a trained head, by acceptance
    paceline check MODEL --head HEAD --fix OUT      and a corrected copy
    paceline check MODEL --head HEAD --url URL      and what a running server makes of it

--draft-model compares the two vocabularies token by token (equal sizes say nothing), the special tokens and the chat
template. No weights are loaded. Exit status 0: they fit together; 2: they do not, and the message names the first
tokens that differ. Differences in special tokens or template cost speed at most, never correctness, and are only shown.
A draft model of another vocabulary can still draft with `--method cross_vocab`: the last line says how, and at what
cost.

--head tries every reading of a head's files (layer offset, order of the inputs, norms, rotary settings, vocabulary map,
mask token, block size, …) on text that the target writes, and shows the acceptance of each by position with its
standard error. A wrong reading runs and only lowers acceptance. Exit status 0: no reading is better than the files'
own; 2: another is, with an error probability below 0.01 over all readings, and the last lines say what to change.
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
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument("--draft-model", metavar="DRAFT", help="Hub id, directory or .gguf of the draft")
    subject.add_argument("--head", metavar="HEAD", help="directory or Hub id of a head, or eagle: the shipped one")
    parser.add_argument("--json", action="store_true", help="end with one JSON document on one line")
    heads = parser.add_argument_group("heads")
    heads.add_argument("--tokens", type=int, default=2000, metavar="N", help="length of the text (2000)")
    heads.add_argument("--text", metavar="FILE", help="a text instead of what the target writes")
    heads.add_argument("--seed", type=int, default=0, metavar="N", help="chooses the prompts that the target answers")
    heads.add_argument("--fix", metavar="OUT", help="write a corrected copy of the head to this new directory")
    heads.add_argument("--url", metavar="URL", help="a server that drafts with this head: compare its acceptance")
    heads.add_argument("--device", metavar="D", help="cpu, cuda or cuda:N (cuda if there is one)")


def main(args: argparse.Namespace) -> int:
    if args.head is not None:
        from paceline.cli.check_head import check_head

        return check_head(args)
    return _check_pair(args)


def _check_pair(args: argparse.Namespace) -> int:
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
