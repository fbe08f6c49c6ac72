"""DFlash heads draft: the right states at the right positions, draft for draft as a reference says, exact outputs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import SpeculativeDecoder
from paceline.cli import main
from paceline.core.cost_model import CostModel
from paceline.core.draft_tree import DraftTree, path_to
from paceline.core.draft_value import DraftValue
from paceline.core.sequence import Sequence
from paceline.core.types import RowOutput, VerifyResult
from paceline.device.graphs import EagerPool
from paceline.drafting import dflash_graph
from paceline.drafting.block_rows import DraftRows
from paceline.drafting.dflash import DFlash
from paceline.drafting.dflash_graph import BlockGraphs
from paceline.drafting.eagle_graph import widened
from paceline.drafting.registry import build_drafter
from paceline.errors import OptionError, PairError
from paceline.heads.dflash import DFlashHead
from paceline.heads.registry import save_head
from paceline.kv.prefix_cache import PrefixCache
from paceline.runners.huggingface import HuggingFaceRunner
from paceline.runners.table import TableRunner
from tests.heads import dflash_checkpoints
from tests.heads.dflash_reference import drafted, tensors_of
from tests.support import drafter_exactness
from tests.support.dflash import VARIANTS, tiny_head, toy_head
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
from tests.support.tiny import tiny_llama

PROMPTS = [[5, 7, 9, 11, 200, 31], [250], [3, 3, 8, 3, 3, 8, 3, 3], list(range(40))]
MORE: dict[str, dict[str, Any]] = {
    "windows": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5},
    "reduced": {"draft_vocab_size": 60},
    "capped": {"output_multiplier": 0.3, "logit_softcap": 2.0, "input_embedding_scale": 2.0},
}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


@pytest.fixture(scope="module")
def target(model: Any) -> HuggingFaceRunner:
    return HuggingFaceRunner(model, "tiny")


# --- draft for draft --------------------------------------------------------------------------------------------------


class Recording(DFlash):
    """Records sequences and drafts."""

    def __init__(self, head: DFlashHead, target: Any) -> None:
        super().__init__(head, target)
        self.drafts: list[tuple[list[int], DraftTree]] = []

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        trees = super().propose(seqs, num_draft_tokens)
        self.drafts += [(list(seq.ids), tree) for seq, tree in zip(seqs, trees) if len(tree)]
        return trees


def true_features(model: Any, ids: list[int]) -> Tensor:
    """Outputs of layers 0 and 1 of the model, read at once and straight from transformers."""
    with torch.no_grad():
        states = model.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.cat([states[1][0], states[2][0]], dim=-1)


def check_drafts(head: DFlashHead, model: Any, target: HuggingFaceRunner, k: int = 9) -> None:
    """A batch of unequal sequences: every draft is what the reference computes from scratch."""
    drafter = Recording(head, target)
    assert_unchanged(target, drafter, PROMPTS, 12, k)
    assert len(drafter.drafts) > 20
    assert max(len(tree) for _, tree in drafter.drafts) == min(k, head.config.max_draft_tokens)
    tensors = tensors_of(head)
    for ids, tree in drafter.drafts[::7]:
        expected = drafted(tensors, head.config, true_features(model, ids[:-1]), ids[-1])
        assert tree.tokens.tolist() == expected[: len(tree)]


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_are_what_the_reference_says(variant: str, model: Any, target: HuggingFaceRunner) -> None:
    check_drafts(tiny_head(variant), model, target)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_drafts_of_other_options_too(name: str, model: Any, target: HuggingFaceRunner) -> None:
    head = tiny_head("dflash2", selector_top_k=5, **MORE[name])
    if head.config.is_reduced:
        head.choose_vocabulary(torch.arange(60) * 4 + 3)
    check_drafts(head, model, target)


@pytest.mark.slow
def test_a_short_causal_block_drafts_what_a_whole_one_does(model: Any, target: HuggingFaceRunner) -> None:
    check_drafts(tiny_head("jetspec"), model, target, k=2)


@pytest.mark.slow
def test_a_wrong_layer_would_show(model: Any, target: HuggingFaceRunner) -> None:
    """The reference reads outputs of layers: a head that is read with inputs instead drafts something else."""
    head = tiny_head()
    shifted = DFlashHead(replace(head.config, feature_layers=(0, 1)))
    shifted.load_state_dict(head.state_dict())
    with pytest.raises(AssertionError):
        check_drafts(shifted.requires_grad_(False), model, target)


# --- exactness --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"causal": True, "conv_kernel_size": 2, "conv_group_size": 8}])
def test_a_head_with_rounded_products_drafts_the_same_in_one_call(changes: dict[str, Any], model: Any) -> None:
    """Both ways round alike; numbers that are nearly equal may still change places."""
    drafts: list[list[int]] = []
    for compiled in (True, False):
        runner = HuggingFaceRunner(model, "tiny")
        drafter = Recording(tiny_head(head_dim=16, intermediate_size=64, **changes), runner)
        drafter.round_products()
        if not compiled:
            drafter._compiled = replace(drafter._compiled, block=None, context=None)
        elif drafter._compiled.block is None:
            pytest.skip("no compiled kernels on this machine")
        assert_unchanged(runner, drafter, PROMPTS, 12, 4)
        drafts.append([token for _, tree in drafter.drafts for token in tree.tokens.tolist()])
    same = sum(one == other for one, other in zip(*drafts))
    assert same > 0.95 * len(drafts[1])


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_outputs_are_unchanged(variant: str) -> None:
    check_greedy(DFlash(toy_head(variant, seed=3), toy()))


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["dflash", "dflash2", "dspark"])
def test_blocks_carry_the_q_they_were_drawn_from(variant: str) -> None:
    assert check_sampled(DFlash(toy_head(variant), toy()), samples=20_000, copies=64).new_tokens >= 20_000


class WholeSoftmax(DFlash):
    """Mutant: claims the softmax over the whole vocabulary for tokens drawn among the candidates."""

    def _one_by_one(self, rows: DraftRows, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        trees = super()._one_by_one(rows, seqs, num_draft_tokens)
        return [
            replace(tree, probs=torch.softmax(widened(rows.unary[index, : len(tree)], self._target_ids, 4), dim=-1))
            for index, tree in enumerate(trees)
        ]


def residual_among_candidates(*arguments: Any) -> Any:
    """Mutant: after a rejection only candidates can come, though the target may want what the head never drafts."""
    tokens, parents, q, target, _ = arguments
    result = right_verify(*arguments)
    refused = result.counts.clamp_max(tokens.shape[1] - 1)
    rows = torch.arange(tokens.shape[0])
    drafted = parents[rows, refused] >= -1
    rest = (target[rows, refused] - q[rows, refused]).clamp_min(0) * (q[rows, refused] > 0)
    wrong = drafter_exactness.torch.multinomial(rest + 1e-9, 1, generator=torch.Generator().manual_seed(1))[:, 0]
    at_fault = (result.counts < tokens.shape[1]) & drafted & (rest.sum(-1) > 0)
    return replace(result, tokens=torch.where(at_fault, wrong, result.tokens))


right_verify = drafter_exactness.verify_trees


@pytest.mark.slow
def test_a_q_over_the_whole_vocabulary_is_caught() -> None:
    with pytest.raises(AssertionError, match=r"chi² .* is over its limit"):
        check_sampled(WholeSoftmax(toy_head("dflash2", seed=1), toy()), samples=12_000, copies=40)


@pytest.mark.slow
def test_a_residual_among_the_candidates_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """By chi² itself: three candidates of four tokens, so that outputs still visit enough contexts."""
    monkeypatch.setattr(drafter_exactness, "verify_trees", residual_among_candidates)
    with pytest.raises(AssertionError, match=r"chi² .* is over its limit"):
        check_sampled(DFlash(toy_head("dflash2", selector_top_k=3), toy()), samples=6_000, copies=40)


def with_graphs(drafter: DFlash) -> DFlash:
    """The drafter with whole blocks as on CUDA, but run eagerly instead of captured."""
    drafter.graphs = drafter._block_graphs(EagerPool())
    return drafter


@pytest.mark.slow
def test_sampled_outputs_with_whole_blocks_are_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = with_graphs(DFlash(toy_head("dflash2"), toy()))
    monkeypatch.setattr(drafter, "_one_by_one", None)  # every block is whole
    assert check_sampled(drafter, samples=20_000, copies=BlockGraphs.MAX_SEQS // 3).accepted


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("variant", ["dflash", "dflash2", "dspark-rnn"])
def test_a_whole_block_is_what_steps_would_make(
    variant: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long prompts, buffers that grow on the way, and unequal draft lengths."""
    monkeypatch.setattr(dflash_graph, "ROOM_ROWS", 1)
    monkeypatch.setattr(dflash_graph, "ROOM_TOKENS", 1)
    target = TableRunner(vocab_size=4, order=2, seed=5)
    # Coupled: the random numbers depend on the position alone, so both draw the same.
    seqs = sequences([[1, 2] * 60, [3, 0, 2]], 400, rule="coupled", temperature=temperature, seed=1)
    windows = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 9}
    steps = DFlash(toy_head(variant, **windows), target)
    whole = with_graphs(DFlash(toy_head(variant, **windows), target))
    for seq in seqs:
        for drafter in (steps, whole):
            begin(seq, drafter, target)
    from_draft = 0
    for num_draft_tokens in ([3, 1], [2, 3], [0, 2], [3, 3]) * 15:
        one, other = (drafter.propose(seqs, num_draft_tokens) for drafter in (steps, whole))
        for mine, theirs in zip(one, other):
            assert torch.equal(mine.tokens, theirs.tokens)
            from_draft += len(mine)
            if mine.probs is not None:
                torch.testing.assert_close(mine.probs, theirs.probs, rtol=1e-4, atol=1e-6)
        output = output_of(target.table[[2] * 5])
        all_accepted = [VerifyResult(list(range(len(tree))), 2) for tree in one]
        results = [settle(seq, tree, walk, output) for seq, tree, walk in zip(seqs, one, all_accepted)]
        for drafter in (steps, whole):
            drafter.observe(seqs, results)
    assert from_draft > 200 and whole._buffers.version >= 2


def begun(drafter: DFlash, ids: list[int], num_cached: int, states: Tensor, **sampling: Any) -> Sequence:
    """A sequence whose first `num_cached` tokens the target has cached; states [positions, 4] of its positions."""
    (seq,) = sequences([ids], 10, **sampling)
    drafter.begin(seq, output_of(states[num_cached : len(ids) - 1]))
    return seq


@pytest.mark.parametrize("variant", ["dflash", "dflash2", "dspark"])
def test_a_drawn_block_has_real_q_over_the_targets_vocabulary(variant: str) -> None:
    drafter = DFlash(toy_head(variant, draft_vocab_size=3), toy())
    seqs = [begun(drafter, ids, 0, torch.randn(9, 4), temperature=1.0, seed=1) for ids in ([0, 1, 2], [2, 3])]
    for tree, k in zip(drafter.propose(seqs, [3, 2]), (3, 2)):
        assert tree.probs is not None and tree.probs.shape == (k, 4)
        assert torch.allclose(tree.probs.sum(-1), torch.ones(k))
        assert (tree.probs[:, 3] == 0).all(), "the head cannot predict token 3"
        assert (tree.probs.gather(1, tree.tokens[:, None]) > 0).all()
        if variant == "dflash2":
            assert ((tree.probs > 0).sum(-1) == 2).all(), "nothing but the two candidates has a probability"


def test_greedy_sampling_with_a_bias_gets_chosen_draft_tokens() -> None:
    drafter = DFlash(toy_head(), toy())
    seq = begun(drafter, [0, 1, 2], 0, torch.randn(9, 4), logit_bias={3: 100.0})
    (tree,) = drafter.propose([seq], [3])
    assert tree.probs is None and tree.tokens.tolist() == [3, 3, 3]


def test_penalties_count_the_draft_tokens_before() -> None:
    drafter = DFlash(toy_head(), toy())
    seq = begun(drafter, [0, 1, 2], 0, torch.randn(9, 4), frequency_penalty=1000.0)
    (tree,) = drafter.propose([seq], [3])
    assert len(set(tree.tokens.tolist())) == 3


# --- confidence -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["dflash", "dflash2", "dspark-gated"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@torch.inference_mode()
def test_confidence_is_the_probability_of_the_likeliest_token(variant: str, temperature: float) -> None:
    """Of a drawn token too: what is stated of it may not depend on what was drawn."""
    drafter = DFlash(toy_head(variant), toy())
    drafter.use_value(DraftValue(CostModel()))
    seqs = [
        begun(drafter, ids, 0, torch.randn(9, 4), temperature=temperature, seed=1) for ids in ([0, 1, 2], [2, 3, 3, 1])
    ]
    states = [drafter.contexts.of(seq) for seq in seqs]
    for index, (tree, k) in enumerate(zip(drafter.propose(seqs, [3, 2]), (3, 2))):
        assert tree.confidence is not None and len(tree.confidence) == len(tree) == k
        rows = drafter._block(states, 3)
        for depth, (confidence, previous) in enumerate(zip(tree.confidence, [seqs[index].ids[-1], *tree.tokens])):
            logits = rows.logits(depth, torch.tensor([int(previous)] * 2))[index]
            assert confidence == pytest.approx(float(torch.softmax(logits, dim=-1).max()), abs=1e-5)


@torch.inference_mode()
def test_a_confidence_head_states_the_confidence() -> None:
    drafter = DFlash(toy_head("dspark"), toy())
    seq = begun(drafter, [0, 1, 2], 0, torch.randn(9, 4))
    assert drafter.propose([seq], [3])[0].confidence is None, "nobody asked"
    drafter.use_value(DraftValue(CostModel()))
    (tree,) = drafter.propose([seq], [3])
    head, rows = drafter._head, drafter._block([drafter.contexts.of(seq)], 3)
    assert head.confidence_head is not None and head.markov_head is not None and tree.confidence is not None
    features = torch.cat([rows.states[0, 0], head.markov_head.previous(torch.tensor(2))])
    assert tree.confidence[0] == pytest.approx(float(torch.sigmoid(head.confidence_head(features))), abs=1e-5)


# --- trees ------------------------------------------------------------------------------------------------------------


def path_scores(head: DFlashHead, rows: DraftRows) -> dict[tuple[int, ...], float]:
    """The log-probability of every path through a block, path by path."""
    scores: dict[tuple[int, ...], float] = {(): 0.0}
    for depth in range(rows.depth):
        for path in [path for path in scores if len(path) == depth]:
            previous = torch.tensor([path[-1]]) if path else rows.anchors
            row = torch.log_softmax(rows.logits(depth, previous)[0].double(), dim=-1)
            for token, score in zip(head.target_ids.tolist(), row.tolist()):
                if score > -torch.inf:
                    scores[*path, token] = scores[path] + score
    del scores[()]
    return scores


@pytest.mark.parametrize("variant", ["dflash", "dflash2", "jetspec"])
def test_a_tree_holds_the_likeliest_paths(variant: str) -> None:
    drafter = DFlash(toy_head(variant, seed=3), toy(), nodes=9, branches=4)
    seq = begun(drafter, [0, 1, 2], 0, torch.randn(9, 4))
    (tree,) = drafter.propose([seq], [9])
    scores = path_scores(drafter._head, drafter._block([drafter.contexts.of(seq)], 3))
    tokens = tree.tokens.tolist()
    paths = [tuple(tokens[step] for step in path_to(tree.parents, node)) for node in range(len(tree))]
    best = sorted(scores, key=lambda path: -scores[path])[:9]
    assert [scores[path] for path in paths] == pytest.approx([scores[path] for path in best], abs=1e-5)


@pytest.mark.slow
def test_trees_leave_greedy_outputs_unchanged() -> None:
    for variant in ("dflash", "dflash2", "dspark"):
        check_greedy(DFlash(toy_head(variant, seed=3), toy(), nodes=6, branches=2))


@pytest.mark.slow
def test_sampled_trees_are_exact() -> None:
    check_sampled(DFlash(toy_head("dflash2"), toy(), nodes=3, branches=2), samples=20_000, copies=64)


# --- prefixes the target has read before ------------------------------------------------------------------------------


@pytest.mark.parametrize("over", [True, False])
@pytest.mark.parametrize("num_cached", [4, 5])
def test_a_reused_prefix_is_as_good_as_one_read_now(num_cached: int, over: bool) -> None:
    """over: the sequence it was read for has ended; otherwise it is still running."""
    states, first, second = torch.randn(9, 4), [0, 2, 1, 3, 0, 1], [0, 2, 1, 3, 0, 0, 2, 2, 1]
    continuing, fresh = (DFlash(toy_head(seed=3), toy(), prefix_cache=PrefixCache(block_size=1)) for _ in range(2))
    earlier = begun(continuing, first, 0, states)
    continuing.propose([earlier], [3])
    if over:
        earlier.keep_cache = True
        continuing.end(earlier)
    seq, whole = begun(continuing, second, num_cached, states), begun(fresh, second, 0, states)
    (reused,), (expected,) = continuing.propose([seq], [3]), fresh.propose([whole], [3])
    assert reused.tokens.tolist() == expected.tokens.tolist()
    one, other = continuing.contexts.of(seq), fresh.contexts.of(whole)
    assert (one.start, one.length) == (other.start, other.length) == (0, 8)
    kept, read = continuing._buffers.written(one.row, 8), fresh._buffers.written(other.row, 8)
    torch.testing.assert_close(kept.keys, read.keys)
    torch.testing.assert_close(kept.values, read.values)


# --- behaviour --------------------------------------------------------------------------------------------------------


def test_a_block_is_never_longer_than_the_head_was_trained_for() -> None:
    for variant, most in (("dflash", 3), ("dspark", 4)):
        drafter = DFlash(toy_head(variant), toy())
        seq = begun(drafter, [0, 1, 2], 0, torch.randn(9, 4))
        first, second = (drafter.propose([seq], [20])[0].tokens.tolist() for _ in range(2))
        assert len(first) == most and first == second, "proposing twice is harmless"


def test_a_step_without_states_leaves_nothing_wrong() -> None:
    drafter = DFlash(toy_head(), toy())
    (seq,) = sequences([[0, 1, 2]], 10)
    drafter.begin(seq, RowOutput(torch.randn(1, 4)))
    assert len(drafter.propose([seq], [3])[0]) == 0


@pytest.mark.slow
def test_ended_sequences_leave_no_state() -> None:
    target = toy()
    drafter = DFlash(toy_head(), target)
    assert_unchanged(target, drafter, [[1, 2, 3]] * 20, 9, 3)
    assert not len(drafter.contexts)
    assert drafter._buffers.num_rows <= 8, "rows of finished sequences are used again"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_hidden_size": 4}, "states of 4 values; tiny has 32"),
        ({"hidden_size": 16}, "hidden size 16"),
        ({"feature_layers": (1, 9)}, "output of layer 8; tiny has 3 layers"),
        ({"vocab_size": 900, "draft_vocab_size": 900, "mask_token_id": 3}, "token 899; tiny has 259"),
        ({"vocab_size": 900, "draft_vocab_size": 8, "mask_token_id": 700}, "token 700; tiny has 259"),
    ],
)
def test_a_head_for_another_target_is_refused(
    changes: dict[str, Any], message: str, target: HuggingFaceRunner
) -> None:
    with pytest.raises(PairError, match=message):
        DFlash(DFlashHead(replace(tiny_head().config, **changes)), target)


def test_impossible_options_are_refused() -> None:
    with pytest.raises(OptionError, match="branches"):
        DFlash(toy_head(), toy(), branches=0)


def test_without_a_head_the_error_says_what_to_do(target: HuggingFaceRunner) -> None:
    with pytest.raises(OptionError, match="paceline train dflash"):
        build_drafter("dflash", context_for(target))


@pytest.mark.slow
def test_a_head_in_a_gguf_file_drafts(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    model = tiny_llama(vocab_size=50, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    target = HuggingFaceRunner(model, "tiny")
    path = dflash_checkpoints.write_gguf(tmp_path / "head.gguf", dflash_checkpoints.dflash2())
    drafter = build_drafter("dflash", context_for(target, path))
    assert assert_unchanged(target, drafter, [[5, 7, 9], [3] * 9], 12, 4).drafted > 0


@pytest.mark.slow
@pytest.mark.parametrize("layout", dflash_checkpoints.CONFIGS)
def test_published_heads_draft(layout: str, tmp_path: Path) -> None:
    model = tiny_llama(vocab_size=50, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    target = HuggingFaceRunner(model, "tiny")
    drafter = build_drafter("dflash", context_for(target, dflash_checkpoints.write(tmp_path, layout)))
    assert assert_unchanged(target, drafter, [[5, 7, 9], [3] * 9], 20, 4).drafted > 0


# --- as a user drives it ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def head_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head")
    save_head(tiny_head("dflash2", selector_top_k=8, conv_group_size=8), folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"dtype": "int8"}, {"draft_options": {"nodes": 8}}], ids=["", "int8", "tree"])
def test_a_decoder_generates_what_it_does_without(
    options: dict[str, Any], head_folder: Path, tiny_folder: Path
) -> None:
    prompts = ["abcabcabc", "to be or not to be", "12 12 12"]
    dtype = {name: value for name, value in options.items() if name == "dtype"}
    with SpeculativeDecoder(tiny_folder, **dtype) as decoder:
        expected = [output.token_ids for output in decoder.generate(prompts, max_new_tokens=24)]
    drafting = {"method": "dflash", "draft_model": head_folder, "num_draft_tokens": 5, **options}
    with SpeculativeDecoder(tiny_folder, **drafting) as decoder:
        outputs = decoder.generate(prompts, max_new_tokens=24)
    assert [output.token_ids for output in outputs] == expected
    assert all(output.stats.drafted > 20 for output in outputs)


@pytest.mark.slow
def test_the_command_line_drafts_with_a_head(
    head_folder: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def generated(*arguments: str) -> dict[str, Any]:
        common = ("generate", "to be or not", "--model", str(tiny_folder), "--max-new-tokens", "16", "--json")
        assert main([*common, *arguments]) == 0
        document: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return document

    with_head = ("--method", "dflash", "--draft-model", str(head_folder), "--num-draft-tokens", "4")
    drafted, plain = generated(*with_head), generated("--method", "none")
    assert drafted["text"] == plain["text"]
    assert drafted["drafted"] > 0


def test_a_head_that_does_not_fit_is_one_line_on_the_command_line(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = dflash_checkpoints.write(tmp_path, "z-lab", {"fc.weight": torch.ones(32, 64)})
    arguments = ["generate", "x", "--model", str(tiny_folder), "--method", "dflash", "--draft-model", str(head)]
    assert main(arguments) != 0
    error = capsys.readouterr().err
    assert "q_norm.weight is missing" in error and "Traceback" not in error
