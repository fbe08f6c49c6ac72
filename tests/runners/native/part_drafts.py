"""Draft tokens that are chosen from the first rows of the LM head, and what they should be."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.core.types import DraftInput, Row
from paceline.runners.native import NativeRunner
from paceline.runners.native.pass_inputs import LEAD_TOKENS

PROMPT_TOKENS = 50


@dataclass(frozen=True, slots=True)
class PartDrafts:
    """Of one sequence."""

    whole: list[int]  # of a chain that reads all rows, …
    whole_again: list[int]  # … and of one after the chain that does not
    part: list[int]
    expected: list[int]  # the best of the first logits of passes that read all rows


def part_drafts(runner: NativeRunner, vocab_rows: int, k: int = 6) -> PartDrafts:
    """k draft tokens each. The runner's passes are one kernel."""
    prompt = torch.randint(0, runner.info.vocab_size, (PROMPT_TOKENS,)).tolist()
    draft = DraftInput(runner.new_cache(), prompt)
    whole = _drafted(runner, draft, k)
    part = _drafted_from_part(runner, vocab_rows, k)
    return PartDrafts(whole, _drafted(runner, draft, k), part, _chosen(runner, prompt, vocab_rows, k))


def _drafted(runner: NativeRunner, draft: DraftInput, k: int) -> list[int]:
    output = runner.draft([draft], k)
    assert output is not None
    tokens: list[int] = output.tokens[0].tolist()
    return tokens


def _drafted_from_part(runner: NativeRunner, vocab_rows: int, k: int) -> list[int]:
    """By the graph that has drafted last, from the same inputs."""
    graphs = runner.decode_graphs
    assert graphs is not None
    size = graphs.fits(1, LEAD_TOKENS, PROMPT_TOKENS + k)
    assert size is not None
    graph = graphs.draft_graph(size, k, sampled=False)
    graph.buffers.chain.set(k, None, vocab_rows)
    tokens: list[int] = graph.run().tokens[0, :k].tolist()
    return tokens


def _chosen(runner: NativeRunner, prompt: list[int], vocab_rows: int, k: int) -> list[int]:
    """Read in the same parts as a drafting graph reads them: the numbers are the same bits."""
    cache, last, chosen = runner.new_cache(), prompt[-LEAD_TOKENS:], list[int]()
    runner.forward([Row.chain(cache, prompt[:-LEAD_TOKENS])], last_only=True)
    for _ in range(k):
        logits = runner.forward([Row.chain(cache, last)]).logits
        last = [int(logits[-1, :vocab_rows].argmax())]
        chosen += last
    return chosen
