"""The state of a transformers model: checkpoints, rollback, forks."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from paceline.core.types import Row
from paceline.runners.huggingface_probe import open_hugging_face
from paceline.runners.huggingface_state import MAX_CHECKPOINTS, StateCheckpoint, thinned
from tests.support.families import Variant, tiny_family

HYBRIDS = ("qwen3_next", "lfm2", "bamba", "falcon_h1", "rwkv")


def test_few_checkpoints_are_kept_and_none_is_much_too_far_back() -> None:
    """As plain decoding makes them, one a token: going back up to 16 tokens never reads more than twice as many."""
    checkpoints: list[StateCheckpoint] = []
    for length in range(50, 1000):
        checkpoints = thinned([*checkpoints, StateCheckpoint(length, {})])
        assert len(checkpoints) <= MAX_CHECKPOINTS
        for back in range(1, min(16, length - 50)):
            reached = max(part.length for part in checkpoints if part.length <= length - back)
            assert length - reached <= max(2 * back + 1, 2) or reached == checkpoints[0].length


def read_at_once(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*HYBRIDS, "mistral", "bloom", "openai-gpt", "mamba"])
def test_any_order_of_reading_truncating_and_forking_gives_what_one_pass_gives(kind: str) -> None:
    """Rows, partial commits, truncations anywhere and forks, in random order: the wrong state would show at once."""
    model = tiny_family(Variant(kind))
    runner, choice = open_hugging_face(model, kind), random.Random(1)
    caches = {0: runner.new_cache()}
    texts: dict[int, list[int]] = {0: []}
    for turn in range(40):
        key = choice.choice(list(caches))
        cache, ids = caches[key], texts[key]
        row = [choice.randrange(250) for _ in range(choice.randint(1, 9))]
        logits = runner.forward([Row.chain(cache, row)]).logits
        torch.testing.assert_close(logits, read_at_once(model, ids + row)[len(ids) :], rtol=2e-3, atol=2e-3)
        kept = choice.randint(1, len(row))
        runner.commit(cache, list(range(kept)))
        ids += row[:kept]
        if turn % 5 == 4:
            length = choice.randint(0, len(ids))
            runner.truncate(cache, length)
            del ids[length:]
        if turn % 9 == 8 and ids:
            length = choice.randint(1, len(ids))
            caches[turn], texts[turn] = runner.fork(cache, length), ids[:length]
    for cache in caches.values():
        runner.free(cache)
    assert runner.blocks.used == 0
