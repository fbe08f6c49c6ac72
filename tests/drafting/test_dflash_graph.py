"""Blocks of a DFlash head captured on a GPU. What they compute is tested in test_dflash.py, on any machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.core.protocols import Drafter
from paceline.core.sequence import Sequence
from paceline.device.graphs import EagerPool
from paceline.drafting import dflash_graph
from paceline.drafting.dflash import DFlash
from paceline.drafting.no_draft import NoDraft
from paceline.runners.native import NativeRunner
from tests.runners.native.models import tiny
from tests.support.build import sequence
from tests.support.dflash import VARIANTS, random_head, tiny_head
from tests.support.drafter_exactness import engine_of

DEVICE = "cuda"


@pytest.mark.parametrize(
    ("captured", "shape", "runs"),
    [
        ((8, 1024, False), (8, 1024, False), True),
        ((8, 1024, False), (2, 256, False), True),  # a batch that drains, and a shorter context
        ((8, 1024, False), (1, 1024, False), False),  # one sequence alone has a graph of its own
        ((8, 4096, False), (8, 512, False), False),  # columns that nothing is in take time too
        ((4, 1024, False), (6, 1024, False), False),
        ((8, 512, False), (8, 1024, False), False),
        ((8, 1024, True), (8, 1024, False), False),
    ],
)
def test_a_graph_also_drafts_for_fewer_sequences_and_shorter_contexts(
    captured: tuple[int, int, bool], shape: tuple[int, int, bool], runs: bool
) -> None:
    assert dflash_graph.BlockShape(*captured).runs(dflash_graph.BlockShape(*shape)) == runs


def written(target: NativeRunner, drafter: Drafter, prompts: list[list[int]], k: int) -> list[Sequence]:
    return engine_of(target, drafter, k).run([sequence(list(prompt), 300) for prompt in prompts])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("variant", VARIANTS)
def test_captured_blocks_draft_what_launches_would(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts short and long, sequences long enough that the buffers move twice while graphs are there."""
    torch.manual_seed(0)
    monkeypatch.setattr(dflash_graph, "ROOM_ROWS", 1)
    monkeypatch.setattr(dflash_graph, "ROOM_TOKENS", 1)
    target = NativeRunner.of_model(tiny("llama").to(DEVICE), "tiny", kv_cache_tokens=8192)
    sizes: dict[str, Any] = {"hidden_size": 48, "target_hidden_size": 48, "vocab_size": 101, "draft_vocab_size": 101}
    config = replace(tiny_head(variant).config, **sizes, mask_token_id=100)
    head = random_head(config, scale=0.3).to(DEVICE)
    prompts = [torch.randint(0, 101, (length,)).tolist() for length in (40, 3, 120)]
    captured, launched = (DFlash(head, target, nodes=4) for _ in range(2))
    launched.graphs = None
    plain = written(target, NoDraft(), prompts, 0)
    drafted = [written(target, drafter, prompts, 4) for drafter in (captured, launched)]
    assert captured._buffers.version >= 2
    for seqs in drafted:
        assert [seq.generated for seq in seqs] == [seq.generated for seq in plain]
    accepted = [sum(seq.stats.accepted for seq in seqs) for seqs in drafted]
    assert accepted[0] == pytest.approx(accepted[1], abs=2)  # products of other shapes round in other ways


def test_blocks_of_all_contexts_and_of_one_sequence_or_a_whole_batch_are_made_ready() -> None:
    """Chains too: where one sequence has room for nothing more, the others draft step by step."""
    sizes: dict[str, Any] = {"hidden_size": 48, "target_hidden_size": 48, "vocab_size": 101, "draft_vocab_size": 101}
    head = random_head(replace(tiny_head("dflash").config, **sizes, mask_token_id=100), scale=0.3)
    target = NativeRunner.of_model(tiny("llama"), "tiny", kv_cache_tokens=1024)
    graphs = DFlash(head, target)._block_graphs(EagerPool())
    for prepare in graphs.preparations([1, 8], 2048):
        prepare()
    shapes = set(graphs._graphs._graphs)
    for trees in (False, True):
        for num_seqs in (1, 2, 8):
            for seen in (256, 512, 1024, 2048):
                wanted = dflash_graph.BlockShape(num_seqs, seen, False, trees)
                assert any(shape.runs(wanted) for shape in shapes), wanted
    assert len(shapes) == 8
