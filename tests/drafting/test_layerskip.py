"""Self-speculation: the lower layers on the target's own cache, which is restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import SpeculativeDecoder
from paceline.core.draft_tree import DraftTree
from paceline.core.protocols import Adapter
from paceline.core.types import ModelOutput, Row, SequenceCache
from paceline.drafting.layerskip import LayerSkip
from paceline.drafting.registry import build_drafter
from paceline.errors import OptionError, PairError
from paceline.heads.exit_adapter import ExitAdapter, ExitConfig
from paceline.heads.registry import save_head
from paceline.runners.huggingface import HuggingFaceRunner
from paceline.runners.table import TableRunner
from tests.support.drafter_exactness import (
    assert_unchanged,
    check_greedy,
    check_sampled,
    context_for,
    greedy_run,
    sequences,
    toy,
)
from tests.support.tiny import byte_tokenizer, tiny_llama

PROMPTS = [[5, 7, 9, 11, 200, 31], [250], [3, 3, 8, 3, 3, 8, 3, 3], list(range(40))]


@pytest.fixture(scope="module")
def target(tiny_model: Any) -> HuggingFaceRunner:
    return HuggingFaceRunner(tiny_model, "tiny")


def adapter_for(hidden_size: int, layer: int = 1) -> ExitAdapter:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        adapter = ExitAdapter(ExitConfig(layer, hidden_size, 4))
        torch.nn.init.normal_(adapter.up.weight)
    return adapter.requires_grad_(False)


def test_an_exit_before_layers_that_do_nothing_is_always_right() -> None:
    """Every draft token is accepted only if the exit reads the right cache at the right positions."""
    model = tiny_llama(3, num_hidden_layers=4)
    for layer in model.model.layers[2:]:
        for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
            torch.nn.init.zeros_(part.weight)
    target = HuggingFaceRunner(model, "tiny")
    result = assert_unchanged(target, LayerSkip(target, 2), PROMPTS, 31, 4)
    assert result.acceptance_by_position == [1.0] * 4


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [False, True])
def test_greedy_outputs_of_a_model_are_unchanged(adapted: bool, target: HuggingFaceRunner) -> None:
    result = assert_unchanged(target, LayerSkip(target, 1, adapter_for(32) if adapted else None), PROMPTS, 24, 3)
    assert result.drafted > 0


@pytest.mark.slow
def test_greedy_outputs_of_the_toy_are_unchanged() -> None:
    target = toy()
    check_greedy(LayerSkip(target, 2))
    check_greedy(LayerSkip(target, 1, adapter_for(4)))


@pytest.mark.slow
def test_sampled_outputs_are_exact() -> None:
    target = toy()
    check_sampled(LayerSkip(target, 1, adapter_for(4)), target)


@pytest.mark.slow
def test_a_users_model_gives_its_hidden_states_as_before() -> None:
    """transformers records them with hooks, which the exit must not leave in layers of the user's model."""
    model, ids = tiny_llama(), torch.tensor([PROMPTS[0]])
    with SpeculativeDecoder(model, tokenizer=byte_tokenizer(), method="layerskip", num_draft_tokens=3) as decoder:
        assert decoder.generate("one two one two", max_new_tokens=6).stats.drafted > 0
    states = model(ids, output_hidden_states=True).hidden_states
    expected = tiny_llama()(ids, output_hidden_states=True).hidden_states
    assert len(states) == len(expected)
    assert all(torch.equal(mine, other) for mine, other in zip(states, expected))


def test_sequence_caches_are_restored(target: HuggingFaceRunner) -> None:
    drafter = LayerSkip(target, 1)
    seqs = greedy_run(target, drafter, PROMPTS[:2], 4, 2)
    for seq in seqs:
        seq.seq_cache = target.new_cache()
        target.forward([Row.chain(seq.seq_cache, seq.ids[:-1])])
        target.commit(seq.seq_cache, list(range(len(seq.ids) - 1)))
        seq.finish_reason = None
    before = [seq.seq_cache.length for seq in seqs if seq.seq_cache is not None]
    trees = drafter.propose(seqs, [3, 0])
    assert [len(tree) for tree in trees] == [3, 0]
    assert [seq.seq_cache.length for seq in seqs if seq.seq_cache is not None] == before
    for seq in seqs:
        assert seq.seq_cache is not None
        target.free(seq.seq_cache)


def test_a_runner_may_continue_from_what_the_exit_has_computed() -> None:
    lengths: list[int] = []

    class Resumable(TableRunner):
        def early_exit(self, layer: int, adapter: Adapter | None = None) -> TableRunner:
            short = Resumable(self.info.vocab_size, self.order, self.seed, blur=0.3)
            return short

        def rollback_draft(self, seq_cache: SequenceCache, length: int) -> None:
            lengths.append(length)
            self.truncate(seq_cache, length)

    target = Resumable(4, 2, 5)
    assert_unchanged(target, LayerSkip(target, 1), [[0, 1, 2]], 12, 2)
    assert lengths


@pytest.mark.slow
def test_an_adapter_changes_the_draft_tokens(target: HuggingFaceRunner) -> None:
    def draft_tokens(drafter: LayerSkip) -> list[DraftTree]:
        drafts: list[DraftTree] = []
        propose = drafter.propose
        drafter.propose = lambda *call: drafts.extend(trees := propose(*call)) or trees  # type: ignore[method-assign]
        greedy_run(target, drafter, PROMPTS[:1], 6, 3)
        return drafts

    bare, adapted = draft_tokens(LayerSkip(target, 1)), draft_tokens(LayerSkip(target, 1, adapter_for(32)))
    assert [tree.tokens.tolist() for tree in bare] != [tree.tokens.tolist() for tree in adapted]


def test_what_does_not_fit_is_refused(target: HuggingFaceRunner) -> None:
    with pytest.raises(PairError, match="states of 8 values; tiny has 32"):
        LayerSkip(target, None, adapter_for(8))
    with pytest.raises(PairError, match="after layer 1, not 2"):
        LayerSkip(target, 2, adapter_for(32))
    with pytest.raises(OptionError, match="layer 1 to 2"):
        LayerSkip(target, 3)
    assert LayerSkip(target).layer == 1
    assert LayerSkip(target, None, adapter_for(32, layer=2)).layer == 2


@pytest.mark.slow
def test_the_adapter_is_the_draft_model_or_an_option(target: HuggingFaceRunner, tmp_path: Path) -> None:
    save_head(adapter_for(32), tmp_path)
    contexts = (context_for(target, tmp_path), context_for(target, adapter=str(tmp_path)), context_for(target, layer=2))
    for context, layer in zip(contexts, (1, 1, 2)):
        drafter = build_drafter("layerskip", context)
        assert isinstance(drafter, LayerSkip) and drafter.layer == layer
        assert_unchanged(target, drafter, PROMPTS[:1], 16, 3)


def test_a_failed_pass_leaves_the_sequence_cache_as_it_was() -> None:
    """The pass of the second draft token fails, after the first one was stored."""

    class Failing(TableRunner):
        passes = 0

        def forward(self, rows: list[Row], *, last_only: bool = False) -> ModelOutput:
            self.passes += 1
            if self.passes == 2:
                raise RuntimeError("out of luck")
            return super().forward(rows, last_only=last_only)

    drafter = LayerSkip(toy(), 1).with_runner(lambda runner: Failing(4, 2, 5))
    (seq,) = sequences([[0, 1, 2]], 10)
    seq.seq_cache = toy().new_cache()
    toy().forward([Row.chain(seq.seq_cache, [0, 1])])
    toy().commit(seq.seq_cache, [0, 1])
    with pytest.raises(RuntimeError, match="out of luck"):
        drafter.propose([seq], [3])
    assert seq.seq_cache.length == 2 and seq.seq_cache.tokens == [0, 1]  # type: ignore[attr-defined]
    assert len(drafter.propose([seq], [3])[0]) == 3
