"""Whether a native runner computes what transformers does: prompts, a tree, a chain and a single token in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.core.draft_tree import path_to
from paceline.core.types import Row
from paceline.runners.native import NativeRunner

PROMPTS = [list(range(3, 40)), [7, 7, 9], list(range(90, 20, -1))]  # two are longer than the windows
CHAIN = list(range(30, 50))  # longer than the windows
NODES, PARENTS = [5, 6, 7, 8, 9, 10], [-1, 0, 1, 0, 3, -1]


def logits_of(model: Any, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def assert_agrees(runner: NativeRunner, model: Any, tolerance: float) -> None:
    """Chains, trees and batches, and what follows the commit of a branch."""

    def close(logits: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)

    caches = [runner.new_cache() for _ in PROMPTS]
    prompts = runner.forward([Row.chain(cache, prompt) for cache, prompt in zip(caches, PROMPTS)])
    for output, prompt in zip(prompts, PROMPTS):
        close(output.logits, logits_of(model, prompt))
    tree, chain, single = runner.forward(
        [Row(caches[0], torch.tensor(NODES), PARENTS), Row.chain(caches[1], CHAIN), Row.chain(caches[2], [40])]
    )
    for leaf in range(len(NODES)):
        path = [NODES[node] for node in path_to(PARENTS, leaf)]
        close(tree.logits[leaf], logits_of(model, PROMPTS[0] + path)[-1])
    close(chain.logits, logits_of(model, PROMPTS[1] + CHAIN)[3:])
    close(single.logits[0], logits_of(model, [*PROMPTS[2], 40])[-1])
    runner.commit(caches[0], [0, 3, 4])
    close(runner.forward([Row.chain(caches[0], [60])]).logits[0], logits_of(model, [*PROMPTS[0], 5, 8, 9, 60])[-1])
