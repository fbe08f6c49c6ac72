"""A ring of the latest sequences on disk: token ids and where each answer starts, and nothing else.

A shard is written again as it fills, whole or not at all, and is named by the number of its first sequence. When the
shards exceed the size of the ring the oldest is deleted. A killed server loses what came since the last `flush`.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.errors import WeightsError
from paceline.train.corpus import Corpus, TrainingSequence

SHARD_NAME = "sequences-{:012d}.safetensors"
SHARDS_PER_RING = 16  # so that deleting the oldest shard deletes a small part of the traffic
MAX_SHARD_BYTES = 256 * 1024
BYTES_A_TOKEN = 4
MAX_SEQ_LEN = 4096  # tokens kept of one sequence
FEWEST_ANSWER_TOKENS = 2
HELD_OUT_SHARE = 1 / 8


class TrafficRing:
    """Writes sequences into the ring. `add` is cheap and safe from any thread; `flush` writes."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._added: list[TrainingSequence] = []
        self._shard = _last_shard(folder)

    def add(self, tokens: list[int], start: int) -> None:
        """Keep one sequence: prompt tokens before `start`, the target's own from there on."""
        tokens = tokens[:MAX_SEQ_LEN]
        if start >= 1 and len(tokens) - start >= FEWEST_ANSWER_TOKENS:
            with self._lock:
                self._added.append(TrainingSequence(tokens, start))

    def flush(self) -> None:
        """Write what was added since the last flush, and delete the oldest shards beyond the size of the ring."""
        with self._lock:
            added, self._added = self._added, []
        for seq in added:
            if self._shard.num_bytes >= min(MAX_SHARD_BYTES, self._max_bytes // SHARDS_PER_RING):
                self._shard.save(self._folder)
                self._shard = OpenShard(self._shard.first + len(self._shard.seqs), [])
            self._shard.seqs.append(seq)
        if added:
            self._shard.save(self._folder)
            self._shrink()

    def _shrink(self) -> None:
        paths = ring_shards(self._folder)
        while len(paths) > 1 and sum(path.stat().st_size for path in paths) > self._max_bytes:
            paths.pop(0).unlink()

    @property
    def num_bytes(self) -> int:
        """Size of the ring on disk."""
        return sum(path.stat().st_size for path in ring_shards(self._folder))

    @property
    def num_seqs(self) -> int:
        """Sequences on disk."""
        paths = ring_shards(self._folder)
        return self._shard.first + len(self._shard.seqs) - shard_number(paths[0]) if paths else 0


@dataclass(slots=True)
class OpenShard:
    """The shard that is being filled. first: the number of its first sequence."""

    first: int
    seqs: list[TrainingSequence]

    @property
    def num_bytes(self) -> int:
        return BYTES_A_TOKEN * sum(len(seq.tokens) for seq in self.seqs)

    def save(self, folder: Path) -> None:
        Corpus.of(self.seqs).save(folder / SHARD_NAME.format(self.first))


def ring_shards(folder: Path) -> list[Path]:
    """Shards, the oldest first."""
    return sorted(folder.glob("sequences-*.safetensors"))


def shard_number(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _last_shard(folder: Path) -> OpenShard:
    """The newest shard goes on where an earlier server stopped; a damaged one is left alone."""
    paths = ring_shards(folder)
    if not paths:
        return OpenShard(0, [])
    first = shard_number(paths[-1])
    try:
        corpus = Corpus.load(paths[-1])
    except WeightsError:
        return OpenShard(first + 1, [])
    return OpenShard(first, sequences_of(corpus))


def sequences_of(corpus: Corpus) -> list[TrainingSequence]:
    """The sequences of a corpus one by one."""
    offsets = corpus.offsets
    return [
        TrainingSequence(corpus.tokens[offsets[index] : offsets[index + 1]].tolist(), int(corpus.starts[index]))
        for index in range(len(corpus))
    ]


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """What a ring holds.

    train     sequences to train on, the oldest first
    held_out  sequences that no training ever sees
    end       one more than the number of the latest sequence
    """

    train: Corpus
    held_out: Corpus
    end: int


def read_ring(folder: Path, max_len: int) -> Traffic:
    """The sequences of a ring without repeats, cut to `max_len` tokens. A shard that is deleted meanwhile is left out.

    Which part a sequence belongs to follows from its tokens: a repeated one is never both trained on and held out.
    """
    parts, end = [], 0
    for path in ring_shards(folder):
        try:
            parts.append(Corpus.load(path))
            end = shard_number(path) + len(parts[-1])
        except WeightsError:
            continue
    corpus = Corpus.joined(parts).cut(max_len).without_repeats()
    held_out = np.array([_is_held_out(seq.tokens) for seq in sequences_of(corpus)], dtype=bool)
    return Traffic(corpus.pick(np.flatnonzero(~held_out)), corpus.pick(np.flatnonzero(held_out)), end)


def latest(corpus: Corpus, max_tokens: int, max_seqs: int) -> Corpus:
    """The last sequences that have at most so many tokens together."""
    newest_first = corpus.lengths[::-1].cumsum()
    count = min(max_seqs, int((newest_first <= max_tokens).sum()))
    return corpus.pick(np.arange(len(corpus) - count, len(corpus)))


def _is_held_out(tokens: list[int]) -> bool:
    digest = hashlib.blake2b(np.array(tokens, dtype=np.int32).tobytes(), digest_size=4).digest()
    return int.from_bytes(digest, "little") < HELD_OUT_SHARE * 2**32
