"""The decode pass that is one kernel: which models it takes, and on a GPU what it computes."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

from paceline.core.confidence import NUM_BINS
from paceline.core.looped_steps import ChainLimits
from paceline.core.types import DraftInput, Row
from paceline.device.tensor_maps import MatrixMap
from paceline.runners.native import NativeRunner, pass_weights
from paceline.runners.native.loading import load_from_model
from paceline.runners.native.pass_inputs import LEAD_TOKENS, PassInputs, PassSize
from paceline.runners.native.pass_weights import (
    MATRIX_FIELDS,
    PLAIN_SLOTS,
    PLAIN_WEIGHTS,
    WIDE_PLAIN_WEIGHTS,
    PassWeights,
)
from paceline.runners.native.persistent_pass import (
    CHAIN_MOST,
    CHAIN_SURVIVAL,
    CHAIN_VOCAB_ROWS,
    DraftChain,
    OutputWish,
    PersistentPass,
    TokenSource,
    definitions,
    fits,
    fits_shapes,
    max_rows,
    plain_formats,
    slots,
    tiles_of,
)
from tests.runners.native.fused import ChainReference
from tests.runners.native.models import ONE_KERNEL_SIZES, tiny
from tests.runners.native.part_drafts import part_drafts
from tests.runners.native.rounding import relative_errors


def loaded(kind: str = "qwen2", dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    return load_from_model(tiny(kind, dtype, **{**ONE_KERNEL_SIZES, **changes}), None)


# --- which models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_small_models_of_every_architecture_fit(kind: str) -> None:
    model = loaded(kind)
    assert fits(model) and fits_shapes(model.config)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"head_dim": 32}, {"intermediate_size": 520}, {"hidden_size": 4096}, {"num_attention_heads": 34}],
    ids=["a small head", "odd columns", "a large model", "many queries a key head"],
)
def test_models_of_other_shapes_run_in_another_way(changes: dict[str, int]) -> None:
    assert not fits_shapes(loaded(**changes).config)


def test_other_precisions_run_in_another_way() -> None:
    assert not fits(loaded(dtype=torch.float32))


@pytest.mark.slow
def test_the_ring_of_weights_shrinks_where_the_input_needs_the_room() -> None:
    small, larger = loaded(), loaded(hidden_size=2048)
    assert slots(small.config, 1) == PLAIN_SLOTS
    assert slots(larger.config, 4) < slots(larger.config, 1)
    assert max_rows(small.config) == max_rows(larger.config) == 32
    assert [tiles_of(rows) for rows in (1, 8, 9, 16, 17)] == [1, 1, 2, 2, 4]


@pytest.mark.slow
def test_copies_bring_two_boxes_of_weights_unless_fewer_tokens_would_fit() -> None:
    small, larger = loaded(), loaded(hidden_size=2048)
    assert plain_formats(small.config) == WIDE_PLAIN_WEIGHTS
    assert plain_formats(larger.config) == PLAIN_WEIGHTS
    assert WIDE_PLAIN_WEIGHTS.slot_bytes == 2 * PLAIN_WEIGHTS.slot_bytes
    assert slots(small.config, 1, WIDE_PLAIN_WEIGHTS) == PLAIN_SLOTS // 2


def test_the_kernel_is_told_the_shapes_of_the_model() -> None:
    constants = definitions(loaded("qwen3"), PLAIN_WEIGHTS, 64, 2, 132)
    sizes = {"-DHIDDEN=256", "-DGROUP=2", "-DVOCAB=1003", "-DBLOCKS=132"}
    assert sizes | {"-DQK_NORM=1", "-DTOKEN_TILES=2", "-DPACKED=0", "-DSPLIT=512"} <= set(constants)


@pytest.mark.parametrize(
    ("rows", "tile"),
    [(1152, 10), (896, 8), (2048, 16), (1536, 12), (4096, 16), (1, 8)],
    ids=["116 blocks", "112 blocks", "128 blocks", "128 blocks of 12", "two rounds", "one row"],
)
def test_tiles_have_as_many_rows_as_give_blocks_equal_shares(rows: int, tile: int) -> None:
    assert PLAIN_WEIGHTS.tile_rows(rows, 132) == tile
    assert tile % 2 == 0  # two neighbours are handed on together


def test_every_matrix_is_described_by_the_rows_of_its_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    described: list[MatrixMap] = []

    def encode(maps: list[MatrixMap], device: torch.device) -> torch.Tensor:
        described.extend(maps)
        return torch.arange(len(maps) * 16, device=device).view(-1, 16)

    monkeypatch.setattr(pass_weights, "encode", encode)
    model = loaded("qwen2", num_hidden_layers=2)
    weights = PassWeights.of(model, 132)
    assert weights is not None
    assert weights.maps is not None
    first = weights.maps.data_ptr()
    places = [[first + 128 * (4 * layer + product) for product in range(4)] for layer in range(2)]
    assert weights.table[:, list(MATRIX_FIELDS)].tolist() == places
    assert weights.lm_head.data_ptr() == first + 128 * 8
    qkv, output, gate_up, down, *_, head = described
    assert [one.box_rows for one in (qkv, output, gate_up, down, head)] == [8, 8, 8, 8, 16]
    assert (gate_up.rows, gate_up.parts) == (512, 2)
    assert (qkv.rows, output.rows, down.columns, head.rows) == (512, 256, 512, 1003)
    assert {one.box_columns for one in described} == {64}
    described.clear()
    wide = PassWeights.of(model, 132, WIDE_PLAIN_WEIGHTS)
    assert wide is not None
    assert wide.formats.constants()["BOXES"] == 2
    assert {one.box_columns for one in described} == {128}


def test_a_chain_is_told_how_many_rows_of_the_lm_head_it_reads() -> None:
    chain, limits = DraftChain(2, torch.device("cpu")), ChainLimits(0.5, (0.25,) * NUM_BINS)
    for vocab_rows in (0, 2048, 0):
        chain.set(6, limits, vocab_rows)
        assert chain.words[CHAIN_VOCAB_ROWS] == vocab_rows
        assert chain.words[CHAIN_MOST:CHAIN_SURVIVAL].tolist() == [6, 0.5, vocab_rows, *limits.rates]
    with pytest.raises(AssertionError, match="tile"):
        chain.set(6, limits, 1000)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def gpu_model(kind: str, **changes: Any) -> Any:
    model = tiny(kind, torch.bfloat16, **{**ONE_KERNEL_SIZES, **changes}).to("cuda")
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight) * 0.1)  # norms and biases that are not all alike
    return model


def persistent(model: Any) -> NativeRunner:
    runner = NativeRunner.of_model(model, "persistent", kv_cache_tokens=8192)
    assert runner.decode_graphs is not None
    assert runner.decode_graphs.is_persistent(1)
    return runner


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("qwen2", {"num_attention_heads": 14, "head_dim": 64, "hidden_size": 896}),
        ("qwen3", {"head_dim": 128}),
        ("llama", {"hidden_size": 320, "intermediate_size": 576}),
    ],
)
def test_it_rounds_no_worse_than_the_eager_pass(kind: str, changes: dict[str, int]) -> None:
    model = gpu_model(kind, **changes)
    ours, eager = persistent(model), NativeRunner.of_model(model, "eager", kv_cache_tokens=8192)
    exact = NativeRunner.of_model(deepcopy(model).double(), "exact", kv_cache_tokens=8192)
    eager.decode_graphs = exact.decode_graphs = None
    own, usual = relative_errors([ours, eager], exact, lengths=(20, 500, 700), widths=(1, 5, 10))
    assert own < 1.25 * usual


@pytest.mark.gpu
@pytest.mark.parametrize("length", [20, 505, 700], ids=["short", "across a split", "two splits"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"head_dim": 128},
        {"head_dim": 64, "intermediate_size": 4864},
        {"hidden_size": 320, "intermediate_size": 448},
        {"hidden_size": 2048},
    ],
    ids=["128", "64", "parts of units", "units of one box"],
)
def test_a_token_has_the_same_bits_alone_in_a_chain_in_a_tree_and_in_a_batch(
    length: int, sizes: dict[str, int]
) -> None:
    """Of the wide intermediate size one token is handed on in another way than many are."""
    runner = persistent(gpu_model("qwen3", **sizes))
    prompt, tokens = torch.randint(0, 1003, (length,)).tolist(), torch.randint(0, 1003, (9,)).tolist()
    cache, neighbour = runner.new_cache(), runner.new_cache()
    runner.forward([Row.chain(cache, prompt)], last_only=True)
    runner.forward([Row.chain(neighbour, prompt[:17])], last_only=True)

    def passed(row: Row, *others: Row) -> torch.Tensor:
        logits = runner.forward([row, *others]).logits[: len(row.parents)].clone()
        runner.truncate(cache, length)
        return logits

    chain = passed(Row.chain(cache, tokens))
    beside = passed(Row.chain(cache, tokens[:3]), Row.chain(neighbour, [5, 6, 7]))
    tree = passed(Row(cache, torch.tensor([tokens[0], 7, tokens[1], 8, 9, tokens[2]]), [-1, 0, 0, 1, 2, 2]))
    alone = torch.cat([runner.forward([Row.chain(cache, [token])]).logits.clone() for token in tokens])
    assert torch.equal(chain, alone)
    assert torch.equal(beside, alone[:3])
    assert torch.equal(tree[[0, 2, 5]], alone[:3])


@pytest.mark.gpu
def test_a_drafting_loop_drafts_what_single_passes_choose() -> None:
    runner = persistent(gpu_model("qwen2"))
    prompt = torch.randint(0, 1003, (50,)).tolist()
    cache, plain = runner.new_cache(), runner.new_cache()
    drafted = runner.draft([DraftInput(cache, prompt, 0.0, None)], 6)
    assert drafted is not None
    expected, last = [], prompt
    for _ in range(6):
        logits = runner.forward([Row.chain(plain, last)], last_only=True).logits
        last = [int(logits[-1].argmax())]
        expected += last
    assert drafted.tokens[0].tolist() == expected


@pytest.mark.gpu
def test_a_drafting_loop_states_its_confidence_and_its_second_choice() -> None:
    runner, prompt = persistent(gpu_model("qwen2")), torch.randint(0, 1003, (50,)).tolist()
    cache = runner.new_cache()
    runner.forward([Row.chain(cache, prompt)], last_only=True)
    inputs = PassInputs(PassSize(1, 4, 1), 8, runner.kv.device)
    row = Row.chain(cache, [5, 6, 7])
    runner.kv.reserve_rows([row], 1)
    inputs.begin()
    inputs.put_row(0, row, runner.kv.tables(cache))
    inputs.send(1)
    inputs.send_tokens([row])
    run = PersistentPass.of(runner.model, runner.kv, runner._rope_caches[0])
    assert run is not None
    output = run(TokenSource(inputs.token_ids, 4), inputs.batch, OutputWish())
    probs, best = output.logits[:3].softmax(-1).topk(2)
    assert torch.equal(output.best[:3], best[:, 0]) and torch.equal(output.second_best[:3], best[:, 1])
    torch.testing.assert_close(output.confidence[:3], probs[:, 0], rtol=1e-4, atol=0)
    torch.testing.assert_close(output.second_confidence[:3], probs[:, 1], rtol=1e-4, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("num_seqs", [1, 3])
def test_a_drafting_loop_ends_where_its_limits_say(num_seqs: int) -> None:
    """Against the same rule in torch, over limits from never to at once."""
    runner = persistent(gpu_model("qwen2"))
    graphs, k = runner.decode_graphs, 7
    assert graphs is not None
    drafts = [DraftInput(runner.new_cache(), torch.randint(0, 1003, (40 + seq,)).tolist()) for seq in range(num_seqs)]
    whole = runner.draft(drafts, k)
    assert whole is not None
    tokens = whole.tokens.clone()
    size = graphs.fits(num_seqs, LEAD_TOKENS, 100)
    assert size is not None
    graph = graphs.draft_graph(size, k, sampled=False)
    stated = graph.run().confidence
    assert stated is not None
    confidence, counts = stated[:num_seqs].cpu().clone(), set()
    rates = tuple(0.3 + 0.04 * index for index in range(NUM_BINS))
    for least in (0.0, *(num_seqs * 0.3 * 0.6**power for power in range(-1, 8)), 100.0):
        limits = ChainLimits(least, rates)
        reference = ChainReference(torch.zeros(CHAIN_SURVIVAL + num_seqs))
        reference.words[CHAIN_MOST:CHAIN_SURVIVAL] = torch.tensor([k, least, 0, *rates])
        step = 0
        while step < k and not reference.has_ended(step):
            reference.extend(step, confidence[:, step], torch.ones(num_seqs))
            step += 1
        graph.buffers.chain.set(k, limits)
        output = graph.run()
        assert output.count is not None and int(output.count) == step
        assert torch.equal(output.tokens[:num_seqs, :step], tokens[:, :step])
        counts.add(step)
    assert {1, k} <= counts and len(counts) > 2


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_rows", [128, 2048, 4096], ids=["few blocks", "one tile a block", "two tiles"])
def test_a_drafting_loop_chooses_from_the_rows_of_the_lm_head_that_it_is_told_to_read(vocab_rows: int) -> None:
    drafts = part_drafts(persistent(gpu_model("qwen2", vocab_size=9003)), vocab_rows)
    assert max(drafts.part) < vocab_rows
    assert drafts.part == drafts.expected
    assert drafts.whole_again == drafts.whole


@pytest.mark.gpu
def test_hidden_states_and_features_are_those_of_the_eager_pass() -> None:
    model = gpu_model("llama")
    ours, eager = persistent(model), NativeRunner.of_model(model, "eager", kv_cache_tokens=8192)
    eager.decode_graphs = None
    layers = (1, ours.info.num_layers)
    outputs = []
    for runner in (ours, eager):
        runner.expose(hidden=True, features=layers)
        cache = runner.new_cache()
        runner.forward([Row.chain(cache, list(range(30)))], last_only=True)
        outputs.append(runner.forward([Row.chain(cache, [3, 4, 5])]))
    for part in ("hidden", "features"):
        got, wanted = (getattr(output, part).float() for output in outputs)
        assert got.shape == wanted.shape
        assert float((got - wanted).norm() / wanted.norm()) < 0.03
