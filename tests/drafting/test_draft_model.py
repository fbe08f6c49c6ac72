"""A second model drafts: its cache stays in step, its q is the distribution it drew from."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.sampling import SamplingParams, distribution, draw_keyed
from paceline.core.sequence import Sequence
from paceline.core.types import DraftInput, DraftOutput, ModelOutput, Row
from paceline.drafting.draft_model import DraftModel
from paceline.drafting.registry import build_drafter
from paceline.errors import OptionError, OutOfMemory, PairError
from paceline.runners.huggingface import HuggingFaceRunner
from paceline.runners.native import NativeRunner
from paceline.runners.table import TableRunner
from tests.runners.native.models import tiny
from tests.support.build import sequence
from tests.support.drafter_exactness import assert_unchanged, context_for, steps
from tests.support.tiny import write_tiny_model


def setting(temperature: float, blur: float = 0.4) -> tuple[Sequence, DraftModel]:
    drafter = DraftModel(TableRunner(vocab_size=5, seed=2, blur=blur), 5)
    return sequence([1, 2, 3], 60, SamplingParams(temperature, seed=1)), drafter


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_draft_cache_holds_what_the_sequence_holds(temperature: float) -> None:
    """After full acceptance it lacks its own last draft token; after a rejection it is truncated."""
    seq, drafter = setting(temperature)
    accepted = set()
    for [result] in itertools.islice(steps([seq], TableRunner(vocab_size=5, seed=2), drafter), 12):
        seq_cache = drafter._seq_caches[seq.seq_id]
        assert seq_cache.tokens == seq.ids[: seq_cache.length]  # type: ignore[attr-defined]
        lacking = len(seq.ids) - seq_cache.length
        assert lacking == (2 if result.accepted == 3 else 1)
        accepted.add(result.accepted)
    assert len(accepted) > 1, "all steps were alike: this shows little"


def test_q_is_the_distribution_each_draft_token_was_drawn_from() -> None:
    seq, drafter = setting(temperature=0.8)
    tree = drafter.propose([seq], [3])[0]
    assert tree.probs is not None
    path = list(seq.ids)
    for node, token in enumerate(tree.tokens.tolist()):
        row = drafter.runner.table[drafter.runner._context(path)]  # type: ignore[attr-defined]
        assert torch.allclose(tree.probs[node], distribution(row, seq.sampling))
        path.append(token)


def test_a_greedy_draft_token_was_chosen() -> None:
    seq, drafter = setting(temperature=0.0)
    assert drafter.propose([seq], [3])[0].probs is None


def test_a_sequence_without_draft_tokens_costs_the_draft_model_nothing() -> None:
    _, drafter = setting(temperature=0.0)
    seq = sequence([1, 2, 3], 4, num_draft_tokens=0)
    for _ in steps([seq], TableRunner(vocab_size=5, seed=2), drafter):
        assert drafter._seq_caches == {}


@pytest.mark.parametrize("size", [4, 9])
def test_another_vocabulary_size_is_cut_or_padded(size: int) -> None:
    drafter = DraftModel(TableRunner(vocab_size=size, seed=3), 5)
    seq = sequence([1, 2, 3], 60, SamplingParams(5.0, seed=0))
    for _ in range(20):
        tree = drafter.propose([seq], [3])[0]
        assert tree.probs is not None and tree.probs.shape == (3, 5)
        assert int(tree.tokens.max()) < min(5, size)
        drafter.end(seq)


def test_a_token_that_the_draft_model_does_not_have_costs_its_own_sequence_its_drafts_and_no_other() -> None:
    """The draft model of a family may have fewer padded rows. Its embedding has none of them: it must not be asked."""
    draft = NativeRunner.of_model(tiny("llama", vocab_size=32), "draft", kv_cache_tokens=512)
    drafter = DraftModel(draft, 40)
    seqs = [sequence([35, 1, 2], 20), sequence([1, 2, 3], 20), sequence([1, 2, 3], 20)]
    assert [len(tree) for tree in drafter.propose(seqs, [3] * 3)] == [0, 3, 3]
    seqs[2].ids += [7, 39, 8]
    for _ in range(2):
        assert [len(tree) for tree in drafter.propose(seqs, [3] * 3)] == [0, 3, 0]
    for seq in seqs:
        drafter.end(seq)
    assert not drafter._num_readable


LARGE_VOCABULARY, QUARTER = 65_536, 16_384
FREQUENT, RARE = [7 * place % 300 for place in range(250)], [60_000 + place for place in range(250)]


def large_runner() -> NativeRunner:
    return NativeRunner.of_model(tiny("llama", vocab_size=LARGE_VOCABULARY), "tiny", kv_cache_tokens=2048)


def sampled(ids: list[int]) -> Sequence:
    return sequence(ids, 60, SamplingParams(1.0, seed=1))


def next_logits(runner: NativeRunner, ids: list[int]) -> torch.Tensor:
    cache = runner.new_cache()
    logits = runner.forward([Row.chain(cache, ids)], last_only=True).logits[0].clone()
    runner.free(cache)
    return logits


@pytest.mark.parametrize(("ids", "size"), [(FREQUENT, QUARTER), (RARE, LARGE_VOCABULARY)], ids=["frequent", "rare"])
def test_on_a_cpu_draft_tokens_come_from_the_part_of_the_vocabulary_that_is_in_use(ids: list[int], size: int) -> None:
    runner = large_runner()
    drafter = DraftModel(runner, LARGE_VOCABULARY)
    trees = drafter.propose([sequence(ids, 60), sampled(ids)], [3, 3])
    path = list(ids)
    for token in trees[0].tokens.tolist():
        assert token == int(next_logits(runner, path)[:size].argmax())
        path.append(token)
    assert trees[1].probs is not None and trees[1].probs.shape == (3, LARGE_VOCABULARY)
    torch.testing.assert_close(trees[1].probs[:, :size].sum(dim=1), torch.ones(3))


@pytest.mark.slow
def test_draws_do_not_depend_on_what_others_in_the_batch_need_of_the_vocabulary() -> None:
    """One sequence needs a quarter, the other half; and one that needs all."""
    half = [20_000 + place for place in range(250)]
    alone = DraftModel(large_runner(), LARGE_VOCABULARY).propose([sampled(FREQUENT)], [3])[0]
    for other in (half, RARE):
        beside = DraftModel(large_runner(), LARGE_VOCABULARY).propose([sampled(other), sampled(FREQUENT)], [3, 3])[1]
        assert alone.probs is not None and beside.probs is not None
        assert torch.equal(beside.tokens, alone.tokens)
        torch.testing.assert_close(beside.probs, alone.probs)


@pytest.mark.slow
def test_what_a_part_of_the_vocabulary_cannot_draft_is_written_all_the_same() -> None:
    """The target's tokens lie anywhere, so that most of them cannot be drafted; and a pass that fails leaves the runner
    with the whole vocabulary."""
    runner = large_runner()
    drafter = DraftModel(runner, LARGE_VOCABULARY)
    assert_unchanged(large_runner(), drafter, [FREQUENT, RARE[:9]], 12, 3)
    full = sequence(FREQUENT * 20, 60)
    with pytest.raises(OutOfMemory):
        drafter._draft([full], [3])
    assert next_logits(runner, FREQUENT).shape == (LARGE_VOCABULARY,)


class DeviceRunner(TableRunner):
    """Drafts "on the device": as many steps as asked for, without returning to the drafter."""

    def draft(self, inputs: list[DraftInput], num_tokens: int) -> DraftOutput | None:
        rows = [TableDraft(self, item, num_tokens) for item in inputs]
        return DraftOutput(torch.stack([row.tokens for row in rows]), torch.stack([row.probs for row in rows]))


class TableDraft:
    def __init__(self, runner: TableRunner, item: DraftInput, num_tokens: int) -> None:
        assert item.uniforms is not None and len(item.uniforms) == num_tokens
        ids, probs = list(item.ids), []
        for uniform in item.uniforms:
            q = distribution(runner.table[runner._context(ids)], SamplingParams(item.temperature))
            probs.append(q)
            ids.append(int(draw_keyed(q[None], torch.tensor([uniform], dtype=torch.float64))))
        cache = item.seq_cache
        runner.forward([Row.chain(cache, ids[cache.length : -1])])
        self.tokens, self.probs = torch.tensor(ids[-num_tokens:]), torch.stack(probs)


@pytest.mark.parametrize("rule", ["coupled", "token"])
def test_a_device_loop_draws_as_many_numbers_as_single_steps_and_keyed_ones_give_the_same_tokens(rule: str) -> None:
    """The random numbers of a sequence depend neither on the way it drafts nor on the draft length of its neighbour."""
    tokens, states = [], []
    for runner in (TableRunner(5, seed=2), DeviceRunner(5, seed=2)):
        seqs = [sequence([1, 2, 3], 60, SamplingParams(1.0, seed=1), rule=rule) for _ in range(2)]
        trees = DraftModel(runner, 5).propose(seqs, [2, 4])
        states.append([seq.rng.generator.get_state().tolist() for seq in seqs])
        tokens.append([tree.tokens.tolist() for tree in trees])
        assert [len(tree) for tree in trees] == [2, 4]
    assert states[0] == states[1]
    assert rule == "token" or tokens[0] == tokens[1]


def test_a_failed_pass_leaves_no_draft_token_behind() -> None:
    class Failing(TableRunner):
        passes = 0

        def forward(self, rows: list[Row], *, last_only: bool = False) -> ModelOutput:
            self.passes += 1
            if self.passes == 3:
                raise RuntimeError("out of luck")
            return super().forward(rows, last_only=last_only)

    drafter, seq = DraftModel(Failing(5, seed=2), 5), sequence([1, 2, 3], 60)
    with pytest.raises(RuntimeError, match="out of luck"):
        drafter.propose([seq], [4])
    seq.ids.append(4)
    expected = DraftModel(TableRunner(5, seed=2), 5).propose([seq], [4])[0].tokens.tolist()
    assert drafter.propose([seq], [4])[0].tokens.tolist() == expected
    assert drafter.propose([seq], [4])[0].tokens.tolist() == expected, "a draft that was never verified is dropped"


def test_it_is_built_from_a_model_of_the_same_vocabulary(tiny_model: Any, tiny_folder: Path, tmp_path: Path) -> None:
    target = HuggingFaceRunner(tiny_model, "tiny")
    drafter = build_drafter("draft_model", context_for(target, str(tiny_folder)))
    assert drafter.draft_runner is not None and drafter.draft_runner.info.name == "draft"
    with pytest.raises(PairError, match="vocabularies differ"):
        build_drafter("draft_model", context_for(target, str(write_tiny_model(tmp_path, swapped=40))))
    with pytest.raises(OptionError, match="needs a draft model"):
        build_drafter("draft_model", context_for(target))


def test_a_wrapped_runner_drafts_in_place_of_the_first() -> None:
    drafter = DraftModel(TableRunner(5, seed=2), 7)
    twin = drafter.with_runner(lambda runner: TableRunner(5, seed=3))
    assert twin.draft_runner is not drafter.draft_runner
    seq = sequence([1, 2, 3], 60, SamplingParams(1.0, seed=0))
    tree = twin.propose([seq], [2])[0]
    assert tree.probs is not None and tree.probs.shape == (2, 7) and not drafter._seq_caches


@pytest.mark.slow
def test_a_draft_model_with_a_shorter_context_stops_where_it_can_read_no_more() -> None:
    """The target goes on; a position past its rope would be read from anywhere."""
    target = NativeRunner.of_model(tiny("llama", max_position_embeddings=128), "target", kv_cache_tokens=512)
    draft = NativeRunner.of_model(tiny("llama", max_position_embeddings=32), "draft", kv_cache_tokens=512)
    drafter = DraftModel(draft, target.info.vocab_size)
    stats = assert_unchanged(target, drafter, [[5, 7, 9] * 8], 40, 3)
    assert 0 < stats.drafted <= 32 - 24 + 3
    seqs = [sequence([1] * length, 9) for length in (30, 31, 32, 40)]
    assert [len(tree) for tree in drafter.propose(seqs, [3] * 4)] == [2, 1, 0, 0]
