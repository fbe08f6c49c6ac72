"""Compares two tokenizers token by token: equal vocab_size is not equal vocabulary.

A draft of another vocabulary can still be used, at a cost: `shared_tokens` finds the tokens both vocabularies have,
and `pairing` says how draft tokens are translated from one to the other.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

SHOWN = 5
LEAST_SHARE = 0.1  # of the target's vocabulary: with less in common, drafting through shared tokens is hopeless
SAME, SHARED, TEXT = "same", "shared", "text"  # how a draft token is translated: not at all, by id, by characters
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Difference:
    """One id that means different tokens in the two vocabularies. None: the vocabulary does not have the id."""

    id: int
    target: str | None
    draft: str | None


@dataclass(frozen=True, slots=True)
class VocabularyComparison:
    """What two vocabularies have in common."""

    target_size: int
    draft_size: int
    differing: int
    first: tuple[Difference, ...]
    shared_strings: int  # tokens that both have, under any id
    special: tuple[str, ...]  # special tokens that differ, described
    same_template: bool

    @property
    def same(self) -> bool:
        """Every id that both have means the same; one may have a longer tail of its own."""
        return self.differing == 0

    def explained(self, target: str, draft: str) -> str:
        """The message of the error: where the two differ and what can be done."""
        examples = "; ".join(f"{d.id} is {d.target!r} and {d.draft!r}" for d in self.first)
        return (
            f"{draft} cannot draft for {target}: their vocabularies differ in {self.differing} of "
            f"{min(self.target_size, self.draft_size)} tokens (id {examples}). Choose a draft of the same family, "
            f"train one (paceline train draft-model), translate its draft tokens (--method cross_vocab), or "
            f"use --method ngram, which needs no draft model"
        )


def compare(target: Any, draft: Any) -> VocabularyComparison:
    """Compare two tokenizers token by token."""
    ours, theirs = _by_id(target), _by_id(draft)
    common = min(len(ours), len(theirs))
    differing = [id_ for id_ in range(common) if ours.get(id_) != theirs.get(id_)]
    first = tuple(Difference(id_, ours.get(id_), theirs.get(id_)) for id_ in differing[:SHOWN])
    return VocabularyComparison(
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
    differences = []
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        ours, theirs = getattr(target, name, None), getattr(draft, name, None)
        if ours != theirs:
            differences.append(f"{name}: {ours!r} and {theirs!r}")
    return tuple(differences)


# --- different vocabularies -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SharedTokens:
    """Tokens with the same characters in both vocabularies: target_ids[i] is draft_ids[i]."""

    target_ids: list[int]
    draft_ids: list[int]


@dataclass(frozen=True, slots=True)
class Pairing:
    """How draft tokens are translated from a draft's vocabulary into the target's, and what that costs."""

    greedy: str  # for greedy sequences: SAME or TEXT
    sampled: str  # for sampled sequences: SAME, SHARED or TEXT
    shared: int
    target_size: int

    @property
    def share(self) -> float:
        """The part of the target's vocabulary that the draft has too."""
        return self.shared / self.target_size

    @property
    def cost(self) -> str:
        """What the pair costs, as a sentence."""
        if self.greedy == SAME:
            return "one vocabulary: draft tokens are used as they are, nothing is lost"
        common = f"{self.shared} of {self.target_size} tokens in common ({self.share:.0%})"
        if self.sampled == SHARED:
            return (
                f"two vocabularies, {common}. Greedy sequences: draft tokens are translated as characters and "
                f"tokenized again every step. Sampled sequences: only common tokens are drafted, with their "
                f"real probabilities"
            )
        return (
            f"two vocabularies, {common}: too few to sample through. Draft tokens are translated as characters, "
            f"tokenized again every step and count as certain, so sampled sequences accept fewer than greedy ones"
        )


def pairing(target: Any, draft: Any) -> Pairing:
    """How draft tokens are translated between two tokenizers."""
    size = len(target.get_vocab())
    if compare(target, draft).same:
        return Pairing(SAME, SAME, min(size, len(draft.get_vocab())), size)
    shared = len(shared_tokens(target, draft).target_ids)
    return Pairing(TEXT, SHARED if shared >= LEAST_SHARE * size else TEXT, shared, size)


def shared_tokens(target: Any, draft: Any) -> SharedTokens:
    """Every token both vocabularies have, matched by its bytes; the two end-of-sequence tokens match each other."""
    ours, theirs = spellings(target), spellings(draft)
    pairs = {ours[spelling]: theirs[spelling] for spelling in ours.keys() & theirs.keys()}
    if target.eos_token_id is not None and draft.eos_token_id is not None:
        pairs[int(target.eos_token_id)] = int(draft.eos_token_id)
    ordered = sorted(pairs.items())
    return SharedTokens([target_id for target_id, _ in ordered], [draft_id for _, draft_id in ordered])


def spellings(tokenizer: Any) -> dict[bytes, int]:
    """The bytes of each token, however the vocabulary writes them. Special tokens are left out."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    special = {int(id_) for id_ in tokenizer.all_special_ids} | set(getattr(tokenizer, "added_tokens_decoder", {}))
    alphabet = byte_level_alphabet()
    # Two conventions: every byte as a printable character, a space as "Ġ"; or plain characters, a space as "▁".
    first_characters = Counter(token[0] for token in vocabulary if token)
    byte_level = first_characters["Ġ"] >= first_characters["▁"]
    return {
        _bytes_of(token, alphabet) if byte_level else _bytes_of_characters(token): id_
        for token, id_ in vocabulary.items()
        if id_ not in special
    }


def _bytes_of(token: str, alphabet: dict[str, int]) -> bytes:
    if all(character in alphabet for character in token):
        return bytes(alphabet[character] for character in token)
    return token.encode()


def _bytes_of_characters(token: str) -> bytes:
    byte = BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()


@cache
def byte_level_alphabet() -> dict[str, int]:
    """The byte behind each character of a byte-level vocabulary: printable bytes are themselves, others from U+0100."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
