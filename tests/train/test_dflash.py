"""Training of DFlash heads: what the command chooses by itself, resuming, and the dtype on a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import OptionError
from paceline.heads.dflash import DFlashHead
from paceline.heads.registry import load_head
from paceline.train.anchor_blocks import AnchorBlocks, block_states, possible_anchors, random_order
from paceline.train.corpus import BatchSampler, Corpus, CorpusSplit, split
from paceline.train.dflash import DFlashOptions, DFlashTask, build, unused_token
from paceline.train.dflash2 import DFlash2Options
from paceline.train.loop import LoopOptions, TrainingLoop
from paceline.train.task import TrainingTarget
from paceline.train.teacher import Teacher
from tests.support.tiny import byte_tokenizer

SMALL: dict[str, Any] = {"draft_vocab_size": 40, "num_layers": 1, "block_size": 4, "anchors": 8}


@pytest.fixture(scope="module")
def target(target_model: Any) -> TrainingTarget:
    return TrainingTarget("tiny", target_model, byte_tokenizer(), Teacher(target_model))


@pytest.fixture(scope="module")
def parts(sequences_folder: Path) -> CorpusSplit:
    return split(Corpus.load(sequences_folder / "sequences-000.safetensors").pick(torch.arange(16).numpy()), 0)


def started(target: TrainingTarget, parts: CorpusSplit) -> DFlashTask:
    torch.manual_seed(3)
    task = build(target, parts, DFlash2Options(**SMALL, selector_rank=4))
    task.start(next(BatchSampler(parts.train, 512, 0).once()))
    return task


def test_the_mask_token_occurs_in_no_text(target: TrainingTarget, parts: CorpusSplit) -> None:
    token = unused_token(target, parts)
    assert token not in parts.train.tokens and token in target.tokenizer.added_tokens_decoder
    assert build(target, parts, DFlashOptions(**SMALL)).head.config.mask_token_id == token
    assert build(target, parts, DFlashOptions(**SMALL, mask_token_id=77)).head.config.mask_token_id == 77


def test_a_head_starts_with_convolutions_that_change_nothing(target: TrainingTarget, parts: CorpusSplit) -> None:
    layer: Any = started(target, parts).head.layers[0]
    states = torch.randn(2, 4, target.teacher.hidden_size)
    assert torch.equal(layer.attention_conv.before(states).states, states)


@pytest.mark.slow
def test_a_training_that_was_cut_off_goes_on_with_the_same_anchors(
    target: TrainingTarget, parts: CorpusSplit, tmp_path: Path
) -> None:
    def loop(folder: str, task: DFlashTask) -> TrainingLoop:
        options = LoopOptions(5, batch_tokens=512, save_every=2, eval_every=100, learning_rate=0.01)
        return TrainingLoop(task, parts, tmp_path / folder, options)

    whole = loop("whole", started(target, parts)).run().losses
    task = started(target, parts)
    cut, losses = loop("cut", task), task.loss
    calls: list[int] = []

    def failing(batch: Any) -> torch.Tensor:
        calls.append(batch.number)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return losses(batch)

    task.loss = failing  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        cut.run()
    assert loop("cut", started(target, parts)).run(resume=True).losses == whole and calls == [0, 1, 2, 3]


def test_the_written_head_takes_the_targets_states_as_they_are(
    target: TrainingTarget, parts: CorpusSplit, tmp_path: Path
) -> None:
    """The scale of the states is part of the file, and the module keeps training with it outside."""
    task = started(target, parts)
    assert float(task.module.scale.max()) != pytest.approx(1.0)
    trained = task.head.fc.weight.detach().clone()
    task.export(tmp_path)
    head = load_head(tmp_path, DFlashHead)
    expected = (trained * task.module.scale).bfloat16().float()
    assert torch.equal(head.fc.weight, expected)
    assert torch.equal(task.head.fc.weight, trained)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_under_autocast_the_rows_of_blocks_are_half_precision(target: TrainingTarget, parts: CorpusSplit) -> None:
    task = started(target, parts)
    batch = next(BatchSampler(parts.train, 512, 0).once())
    features = target.teacher.states(batch.tokens).features(task.head.config.feature_layers)
    blocks = AnchorBlocks.of(random_order(batch), possible_anchors(batch), 8, 4)
    with torch.no_grad():
        exact = block_states(task.head, features, batch.tokens, blocks)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rounded = block_states(task.head, features, batch.tokens, blocks)
    assert exact.dtype == torch.float32 and rounded.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(exact, rounded.float(), dim=-1).min() > 0.98


def test_a_head_of_another_model_is_not_continued(target: TrainingTarget, parts: CorpusSplit, tmp_path: Path) -> None:
    from paceline.heads.registry import save_head
    from tests.heads.dflash_reference import random_head

    save_head(random_head(), tmp_path)
    task = started(target, parts)
    with pytest.raises(OptionError, match="a model of other sizes"):
        task.start_from(tmp_path, next(BatchSampler(parts.train, 512, 0).once()))


@pytest.mark.slow
def test_a_continued_head_may_have_longer_blocks(target: TrainingTarget, parts: CorpusSplit, tmp_path: Path) -> None:
    """A head of blocks of 4 goes on with blocks of 6, and without a word with its own; the weights are the same."""
    first = started(target, parts)
    first.export(tmp_path)
    sample = next(BatchSampler(parts.train, 512, 0).once())
    for asked, expected in ((6, 6), (0, 4)):
        task = build(target, parts, DFlash2Options(**{**SMALL, "block_size": asked}, selector_rank=4))
        task.start_from(tmp_path, sample)
        assert task.head.config.block_size == expected
        assert task.draft_tokens(sample).shape[-1] == expected - 1
        layer = task.head.layers[0].mlp.down_proj.weight
        torch.testing.assert_close(layer, first.head.layers[0].mlp.down_proj.weight, rtol=1e-2, atol=1e-2)
        assert task.loss(sample).isfinite()


def test_some_steps_read_states_of_the_target_in_int4(target: TrainingTarget, parts: CorpusSplit) -> None:
    task = build(target, parts, DFlash2Options(**SMALL, selector_rank=4, int4_share=0.5))
    sample = next(BatchSampler(parts.train, 512, 0).once())
    chosen = [task.teacher_of(replace(sample, number=number)) for number in range(40)]
    assert 8 < sum(teacher is not task.teacher for teacher in chosen) < 32
    rounded = next(teacher for teacher in chosen if teacher is not task.teacher)
    exact, near = (teacher.states(sample.tokens).final for teacher in (task.teacher, rounded))
    assert not torch.equal(exact, near) and torch.nn.functional.cosine_similarity(exact, near, dim=-1).mean() > 0.9
    assert chosen == [task.teacher_of(replace(sample, number=number)) for number in range(40)]


def test_shares_outside_their_range_are_refused() -> None:
    with pytest.raises(OptionError, match="--int4-share lie between 0 and 1"):
        DFlashOptions(int4_share=1.5)
    with pytest.raises(OptionError, match="--block-size is 2 or more"):
        DFlashOptions(block_size=1)
