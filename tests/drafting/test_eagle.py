"""EAGLE heads: the right states beside the right tokens, trees by the rule, exact outputs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.draft_tree import DraftTree, path_to
from paceline.core.sequence import Sequence
from paceline.core.types import RowOutput, StepResult, VerifyResult
from paceline.device.graphs import EagerPool
from paceline.drafting import eagle_graph
from paceline.drafting.eagle import Eagle
from paceline.drafting.eagle_graph import EagleGraphs
from paceline.drafting.eagle_state import HeadEntries
from paceline.drafting.registry import build_drafter
from paceline.errors import OptionError, PairError
from paceline.heads.attention import KeyValues, causal_mask
from paceline.heads.eagle import EagleHead
from paceline.heads.eagle1 import Eagle1Config, Eagle1Head
from paceline.heads.eagle3 import Eagle3Config, Eagle3Head
from paceline.heads.registry import load_head
from paceline.kv.prefix_cache import PrefixCache
from paceline.runners.huggingface import HuggingFaceRunner
from paceline.runners.table import TableRunner
from tests.heads import checkpoints
from tests.support.drafter_exactness import (
    assert_unchanged,
    begin,
    check_greedy,
    check_sampled,
    context_for,
    output_of,
    sequences,
    settle,
    toy,
)

PROMPTS = [[5, 7, 9, 11, 200, 31], [250], [3, 3, 8, 3, 3, 8, 3, 3], list(range(40))]
KINDS = ("eagle1", "eagle3")
SHAPES: dict[str, dict[str, Any]] = {"chain": {}, "graph": {}, "tree": {"nodes": 8, "branches": 3, "depth": 4}}


def toy_head(kind: str = "eagle3", seed: int = 0, vocab: int = 4) -> EagleHead:
    """A random head for the toy; the EAGLE-3 one cannot predict token 1."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head: EagleHead
        if kind == "eagle1":
            head = Eagle1Head(Eagle1Config(vocab, 8, 2, 1, 2, vocab, vocab, vocab))
        else:
            head = Eagle3Head(Eagle3Config(vocab, 8, 2, 1, 2, vocab, vocab - 1, vocab))
            head.choose_vocabulary(torch.tensor([token for token in range(vocab) if token != 1]))
    return head.eval().requires_grad_(False)


def with_graphs(drafter: Eagle) -> Eagle:
    """The drafter with whole chains as on CUDA, but run eagerly instead of captured."""
    drafter.graphs = EagleGraphs(drafter._head, drafter._buffers, drafter._vocab_size, EagerPool())
    return drafter


def made(shape: str, head: EagleHead, target: Any, **changes: Any) -> Eagle:
    drafter = Eagle(
        head, target, prefix_cache=PrefixCache(block_size=1), **SHAPES[shape] | (changes if shape == "tree" else {})
    )
    return with_graphs(drafter) if shape == "graph" else drafter


@pytest.fixture(scope="module")
def target(tiny_model: Any) -> HuggingFaceRunner:
    return HuggingFaceRunner(tiny_model, "tiny")


# --- pairing: heads that know the answer ------------------------------------------------------------------------------


def token_oracle(target: TableRunner) -> EagleHead:
    """For a toy that looks one token back: its next state stands in its table under the token t + 1."""
    size = target.info.vocab_size
    head = Eagle1Head(Eagle1Config(size, 4, 1, 1, 2, size, size, size)).requires_grad_(False)
    _zero_the_rest(head)
    head.fc.weight.copy_(torch.cat([target.table[:size].T, torch.zeros(size, size)], dim=1))
    return head


def state_oracle(target: TableRunner) -> EagleHead:
    """For a toy that looks two tokens back: the state at t AND the token t + 1 are needed to know the next state.

    Random features of every possible pair, and the one layer that turns them into the right answer, by least squares.
    """
    size = target.info.vocab_size
    generator = torch.Generator().manual_seed(3)
    head = Eagle1Head(Eagle1Config(size, 1500, 1, 1, 2, size, size, size)).requires_grad_(False)
    _zero_the_rest(head)
    for weight, scale in ((head.fc.weight, 1.0), (head.midlayer.mlp.gate_proj.weight, 3.0)):
        weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    head.midlayer.mlp.up_proj.weight.copy_(torch.randn(1500, size, generator=generator))
    pairs = [(a, b, c) for a in range(size + 1) for b in range(size) for c in range(size)]
    states = torch.stack([target.table[a * (size + 1) + b] for a, b, _ in pairs])
    answers = torch.stack([target.table[b * (size + 1) + c] for _, b, c in pairs])
    mixed = torch.cat([target.embed(torch.tensor([c for *_, c in pairs])), states], dim=1) @ head.fc.weight.T
    read, mlp = head.midlayer.post_attention_layernorm(mixed), head.midlayer.mlp
    inner = torch.nn.functional.silu(mlp.gate_proj(read)) * mlp.up_proj(read)
    solved = torch.linalg.lstsq(inner.double(), (answers - mixed).double(), driver="gelsd").solution
    mlp.down_proj.weight.copy_(solved.T.float())
    return head


def _zero_the_rest(head: EagleHead) -> None:
    """Only the first layer contributes."""
    head.midlayer.self_attn.o_proj.weight.zero_()
    head.midlayer.mlp.down_proj.weight.zero_()


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("order", [1, 2])
def test_an_oracle_is_always_right(order: int, shape: str) -> None:
    """Any slip between positions (t for t + 1, a stale state, a wrong column) would show as a rejected draft token."""
    target = TableRunner(vocab_size=5, order=order, seed=3)
    head = token_oracle(target) if order == 1 else state_oracle(target)
    drafter = made(shape, head, target, nodes=30, depth=5)
    k = 30 if shape == "tree" else 5
    result = assert_unchanged(target, drafter, [[1, 2, 3], [4, 0], [2, 2, 2, 2, 1]], 61, k)
    # A tree of the likeliest paths may leave out the one that is likeliest step by step, but not its beginning.
    sure = 1 if shape == "tree" else 5
    assert result.acceptance_by_position[:sure] == [1.0] * sure
    assert result.tokens_per_step > 3


def test_a_sequence_of_one_token_is_drafted_for_from_its_second_step_on() -> None:
    target = TableRunner(vocab_size=5, order=1, seed=3)
    result = assert_unchanged(target, Eagle(token_oracle(target), target), [[3]], 31, 5)
    assert result.steps == 1 + 5, "one plain step, then five of six tokens"


def test_steps_it_did_not_observe_do_not_shift_the_pairing() -> None:
    """A drafter beside others may miss some steps; its state is then shorter, but never wrong."""
    target = TableRunner(vocab_size=5, order=1, seed=3)
    drafter = Eagle(token_oracle(target), target)
    told, observe = itertools.count(), drafter.observe

    def now_and_then(seqs: list[Sequence], results: list[StepResult]) -> None:
        if next(told) % 3 != 1:
            observe(seqs, results)

    drafter.observe = now_and_then  # type: ignore[method-assign]
    result = assert_unchanged(target, drafter, [[1, 2, 3]], 60, 2)
    assert result.acceptance_by_position[1] > 0.6


# --- against a slow reference -----------------------------------------------------------------------------------------


class Recording(Eagle):
    """Records sequences and drafts."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.drafts: list[tuple[list[int], DraftTree]] = []

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        trees = super().propose(seqs, num_draft_tokens)
        self.drafts += [(list(seq.ids), tree) for seq, tree in zip(seqs, trees) if len(tree)]
        return trees


def true_states(target: HuggingFaceRunner, ids: list[int], head: EagleHead) -> Tensor:
    """The states of a sequence, read at once into a new cache."""
    from paceline.core.types import Row

    seq_cache = target.new_cache()
    output = target.forward([Row.chain(seq_cache, ids)])
    target.free(seq_cache)
    layers = head.feature_layers(target.info.num_layers)
    states = target.expose(hidden=not layers, features=layers).of(output[0])
    assert states is not None
    return states


def reference_rows(head: EagleHead, states: Tensor, ids: list[int], path: list[int]) -> Tensor:
    """Log-probabilities after a sequence and a path of draft tokens, computed from scratch. [draft vocab]"""
    g = head.fuse(states)[None]
    tokens = ids[1:]
    for token in [*path, None]:
        width = len(tokens)
        embeddings = head.embed(torch.tensor([tokens]))
        # Rows past the target's states continue the head's own output at the position before.
        out = head.block(embeddings, g, torch.arange(width)[None], causal_mask(width))
        if token is None:
            return torch.log_softmax(head.logits(out[0, -1]), dim=-1)
        g, tokens = torch.cat([g, out[:, -1:]], dim=1), [*tokens, token]
    raise AssertionError


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["eagle1", "eagle3", "eagle3.1", "speculators"])
@torch.inference_mode()
def test_cached_chains_are_what_a_fresh_computation_says(
    layout: str, target: HuggingFaceRunner, tmp_path: Path
) -> None:
    head = load_head(checkpoints.write(tmp_path, layout), EagleHead)
    drafter = Recording(head, target)
    assert_unchanged(target, drafter, PROMPTS, 12, 4)
    assert len(drafter.drafts) > 20
    for ids, tree in drafter.drafts[::5]:
        states, path = true_states(target, ids[:-1], head), []
        for token in tree.tokens.tolist():
            scores = reference_rows(head, states, ids, path)
            assert float(scores.max() - scores[head.target_ids == token]) < 1e-3
            path.append(token)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["eagle1", "eagle3"])
@torch.inference_mode()
def test_trees_are_grown_by_the_rule(layout: str, target: HuggingFaceRunner, tmp_path: Path) -> None:
    """Expand the likeliest `branches` of each depth, then keep the likeliest nodes of all: computed path by path."""
    head = load_head(checkpoints.write(tmp_path, layout), EagleHead)
    drafter = Recording(head, target, **SHAPES["tree"])
    assert_unchanged(target, drafter, PROMPTS, 10, 8)
    for ids, tree in drafter.drafts[::6]:
        states = true_states(target, ids[:-1], head)
        scores = grown_path_by_path(head, states, ids, branches=3, depth=4)
        tokens = tree.tokens.tolist()
        paths = [tuple(tokens[step] for step in path_to(tree.parents, node)) for node in range(len(tree))]
        assert len(set(paths)) == len(tree) <= 8
        worst = min(scores[path] for path in paths)
        best_left = max(score for path, score in scores.items() if path not in paths)
        assert worst > best_left - 1e-3


def grown_path_by_path(
    head: EagleHead, states: Tensor, ids: list[int], branches: int, depth: int
) -> dict[tuple[int, ...], float]:
    found: dict[tuple[int, ...], float] = {}
    front: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(depth):
        level: dict[tuple[int, ...], float] = {}
        for path, score in front.items():
            best = reference_rows(head, states, ids, list(path)).topk(branches)
            for value, token in zip(best.values.tolist(), head.to_target_ids(best.indices).tolist()):
                level[*path, token] = score + value
        found |= level
        front = dict(sorted(level.items(), key=lambda item: -item[1])[:branches])
    return found


# --- exactness --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_outputs_are_unchanged(kind: str, shape: str) -> None:
    check_greedy(made(shape, toy_head(kind, seed=3), toy()))


@pytest.mark.slow
def test_chains_carry_the_q_they_were_drawn_from() -> None:
    result = check_sampled(Eagle(toy_head(), toy()))
    assert result.new_tokens >= 20_000


@pytest.mark.slow
def test_sampled_trees_are_exact() -> None:
    check_sampled(Eagle(toy_head(), toy(), nodes=3, branches=2, depth=3))


@pytest.mark.slow
def test_sampled_outputs_with_whole_chains_are_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = with_graphs(Eagle(toy_head(), toy()))
    monkeypatch.setattr(drafter, "_step_by_step", None)  # every chain is whole
    result = check_sampled(drafter, copies=EagleGraphs.MAX_SEQS // 3)
    assert result.accepted


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_whole_chain_is_what_steps_would_make(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts, buffers that grow on the way, and unequal draft lengths."""
    monkeypatch.setattr(eagle_graph, "ROOM_ROWS", 1)
    monkeypatch.setattr(eagle_graph, "ROOM_TOKENS", 1)
    target = TableRunner(vocab_size=4, order=2, seed=5)
    # Coupled: the random numbers depend on the position alone, so both draw the same.
    seqs = sequences([[1, 2] * 60, [3, 0, 2]], 400, rule="coupled", temperature=temperature, seed=1)
    steps, whole = Eagle(toy_head(), target), with_graphs(Eagle(toy_head(), target))
    for seq in seqs:
        for drafter in (steps, whole):
            begin(seq, drafter, target)
    from_draft = 0
    for num_draft_tokens in ([3, 1], [2, 4], [0, 2], [4, 4]) * 20:
        one, other = (drafter.propose(seqs, num_draft_tokens) for drafter in (steps, whole))
        for mine, theirs in zip(one, other):
            assert torch.equal(mine.tokens, theirs.tokens)
            from_draft += len(mine)
            if mine.probs is not None:
                torch.testing.assert_close(mine.probs, theirs.probs, rtol=1e-4, atol=1e-6)
        output = output_of(target.table[[2] * 5])
        results = [settle(seq, tree, all_accepted(tree), output) for seq, tree in zip(seqs, one)]
        for drafter in (steps, whole):
            drafter.observe(seqs, results)
    assert from_draft > 300 and whole._buffers.version >= 2


def test_usual_sequences_do_not_move_the_buffers_of_graphs() -> None:
    drafter = with_graphs(Eagle(toy_head(), toy()))
    before = drafter._buffers.version
    target = TableRunner(vocab_size=4, order=2, seed=5)
    seqs = sequences([[1, 2] * 500, *([3, 0, 2] for _ in range(7))], 400)
    for seq in seqs:
        begin(seq, drafter, target)
    drafter.propose(seqs, [4] * len(seqs))
    assert drafter._buffers.version == before


def all_accepted(tree: DraftTree) -> VerifyResult:
    return VerifyResult(list(range(len(tree))), 2)


def test_a_sampled_chain_has_real_q_over_the_targets_vocabulary() -> None:
    drafter = Eagle(toy_head(), toy())
    seqs = sequences([[0, 1, 2], [2, 3]], 10, temperature=1.0, seed=1)
    for seq in seqs:
        rows = torch.randn(len(seq.ids) - 1, 4)
        drafter.begin(seq, RowOutput(rows, rows, torch.cat([rows] * 3, dim=-1)))
    for tree, k in zip(drafter.propose(seqs, [3, 2]), (3, 2)):
        assert tree.probs is not None and tree.probs.shape == (k, 4)
        assert torch.allclose(tree.probs.sum(-1), torch.ones(k))
        assert (tree.probs[:, 1] == 0).all(), "the head cannot predict token 1"
        assert (tree.probs.gather(1, tree.tokens[:, None]) > 0).all()


def test_greedy_sampling_with_a_bias_gets_chosen_draft_tokens() -> None:
    """Greedy with a bias is not the head's argmax, and still chosen: q stays one-hot."""
    drafter = Eagle(toy_head(), toy())
    seq = sequences([[0, 1, 2]], 10, logit_bias={3: 100.0})[0]
    rows = torch.randn(2, 4)
    drafter.begin(seq, RowOutput(rows, rows, torch.cat([rows] * 3, dim=-1)))
    (tree,) = drafter.propose([seq], [3])
    assert tree.probs is None and tree.tokens.tolist() == [3, 3, 3]


# --- prefixes the target has read before ----------------------------------------------------------------------------


def begun(drafter: Eagle, ids: list[int], num_cached: int, states: Tensor) -> Sequence:
    """A sequence whose first `num_cached` tokens the target has cached; states [positions, 4] of its positions."""
    (seq,) = sequences([ids], 10)
    drafter.begin(seq, output_of(states[num_cached : len(ids) - 1]))
    return seq


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("over", [True, False])
def test_a_reused_prefix_is_as_good_as_one_read_now(shape: str, over: bool) -> None:
    """over: the sequence it was read for has ended; otherwise it is still running."""
    states, first, second = torch.randn(9, 4), [0, 2, 1, 3, 0], [0, 2, 1, 3, 0, 0, 2, 2, 1]
    continuing, fresh = (made(shape, toy_head(seed=3), toy()) for _ in range(2))
    earlier = begun(continuing, first, 0, states)
    continuing.propose([earlier], [3])
    if over:
        earlier.keep_cache = True
        continuing.end(earlier)
    seq, whole = begun(continuing, second, 4, states), begun(fresh, second, 0, states)
    (found,), (expected,) = continuing.propose([seq], [4]), fresh.propose([whole], [4])
    assert (found.tokens.tolist(), found.parents) == (expected.tokens.tolist(), expected.parents)
    reused, read = continuing._contexts.of(seq), fresh._contexts.of(whole)
    assert (reused.start, reused.length) == (read.start, read.length) == (0, 8)
    torch.testing.assert_close(reused.out, read.out)


def test_sequences_that_have_not_drafted_have_no_entries_to_reuse() -> None:
    """Their rows of the buffers may not even be there yet."""
    states, drafter = torch.randn(9, 4), Eagle(toy_head(seed=3), toy())
    for _ in range(3):
        begun(drafter, [0, 2, 1, 3, 0], 0, states)
    memory = drafter._contexts.of(begun(drafter, [0, 2, 1, 3, 0, 2], 4, states))
    assert (memory.start, memory.length) == (4, 0)


def test_nothing_is_kept_of_a_sequence_whose_cache_is_freed() -> None:
    states, prefix_cache = torch.randn(9, 4), PrefixCache(block_size=1)
    drafter = Eagle(toy_head(seed=3), toy(), prefix_cache=prefix_cache)
    earlier = begun(drafter, [0, 2, 1, 3, 0], 0, states)
    drafter.propose([earlier], [3])
    drafter.end(earlier)
    assert len(prefix_cache) == 0


def test_an_entry_with_another_next_token_is_not_reused() -> None:
    states, drafter = torch.randn(9, 4), Eagle(toy_head(seed=3), toy())
    earlier = begun(drafter, [0, 2, 1, 3, 0], 0, states)
    drafter.propose([earlier], [3])
    memory = drafter._contexts.of(begun(drafter, [0, 2, 1, 2, 0, 3], 3, states))
    assert (memory.start, memory.length) == (1, 2), "after the last of three shared tokens comes another one"
    stranger = drafter._contexts.of(begun(drafter, [3, 2, 1, 2, 0, 3], 3, states))
    assert (stranger.start, stranger.length) == (3, 0)


# --- behaviour --------------------------------------------------------------------------------------------------------


def test_num_draft_tokens_is_kept_and_proposing_twice_is_harmless() -> None:
    drafter = Eagle(toy_head(), toy(), nodes=6, branches=2, depth=3)
    seqs = sequences([[0, 1, 2], [2, 3], [1, 1]], 10)
    for seq in seqs:
        rows = torch.randn(len(seq.ids) - 1, 4)
        drafter.begin(seq, RowOutput(rows, rows, torch.cat([rows] * 3, dim=-1)))
    first, second = drafter.propose(seqs, [3, 0, 20]), drafter.propose(seqs, [3, 0, 20])
    assert [len(tree) for tree in first] == [3, 0, 6]
    for one, other in zip(first, second):
        assert one.tokens.tolist() == other.tokens.tolist() and one.parents == other.parents
    drafter.end(seqs[0])
    assert len(drafter.propose(seqs[:1], [3])[0]) == 0
    drafter.end(seqs[0])


@pytest.mark.slow
def test_ended_sequences_leave_no_state() -> None:
    target = toy()
    drafter = Eagle(toy_head(), target)
    assert_unchanged(target, drafter, [[1, 2, 3]] * 20, 9, 3)
    assert not len(drafter._contexts)
    assert drafter._buffers.num_rows <= 8, "rows of finished sequences are used again"


def test_a_head_for_another_target_is_refused(target: HuggingFaceRunner) -> None:
    with pytest.raises(PairError, match="states of 4 values; tiny has 32"):
        Eagle(toy_head(), target)
    config = Eagle3Config(32, 8, 2, 1, 2, 900, 8, 32)
    head = Eagle3Head(config)
    head.choose_vocabulary(torch.arange(8) + 892)
    with pytest.raises(PairError, match="predicts token 899; tiny has 259"):
        Eagle(head, target)
    with pytest.raises(PairError, match="embed_tokens"):
        Eagle(Eagle3Head(replace(config, hidden_size=16)), target)
    with pytest.raises(OptionError, match="branches"):
        Eagle(toy_head(), toy(), branches=0)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["eagle1", "eagle3", "specforge", "speculators"])
@pytest.mark.parametrize("options", [{}, {"nodes": 6}], ids=["chain", "tree"])
def test_published_heads_draft(layout: str, options: dict[str, Any], target: HuggingFaceRunner, tmp_path: Path) -> None:
    drafter = build_drafter("eagle", context_for(target, checkpoints.write(tmp_path, layout), **options))
    assert assert_unchanged(target, drafter, PROMPTS, 24, 6).drafted > 0


def test_without_a_head_the_error_says_what_to_do(target: HuggingFaceRunner, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="paceline train eagle"):
        build_drafter("eagle", context_for(target))
    with pytest.raises(OptionError, match="nodes, branches, depth"):
        build_drafter("eagle", context_for(target, checkpoints.write(tmp_path, "eagle3"), nods=1))


def test_entries_of_later_positions_need_more_shared_tokens() -> None:
    rows = torch.arange(2.0).view(1, -1, 1)
    entries = HeadEntries(2, KeyValues(rows, rows))
    assert [entries.usable(shared).keys.shape[1] for shared in (2, 3, 4, 5, 9)] == [0, 0, 1, 2, 2]


def test_the_next_turn_replaces_the_one_before_in_the_prefix_cache() -> None:
    states, prefix_cache = torch.randn(9, 4), PrefixCache(block_size=1)
    drafter = Eagle(toy_head(seed=3), toy(), prefix_cache=prefix_cache)
    for ids, num_cached in (([0, 2, 1, 3, 0], 0), ([0, 2, 1, 3, 0, 2, 2], 4), ([3, 2], 0)):
        seq = begun(drafter, ids, num_cached, states)
        drafter.propose([seq], [3])
        seq.keep_cache = True
        drafter.end(seq)
    assert len(prefix_cache) == 2 and prefix_cache.hits == 1


def test_no_token_is_drafted_twice_after_the_same_path() -> None:
    drafter = Recording(toy_head("eagle1"), toy(), nodes=12, branches=3, depth=4)
    assert_unchanged(toy(), drafter, [[1, 2, 3], [0, 3]], 20, 12)
    assert drafter.drafts
    for _, tree in drafter.drafts:
        draft_tokens = list(zip(tree.parents, tree.tokens.tolist()))
        assert len(set(draft_tokens)) == len(draft_tokens)
