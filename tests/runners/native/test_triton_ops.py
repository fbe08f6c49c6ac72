"""The fused kernels against float64, and the passes made of them against the plain path.

Without a GPU they run through Triton's interpreter: the same code, slowly.
"""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

pytest.importorskip("triton")

from paceline.core import FixedDraftLength, Row, SamplingParams, Sequence, StopRules
from paceline.core.types import Capability, DraftInput, SequenceCache
from paceline.drafting.no_draft import NoDraft
from paceline.engines.local.generate import run
from paceline.engines.local.step import EngineParts
from paceline.engines.local.verifier import Verifier
from paceline.runners.native import NativeRunner
from paceline.runners.native.decode_graphs import MOST_LOOPS, OFTEN
from tests.runners.native.models import tiny

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = (150, 17)  # one text has a full chunk of context and one begins, the other is short
TREES = (([5, 6, 7, 8], [-1, 0, 0, 2]), ([9, 10, 11], [-1, 0, 1]))


def fused(kind: str, *, batch_invariant: bool = False, **changes: int) -> NativeRunner:
    """A runner whose narrow passes run launch by launch, on whatever there is."""
    from paceline.runners.native.decode_graphs import DecodeGraphs
    from paceline.runners.native.kv_cache import BLOCK_SIZE
    from paceline.runners.native.triton_ops import TritonOps

    runner = NativeRunner.of_model(tiny(kind, **changes).to(DEVICE), kind, kv_cache_tokens=1024, batch_invariant=batch_invariant)
    parts = (runner.shape, runner.keys, runner.values, runner.rope_cache, BLOCK_SIZE)
    ops = [TritonOps(*parts, batch_invariant=batch_invariant), TritonOps(*parts, vectors=True)]
    runner.narrow = DecodeGraphs(runner, ops[0], ops[1], 16, None)
    return runner


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_trees_of_a_batch_agree_with_float64(kind: str) -> None:
    runner = fused(kind)
    exact = NativeRunner.of_model(tiny(kind, torch.float64).to(DEVICE), kind, kv_cache_tokens=1024)
    exact.narrow = None
    prompts = [torch.randint(0, 101, (length,)) for length in LENGTHS]
    output = []
    for one in (runner, exact):
        seq_caches = [one.open() for _ in prompts]
        one.forward([Row.chain(seq_cache, prompt) for seq_cache, prompt in zip(seq_caches, prompts)], last_only=True)
        rows = [Row(seq_cache, torch.tensor(tokens), parents) for seq_cache, (tokens, parents) in zip(seq_caches, TREES)]
        output.append(one.forward(rows))
    ours, reference = output
    error = (ours.logits.double() - reference.logits).norm() / reference.logits.norm()
    assert error < 1e-5
    assert ours.best is not None
    assert torch.equal(ours.best, reference.logits.argmax(-1))


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("nodes", [6, 14, 20])  # rows for tiles of 32 and 64, and more than one of these
def test_wide_passes_agree_with_float64(nodes: int, batch_invariant: bool) -> None:
    runner = fused("qwen2", batch_invariant=batch_invariant)
    exact = NativeRunner.of_model(tiny("qwen2", torch.float64).to(DEVICE), "exact", kv_cache_tokens=1024)
    exact.narrow = None
    rows = torch.randint(0, 101, (4, nodes))
    output = []
    for one in (runner, exact):
        seq_caches = [one.open() for _ in rows]
        one.forward([Row.chain(seq_cache, [7] * (3 + place)) for place, seq_cache in enumerate(seq_caches)], last_only=True)
        output.append(one.forward([Row.chain(seq_cache, row.tolist()) for seq_cache, row in zip(seq_caches, rows)]))
    ours, reference = output
    assert (ours.logits.double() - reference.logits).norm() / reference.logits.norm() < 1e-5
    assert ours.best is not None and torch.equal(ours.best, reference.logits.argmax(-1))


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


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_how_many_programs_share_the_chunks_changes_no_bit(lanes: int) -> None:
    from paceline.runners.native.triton_ops import ATTENTION_PROGRAMS

    runner = fused("llama")
    prompts = [torch.randint(0, 101, (length,)) for length in (300, 129)]  # three chunks, and two
    seq_caches = [runner.new_cache() for _ in prompts]
    runner.forward([Row.chain(seq_cache, prompt) for seq_cache, prompt in zip(seq_caches, prompts)], last_only=True)
    rows = [Row(seq_cache, torch.tensor(tokens), parents) for seq_cache, (tokens, parents) in zip(seq_caches, TREES)]
    output = []
    heads = len(prompts) * runner.shape.num_kv_heads
    assert runner.narrow is not None
    for programs in (4 * heads, lanes * heads):  # one for each chunk a graph has room for, and fewer
        runner.narrow._check_ops.multiprocessors = programs // ATTENTION_PROGRAMS
        output.append(runner.forward(rows).logits.clone())
        for seq_cache, prompt in zip(seq_caches, prompts):
            runner.truncate(seq_cache, len(prompt))
    assert torch.equal(output[0], output[1])


def test_prompts_are_read_apart_where_the_same_bits_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = fused("llama", batch_invariant=True)
    together: list[int] = []
    plain_pass = runner._plain_pass
    monkeypatch.setattr(runner, "_plain_pass", lambda rows, last: together.append(len(rows)) or plain_pass(rows, last))
    runner.prompts = None
    prompts = [torch.randint(0, 101, (length,)) for length in (90, 17, 40)]
    seq_caches = [runner.new_cache() for _ in prompts]
    output = runner.forward([Row.chain(seq_cache, prompt) for seq_cache, prompt in zip(seq_caches, prompts)], last_only=True)
    assert together == [1, 1, 1] and output.sizes == [1, 1, 1]
    for prompt, ours in zip(prompts, output):
        assert torch.equal(ours.logits, runner.forward([Row.chain(runner.new_cache(), prompt)], last_only=True).logits)


def test_a_loop_drafts_what_steps_would() -> None:
    runner = fused("llama")
    prompts = [torch.randint(0, 101, (length,)).tolist() for length in (9, 70, 3)]
    seq_caches = [runner.new_cache() for _ in prompts]
    drafted = runner.loop([DraftInput(seq_cache, prompt) for seq_cache, prompt in zip(seq_caches, prompts)], 3)
    assert drafted is not None and drafted.probs is None
    passes, runner.narrow = runner.narrow, None
    for row, prompt in enumerate(prompts):
        seq_cache, seq = runner.new_cache(), list(prompt)
        output = runner.forward([Row.chain(seq_cache, seq)], last_only=True)
        steps = []
        for _ in range(3):
            steps.append(int(output.logits[0].argmax()))
            output = runner.forward([Row.chain(seq_cache, steps[-1:])])
        assert drafted.tokens[row].tolist() == steps
    runner.narrow = passes
    for seq_cache, prompt in zip(seq_caches, prompts):
        assert seq_cache.length == len(prompt) + 2
        runner.truncate(seq_cache, len(prompt))


def prepared(runner: NativeRunner, prompts: list[list[int]]) -> list[SequenceCache]:
    """Slots that hold all but the last token of their prompts."""
    seq_caches = [runner.new_cache() for _ in prompts]
    runner.forward([Row.chain(seq_cache, prompt[:-1]) for seq_cache, prompt in zip(seq_caches, prompts)], last_only=True)
    return seq_caches


def test_a_stride_writes_what_passes_would() -> None:
    runner = fused("llama")
    prompts = [torch.randint(0, 101, (length,)).tolist() for length in (62, 127)]  # a page and a chunk are crossed
    seq_caches = prepared(runner, prompts)
    written = runner.stride([Row.chain(seq_cache, prompt[-1:]) for seq_cache, prompt in zip(seq_caches, prompts)], 4)
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


def test_a_stride_that_finds_no_room_changes_nothing() -> None:
    runner = fused("llama")
    prompt = list(range(1, 65))
    [seq_cache] = prepared(runner, [prompt])
    while runner.blocks.free:
        runner.blocks.grow(object(), 64)
    assert runner.stride([Row.chain(seq_cache, prompt[-1:])], 4) is None
    assert seq_cache.length == 63 and len(runner.blocks.table(seq_cache.seq_id)) == 1


def test_texts_written_in_strides_are_those_of_single_rounds() -> None:
    runner = fused("llama")
    prompt = [5, 17, 90, 2]
    found = []
    for capabilities in (runner.capabilities | {Capability.STRIDE}, runner.capabilities - {Capability.STRIDE}):
        runner.capabilities = capabilities
        # The second ends inside a stride.
        num_seqs = [Sequence(prompt, SamplingParams(), StopRules(room, frozenset())) for room in (5, 2)]
        rounds = list(run(num_seqs, EngineParts(runner, NoDraft(), FixedDraftLength(0), Verifier())))
        found.append([(seq.written, seq.stats.steps, seq.finish_reason) for seq in num_seqs])
        assert runner.blocks.used == 0
        strides = {len(progress.round.emitted) for progress in rounds}
        assert strides == ({1} if Capability.STRIDE not in capabilities else {4, 2, 1})
    assert found[0] == found[1]


def test_a_drawing_loop_carries_the_distribution_it_drew_from() -> None:
    runner = fused("llama")
    prompt = list(range(5, 30))
    seq_cache = runner.new_cache()
    uniforms = [0.05, 0.5, 0.95]
    drafted = runner.loop([DraftInput(seq_cache, prompt, 0.7, uniforms)], 3)
    assert drafted is not None and drafted.probs is not None
    runner.narrow = None
    checker = runner.new_cache()
    output = runner.forward([Row.chain(checker, prompt)], last_only=True).logits[0]
    for step in range(3):
        torch.testing.assert_close(drafted.probs[0, step], (output / 0.7).softmax(-1), rtol=1e-4, atol=1e-6)
        below = drafted.probs[0, step].cumsum(0)
        token = int(drafted.tokens[0, step])
        assert below[token] >= uniforms[step] - 1e-5 and (token == 0 or below[token - 1] <= uniforms[step] + 1e-5)
        output = runner.forward([Row.chain(checker, [token])]).logits[0]


def test_smaller_passes_take_a_captured_size_that_is_near() -> None:
    runner = fused("llama")
    passes = runner.narrow
    assert passes is not None
    six = passes.fits(1, 6, 100)
    one = passes.fits(1, 1, 100)
    assert six is not None and one is not None
    assert passes.check(six).size == six
    assert passes.check(one).size == six  # near: both are computed on a tile of 16 rows
    wide = passes.fits(4, 6, 100)
    assert wide is not None and passes.check(wide).size == wide  # 24 rows are not
    assert passes.fits(1, 200, 100) is None
    long, short = passes.fits(1, 6, 4000), passes.fits(1, 6, 600)
    assert long is not None and short is not None
    assert passes.check(long).size == long
    assert passes.check(short).size == short  # a long text's graph is not near: most of its chunks would be empty


def test_steps_asked_for_often_get_a_loop_of_their_own() -> None:
    passes = fused("llama").narrow
    assert passes is not None
    size = passes.fits(1, 2, 100)
    assert size is not None
    five = passes.loop(size, 5, False)
    taken = [passes.loop(size, 2, False) for _ in range(OFTEN + 1)]
    assert taken[:OFTEN - 1] == [five] * (OFTEN - 1)  # the end of a text may draft a few steps too many
    assert taken[-1] is taken[-2] is not five and taken[-1].uniforms.shape[1] == 2
    for steps in range(6, 6 + MOST_LOOPS):
        passes.loop(size, steps, False)
    assert len(passes._loops) == MOST_LOOPS and five not in passes._loops.values()


def test_one_text_does_not_wait_for_the_loop_of_eight() -> None:
    passes = fused("llama").narrow
    assert passes is not None
    eight, three, one = (passes.fits(num_seqs, 2, 100) for num_seqs in (8, 3, 1))
    assert eight is not None and three is not None and one is not None
    many = passes.loop(eight, 2, False)
    assert passes.loop(three, 2, False) is many  # the end of a batch
    assert passes.loop(one, 2, False) is not many  # multiplied in another way, twice as fast


@pytest.mark.gpu
@pytest.mark.parametrize("num_seqs", [1, 4, 8, 10])  # rows for tiles of 16, 32 and 64, and more than one of these
def test_captured_passes_are_bit_equal_over_widths_and_batches_in_bfloat16(num_seqs: int) -> None:
    """What is read among guesses and other texts, against every token read by itself."""
    wide = {"hidden_size": 2112, "intermediate_size": 2304, "vocab_size": 20000}  # long rows are cut in other ways
    model = tiny("llama", torch.bfloat16, **wide).to("cuda")
    runner = NativeRunner.of_model(model, "tiny", kv_cache_tokens=8192, batch_invariant=True)
    prompts = [torch.randint(0, 101, (length,)) for length in range(300, 300 + num_seqs)]
    seq_caches = [runner.new_cache() for _ in prompts]
    runner.forward([Row.chain(seq_cache, prompt) for seq_cache, prompt in zip(seq_caches, prompts)], last_only=True)
    tokens = [3, 4, 5, 6, 7, 8]
    together = runner.forward([Row.chain(seq_cache, tokens) for seq_cache in seq_caches]).logits.view(num_seqs, len(tokens), -1).clone()
    for seq_cache, prompt, ours in zip(seq_caches, prompts, together):
        runner.truncate(seq_cache, len(prompt))
        alone = torch.cat([runner.forward([Row.chain(seq_cache, [token])]).logits.clone() for token in tokens])
        assert torch.equal(ours, alone)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "key_heads", "size"), [(9, 3, 64), (14, 2, 64), (12, 2, 128), (32, 8, 128), (4, 4, 64), (24, 1, 32)]
)
def test_shapes_of_real_models_agree_with_float64_on_the_card(heads: int, key_heads: int, size: int) -> None:
    """What a compiler makes of a kernel depends on its shapes. The plain path says how far bfloat16 rounds."""
    changes = {"num_attention_heads": heads, "num_key_value_heads": key_heads, "head_dim": size}
    model = tiny("llama", torch.bfloat16, hidden_size=16 * heads, **changes).to("cuda")
    ours, plain = (NativeRunner.of_model(model, "rounded", kv_cache_tokens=4096) for _ in range(2))
    exact = NativeRunner.of_model(deepcopy(model).double(), "exact", kv_cache_tokens=4096)
    plain.narrow = exact.narrow = None
    prompts = [torch.randint(0, 101, (length,)) for length in (20, 300, 700)]
    output = []
    for runner in (ours, plain, exact):
        seq_caches = [runner.new_cache() for _ in prompts]
        runner.forward([Row.chain(seq_cache, prompt) for seq_cache, prompt in zip(seq_caches, prompts)], last_only=True)
        chains = [[Row.chain(seq_cache, list(range(nodes))) for seq_cache in seq_caches] for nodes in (1, 5, 16)]
        output.append(torch.cat([runner.forward(rows).logits.double() for rows in chains]))
    off = [float((one - output[2]).norm() / output[2].norm()) for one in output[:2]]
    assert off[0] < 1.25 * off[1]
