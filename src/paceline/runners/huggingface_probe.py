"""Whether a transformers model uses the positions it is given: a few tokens, read together and one row at a time.

Some models compute positions (bart, marian) or the window of local attention (gpt_neo) from the length of the cache,
which is that of the longest row of a batch. Their output in a batch would be another model's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.core.protocols import Runner
from paceline.core.types import Row

SHORT_PREFIX = [3]
LONG_ROW, SHORT_ROW = [2, 1], [1, 3, 2]
PREFIX_TOKENS = 4  # enough for positions
MAX_PREFIX_TOKENS = 4096  # a window beyond it is not probed
TREE_TOKENS, TREE_PARENTS = [1, 2, 3], [-1, -1, 1]
TREE_PATHS = ([1], [2], [2, 3])
TOLERANCES = {"float64": 1e-6, "float32": 1e-4}  # relative error; another position is another model
HALF_TOLERANCE = 5e-2


def probe_length(config: Any) -> int:
    """Tokens of the longer prefix: past the largest window of attention that the config names."""
    numbers = {name: value for name, value in config.to_dict().items() if "window" in name and isinstance(value, int)}
    windows = [value for value in numbers.values() if value <= MAX_PREFIX_TOKENS]
    return max([0, *windows]) + PREFIX_TOKENS


def _prefix(length: int) -> list[int]:
    return [1 + index % 3 for index in range(length)]


def reads_batches(runner: Runner, prefix_length: int = PREFIX_TOKENS) -> bool:
    """Whether rows of different lengths give in one pass what each gives by itself."""
    caches = [runner.new_cache(), runner.new_cache()]
    prefixes, rows = (_prefix(prefix_length), SHORT_PREFIX), (LONG_ROW, SHORT_ROW)
    runner.forward([Row.chain(cache, prefix) for cache, prefix in zip(caches, prefixes)])
    together = runner.forward([Row.chain(cache, row) for cache, row in zip(caches, rows)]).logits
    for cache in caches:
        runner.free(cache)
    alone = torch.cat([_alone(runner, prefix, row) for prefix, row in zip(prefixes, rows)])
    return _agree(runner, together, alone)


def reads_trees(runner: Runner, prefix_length: int = PREFIX_TOKENS) -> bool:
    """Whether a node of a tree is at the position of its depth."""
    cache, prefix = runner.new_cache(), _prefix(prefix_length)
    runner.forward([Row.chain(cache, prefix)])
    tree = runner.forward([Row(cache, torch.tensor(TREE_TOKENS), TREE_PARENTS)]).logits
    runner.free(cache)
    alone = torch.cat([_alone(runner, prefix, path)[-1:] for path in TREE_PATHS])
    return _agree(runner, tree, alone)


def _alone(runner: Runner, prefix: list[int], row: list[int]) -> Tensor:
    """The logits of a row after a prefix, in a sequence cache of its own."""
    cache = runner.new_cache()
    runner.forward([Row.chain(cache, prefix)])
    logits = runner.forward([Row.chain(cache, row)]).logits
    runner.free(cache)
    return logits


def _agree(runner: Runner, logits: Tensor, reference: Tensor) -> bool:
    error = (logits.double() - reference.double()).norm() / reference.double().norm().clamp_min(1e-30)
    return bool(error < TOLERANCES.get(runner.info.dtype, HALF_TOLERANCE))
