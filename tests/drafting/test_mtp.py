"""MTP heads: the draft tokens that their published tensors say, exact outputs, and one line where there is no head."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from paceline import SpeculativeDecoder
from paceline.core.draft_tree import DraftTree
from paceline.core.sequence import Sequence
from paceline.device.graphs import EagerPool
from paceline.drafting.eagle_graph import EagleGraphs
from paceline.drafting.mtp import Mtp
from paceline.engines.local.engine import LocalEngine
from paceline.errors import OptionError, WeightsError
from tests.support.build import sequence, tiny_engine
from tests.support.drafter_exactness import begin, check_greedy, check_sampled, sequences, toy
from tests.support.mtp import (
    FAMILIES,
    GGUF_ARCHITECTURES,
    head_tensors,
    several_modules,
    write_gguf_head,
    write_target,
)
from tests.support.mtp_heads import toy_mtp_head
from tests.support.mtp_reference import Reference, draft_by_modules, true_states

PROMPTS = [[5, 7, 9, 11, 200, 31], [250], [3, 3, 8, 3, 3, 8, 3, 3], list(range(40))]
K = 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of a family, written once."""
    return cache(lambda model_type: write_target(model_type, tmp_path_factory.mktemp(model_type)))


class Drafts:
    """Every draft of an engine, with the sequence it was made for."""

    def __init__(self, engine: LocalEngine) -> None:
        self.made: list[tuple[list[int], list[int]]] = []
        drafter = engine.parts.drafter
        self._propose = drafter.propose
        drafter.propose = self.propose  # type: ignore[method-assign]

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        trees = self._propose(seqs, num_draft_tokens)
        self.made += [(list(seq.ids), tree.tokens.tolist()) for seq, tree in zip(seqs, trees) if len(tree)]
        return trees


def disagreeing(folder: Path, model_type: str, made: list[tuple[list[int], list[int]]]) -> Iterator[Any]:
    """Drafts that are not the reference's."""
    reference = Reference(model_type, folder, json.loads((folder / "config.json").read_text()))
    for ids, tokens in made:
        expected = reference.draft(true_states(folder, ids[:-1]), ids, len(tokens))
        if tokens != expected:
            yield ids, tokens, expected


# --- what it drafts ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("model_type", FAMILIES)
def test_draft_tokens_are_those_of_a_float64_reference(model_type: str, folders: Callable[[str], Path]) -> None:
    """In a batch of four lengths, through the engine that a user gets, with the head in the target's own file."""
    folder = folders(model_type)
    engine = tiny_engine(folder, method="mtp", num_draft_tokens=K)
    drafts = Drafts(engine)
    engine.run([sequence(list(prompt), 9) for prompt in PROMPTS])
    assert len(drafts.made) > 20 and all(len(tokens) <= K for _, tokens in drafts.made)
    assert not list(disagreeing(folder, model_type, drafts.made[::3]))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "deepseek_v3"])
def test_a_cached_prefix_is_drafted_after_with_its_keys(model_type: str, folders: Callable[[str], Path]) -> None:
    """The target does not read a known prefix again; the head continues from the keys it stored for it."""
    folder = folders(model_type)
    engine = tiny_engine(folder, method="mtp", num_draft_tokens=K, prefix_cache_tokens=4096)
    first = sequence(list(range(80)), 8)  # longer than a block of the cache
    engine.run([first])
    drafts = Drafts(engine)
    second = sequence([*first.ids, 77, 78], 6)
    engine.run([second])
    assert second.num_cached_tokens > 64, "the prefix was read again: this shows nothing"
    assert drafts.made and not list(disagreeing(folder, model_type, drafts.made))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_next", "deepseek_v3", "glm4_moe", "mimo_v2_flash"])
def test_outputs_are_what_the_target_alone_generates(model_type: str, folders: Callable[[str], Path]) -> None:
    folder = str(folders(model_type))
    settings = {"max_new_tokens": 16, "ignore_eos": True}
    with SpeculativeDecoder(folder, method="none") as decoder:
        expected = [result.token_ids for result in decoder.generate(PROMPTS, **settings)]
    with SpeculativeDecoder(folder, method="mtp", num_draft_tokens=3) as decoder:
        results = decoder.generate(PROMPTS, **settings)
        alone = decoder.generate(PROMPTS[0], **settings)
    assert [result.token_ids for result in results] == expected and alone.token_ids == expected[0]
    assert all(result.stats.drafted for result in results)


@pytest.mark.slow
def test_draft_trees_leave_the_output_as_it_is(folders: Callable[[str], Path]) -> None:
    folder = str(folders("deepseek_v3"))
    with SpeculativeDecoder(folder, method="mtp", num_draft_tokens=6, draft_options={"nodes": 6}) as decoder:
        trees, plain = (decoder.generate(PROMPTS[0], max_new_tokens=8, ignore_eos=True, num_draft_tokens=k)
                        for k in (6, 0))  # fmt: skip
    assert trees.token_ids == plain.token_ids and trees.stats.drafted > plain.stats.drafted == 0


# --- several modules, GGUF --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "glm4_moe", "mimo_v2_flash"])
def test_each_of_several_modules_drafts_one_token(model_type: str, tmp_path: Path) -> None:
    """Of four tokens asked for three come, each what a float64 reference says of its module; outputs are unchanged."""
    folder = write_target(model_type, tmp_path, several_modules(model_type, 3))
    engine = tiny_engine(folder, method="mtp", num_draft_tokens=4)
    drafts, seqs = Drafts(engine), [sequence(list(prompt), 7) for prompt in PROMPTS]
    engine.run(seqs)
    assert max(len(tokens) for _, tokens in drafts.made) == 3 and len(drafts.made) > 15
    config = json.loads((folder / "config.json").read_text())
    modules = [Reference(model_type, folder, config, module) for module in range(3)]
    for ids, tokens in drafts.made[::2]:
        assert draft_by_modules(modules, true_states(folder, ids[:-1]), ids, len(tokens)) == tokens
    plain = tiny_engine(folder, method="none").run([sequence(list(prompt), 7) for prompt in PROMPTS])
    assert [seq.generated for seq in seqs] == [seq.generated for seq in plain]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", GGUF_ARCHITECTURES)
def test_a_head_in_a_gguf_file_drafts_what_its_tensors_say(
    model_type: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """The target has another head inside; the file that is named counts."""
    pytest.importorskip("gguf")
    tensors = head_tensors(model_type, seed=2)
    path, expected = write_gguf_head(tmp_path / "mtp-head.gguf", model_type, tensors), tmp_path / "same"
    write_target(model_type, expected, tensors)
    engine = tiny_engine(folders(model_type), method="mtp", draft_model=str(path), num_draft_tokens=K)
    drafts = Drafts(engine)
    engine.run([sequence(list(PROMPTS[0]), 9)])
    assert len(drafts.made) > 4 and not list(disagreeing(expected, model_type, drafts.made))


def test_a_gguf_file_without_a_head_is_named(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from tests.heads.dflash_checkpoints import dflash, write_gguf

    target = str(write_target("glm4_moe", tmp_path / "target", {}))
    with pytest.raises(WeightsError, match=r"holds no MTP head \(qwen3\.nextn_predict_layers is not there\)"):
        SpeculativeDecoder(target, method="mtp", draft_model=str(write_gguf(tmp_path / "a.gguf", dflash(), "qwen3")))


def test_several_modules_draft_no_trees() -> None:
    with pytest.raises(OptionError, match="drafts chains; leave nodes at 0"):
        Mtp(toy_mtp_head(num_modules=2), toy(), nodes=4)


@pytest.mark.slow
def test_chains_of_several_modules_carry_the_q_they_were_drawn_from() -> None:
    """chi² over six thousand tokens; fails a correct drafter with probability 1e-6."""
    drafter = Mtp(toy_mtp_head(num_modules=2), toy())
    assert check_sampled(drafter, samples=6_000, copies=80).new_tokens >= 6_000
    assert check_greedy(Mtp(toy_mtp_head(num_modules=2), toy())).acceptance_by_position[2:] == []


# --- exactness on the toy ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "deepseek_v3"])
def test_greedy_outputs_are_unchanged(model_type: str) -> None:
    check_greedy(Mtp(toy_mtp_head(model_type), toy()))


@pytest.mark.slow
def test_chains_carry_the_q_they_were_drawn_from() -> None:
    """chi² over twelve thousand tokens; fails a correct drafter with probability 1e-6."""
    assert check_sampled(Mtp(toy_mtp_head(), toy()), samples=12_000, copies=40).new_tokens >= 12_000


@pytest.mark.slow
def test_a_whole_chain_is_what_steps_would_make() -> None:
    """The chain of a graph, run eagerly, drafts what single passes draft: nothing in it depends on the host."""
    steps, whole = Mtp(toy_mtp_head(), toy()), Mtp(toy_mtp_head(), toy())
    whole.graphs = EagleGraphs(whole._head, whole._buffers, whole._vocab_size, EagerPool())
    seqs = sequences([[1, 2] * 20, [3, 0, 2]], 40)
    for seq in seqs:
        for drafter in (steps, whole):
            begin(seq, drafter, toy())
    one, other = (drafter.propose(seqs, [4, 2]) for drafter in (steps, whole))
    assert [tree.tokens.tolist() for tree in one] == [tree.tokens.tolist() for tree in other]
    assert [len(tree) for tree in one] == [4, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "deepseek_v3"])
def test_outputs_on_a_gpu_are_what_the_target_alone_generates(
    model_type: str, folders: Callable[[str], Path]
) -> None:
    """Chains of a head without experts are captured, those of one with experts run eagerly."""
    options = {"device": "cuda", "dtype": "float32", "num_draft_tokens": 3}
    with SpeculativeDecoder(str(folders(model_type)), method="mtp", **options) as decoder:
        drafted = decoder.generate(PROMPTS, max_new_tokens=16, ignore_eos=True)
        plain = decoder.generate(PROMPTS, max_new_tokens=16, ignore_eos=True, num_draft_tokens=0)
    assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
    assert all(result.stats.drafted for result in drafted)


@pytest.mark.slow
def test_a_head_trained_for_one_token_drafts_one() -> None:
    head = toy_mtp_head("qwen2")
    assert check_greedy(Mtp(head, toy())).acceptance_by_position[1:] == []


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_head_may_lie_in_a_directory_of_its_own(folders: Callable[[str], Path], tmp_path: Path) -> None:
    from paceline.heads.mtp import load_mtp
    from paceline.heads.registry import save_head

    whole, bare = folders("glm4_moe"), write_target("glm4_moe", tmp_path / "bare", {})
    save_head(load_mtp(whole, "glm"), tmp_path / "head")
    drafts = []
    for folder, draft_model in ((whole, None), (bare, str(tmp_path / "head"))):
        engine = tiny_engine(folder, method="mtp", draft_model=draft_model, num_draft_tokens=K)
        drafts.append(Drafts(engine))
        engine.run([sequence(list(PROMPTS[0]), 8)])
    assert drafts[0].made and drafts[0].made == drafts[1].made


def test_a_checkpoint_without_a_head_says_so_in_one_line(tmp_path: Path) -> None:
    folder = write_target("qwen3_5_text", tmp_path, {})
    with pytest.raises(WeightsError, match=r"has no MTP head: .*choose another method") as error:
        SpeculativeDecoder(str(folder), method="mtp")
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_next", "deepseek_v3", "glm4_moe"])
def test_other_methods_leave_the_head_where_it_is(model_type: str, folders: Callable[[str], Path]) -> None:
    with SpeculativeDecoder(str(folders(model_type)), method="ngram", num_draft_tokens=2) as decoder:
        assert decoder.generate(PROMPTS[2], max_new_tokens=4, ignore_eos=True).token_ids


def test_a_further_layer_that_is_no_head_is_still_refused(tmp_path: Path) -> None:
    head = {name: value for name, value in head_tensors("glm4_moe").items() if "eh_proj" not in name}
    folder = write_target("glm4_moe", tmp_path, head)
    with pytest.raises(WeightsError, match=r"model\.layers\.2\..* does not use"):
        SpeculativeDecoder(str(folder), method="ngram")


@pytest.mark.slow
def test_quantized_targets_draft_with_the_head_in_int8(folders: Callable[[str], Path]) -> None:
    with SpeculativeDecoder(str(folders("qwen3_5_text")), method="mtp", num_draft_tokens=2, dtype="int8") as decoder:
        drafted = decoder.generate(PROMPTS[0], max_new_tokens=8, ignore_eos=True)
        plain = decoder.generate(PROMPTS[0], max_new_tokens=8, ignore_eos=True, num_draft_tokens=0)
    assert drafted.token_ids == plain.token_ids and drafted.stats.drafted
