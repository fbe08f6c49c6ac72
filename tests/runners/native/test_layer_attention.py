"""What attention of a layer may have of its own, through every kind of pass: eager, prefill chunks, fused kernels.

The reference is a pass that reads a whole path from its first token in float64. That this is what transformers
computes is the matter of tests/models.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.draft_tree import path_to
from paceline.core.types import Row
from paceline.device.graphs import EagerPool
from paceline.kv.block_manager import BlockManager
from paceline.layers.attention import LayerAttention
from paceline.runners.native import NativeRunner, attention_metadata
from paceline.runners.native.prefill_graphs import PrefillGraphs
from tests.runners.native.models import tiny, with_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = (70, 3, 21, 130)  # past windows and blocks, and before them
CHAIN = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23]  # longer than the windows
TREE = ([5, 6, 7, 8, 9, 10, 11], [-1, 0, 1, 0, 3, 4, -1])
SINKS = torch.linspace(-1.0, 3.0, 6)
KINDS: dict[str, list[LayerAttention]] = {
    "windows": [LayerAttention(window=16), LayerAttention()],
    "narrow windows": [LayerAttention(window=1), LayerAttention(window=3)],
    "near windows": [LayerAttention(window=2, rope=None), LayerAttention(window=3, rope=None)],
    "wide windows": [LayerAttention(window=100), LayerAttention(window=65)],
    "sinks": [LayerAttention(sinks=SINKS), LayerAttention(sinks=-SINKS, window=16)],
    "softcaps": [LayerAttention(softcap=1.5), LayerAttention(softcap=0.5, window=16)],
    "scales": [LayerAttention(scale=0.4), LayerAttention(scale=0.05)],
    "ropes": [LayerAttention(rope=1), LayerAttention(rope=None)],
    "everything": [LayerAttention(scale=0.3, window=16, softcap=2.0, sinks=SINKS, rope=1), LayerAttention(rope=None)],
}


def runner_of(name: str, dtype: torch.dtype = torch.float64, blocks: int = 40, **changes: Any) -> NativeRunner:
    made = NativeRunner.of_model(tiny("llama", dtype, **changes).to(DEVICE), "tiny", kv_cache_tokens=64)
    kinds = [_moved(kind, dtype) for kind in KINDS[name]]
    runner = NativeRunner(with_attention(made.model, kinds), made.info, BlockManager(blocks))
    runner.prefill_graphs = runner.decode_graphs = None
    return runner


def _moved(kind: LayerAttention, dtype: torch.dtype, device: str = DEVICE) -> LayerAttention:
    return kind if kind.sinks is None else replace(kind, sinks=kind.sinks.to(device, dtype))


def prompts() -> list[list[int]]:
    return [torch.randint(0, 101, (length,)).tolist() for length in LENGTHS]


def whole(runner: NativeRunner, tokens: list[int], count: int) -> Tensor:
    """Logits of the last `count` tokens of a sequence read at once."""
    seq_cache = runner.new_cache()
    logits = runner.forward([Row.chain(seq_cache, tokens)]).logits[-count:]
    runner.free(seq_cache)
    return logits


def one_by_one(runner: NativeRunner, tokens: list[int]) -> Tensor:
    seq_cache = runner.new_cache()
    logits = torch.cat([runner.forward([Row.chain(seq_cache, [token])]).logits.clone() for token in tokens])
    runner.free(seq_cache)
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_prompt_read_at_once_and_token_by_token_is_the_same(name: str) -> None:
    runner, tokens = runner_of(name), prompts()[0]
    torch.testing.assert_close(whole(runner, tokens, 70), one_by_one(runner, tokens), rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("by_node", [False, True], ids=["together", "node by node"])
@pytest.mark.parametrize("name", KINDS)
def test_chains_trees_and_single_tokens_of_a_batch_see_what_one_pass_sees(name: str, by_node: bool) -> None:
    runner, seqs = runner_of(name), prompts()
    expected = [whole(runner, [*seq, *CHAIN], len(CHAIN)) for seq in seqs]
    nodes, parents = TREE
    paths = [[nodes[node] for node in path_to(parents, leaf)] for leaf in range(len(nodes))]
    leaves = torch.stack([whole(runner, [*seqs[0], *path], 1)[0] for path in paths])
    runner.eager.ops.attention.node_by_node = by_node
    caches = [runner.new_cache() for _ in seqs]
    runner.forward([Row.chain(cache, seq) for cache, seq in zip(caches, seqs)], last_only=True)
    chains = runner.forward([Row.chain(cache, CHAIN) for cache in caches])
    for output, logits in zip(chains, expected):
        torch.testing.assert_close(output.logits, logits, rtol=1e-8, atol=1e-8)
    for cache, seq in zip(caches, seqs):
        runner.truncate(cache, len(seq))
    for place, token in enumerate(CHAIN[:4]):
        singles = runner.forward([Row.chain(cache, [token]) for cache in caches])
        for output, logits in zip(singles, expected):
            torch.testing.assert_close(output.logits[0], logits[place], rtol=1e-8, atol=1e-8)
    runner.truncate(caches[0], len(seqs[0]))
    tree = runner.forward([Row(caches[0], torch.tensor(nodes), parents), Row.chain(caches[1], [40])])[0]
    torch.testing.assert_close(tree.logits, leaves, rtol=1e-8, atol=1e-8)
    runner.commit(caches[0], [0, 3, 4])
    after = runner.forward([Row.chain(caches[0], [60])]).logits
    accepted = whole(runner, [*seqs[0], *paths[4], 60], 1)
    torch.testing.assert_close(after, accepted, rtol=1e-8, atol=1e-8)


def test_a_long_prompt_is_read_in_parts_that_reach_only_a_window_back(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, tokens = runner_of("windows"), prompts()[3]
    expected = whole(runner, tokens, 130)
    monkeypatch.setattr(attention_metadata, "MAX_SPAN_NODES", 24)
    seq_cache = runner.new_cache()
    logits = torch.cat([runner.forward([Row.chain(seq_cache, part)]).logits for part in (tokens[:50], tokens[50:])])
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    runner.truncate(seq_cache, 50)
    row = Row.chain(seq_cache, tokens[50:])
    runner.kv.reserve_rows([row])
    batch = runner.eager._builder.batch([row])
    parts = batch.by_window[16].spans
    assert [part.count for part in parts] == [24, 24, 24, 8]
    assert all(_num_keys(part.slot_mapping) == 15 + part.count for part in parts)
    assert [_num_keys(span.slot_mapping) for span in batch.by_window[None].spans] == [130]


def test_single_tokens_of_a_batch_read_only_the_blocks_of_their_window() -> None:
    runner = runner_of("windows")
    caches = [runner.new_cache() for _ in range(2)]
    tokens = torch.randint(0, 101, (2, 400)).tolist()
    runner.forward([Row.chain(cache, seq) for cache, seq in zip(caches, tokens)], last_only=True)
    batch = runner.eager._builder.batch([Row.chain(cache, [1]) for cache in caches])
    size = runner.kv.block_size
    [near], [far] = (batch.by_window[window].groups for window in (16, None))
    assert near.mask.shape[-1] == 2 * size and far.mask.shape[-1] == 7 * size
    assert int((near.mask == 0).sum()) == 2 * 16 and int((far.mask == 0).sum()) == 2 * 401


def _num_keys(slots: Tensor | slice) -> int:
    return slots.stop - slots.start if isinstance(slots, slice) else slots.shape[0]


@pytest.mark.slow
def test_scattered_blocks_are_read_through_windows() -> None:
    runner, other = runner_of("everything", blocks=13), runner_of("everything")
    caches, seqs = [runner.new_cache() for _ in range(3)], [list[int]() for _ in range(3)]
    for turn in range(5):
        for index, (cache, seq) in enumerate(zip(caches, seqs)):
            new = [(turn * 31 + place * 7 + index) % 101 for place in range(40)]
            runner.forward([Row.chain(cache, new)], last_only=True)
            seq += new
    assert any(b - a != 1 for cache in caches for a, b in pairwise(runner.blocks.table(cache)))
    output = runner.forward([Row.chain(cache, [5, 6]) for cache in caches])
    for row, seq in zip(output, seqs):
        torch.testing.assert_close(row.logits, whole(other, [*seq, 5, 6], 2), rtol=1e-8, atol=1e-8)


def test_verification_resumes_from_an_exit_behind_windows() -> None:
    runner, tokens = runner_of("narrow windows"), prompts()[0]
    early, seq_cache = runner.early_exit(1), runner.new_cache()
    runner.forward([Row.chain(seq_cache, tokens)], last_only=True)
    for token in CHAIN[:5]:
        early.forward([Row.chain(seq_cache, [token])])
        early.commit(seq_cache, [0])
    early.rollback_draft(seq_cache, len(tokens))
    resumed = runner.forward([Row.chain(seq_cache, CHAIN[:6])]).logits
    torch.testing.assert_close(resumed, whole(runner, [*tokens, *CHAIN[:6]], 6), rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["windows", "wide windows", "everything", "ropes"])
@pytest.mark.parametrize("lengths", [(40,), (150, 70, 33), (530, 66)])
def test_prefill_chunks_are_what_the_eager_pass_computes(name: str, lengths: tuple[int, ...]) -> None:
    eager, captured = runner_of(name), runner_of(name)
    parts = (captured.model, captured.kv, captured.eager.ops, captured._rope_caches, captured.options)
    captured.prefill_graphs = PrefillGraphs(*parts, EagerPool())
    caches = [runner.new_cache() for runner in (eager, captured)]
    for length in lengths:
        tokens = torch.randint(0, 101, (length,)).tolist()
        rows = [Row.chain(cache, tokens) for cache in caches]
        assert captured.prefill_graphs.fits([rows[1]], True)
        expected, ours = (runner.forward([row], last_only=True) for runner, row in zip((eager, captured), rows))
        torch.testing.assert_close(ours.logits, expected.logits, rtol=1e-8, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("by_node", [False, True], ids=["together", "node by node"])
def test_a_window_far_behind_the_first_tokens_hides_all_of_them(by_node: bool) -> None:
    """Libraries sum keys in steps: a step that is hidden as a whole must add nothing. Without positions the end of a
    long sequence is that of a short one."""
    runner, tokens = runner_of("near windows"), torch.randint(0, 101, (1200,)).tolist()
    runner.eager.ops.attention.node_by_node = by_node
    long, short = runner.new_cache(), runner.new_cache()
    runner.forward([Row.chain(long, tokens[:-2]), Row.chain(short, tokens[-12:-2])], last_only=True)
    output = runner.forward([Row.chain(cache, tokens[-2:]) for cache in (long, short)])
    torch.testing.assert_close(output[0].logits, output[1].logits, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["windows", "everything"])
def test_integer_weights_give_a_token_the_same_bits_at_every_width(name: str) -> None:
    sizes = {"hidden_size": 96, "intermediate_size": 96}
    made = NativeRunner.of_model(tiny(**sizes), "tiny", 64, weight_format="int8")
    kinds = [_moved(kind, torch.float32, "cpu") for kind in KINDS[name]]
    runner = NativeRunner(with_attention(made.model, kinds), made.info, BlockManager(40))
    seq_cache, other = runner.new_cache(), runner.new_cache()
    for cache in (seq_cache, other):
        runner.forward([Row.chain(cache, list(range(60)))], last_only=True)
    together = runner.forward([Row.chain(seq_cache, CHAIN)]).logits
    alone = torch.cat([runner.forward([Row.chain(other, [token])]).logits for token in CHAIN])
    assert torch.equal(together, alone)


# --- fused kernels ----------------------------------------------------------------------------------------------------


def fused_runner(name: str, **changes: Any) -> NativeRunner:
    pytest.importorskip("triton")
    from tests.runners.native.fused import eager_graphs

    runner = runner_of(name, torch.float32, **changes)
    runner.decode_graphs = eager_graphs(runner)
    return runner


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in KINDS if name != "near windows"])
def test_the_kernel_agrees_with_float64_on_trees_and_chains(name: str) -> None:
    fused, exact = fused_runner(name), runner_of(name)
    seqs = [torch.randint(0, 101, (length,)).tolist() for length in (150, 17)]
    outputs = []
    for runner in (fused, exact):
        caches = [runner.new_cache() for _ in seqs]
        runner.forward([Row.chain(cache, seq) for cache, seq in zip(caches, seqs)], last_only=True)
        tree = Row(caches[0], torch.tensor(TREE[0]), TREE[1])
        outputs.append(runner.forward([tree, Row.chain(caches[1], CHAIN[:6])]).logits.double())
    assert float((outputs[0] - outputs[1]).norm() / outputs[1].norm()) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["windows", "everything"])
def test_the_kernel_gives_a_token_the_same_bits_alone_and_in_a_wide_pass(name: str) -> None:
    """Behind 141 tokens the windows of the first two nodes begin in a chunk of context that the others do not see."""
    runner, tokens = fused_runner(name), torch.randint(0, 101, (141,)).tolist()
    seq_cache = runner.new_cache()
    runner.forward([Row.chain(seq_cache, tokens)], last_only=True)
    together = runner.forward([Row.chain(seq_cache, CHAIN[:4])]).logits.clone()
    runner.truncate(seq_cache, len(tokens))
    alone = torch.cat([runner.forward([Row.chain(seq_cache, [token])]).logits.clone() for token in CHAIN[:4]])
    assert torch.equal(together, alone)


@pytest.mark.gpu
def test_heads_that_the_kernel_gets_wrong_are_read_eagerly() -> None:
    runner = runner_of("windows", torch.bfloat16, head_dim=256, hidden_size=96)
    runner._make_passes()
    assert runner.decode_graphs is None


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", KINDS)
def test_the_kernel_agrees_with_float64_on_the_card(name: str, head_dim: int) -> None:
    """In bfloat16, through captured graphs; the eager pass shows how far bfloat16 rounds."""
    changes = {"head_dim": head_dim, "hidden_size": 96}
    fused, plain = (runner_of(name, torch.bfloat16, **changes) for _ in range(2))
    fused._make_passes()
    exact = runner_of(name, **changes)
    assert fused.decode_graphs is not None and fused.prefill_graphs is not None
    seqs, outputs = [torch.randint(0, 101, (length,)).tolist() for length in (20, 300, 700)], []
    for runner in (fused, plain, exact):
        caches = [runner.new_cache() for _ in seqs]
        runner.forward([Row.chain(cache, seq) for cache, seq in zip(caches, seqs)], last_only=True)
        passes = [[Row.chain(cache, list(range(nodes))) for cache in caches] for nodes in (1, 5, 16)]
        outputs.append(torch.cat([runner.forward(rows).logits.double() for rows in passes]))
    errors = [float((output - outputs[2]).norm() / outputs[2].norm()) for output in outputs[:2]]
    assert errors[0] < 1.25 * errors[1]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["windows", "everything"])
def test_captured_windows_are_bit_equal_over_widths(name: str) -> None:
    runner, tokens = runner_of(name, torch.bfloat16), torch.randint(0, 101, (300,)).tolist()
    runner._make_passes()
    seq_cache = runner.new_cache()
    runner.forward([Row.chain(seq_cache, tokens)], last_only=True)
    together = runner.forward([Row.chain(seq_cache, CHAIN[:6])]).logits.clone()
    runner.truncate(seq_cache, len(tokens))
    alone = torch.cat([runner.forward([Row.chain(seq_cache, [token])]).logits.clone() for token in CHAIN[:6]])
    assert torch.equal(together, alone)
