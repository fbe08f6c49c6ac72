"""Do two tokenizers mean the same by every number? Equal vocab_size says nothing; this looks token by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SHOWN = 5


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
            f"{min(self.target_size, self.draft_size)} tokens (id {shown}). Choose a draft of the same family, "
            f"train one (paceline train draft), or use --method ngram, which needs none"
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
