"""One idea, one word: code, help and documents use the words of docs/glossary.md.

Every rule names a word that is not used, the word to use instead, and, where the word has other meanings, the rooms or
the kind of place it is forbidden in. A word with a good meaning in a forbidden place is listed in the rule's `unless`.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from paceline import cli

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "paceline"

SOURCES = ["."]
DATA = ["train/prompt_openings.py"]  # strings that models read, not ours
COMMANDS = cli.commands()
DOCUMENTS = [
    "README.md",
    *(
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "docs").glob("*.md"))
        if path.name != "glossary.md"
    ),
]  # the glossary and the changes name other projects' words and old ones

NAME, PROSE = "name", "prose"  # an identifier; a comment, a string, a line of a document or of help
BOTH = (NAME, PROSE)
SEQUENCE_ROOMS = ("core", "device", "kv", "layers", "models", "quantization", "runners", "drafting", "engines")
REQUEST_ROOMS = ("serve", "engines", "cli")


@dataclass(frozen=True, slots=True)
class Rule:
    """A word that is not used. In names it is compared with the whole name and with each of its parts."""

    word: str  # a regular expression for the whole word, lower case
    use: str
    places: tuple[str, ...] = BOTH
    rooms: tuple[str, ...] = ()  # empty: everywhere, documents and help too
    other_rooms: tuple[str, ...] = ()  # where the word means something else
    unless: str = ""  # a regular expression: what it matches is no violation

    def applies(self, place: str, room: str) -> bool:
        return place in self.places and (not self.rooms or room in self.rooms) and room not in self.other_rooms

    def finds(self, place: str, text: str) -> bool:
        if self.unless:
            text = re.sub(self.unless, " ", text, flags=re.IGNORECASE)
        if place == NAME:
            return any(re.fullmatch(self.word, part) for part in name_parts(text))
        return re.search(rf"(?<![\w-])(?:{self.word})(?![\w-])", text.lower()) is not None


RULES = [
    Rule("guess(es|ed|ing|er)?|guesswork", "draft token, draft"),
    Rule("verdicts?|judges?|judged|judging|judge?ments?", "verify, VerifyResult"),
    Rule("tally|tallies|tallied", "stats, SpecStats"),
    # A thinking budget is what clients call the limit of the reasoning; servers spell the field in three ways.
    Rule(
        "budgets?",
        "num_draft_tokens; DraftLengthPolicy",
        unless="thinking budgets?|thinking_(token_)?budget|budget_tokens",
    ),
    Rule("stood", "accepted"),
    Rule("(token|draft|node)s? (that )?stands?", "is accepted", (PROSE,), unless="stands? for"),
    Rule("rounds", "steps", (NAME,)),
    Rule(r"(a|an|each|every|per|this|last|next|plain|between|two|several|one) rounds?", "step", (PROSE,)),
    Rule("texts", "seqs", (NAME,), SEQUENCE_ROOMS),
    Rule("texts|(each|every|another) text", "sequence", (PROSE,), SEQUENCE_ROOMS),
    # In layers and runners a slot is the place of one token in the KV tensors, as in vLLM's slot mapping; /slots is a
    # route of llama.cpp.
    Rule("slots?", "sequence cache", other_rooms=("layers", "runners"), unless="__slots__|slots=True|^slots$|/slots"),
    Rule("pages?|paged_out", "block, block table", BOTH, SEQUENCE_ROOMS, unless="pageable|page.locked|huge pages"),
    Rule("residents?|beginnings", "prefix cache"),
    Rule("sights", "tree_mask"),
    Rule("captured work", "graph", (PROSE,)),
    Rule("cards?", "ModelInfo; accelerator, GPU", (NAME,)),
    Rule("foreign", "cross-vocabulary"),
    Rule("prices?|priced", "cost, cost model"),
    Rule("longest texts?|head sizes?", "max_seq_len, head_dim", (PROSE,)),
    Rule("longest_text|head_size|mlp_width|end_tokens?", "max_seq_len, head_dim, …", (NAME,)),
    Rule("kv_heads", "num_kv_heads", (NAME,), unless="num_kv_heads"),
    Rule("tickets?|letters?|desks?|offices?|doors?|gates?", "RequestState, AdmissionControl, …", BOTH, REQUEST_ROOMS),
    Rule("words?", "command, name", (NAME,), ("cli",)),
    Rule("(a|the|every|each|this|which|no) words?", "command", (PROSE,), ("cli",)),
    Rule("nobody|anew|whoever|seldom|oftener|for ever|dearer|dear|henceforth|thereof", "plain words", (PROSE,)),
    Rule("said|wanted|mine|with_", "a noun for what it holds", (NAME,)),
]


# --- what is read -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """A name or a stretch of prose, and where it is."""

    where: str
    line: int
    place: str
    text: str


def name_parts(name: str) -> list[str]:
    """`num_DraftTokens` -> the whole in lower case, then num, draft, tokens, and neighbours joined: draft_tokens."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    parts = [part for part in spaced.split("_") if part]
    return [spaced, *parts, *(f"{first}_{second}" for first, second in pairwise(parts))]


def read_source(path: Path) -> Iterator[Piece]:
    """Identifiers, comments and strings of a module."""
    where = str(path.relative_to(ROOT))
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.NAME:
            yield Piece(where, token.start[0], NAME, token.string)
        elif token.type in (tokenize.COMMENT, tokenize.STRING):
            yield from read_prose(where, token.string, token.start[0])


def read_prose(where: str, text: str, first_line: int = 1) -> Iterator[Piece]:
    """Lines of prose. A line is joined to the one before, so that no phrase hides behind a line break."""
    before = ""
    for number, line in enumerate(text.splitlines(), first_line):
        yield Piece(where, number, PROSE, f"{before} {line.strip()}")
        before = line.strip().rsplit(" ", 1)[-1]


def source_files() -> list[Path]:
    chosen = [SOURCE / name for name in SOURCES]
    files = {file for path in chosen for file in (path.rglob("*.py") if path.is_dir() else [path])}
    return sorted(files - {SOURCE / name for name in DATA})


@cache
def room_of(where: str) -> str:
    path = Path(where)
    return path.parts[2] if where.startswith("src/") and len(path.parts) > 3 else path.name


ANY_WORD = re.compile("|".join(rule.word for rule in RULES))


@cache
def broken_rules(place: str, room: str, text: str) -> tuple[Rule, ...]:
    """Most names come often and most lines have no such word at all, so few are compared rule by rule."""
    if not ANY_WORD.search(text.lower() if place == PROSE else " ".join(name_parts(text))):
        return ()
    return tuple(rule for rule in RULES if rule.applies(place, room) and rule.finds(place, text))


def violations(pieces: Iterator[Piece]) -> list[str]:
    """One line for each: where, what, and what to write instead."""
    return [
        f"{piece.where}:{piece.line}: {piece.text.strip()[:90]!r} -> {rule.use}"
        for piece in pieces
        for rule in broken_rules(piece.place, room_of(piece.where), piece.text)
    ]


# --- tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_code_uses_the_words_of_the_glossary(path: Path) -> None:
    assert violations(read_source(path)) == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_use_the_words_of_the_glossary(name: str) -> None:
    assert violations(read_prose(name, (ROOT / name).read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_uses_the_words_of_the_glossary(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"] if name else ["--help"]) == 0
    assert violations(read_prose("src/paceline/cli/help", capsys.readouterr().out)) == []


@pytest.mark.parametrize(
    ("place", "room", "text"),
    [
        (NAME, "core", "texts"),
        (NAME, "kv", "pages_free"),
        (NAME, "cli", "guessedTokens"),
        (NAME, "serve", "Desk"),
        (NAME, "plan", "model_card"),
        (PROSE, "core", "the draft tokens of each text"),
        (PROSE, "cli", "Guesses that stood are green"),
        (PROSE, "engines", "one copy every round"),
    ],
)
def test_a_word_of_the_old_dialect_is_found(place: str, room: str, text: str) -> None:
    assert violations(iter([Piece(f"src/paceline/{room}/module.py", 1, place, text)]))


@pytest.mark.parametrize(
    ("place", "room", "text"),
    [
        (NAME, "core", "__slots__"),
        (NAME, "core", "slots"),
        (NAME, "runners", "new_slots"),
        (NAME, "models", "gate_proj"),
        (NAME, "core", "num_kv_heads"),
        (NAME, "serve", "page"),
        (NAME, "core", "text"),
        (PROSE, "core", "a sum that rounds to nearest, rounded once"),
        (PROSE, "drafting", "the text of a stop string"),
        (PROSE, "bench", "what stands in the table"),
    ],
)
def test_other_meanings_are_no_false_alarm(place: str, room: str, text: str) -> None:
    assert violations(iter([Piece(f"src/paceline/{room}/module.py", 1, place, text)])) == []
