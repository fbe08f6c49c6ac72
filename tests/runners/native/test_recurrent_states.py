"""States of recurrent layers: going back, forks, slots that run out, passes that fail."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.types import Row, SequenceCache
from paceline.errors import OutOfMemory
from paceline.layers.linear_attention import MAX_UNSETTLED
from paceline.runners.native import NativeRunner
from paceline.runners.native.recurrent_states import MAX_CHECKPOINTS, RecurrentStates, StateSlots, thinned
from paceline.runners.native.sequence_state import Snapshot
from tests.support.families import Variant, tiny_family

IDS = [(7 * n + n // 5) % 250 for n in range(300)]
TOLERANCE = 2e-4  # float32: another width adds in another order


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_family(Variant("qwen3_5_text"))


@pytest.fixture
def runner(model: Any) -> NativeRunner:
    return NativeRunner.of_model(model, "tiny", kv_cache_tokens=4096)


def with_slots(runner: NativeRunner, count: int) -> NativeRunner:
    sizes = runner.model.config.delta_net
    assert sizes is not None
    runner.kv.states = runner.eager._states = RecurrentStates(sizes, count, torch.float32, runner.kv.device)
    return runner


def filled(runner: NativeRunner, ids: list[int]) -> SequenceCache:
    cache = runner.new_cache()
    runner.forward([Row.chain(cache, ids)], last_only=True)
    runner.commit(cache, list(range(len(ids))))
    return cache


def logits_after(runner: NativeRunner, cache: SequenceCache, token: int) -> Tensor:
    return runner.forward([Row.chain(cache, [token])]).logits[0]


def assert_near(logits: Tensor, others: Tensor) -> None:
    torch.testing.assert_close(logits, others, atol=TOLERANCE, rtol=0)


def expected(model: Any, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -1]


@pytest.mark.parametrize("length", [299, 280, 269, 200, 31, 1, 0])
def test_a_sequence_can_be_cut_back_to_any_length(model: Any, runner: NativeRunner, length: int) -> None:
    cache = filled(runner, IDS)
    runner.truncate(cache, length)
    assert cache.length == length
    assert_near(logits_after(runner, cache, 5), expected(model, [*IDS[:length], 5]))


@pytest.mark.parametrize("length", [299, 130, 3])
def test_a_fork_goes_on_from_any_length_and_leaves_the_other_alone(
    model: Any, runner: NativeRunner, length: int
) -> None:
    cache = filled(runner, IDS)
    twin = runner.fork(cache, length)
    assert_near(logits_after(runner, twin, 5), expected(model, [*IDS[:length], 5]))
    assert_near(logits_after(runner, cache, 6), expected(model, [*IDS, 6]))


def test_a_prompt_that_was_shared_before_is_not_read_again(runner: NativeRunner, monkeypatch: Any) -> None:
    """The second sequence that parts from a prompt reads up to there; the third finds that state."""
    passes: list[int] = []
    cache = filled(runner, IDS)
    forward = runner.forward

    def counted(rows: list[Row], **options: Any) -> Any:
        passes.append(len(rows[0].parents))
        return forward(rows, **options)

    monkeypatch.setattr(runner, "forward", counted)
    second = runner.fork(cache, 200)
    runner.forward([Row.chain(second, [1, 2])])
    assert passes == [2, 200]
    third = runner.fork(second, 200)
    runner.forward([Row.chain(third, [3])])
    assert passes == [2, 200, 1]


@pytest.mark.slow
def test_what_lost_its_slot_is_computed_again(model: Any, runner: NativeRunner) -> None:
    with_slots(runner, 3)
    caches = [filled(runner, IDS[start : start + 40]) for start in range(0, 240, 40)]
    for place, cache in enumerate(caches):
        own = IDS[40 * place : 40 * place + 40]
        assert_near(logits_after(runner, cache, 5), expected(model, [*own, 5]))


def test_a_pass_of_more_sequences_than_slots_is_out_of_memory_and_changes_nothing(
    model: Any, runner: NativeRunner
) -> None:
    with_slots(runner, 2)
    caches = [filled(runner, IDS[:10]) for _ in range(3)]
    with pytest.raises(OutOfMemory, match="run fewer at a time"):
        runner.forward([Row.chain(cache, [5]) for cache in caches])
    assert [cache.length for cache in caches] == [10, 10, 10]
    assert_near(logits_after(runner, caches[0], 5), expected(model, [*IDS[:10], 5]))


def test_a_pass_that_failed_on_its_way_leaves_the_text_as_it_is(
    model: Any, runner: NativeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = filled(runner, IDS[:50])
    with monkeypatch.context() as patched:
        patched.setattr(runner.eager.ops.attention, "__call__", None)
        patched.setattr(type(runner.eager.ops), "attend", _fails)
        with pytest.raises(RuntimeError):
            runner.forward([Row.chain(cache, [1, 2, 3])])
    assert cache.length == 50
    assert_near(logits_after(runner, cache, 5), expected(model, [*IDS[:50], 5]))


def _fails(*args: Any) -> Any:
    raise RuntimeError("a pass fails here")


def test_rows_longer_than_the_ring_can_be_rejected(model: Any, runner: NativeRunner) -> None:
    cache, length = filled(runner, IDS[:100]), 100
    for kept in (1, 17, 40):
        draft = IDS[length : length + kept] + [9] * (MAX_UNSETTLED + 20 - kept)
        runner.forward([Row.chain(cache, draft)])
        runner.commit(cache, list(range(kept)))
        length += kept
    assert_near(logits_after(runner, cache, 5), expected(model, [*IDS[:length], 5]))


def test_slots_are_taken_from_what_was_used_least_recently() -> None:
    slots, snapshots = StateSlots(2), [Snapshot() for _ in range(3)]
    for snapshot in snapshots[:2]:
        slots.take(snapshot)
    slots.touch(snapshots[0])
    slots.take(snapshots[2], keep=[snapshots[0]])
    assert snapshots[1].slot is None and None not in (snapshots[0].slot, snapshots[2].slot)
    slots.release(snapshots[0])
    slots.release(snapshots[0])
    assert slots.take(Snapshot()) is not None


def test_checkpoints_are_few_and_their_gaps_double() -> None:
    kept: list[Snapshot] = []
    for length in range(64, 6400, 64):
        kept = thinned([*kept, Snapshot(length, length, slot=length)])
        assert len(kept) <= MAX_CHECKPOINTS and kept[-1].length == length
    distances = [kept[-1].length - checkpoint.length for checkpoint in kept[:-1]]
    assert all(older >= 2 * newer for older, newer in pairwise(distances))
