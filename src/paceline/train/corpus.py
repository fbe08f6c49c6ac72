"""The texts a drafter learns from: token ids with the place where each answer starts, on disk and in batches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor

from paceline.errors import OptionError, WeightsError
from paceline.train.atomic import replacing

SHARD = "texts-{:03d}.safetensors"
GREEDY = 128  # added to a text's kind where its answer is greedy
HELD_OUT_SHARE = 0.02
FEWEST_HELD_OUT, MOST_HELD_OUT = 8, 512
WIDTHS = 64  # batches are padded to multiples of this: few shapes, little padding
NEIGHBOURS = 32  # batches that are filled together from texts sorted by length


@dataclass(frozen=True, slots=True)
class Text:
    """One text; what lies before `start` was given and is not learnt. kind: index into KINDS."""

    tokens: list[int]
    start: int
    kind: int = 0
    greedy: bool = False


KINDS = ("own", "chat", "code", "math", "summarize", "text")


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Many texts in four flat arrays."""

    tokens: np.ndarray  # of all texts, one behind the other
    lengths: np.ndarray
    starts: np.ndarray
    kinds: np.ndarray  # kind, + GREEDY where the answer is

    @classmethod
    def of(cls, texts: list[Text]) -> Corpus:
        tokens = np.array([token for text in texts for token in text.tokens], dtype=np.int32)
        kinds = np.array([text.kind + GREEDY * text.greedy for text in texts], dtype=np.uint8)
        lengths = np.array([len(text.tokens) for text in texts], dtype=np.int32)
        return cls(tokens, lengths, np.array([text.start for text in texts], dtype=np.int32), kinds)

    @classmethod
    def joined(cls, parts: list[Corpus]) -> Corpus:
        if not parts:
            return cls.of([])
        columns = (np.concatenate([getattr(part, name) for part in parts]) for name in cls.__slots__)
        return cls(*columns)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def offsets(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    @property
    def answer_tokens(self) -> int:
        return int((self.lengths - self.starts).sum())

    def pick(self, chosen: np.ndarray) -> Corpus:
        """The texts with these numbers, in this order."""
        offsets = self.offsets
        parts = [self.tokens[offsets[index] : offsets[index + 1]] for index in chosen]
        tokens = np.concatenate(parts) if parts else self.tokens[:0]
        return Corpus(tokens, self.lengths[chosen], self.starts[chosen], self.kinds[chosen])

    def cut(self, longest: int) -> Corpus:
        """Texts of at most this many tokens; those whose answer would be cut off altogether are left out."""
        keep = np.flatnonzero((self.starts < longest - 1) & (self.lengths - self.starts > 1))
        kept = self.pick(keep)
        offsets = kept.offsets[:-1]
        lengths = np.minimum(kept.lengths, longest)
        parts = [kept.tokens[offset : offset + length] for offset, length in zip(offsets, lengths)]
        tokens = np.concatenate(parts) if parts else kept.tokens
        return Corpus(tokens, lengths, kept.starts, kept.kinds)

    def without_repeats(self) -> Corpus:
        """The first of all texts that are equal."""
        offsets, seen, keep = self.offsets, set(), []
        for index in range(len(self)):
            mark = hashlib.blake2b(self.tokens[offsets[index] : offsets[index + 1]].tobytes(), digest_size=16).digest()
            if mark not in seen:
                seen.add(mark)
                keep.append(index)
        return self if len(keep) == len(self) else self.pick(np.array(keep, dtype=np.int64))

    def save(self, path: Path) -> None:
        """Written under another name first: a shard that is there is whole."""
        narrow = np.uint16 if self.tokens.size == 0 or int(self.tokens.max()) < 1 << 16 else np.int32
        columns = {name: np.ascontiguousarray(getattr(self, name)) for name in self.__slots__}
        with replacing(path) as unfinished:
            save_file({**columns, "tokens": self.tokens.astype(narrow)}, unfinished)

    @classmethod
    def load(cls, path: Path) -> Corpus:
        try:
            columns = load_file(path)
            tokens = columns.pop("tokens").astype(np.int32)
            return cls(tokens=tokens, **columns)
        except (SafetensorError, KeyError, TypeError, OSError) as error:
            raise WeightsError(
                f"{path} is not a shard of collected texts ({error}); delete it and run again"
            ) from error


def shards(folder: Path) -> list[Path]:
    """Shards in the order in which they were written."""
    return sorted(folder.glob("texts-*.safetensors"))


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """What is learnt from, and the slice that is only measured on."""

    train: Corpus
    held_out: Corpus


def split(corpus: Corpus, seed: int) -> Split:
    """Take a small slice out, the same one for the same corpus and seed: greedy answers where there are some."""
    if len(corpus) < 4:
        raise OptionError(f"{len(corpus)} texts are too few to train on; give more data or collect more (--tokens)")
    order = np.random.default_rng(seed).permutation(len(corpus))
    fewest = max(1, min(FEWEST_HELD_OUT, len(corpus) // 8))
    size = min(max(fewest, round(HELD_OUT_SHARE * len(corpus))), MOST_HELD_OUT)
    greedy = order[corpus.kinds[order] >= GREEDY]
    chosen = np.sort((greedy if len(greedy) >= 2 * size else order)[:size])
    return Split(corpus.pick(np.setdiff1d(order, chosen)), corpus.pick(chosen))


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Texts side by side, padded on the right.

    tokens   int64 [batch, width]
    lengths  int64 [batch]
    starts   int64 [batch]: tokens from here on are answers
    """

    tokens: Tensor
    lengths: Tensor
    starts: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(*(part.to(device, non_blocking=True) for part in (self.tokens, self.lengths, self.starts)))

    def inside(self, ahead: int) -> Tensor:
        """bool [batch, width]: token t + ahead exists."""
        return self._places(ahead) < self.lengths[:, None]

    def answers(self, ahead: int) -> Tensor:
        """bool [batch, width]: token t + ahead exists and belongs to the answer."""
        return (self._places(ahead) >= self.starts[:, None]) & self.inside(ahead)

    def _places(self, ahead: int) -> Tensor:
        return torch.arange(self.tokens.shape[1], device=self.tokens.device)[None] + ahead


class Batches:
    """The texts of a corpus in batches of about `size` tokens, in an order that only seed and number of pass decide.

    Texts are shuffled, then batches are filled from neighbours sorted by length, then the batches are shuffled: little
    padding, and no batch knows which length comes next.
    """

    def __init__(self, corpus: Corpus, size: int, seed: int) -> None:
        self._corpus, self._size, self._seed = corpus, size, seed
        self._offsets = corpus.offsets

    def epoch(self, number: int) -> list[np.ndarray]:
        """The batches of one pass over the corpus, as numbers of texts."""
        rng = np.random.default_rng((self._seed, number))
        order = rng.permutation(len(self._corpus))
        lengths = self._corpus.lengths[order]
        window = max(1, int(NEIGHBOURS * self._size / max(1.0, float(lengths.mean()))))
        batches: list[np.ndarray] = []
        for first in range(0, len(order), window):
            part = order[first : first + window]
            batches += self._filled(part[np.argsort(self._corpus.lengths[part], kind="stable")])
        return [batches[index] for index in rng.permutation(len(batches))]

    def _filled(self, part: np.ndarray) -> list[np.ndarray]:
        """Cut texts sorted by length into batches whose padded size stays within the limit."""
        out, first = [], 0
        for index in range(len(part)):
            width = _rounded(int(self._corpus.lengths[part[index]]))
            if index > first and (index + 1 - first) * width > self._size:
                out.append(part[first:index])
                first = index
        out.append(part[first:])
        return out

    def batch(self, chosen: np.ndarray) -> Batch:
        lengths = self._corpus.lengths[chosen]
        tokens = np.zeros((len(chosen), _rounded(int(lengths.max()))), dtype=np.int64)
        for row, index in enumerate(chosen):
            tokens[row, : lengths[row]] = self._corpus.tokens[self._offsets[index] : self._offsets[index + 1]]
        columns = (lengths.astype(np.int64), self._corpus.starts[chosen].astype(np.int64))
        return Batch(torch.from_numpy(tokens), *(torch.from_numpy(column) for column in columns))

    def from_step(self, step: int, share: int = 0, shares: int = 1) -> Iterator[Batch]:
        """Endless batches as they would come from step `step` on; of several distributed each takes its share."""
        number, result = 0, 0
        while True:
            chosen = self.epoch(number)[share::shares] if shares > 1 else self.epoch(number)
            whole = len(chosen) if shares == 1 else len(self.epoch(number)) // shares
            if not whole:
                raise OptionError(f"too few texts for {shares} distributed; give more data or a smaller --batch-tokens")
            for place in range(max(0, step - result), whole):
                yield self.batch(chosen[place])
            number, result = number + 1, result + whole

    def once(self) -> Iterator[Batch]:
        """Every text exactly once."""
        return (self.batch(chosen) for chosen in self.epoch(0))


def _rounded(length: int) -> int:
    return -(-length // WIDTHS) * WIDTHS


def frequent_tokens(corpus: Corpus, vocab_size: int, count: int, always: frozenset[int] = frozenset()) -> Tensor:
    """The `count` target tokens seen most often, as rising ids; end tokens are always among them.

    Ties and tokens never seen are filled by the lowest ids, which in most vocabularies are the commonest.
    """
    seen = np.bincount(corpus.tokens, minlength=vocab_size)[:vocab_size].astype(np.int64)
    seen[[token for token in always if token < vocab_size]] = np.iinfo(np.int64).max
    best = np.argsort(-seen, kind="stable")[: min(count, vocab_size)]
    return torch.from_numpy(np.sort(best).astype(np.int64))
