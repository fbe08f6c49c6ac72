"""The ring: bounded, whole whenever the server is killed, and nothing in it but token ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from paceline.learning.ring import MAX_SEQ_LEN, TrafficRing, latest, read_ring, ring_shards, sequences_of
from paceline.train.corpus import Corpus, TrainingSequence


def numbered(number: int, length: int = 20) -> list[int]:
    """A sequence that no other equals."""
    return [number % 256, number // 256 % 256, *range(2, length)]


def fill(ring: TrafficRing, numbers: range, length: int = 20) -> None:
    for number in numbers:
        ring.add(numbered(number, length), 4)
    ring.flush()


def stored(folder: Path) -> set[tuple[int, ...]]:
    traffic = read_ring(folder, MAX_SEQ_LEN)
    return {tuple(seq.tokens) for part in (traffic.train, traffic.held_out) for seq in sequences_of(part)}


def test_a_killed_server_loses_only_what_was_not_flushed(tmp_path: Path) -> None:
    ring = TrafficRing(tmp_path, 10**6)
    fill(ring, range(10))
    ring.add(numbered(10), 4)  # and is killed here
    again = TrafficRing(tmp_path, 10**6)
    assert again.num_seqs == 10
    fill(again, range(11, 15))
    assert stored(tmp_path) == {tuple(numbered(number)) for number in range(15) if number != 10}
    assert again.num_seqs == 14 and read_ring(tmp_path, MAX_SEQ_LEN).end == 14


@pytest.mark.slow
def test_the_oldest_sequences_make_room_for_new_ones(tmp_path: Path) -> None:
    ring = TrafficRing(tmp_path, 100_000)
    for first in range(0, 4000, 100):
        fill(ring, range(first, first + 100), length=40)
        assert ring.num_bytes <= 100_000
    kept = stored(tmp_path)
    numbers = sorted(seq[0] + 256 * seq[1] for seq in kept)
    assert numbers == list(range(numbers[0], 4000)), "the latest ones, without a hole"
    assert len(kept) == ring.num_seqs and ring.num_bytes > 50_000 and len(ring_shards(tmp_path)) > 4


def test_files_hold_token_ids_and_the_start_of_each_answer_and_nothing_else(tmp_path: Path) -> None:
    ring = TrafficRing(tmp_path, 10**6)
    fill(ring, range(3))
    (path,) = tmp_path.iterdir()
    columns = load_file(path)
    assert sorted(columns) == ["domains", "lengths", "starts", "tokens"]
    assert not columns["domains"].any() and columns["starts"].tolist() == [4, 4, 4]
    assert columns["tokens"].tolist() == [token for number in range(3) for token in numbered(number)]


def test_a_damaged_shard_costs_its_own_sequences(tmp_path: Path) -> None:
    ring = TrafficRing(tmp_path, 16 * 200)  # shards of 200 bytes
    fill(ring, range(4), length=50)
    paths = ring_shards(tmp_path)
    assert len(paths) >= 3
    before = stored(tmp_path)
    for path in (paths[0], paths[-1]):
        path.write_bytes(path.read_bytes()[:-7])
    assert stored(tmp_path) < before
    fill(TrafficRing(tmp_path, 10**6), range(100, 102))
    assert tuple(numbered(101)) in stored(tmp_path)


def test_a_sequence_is_never_both_trained_on_and_held_out(tmp_path: Path) -> None:
    ring = TrafficRing(tmp_path, 10**7)
    for _ in range(3):
        fill(ring, range(400))
    traffic = read_ring(tmp_path, MAX_SEQ_LEN)
    train, held_out = ({tuple(seq.tokens) for seq in sequences_of(part)} for part in (traffic.train, traffic.held_out))
    assert not train & held_out and len(train | held_out) == 400
    assert len(traffic.train) + len(traffic.held_out) == 400, "repeats are read once"
    assert 25 <= len(held_out) <= 80  # an eighth of 400; hashes do not change from run to run


@pytest.mark.parametrize(("length", "start"), [(20, 0), (20, 19), (20, 20), (MAX_SEQ_LEN + 10, MAX_SEQ_LEN)])
def test_a_sequence_without_an_answer_is_not_kept(tmp_path: Path, length: int, start: int) -> None:
    ring = TrafficRing(tmp_path, 10**6)
    ring.add([1] * length, start)
    ring.flush()
    assert not ring_shards(tmp_path)


def test_the_latest_sequences_are_taken_from_the_end() -> None:
    corpus = Corpus.of([TrainingSequence([number] * 10, 1) for number in range(9)])
    assert np.unique(latest(corpus, 35, 100).tokens).tolist() == [6, 7, 8]
    assert np.unique(latest(corpus, 1000, 2).tokens).tolist() == [7, 8]
