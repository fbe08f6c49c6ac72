"""Do two tokenizers mean the same by every number? Equal vocab_size says nothing; this looks token by token.

Where they do not, a draft can still be used, at a price: `shared_tokens` finds what both can say in one token, and
`pairing` says which way guesses take from one to the other.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

SHOWN = 5
LEAST_SHARE = 0.1  # of the target's vocabulary: with less in common, guesses through shared tokens are hopeless
SAME, SHARED, TEXT = "same", "shared", "text"  # ways a guess takes: as it is, as a shared token, as characters
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Difference:
    """One id that the two vocabularies read differently. None: the id is not there."""

    id: int
    target: str | None
    draft: str | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two vocabularies have in common."""

    target_size: int
    draft_size: int
    differing: int
    first: tuple[Difference, ...]
    shared_strings: int  # tokens that both have, under whatever number
    special: tuple[str, ...]  # special tokens that differ, in words
    same_template: bool

    @property
    def same(self) -> bool:
        """Every id that both have means the same; one may have a longer tail of its own."""
        return self.differing == 0

    def explained(self, target: str, draft: str) -> str:
        """The error a user gets: where the two differ and what can be done."""
        shown = "; ".join(f"{d.id} is {d.target!r} and {d.draft!r}" for d in self.first)
        return (
            f"{draft} cannot draft for {target}: their vocabularies differ in {self.differing} of "
            f"{min(self.target_size, self.draft_size)} tokens (id {shown}). Choose a draft of the same family, train "
            f"one (paceline train draft), let its guesses be translated (--method foreign), or use --method ngram, "
            f"which needs none"
        )


def compare(target: Any, draft: Any) -> Comparison:
    """Compare two tokenizers token by token."""
    ours, theirs = _by_id(target), _by_id(draft)
    common = min(len(ours), len(theirs))
    differing = [id_ for id_ in range(common) if ours.get(id_) != theirs.get(id_)]
    first = tuple(Difference(id_, ours.get(id_), theirs.get(id_)) for id_ in differing[:SHOWN])
    return Comparison(
        len(ours),
        len(theirs),
        len(differing),
        first,
        len(set(ours.values()) & set(theirs.values())),
        _special_differences(target, draft),
        getattr(target, "chat_template", None) == getattr(draft, "chat_template", None),
    )


def _by_id(tokenizer: Any) -> dict[int, str]:
    return {id_: token for token, id_ in tokenizer.get_vocab().items()}


def _special_differences(target: Any, draft: Any) -> tuple[str, ...]:
    found = []
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        ours, theirs = getattr(target, name, None), getattr(draft, name, None)
        if ours != theirs:
            found.append(f"{name}: {ours!r} and {theirs!r}")
    return tuple(found)


# --- different vocabularies -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SharedTokens:
    """Tokens that stand for the same characters on both sides: target_ids[i] is draft_ids[i]."""

    target_ids: list[int]
    draft_ids: list[int]


@dataclass(frozen=True, slots=True)
class Pairing:
    """How guesses get from a draft's vocabulary into the target's, and what is lost on the way."""

    greedy: str  # the way for greedy texts: SAME or TEXT
    sampled: str  # the way for sampled texts: SAME, SHARED or TEXT
    shared: int
    target_size: int

    @property
    def share(self) -> float:
        """Of the target's vocabulary, the part that the draft can say in one token."""
        return self.shared / self.target_size

    @property
    def cost(self) -> str:
        """What the pair costs, in words."""
        if self.greedy == SAME:
            return "one vocabulary: guesses are used as they are, nothing is lost"
        common = f"{self.shared} of {self.target_size} tokens in common ({self.share:.0%})"
        if self.sampled == SHARED:
            return (
                f"two vocabularies, {common}. Greedy texts: guesses travel as characters and are tokenised again every "
                f"round. Sampled texts: only common tokens can be guessed, with their real probabilities"
            )
        return (
            f"two vocabularies, {common}: too few to sample through. Guesses travel as characters, are tokenised again "
            f"every round and count as certain, so sampled texts accept fewer of them than greedy ones"
        )


def pairing(target: Any, draft: Any) -> Pairing:
    """Which way guesses take between two tokenizers."""
    size = len(target.get_vocab())
    if compare(target, draft).same:
        return Pairing(SAME, SAME, min(size, len(draft.get_vocab())), size)
    shared = len(shared_tokens(target, draft).target_ids)
    return Pairing(TEXT, SHARED if shared >= LEAST_SHARE * size else TEXT, shared, size)


def shared_tokens(target: Any, draft: Any) -> SharedTokens:
    """Every token both can say, by the bytes it stands for, and the end token of each for that of the other."""
    ours, theirs = spellings(target), spellings(draft)
    pairs = {ours[spelling]: theirs[spelling] for spelling in ours.keys() & theirs.keys()}
    if target.eos_token_id is not None and draft.eos_token_id is not None:
        pairs[int(target.eos_token_id)] = int(draft.eos_token_id)
    ordered = sorted(pairs.items())
    return SharedTokens([ours for ours, _ in ordered], [theirs for _, theirs in ordered])


def spellings(tokenizer: Any) -> dict[bytes, int]:
    """The bytes each token stands for, whichever way the vocabulary writes them down. Special tokens have none."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    special = {int(id_) for id_ in tokenizer.all_special_ids} | set(getattr(tokenizer, "added_tokens_decoder", {}))
    letters = _byte_letters()
    # Two habits: every byte as a printable letter, a space as "Ġ"; or plain characters, a space as "▁".
    spaces = Counter(token[0] for token in vocabulary if token)
    as_letters = spaces["Ġ"] >= spaces["▁"]
    return {
        _from_letters(token, letters) if as_letters else _from_characters(token): id_
        for token, id_ in vocabulary.items()
        if id_ not in special
    }


def _from_letters(token: str, letters: dict[str, int]) -> bytes:
    if all(letter in letters for letter in token):
        return bytes(letters[letter] for letter in token)
    return token.encode()


def _from_characters(token: str) -> bytes:
    byte = BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()


def _byte_letters() -> dict[str, int]:
    """The letter a byte-level vocabulary writes for each byte: itself if it prints, else one above 255 in turn."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(rest)}
