"""The sequences a drafter is trained on: token ids with the start of each answer, on disk and in batches."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor

from paceline.errors import OptionError, WeightsError
from paceline.train.atomic import replacing

SHARD = "sequences-{:03d}.safetensors"
GREEDY = 128  # added to a sequence's domain where its answer is greedy
HELD_OUT_SHARE = 0.02
FEWEST_HELD_OUT, MOST_HELD_OUT = 8, 512
PADDED_MULTIPLES = (8, 64)  # batches are padded to multiples: of the first where they are small, for little padding,
TOKENS_OF_LARGE_BATCH = 8192  # of the second from this size on, for few shapes
WINDOW_BATCHES = 32  # batches that are filled together from sequences sorted by length


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One sequence; tokens before `start` are the prompt and not trained on. domain: index into DOMAINS."""

    tokens: list[int]
    start: int
    domain: int = 0
    greedy: bool = False


DOMAINS = ("own", "chat", "code", "math", "summarize", "text", "translation", "question", "retrieval", "edit", "turns",
           "language")  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Many sequences in four flat arrays."""

    tokens: np.ndarray  # of all sequences, one after the other
    lengths: np.ndarray
    starts: np.ndarray
    domains: np.ndarray  # domain, + GREEDY where the answer is greedy

    @classmethod
    def of(cls, seqs: list[TrainingSequence]) -> Corpus:
        tokens = np.array([token for seq in seqs for token in seq.tokens], dtype=np.int32)
        lengths = np.array([len(seq.tokens) for seq in seqs], dtype=np.int32)
        starts = np.array([seq.start for seq in seqs], dtype=np.int32)
        domains = np.array([seq.domain + GREEDY * seq.greedy for seq in seqs], dtype=np.uint8)
        return cls(tokens, lengths, starts, domains)

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

    def pick(self, indices: np.ndarray) -> Corpus:
        """The sequences with these indices, in this order."""
        offsets = self.offsets
        parts = [self.tokens[offsets[index] : offsets[index + 1]] for index in indices]
        tokens = np.concatenate(parts) if parts else self.tokens[:0]
        return Corpus(tokens, self.lengths[indices], self.starts[indices], self.domains[indices])

    def cut(self, max_len: int) -> Corpus:
        """Sequences of at most this many tokens; those whose whole answer would be cut off are left out."""
        with_answer = (self.starts < max_len - 1) & (self.lengths - self.starts > 1)
        corpus = self.pick(np.flatnonzero(with_answer))
        lengths = np.minimum(corpus.lengths, max_len)
        parts = [corpus.tokens[offset : offset + length] for offset, length in zip(corpus.offsets, lengths)]
        tokens = np.concatenate(parts) if parts else corpus.tokens
        return Corpus(tokens, lengths, corpus.starts, corpus.domains)

    def without_repeats(self) -> Corpus:
        """The first of each group of equal sequences."""
        offsets = self.offsets
        first_index: dict[bytes, int] = {}
        for index in range(len(self)):
            tokens = self.tokens[offsets[index] : offsets[index + 1]]
            first_index.setdefault(hashlib.blake2b(tokens.tobytes(), digest_size=16).digest(), index)
        return self if len(first_index) == len(self) else self.pick(np.array([*first_index.values()], dtype=np.int64))

    def save(self, path: Path) -> None:
        """Write a shard under another name first: a shard that exists is whole."""
        dtype = np.uint16 if self.tokens.size == 0 or int(self.tokens.max()) < 1 << 16 else np.int32
        columns = {name: np.ascontiguousarray(getattr(self, name)) for name in self.__slots__}
        with replacing(path) as unfinished:
            save_file({**columns, "tokens": self.tokens.astype(dtype)}, unfinished)

    @classmethod
    def load(cls, path: Path) -> Corpus:
        try:
            columns = load_file(path)
            tokens = columns.pop("tokens").astype(np.int32)
            return cls(tokens=tokens, **columns)
        except (SafetensorError, KeyError, TypeError, OSError) as error:
            raise WeightsError(
                f"{path} is not a shard of collected sequences ({error}); delete it and run again"
            ) from error


def shards(folder: Path) -> list[Path]:
    """Shards in the order in which they were written."""
    return sorted(folder.glob("sequences-*.safetensors"))


@dataclass(frozen=True, slots=True, eq=False)
class CorpusSplit:
    """What is trained on, and the held-out part that is only measured on."""

    train: Corpus
    held_out: Corpus


def split(corpus: Corpus, seed: int) -> CorpusSplit:
    """Hold a small part out, the same for the same corpus and seed: greedy answers where there are some."""
    if len(corpus) < 4:
        raise OptionError(f"{len(corpus)} sequences are too few to train on; give more data or more --answer-tokens")
    order = np.random.default_rng(seed).permutation(len(corpus))
    fewest = max(1, min(FEWEST_HELD_OUT, len(corpus) // 8))
    size = min(max(fewest, round(HELD_OUT_SHARE * len(corpus))), MOST_HELD_OUT)
    greedy = order[corpus.domains[order] >= GREEDY]
    held_out = np.sort((greedy if len(greedy) >= 2 * size else order)[:size])
    return CorpusSplit(corpus.pick(np.setdiff1d(order, held_out)), corpus.pick(held_out))


@dataclass(frozen=True, slots=True, eq=False)
class TrainingBatch:
    """Sequences side by side, padded on the right.

    tokens   int64 [batch, length]
    lengths  int64 [batch]
    starts   int64 [batch]: tokens from here on are answers
    number   of the training step: the seed of what a task chooses at random
    """

    tokens: Tensor
    lengths: Tensor
    starts: Tensor
    number: int = 0

    def to(self, device: torch.device) -> TrainingBatch:
        tokens, lengths, starts = (
            part.to(device, non_blocking=True) for part in (self.tokens, self.lengths, self.starts)
        )
        return TrainingBatch(tokens, lengths, starts, self.number)

    def inside(self, ahead: int) -> Tensor:
        """bool [batch, length]: token t + ahead exists."""
        return self._positions(ahead) < self.lengths[:, None]

    def answers(self, ahead: int) -> Tensor:
        """bool [batch, length]: token t + ahead exists and belongs to the answer."""
        return (self._positions(ahead) >= self.starts[:, None]) & self.inside(ahead)

    def _positions(self, ahead: int) -> Tensor:
        return torch.arange(self.tokens.shape[1], device=self.tokens.device)[None] + ahead


class BatchSampler:
    """The sequences of a corpus in batches of about `size` tokens, in an order that only seed and epoch decide.

    Sequences are shuffled, batches are filled from windows sorted by length, then batches are shuffled: little
    padding, and lengths come in no order.
    """

    def __init__(self, corpus: Corpus, size: int, seed: int) -> None:
        self._corpus, self._size, self._seed = corpus, size, seed
        self._offsets = corpus.offsets
        self._multiple = PADDED_MULTIPLES[size >= TOKENS_OF_LARGE_BATCH]

    def _padded(self, length: int) -> int:
        return -(-length // self._multiple) * self._multiple

    def epoch(self, number: int) -> list[np.ndarray]:
        """The batches of one pass over the corpus, as indices of sequences."""
        rng = np.random.default_rng((self._seed, number))
        order = rng.permutation(len(self._corpus))
        lengths = self._corpus.lengths[order]
        window = max(1, int(WINDOW_BATCHES * self._size / max(1.0, float(lengths.mean()))))
        batches: list[np.ndarray] = []
        for first in range(0, len(order), window):
            part = order[first : first + window]
            batches += self._filled(part[np.argsort(self._corpus.lengths[part], kind="stable")])
        return [batches[index] for index in rng.permutation(len(batches))]

    def _filled(self, part: np.ndarray) -> list[np.ndarray]:
        """Cut sequences sorted by length into batches whose padded size stays within the limit."""
        out, first = [], 0
        for index in range(len(part)):
            padded = self._padded(int(self._corpus.lengths[part[index]]))
            if index > first and (index + 1 - first) * padded > self._size:
                out.append(part[first:index])
                first = index
        out.append(part[first:])
        return out

    def batch(self, indices: np.ndarray) -> TrainingBatch:
        lengths = self._corpus.lengths[indices]
        tokens = np.zeros((len(indices), self._padded(int(lengths.max()))), dtype=np.int64)
        for row, index in enumerate(indices):
            tokens[row, : lengths[row]] = self._corpus.tokens[self._offsets[index] : self._offsets[index + 1]]
        starts = torch.from_numpy(self._corpus.starts[indices].astype(np.int64))
        return TrainingBatch(torch.from_numpy(tokens), torch.from_numpy(lengths.astype(np.int64)), starts)

    def from_step(self, step: int, rank: int = 0, world_size: int = 1) -> Iterator[TrainingBatch]:
        """Endless batches in their order from `step` on; each of several processes takes its share of an epoch."""
        first_step = 0
        for number in itertools.count():
            epoch = self.epoch(number)
            num_steps = len(epoch) // world_size
            if not num_steps:
                raise OptionError(
                    f"too few sequences for {world_size} processes; give more data or a smaller --batch-tokens"
                )
            for index in range(max(0, step - first_step), num_steps):
                yield replace(self.batch(epoch[rank + index * world_size]), number=first_step + index)
            first_step += num_steps

    def once(self) -> Iterator[TrainingBatch]:
        """Every sequence exactly once."""
        return (self.batch(indices) for indices in self.epoch(0))


def frequent_tokens(corpus: Corpus, vocab_size: int, count: int, always: frozenset[int] = frozenset()) -> Tensor:
    """The `count` target tokens seen most often, as ascending ids; those in `always` are included.

    The lowest ids win ties; in most vocabularies they are the most common.
    """
    counts = np.bincount(corpus.tokens, minlength=vocab_size)[:vocab_size].astype(np.int64)
    counts[[token for token in always if token < vocab_size]] = np.iinfo(np.int64).max
    best = np.argsort(-counts, kind="stable")[: min(count, vocab_size)]
    return torch.from_numpy(np.sort(best).astype(np.int64))


def adapted_tokens(corpus: Corpus, present: Tensor, vocab_size: int, always: frozenset[int] = frozenset()) -> Tensor:
    """As many ascending ids as are present: those that repeat in the corpus first, then the present ones.

    Of the present ones that the corpus does not need the highest ids, in most vocabularies the rarest, make room.
    """
    counts = np.bincount(corpus.tokens, minlength=vocab_size)[:vocab_size].astype(np.int64)
    counts[counts < 2] = 0  # a token seen once may never come again
    counts[[token for token in always if token < vocab_size]] = np.iinfo(np.int64).max
    absent = np.ones(vocab_size, dtype=bool)
    absent[present.cpu().numpy()] = False
    best = np.lexsort((np.arange(vocab_size), absent, -counts))[: present.numel()]
    return torch.from_numpy(np.sort(best).astype(np.int64))
