"""Decode graphs through the fused kernels: against float64, and against the eager pass.

Without a GPU they run through Triton's interpreter: the same code, slowly.
"""

from __future__ import annotations

from copy import deepcopy
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from paceline.core.sampling import draw_keyed
from paceline.core.types import DraftInput, Row, SequenceCache, WarmupPlan
from paceline.layers import attention_triton
from paceline.layers.attention_kernels import CHUNK
from paceline.layers.attention_triton import PROGRAMS
from paceline.runners.native import NativeRunner
from paceline.runners.native.decode_graphs import MAX_DRAFT_GRAPHS, OFTEN
from tests.runners.native.fused import eager_graphs
from tests.runners.native.models import tiny

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = (150, 17)  # one sequence has a full chunk of context and one begins, the other is short
TREES = (([5, 6, 7, 8], [-1, 0, 0, 2]), ([9, 10, 11], [-1, 0, 1]))


def fused(kind: str, *, batch_invariant: bool = False, **changes: Any) -> NativeRunner:
    """A runner whose decode graphs use the fused kernels launch by launch, on any machine."""
    model = tiny(kind, **changes).to(DEVICE)
    runner = NativeRunner.of_model(model, kind, kv_cache_tokens=1024, batch_invariant=batch_invariant)
    runner.decode_graphs = eager_graphs(runner)
    return runner


def chains(seq_caches: list[SequenceCache], prompts: Any) -> list[Row]:
    return [Row.chain(seq_cache, prompt) for seq_cache, prompt in zip(seq_caches, prompts)]


def trees_after(seq_caches: list[SequenceCache]) -> list[Row]:
    return [Row(seq_cache, torch.tensor(tokens), parents) for seq_cache, (tokens, parents) in zip(seq_caches, TREES)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "changes"), [("llama", {}), ("qwen2", {}), ("qwen3", {}), ("qwen3", {"attention_bias": True})]
)
def test_trees_of_a_batch_agree_with_float64(kind: str, changes: dict[str, Any]) -> None:
    runner = fused(kind, **changes)
    exact = NativeRunner.of_model(tiny(kind, torch.float64, **changes).to(DEVICE), kind, kv_cache_tokens=1024)
    exact.decode_graphs = None
    prompts = [torch.randint(0, 101, (length,)) for length in LENGTHS]
    output = []
    for model in (runner, exact):
        seq_caches = [model.new_cache() for _ in prompts]
        model.forward(chains(seq_caches, prompts), last_only=True)
        rows = trees_after(seq_caches)
        output.append(model.forward(rows))
    ours, reference = output
    error = (ours.logits.double() - reference.logits).norm() / reference.logits.norm()
    assert error < 1e-5
    assert ours.best is not None
    assert torch.equal(ours.best, reference.logits.argmax(-1))


@pytest.mark.slow
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("nodes", [6, 14, 20])  # rows for tiles of 32 and 64, and more than one of these
def test_wide_passes_agree_with_float64(nodes: int, batch_invariant: bool) -> None:
    runner = fused("qwen2", batch_invariant=batch_invariant)
    exact = NativeRunner.of_model(tiny("qwen2", torch.float64).to(DEVICE), "exact", kv_cache_tokens=1024)
    exact.decode_graphs = None
    rows = torch.randint(0, 101, (4, nodes))
    output = []
    for model in (runner, exact):
        seq_caches = [model.new_cache() for _ in rows]
        prompts = [[7] * (3 + place) for place in range(4)]
        model.forward(chains(seq_caches, prompts), last_only=True)
        output.append(model.forward([Row.chain(seq_cache, row.tolist()) for seq_cache, row in zip(seq_caches, rows)]))
    ours, reference = output
    assert (ours.logits.double() - reference.logits).norm() / reference.logits.norm() < 1e-5
    assert ours.best is not None and torch.equal(ours.best, reference.logits.argmax(-1))


@pytest.mark.slow
def test_a_node_is_the_same_bits_at_every_width() -> None:
    runner = fused("llama")
    prompt = torch.randint(0, 101, (126,))  # the chain crosses the edge of a chunk
    seq_cache = runner.new_cache()
    runner.forward([Row.chain(seq_cache, prompt)], last_only=True)
    tokens = [3, 4, 5, 6]
    together = runner.forward([Row.chain(seq_cache, tokens)]).logits.clone()
    runner.truncate(seq_cache, 126)
    alone = torch.cat([runner.forward([Row.chain(seq_cache, [token])]).logits.clone() for token in tokens])
    assert torch.equal(together, alone)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_how_many_programs_share_the_chunks_changes_no_bit(lanes: int) -> None:
    runner = fused("llama")
    prompts = [torch.randint(0, 101, (length,)) for length in (300, 129)]  # three chunks, and two
    seq_caches = [runner.new_cache() for _ in prompts]
    runner.forward(chains(seq_caches, prompts), last_only=True)
    rows = trees_after(seq_caches)
    output = []
    heads = len(prompts) * runner.model.config.num_kv_heads
    assert runner.decode_graphs is not None
    for programs in (4 * heads, lanes * heads):  # one for each chunk a graph has room for, and fewer
        runner.decode_graphs.ops.attention.multiprocessors = programs // PROGRAMS
        output.append(runner.forward(rows).logits.clone())
        for seq_cache, prompt in zip(seq_caches, prompts):
            runner.truncate(seq_cache, len(prompt))
    assert torch.equal(output[0], output[1])


def test_a_batch_invariant_runner_reads_prompts_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = fused("llama", batch_invariant=True)
    together: list[int] = []
    eager = runner.eager.forward
    monkeypatch.setattr(runner.eager, "forward", lambda rows, last: together.append(len(rows)) or eager(rows, last))
    runner.prefill_graphs = None
    prompts = [torch.randint(0, 101, (length,)) for length in (90, 17, 40)]
    seq_caches = [runner.new_cache() for _ in prompts]
    output = runner.forward(chains(seq_caches, prompts), last_only=True)
    assert together == [1, 1, 1] and output.sizes == [1, 1, 1]
    for prompt, ours in zip(prompts, output):
        assert torch.equal(ours.logits, runner.forward([Row.chain(runner.new_cache(), prompt)], last_only=True).logits)


@pytest.mark.slow
def test_a_drafting_graph_drafts_what_single_steps_would() -> None:
    runner = fused("llama")
    prompts = [torch.randint(0, 101, (length,)).tolist() for length in (9, 70, 3)]
    seq_caches = [runner.new_cache() for _ in prompts]
    drafted = runner.draft([DraftInput(seq_cache, prompt) for seq_cache, prompt in zip(seq_caches, prompts)], 3)
    assert drafted is not None and drafted.probs is None
    graphs, runner.decode_graphs = runner.decode_graphs, None
    for row, prompt in enumerate(prompts):
        seq_cache, seq = runner.new_cache(), list(prompt)
        output = runner.forward([Row.chain(seq_cache, seq)], last_only=True)
        steps = []
        for _ in range(3):
            steps.append(int(output.logits[0].argmax()))
            output = runner.forward([Row.chain(seq_cache, steps[-1:])])
        assert drafted.tokens[row].tolist() == steps
    runner.decode_graphs = graphs
    for seq_cache, prompt in zip(seq_caches, prompts):
        assert seq_cache.length == len(prompt) + 2
        runner.truncate(seq_cache, len(prompt))


def prepared(runner: NativeRunner, prompts: list[list[int]]) -> list[SequenceCache]:
    """Sequence caches that hold all but the last token of their prompts."""
    seq_caches = [runner.new_cache() for _ in prompts]
    runner.forward(chains(seq_caches, [prompt[:-1] for prompt in prompts]), last_only=True)
    return seq_caches


@pytest.mark.slow
def test_several_decode_steps_write_what_single_passes_would() -> None:
    runner = fused("llama")
    prompts = [torch.randint(0, 101, (length,)).tolist() for length in (62, 127)]  # a block and a chunk are crossed
    seq_caches = prepared(runner, prompts)
    written = runner.decode([Row.chain(seq_cache, prompt[-1:]) for seq_cache, prompt in zip(seq_caches, prompts)], 4)
    assert written is not None
    assert [seq_cache.length for seq_cache in seq_caches] == [len(prompt) + 3 for prompt in prompts]
    for seq_cache, prompt in zip(seq_caches, prompts):
        runner.truncate(seq_cache, len(prompt) - 1)
    last = [prompt[-1] for prompt in prompts]
    for step in range(4):
        output = runner.forward([Row.chain(seq_cache, [token]) for seq_cache, token in zip(seq_caches, last)])
        assert output.best is not None
        last = output.best.tolist()
        assert written[:, step].tolist() == last


def test_decode_steps_without_free_blocks_change_nothing() -> None:
    runner = fused("llama")
    prompt = list(range(1, 65))
    [seq_cache] = prepared(runner, [prompt])
    while runner.blocks.free:
        runner.blocks.grow(object(), 64)
    assert runner.decode([Row.chain(seq_cache, prompt[-1:])], 4) is None
    assert seq_cache.length == 63 and len(runner.blocks.table(seq_cache)) == 1


@pytest.mark.slow
def test_a_sampling_graph_returns_the_distributions_it_drew_from() -> None:
    runner = fused("llama")
    prompt = list(range(5, 30))
    seq_cache = runner.new_cache()
    uniforms = [0.05, 0.5, 0.95]
    drafted = runner.draft([DraftInput(seq_cache, prompt, 0.7, uniforms)], 3)
    assert drafted is not None and drafted.probs is not None
    runner.decode_graphs = None
    checker = runner.new_cache()
    output = runner.forward([Row.chain(checker, prompt)], last_only=True).logits[0]
    for step in range(3):
        torch.testing.assert_close(drafted.probs[0, step], (output / 0.7).softmax(-1), rtol=1e-4, atol=1e-6)
        token = int(drafted.tokens[0, step])
        assert token == int(draw_keyed(drafted.probs[0, step], torch.tensor(uniforms[step], dtype=torch.float64)))
        output = runner.forward([Row.chain(checker, [token])]).logits[0]


def test_smaller_passes_run_on_a_near_graph() -> None:
    runner = fused("llama")
    graphs = runner.decode_graphs
    assert graphs is not None
    six = graphs.fits(1, 6, 100)
    one = graphs.fits(1, 1, 100)
    assert six is not None and one is not None
    assert graphs.forward_graph(six).key.size == six
    assert graphs.forward_graph(one).key.size == six  # near: both are computed on a tile of 16 rows
    wide = graphs.fits(4, 6, 100)
    assert wide is not None and graphs.forward_graph(wide).key.size == wide  # 24 rows are not
    assert graphs.fits(1, 200, 100) is None
    long, short = graphs.fits(1, 6, 4000), graphs.fits(1, 6, 600)
    assert long is not None and short is not None
    assert graphs.forward_graph(long).key.size == long
    assert graphs.forward_graph(short).key.size == short  # in the long graph most chunks would be empty


def test_a_number_of_draft_tokens_asked_for_often_gets_its_own_graph() -> None:
    graphs = fused("llama").decode_graphs
    assert graphs is not None
    size = graphs.fits(1, 2, 100)
    assert size is not None
    five = graphs.draft_graph(size, 5, False)
    taken = [graphs.draft_graph(size, 2, False) for _ in range(OFTEN + 1)]
    assert taken[: OFTEN - 1] == [five] * (OFTEN - 1)  # the end of a sequence may draft a few steps too many
    assert taken[-1] is taken[-2] is not five and taken[-1].key.num_tokens == 2
    for steps in range(6, 6 + MAX_DRAFT_GRAPHS):
        graphs.draft_graph(size, steps, False)
    assert len(graphs._draft) == MAX_DRAFT_GRAPHS and five.key not in graphs._draft


def test_one_sequence_does_not_run_on_the_graph_of_eight() -> None:
    graphs = fused("llama").decode_graphs
    assert graphs is not None
    eight, three, one = (graphs.fits(num_seqs, 2, 100) for num_seqs in (8, 3, 1))
    assert eight is not None and three is not None and one is not None
    many = graphs.draft_graph(eight, 2, False)
    assert graphs.draft_graph(three, 2, False) is many  # the end of a batch
    assert graphs.draft_graph(one, 2, False) is not many  # multiplied on another path, twice as fast


BRANCHES = ([3, 4, 5, 6, 7, 8, 9, 10], [-1, 0, 1, 2, 2, 0, 5, 6])  # tokens, parents: a chain of four, two branches


def check_bits_of_branches(runner: NativeRunner, lengths: tuple[int, ...]) -> None:
    """Every node of a tree, against its path to the root read as a chain."""
    tokens, parents = BRANCHES
    for length in lengths:
        prompt = torch.randint(0, 101, (length,))
        cache = runner.new_cache()
        runner.forward([Row.chain(cache, prompt)], last_only=True)
        together = runner.forward([Row(cache, torch.tensor(tokens), parents)]).logits.clone()
        for node in range(len(tokens)):
            path = [node]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            runner.truncate(cache, length)
            alone = runner.forward([Row.chain(cache, [tokens[place] for place in path])]).logits[-1]
            assert torch.equal(together[node], alone), (length, node)
        runner.free(cache)


@pytest.mark.slow
def test_nodes_off_the_first_branch_have_the_bits_of_a_chain() -> None:
    check_bits_of_branches(fused("qwen2"), (5, CHUNK - 3, CHUNK + 9))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_nodes_off_the_first_branch_have_the_bits_of_a_chain_in_bfloat16(kind: str) -> None:
    model = tiny(kind, torch.bfloat16, vocab_size=20000).to("cuda")
    runner = NativeRunner.of_model(model, "tiny", kv_cache_tokens=8192)
    assert runner.decode_graphs is not None and runner.decode_graphs.persistent_rows is None
    check_bits_of_branches(runner, (5, CHUNK - 3, CHUNK + 9, 300, 2 * CHUNK - 1))


@pytest.mark.gpu
@pytest.mark.parametrize("num_seqs", [1, 4, 8, 10])  # rows for tiles of 16, 32 and 64, and more than one of these
def test_captured_passes_are_bit_equal_over_widths_and_batches_in_bfloat16(num_seqs: int) -> None:
    """Tokens read among draft tokens and other sequences, against every token read by itself."""
    wide = {"hidden_size": 2112, "intermediate_size": 2304, "vocab_size": 20000}  # long rows are cut in other ways
    model = tiny("llama", torch.bfloat16, **wide).to("cuda")
    runner = NativeRunner.of_model(model, "tiny", kv_cache_tokens=8192, batch_invariant=True)
    prompts = [torch.randint(0, 101, (length,)) for length in range(300, 300 + num_seqs)]
    seq_caches = [runner.new_cache() for _ in prompts]
    runner.forward(chains(seq_caches, prompts), last_only=True)
    tokens = [3, 4, 5, 6, 7, 8]
    logits = runner.forward([Row.chain(seq_cache, tokens) for seq_cache in seq_caches]).logits
    together = logits.view(num_seqs, len(tokens), -1).clone()
    for seq_cache, prompt, ours in zip(seq_caches, prompts, together):
        runner.truncate(seq_cache, len(prompt))
        alone = torch.cat([runner.forward([Row.chain(seq_cache, [token])]).logits.clone() for token in tokens])
        assert torch.equal(ours, alone)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "key_heads", "size"), [(9, 3, 64), (14, 2, 64), (12, 2, 128), (32, 8, 128), (4, 4, 64), (24, 1, 32)]
)
def test_shapes_of_real_models_agree_with_float64_on_the_card(heads: int, key_heads: int, size: int) -> None:
    """What a compiler makes of a kernel depends on its shapes. The eager pass shows how far bfloat16 rounds."""
    changes = {"num_attention_heads": heads, "num_key_value_heads": key_heads, "head_dim": size}
    model = tiny("llama", torch.bfloat16, hidden_size=16 * heads, **changes).to("cuda")
    ours, plain = (NativeRunner.of_model(model, "rounded", kv_cache_tokens=4096) for _ in range(2))
    exact = NativeRunner.of_model(deepcopy(model).double(), "exact", kv_cache_tokens=4096)
    plain.decode_graphs = exact.decode_graphs = None
    prompts = [torch.randint(0, 101, (length,)) for length in (20, 300, 700)]
    output = []
    for runner in (ours, plain, exact):
        seq_caches = [runner.new_cache() for _ in prompts]
        runner.forward(chains(seq_caches, prompts), last_only=True)
        passes = [[Row.chain(seq_cache, list(range(nodes))) for seq_cache in seq_caches] for nodes in (1, 5, 16)]
        output.append(torch.cat([runner.forward(rows).logits.double() for rows in passes]))
    off = [float((one - output[2]).norm() / output[2].norm()) for one in output[:2]]
    assert off[0] < 1.25 * off[1]


def test_what_was_prepared_runs_every_pass_of_the_plan() -> None:
    """Widths, contexts and numbers of draft tokens of one sequence: none of them needs a graph that is not there."""
    graphs = fused("llama").decode_graphs
    assert graphs is not None
    for prepare in graphs.preparations(WarmupPlan(tuple(range(1, 18)), tuple(range(1, 17)), 4096, trees=True)):
        prepare()
    prepared = (len(graphs._forward), len(graphs._draft))
    assert prepared[1] <= MAX_DRAFT_GRAPHS
    for tokens in (1, 100, 512, 513, 1500, 4096):
        for k in range(17):
            size, tree = graphs.fits(1, k + 1, tokens), graphs.fits(1, k + 1, tokens, trees=k > 1)
            assert size is not None and tree is not None
            graphs.forward_graph(size)
            graphs.forward_graph(tree)
            lead = graphs.fits(1, 2, tokens)
            for _ in range(OFTEN + 1):
                assert lead is not None and (not k or graphs.draft_graph(lead, k, sampled=False) is not None)
    assert (len(graphs._forward), len(graphs._draft)) == prepared


@pytest.mark.parametrize(("widths", "ks"), [((1, 4), (3,)), (tuple(range(1, 17)), tuple(range(1, 9)))])
def test_batches_are_prepared_where_a_pass_is_one_kernel(widths: tuple[int, ...], ks: tuple[int, ...]) -> None:
    graphs = fused("llama").decode_graphs
    assert graphs is not None
    graphs._persistent = SimpleNamespace(holds=lambda rows: rows <= 32)  # type: ignore[assignment]
    for prepare in graphs.preparations(WarmupPlan(widths, ks, 2048, quick_batches=(2, 4, 8))):
        prepare()
    prepared = (len(graphs._forward), len(graphs._draft))
    for count in range(1, 9):
        for k in (0, *ks):
            size, lead = graphs.fits(count, k + 1, 700), graphs.fits(count, 2, 700)
            assert size is not None and lead is not None
            if k + 1 in widths and graphs.is_persistent(size.rows) and count * (k + 1) <= 24:
                graphs.forward_graph(size)
            if k:
                graphs.draft_graph(lead, k, sampled=False)
    assert (len(graphs._forward), len(graphs._draft)) == prepared


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="memory behind a tensor cannot be looked at")
def test_a_graph_that_drafts_more_than_was_asked_for_keeps_its_sums_within_their_room(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of its tokens would be in a chunk of context that the graph has no room for."""
    behind, room = list[torch.Tensor](), 100_000

    def guarded(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        whole = torch.full((prod(shape) + room,), 777.0, dtype=dtype, device=device)
        behind.append(whole[prod(shape) :])
        return whole[: prod(shape)].view(*shape)

    monkeypatch.setattr(attention_triton, "torch", SimpleNamespace(**{**vars(torch), "empty": guarded}))
    runner = NativeRunner.of_model(tiny("llama", num_hidden_layers=1), "llama", kv_cache_tokens=2048)
    runner.decode_graphs = eager_graphs(runner)
    ids = torch.randint(0, 101, (510,)).tolist()
    for length, k in ((200, 6), (509, 2)):  # the second runs on the graph of the first
        assert runner.draft([DraftInput(runner.new_cache(), ids[:length])], k) is not None
    assert behind and all(bool((part == 777.0).all()) for part in behind)
