"""Decode graphs of mixtures of experts through the fused kernels: against float64, and against each other bit by bit.

Without a GPU they run through Triton's interpreter: the same code, slowly.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from paceline.core.types import DraftInput, Row
from paceline.layers.moe_triton import ExpertKernels, ExpertTiles
from paceline.runners.native import NativeRunner
from tests.runners.native.fused import eager_graphs
from tests.runners.native.models import tiny

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = (list(range(1, 30)), [9, 8, 7])
TREES = (([5, 6, 7, 8], [-1, 0, 0, 2]), ([9, 10, 11], [-1, 0, 1]))


def fused(kind: str, **changes: Any) -> NativeRunner:
    """A runner whose decode graphs use the fused kernels launch by launch, on any machine."""
    runner = NativeRunner.of_model(tiny(kind, **changes).to(DEVICE), kind, kv_cache_tokens=512)
    runner.decode_graphs = eager_graphs(runner)
    return runner


def after_prompts(runner: NativeRunner) -> list[Any]:
    seq_caches = [runner.new_cache() for _ in PROMPTS]
    rows = [Row.chain(seq_cache, prompt) for seq_cache, prompt in zip(seq_caches, PROMPTS)]
    runner.forward(rows, last_only=True)
    return seq_caches


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"])
def test_trees_of_a_batch_agree_with_float64(kind: str) -> None:
    runner = fused(kind)
    exact = NativeRunner.of_model(tiny(kind, torch.float64).to(DEVICE), kind, kv_cache_tokens=512)
    exact.decode_graphs = None
    outputs = []
    for model in (runner, exact):
        rows = zip(after_prompts(model), TREES)
        outputs.append(model.forward([Row(cache, torch.tensor(tokens), parents) for cache, (tokens, parents) in rows]))
    ours, reference = outputs
    assert (ours.logits.double() - reference.logits).norm() / reference.logits.norm() < 1e-5
    assert ours.best is not None and torch.equal(ours.best, reference.logits.argmax(-1))


@pytest.mark.slow
def test_a_token_is_the_same_bits_alone_in_a_chain_in_a_tree_and_in_a_batch() -> None:
    runner = fused("qwen3_moe", num_experts=5, num_hidden_layers=1)
    seq_cache, other = after_prompts(runner)
    length, tokens = len(PROMPTS[0]), [3, 4, 5]
    alone = torch.cat([runner.forward([Row.chain(seq_cache, [token])]).logits.clone() for token in tokens])
    runner.truncate(seq_cache, length)
    chain = runner.forward([Row.chain(seq_cache, tokens)]).logits.clone()
    runner.truncate(seq_cache, length)
    tree = Row(seq_cache, torch.tensor([3, 9, 4, 5]), [-1, -1, 0, 2])
    branches = runner.forward([tree, Row.chain(other, [6, 7])])[0].logits.clone()
    assert torch.equal(chain, alone) and torch.equal(branches[[0, 2, 3]], alone)


@pytest.mark.slow
def test_padding_reads_no_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = fused("qwen3_moe")
    [seq_cache, _] = after_prompts(runner)
    read: list[int] = []
    products = ExpertKernels.products

    def counted(self: ExpertKernels, x: Any, tiles: ExpertTiles, *rest: Any) -> Any:
        read.append(int((tiles.expert >= 0).sum()))
        return products(self, x, tiles, *rest)

    runner.forward([Row.chain(seq_cache, [1, 2, 3, 4, 5, 6])])  # its graph also runs narrower passes
    monkeypatch.setattr(ExpertKernels, "products", counted)
    runner.forward([Row.chain(seq_cache, [7])])
    assert read == [2, 2], "each layer reads the experts of the one row that is real"


@pytest.mark.slow
def test_a_drafting_graph_drafts_what_single_steps_would() -> None:
    runner = fused("mixtral", num_hidden_layers=1)
    prompts = [list(range(5, 14)), [3, 2, 1]]
    drafted = runner.draft([DraftInput(runner.new_cache(), prompt) for prompt in prompts], 2)
    assert drafted is not None
    runner.decode_graphs = None
    for row, prompt in enumerate(prompts):
        seq_cache, steps = runner.new_cache(), list[int]()
        output = runner.forward([Row.chain(seq_cache, prompt)], last_only=True)
        for _ in range(2):
            steps.append(int(output.logits[0].argmax()))
            output = runner.forward([Row.chain(seq_cache, steps[-1:])])
        assert drafted.tokens[row].tolist() == steps


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen2_moe", "mixtral"])
@pytest.mark.parametrize("num_seqs", [1, 2])
def test_captured_passes_are_bit_equal_over_widths_and_batches_in_bfloat16(kind: str, num_seqs: int) -> None:
    """Tokens read among draft tokens and other sequences, against every token read by itself."""
    sizes = {"hidden_size": 512, "intermediate_size": 384, "moe_intermediate_size": 192, "num_local_experts": 32}
    sizes |= {"num_experts": 32, "num_experts_per_tok": 4, "shared_expert_intermediate_size": 320}
    known = {name: value for name, value in sizes.items() if name in tiny(kind).config.to_dict()}
    model = tiny(kind, torch.bfloat16, **known).cuda()
    runner = NativeRunner.of_model(deepcopy(model), kind, kv_cache_tokens=4096)
    assert runner.decode_graphs is not None and runner.prefill_graphs is not None
    prompts, tokens = torch.randint(0, 101, (num_seqs, 40)), torch.randint(0, 101, (num_seqs, 8))
    seq_caches = [runner.new_cache() for _ in range(num_seqs)]
    for seq_cache, prompt in zip(seq_caches, prompts):
        runner.forward([Row.chain(seq_cache, prompt)], last_only=True)
    together = runner.forward([Row.chain(cache, row.tolist()) for cache, row in zip(seq_caches, tokens)])
    together = torch.stack([output.logits.clone() for output in together])
    for seq_cache in seq_caches:
        runner.truncate(seq_cache, 40)
    for seq, seq_cache in enumerate(seq_caches):
        alone = [runner.forward([Row.chain(seq_cache, [token])]).logits[0].clone() for token in tokens[seq].tolist()]
        assert torch.equal(together[seq], torch.stack(alone))
