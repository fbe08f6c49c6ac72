"""How far passes of runners are from those of an exact one."""

from __future__ import annotations

import torch

from paceline.core.types import Row
from paceline.runners.native import NativeRunner


def relative_errors(
    runners: list[NativeRunner], exact: NativeRunner, lengths: tuple[int, ...], widths: tuple[int, ...]
) -> list[float]:
    """Of the logits of passes over so many tokens, behind prompts of these lengths, all prompts in one batch."""
    vocab_size = exact.info.vocab_size
    prompts = [torch.randint(0, vocab_size, (length,)).tolist() for length in lengths]
    outputs = []
    for runner in (*runners, exact):
        caches = [runner.new_cache() for _ in prompts]
        runner.forward([Row.chain(cache, prompt) for cache, prompt in zip(caches, prompts)], last_only=True)
        passes = [[Row.chain(cache, list(range(width))) for cache in caches] for width in widths]
        outputs.append(torch.cat([runner.forward(rows).logits.double().clone() for rows in passes]))
    return [float((output - outputs[-1]).norm() / outputs[-1].norm()) for output in outputs[:-1]]
