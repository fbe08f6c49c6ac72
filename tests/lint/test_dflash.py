"""Block drafters: drafts along a text against the plain reference, and planted mistakes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.heads.checkpoint import Checkpoint, read_checkpoint
from paceline.heads.dflash_files import config_of
from paceline.heads.registry import save_head
from paceline.lint.dflash import draft, readings
from paceline.lint.run import lint
from paceline.lint.target import StatedText, TargetFacts, stated
from paceline.train.teacher import Teacher
from tests.heads.dflash_reference import block_logits, block_states, drafted, random_head, tensors_of
from tests.lint.tiny_heads import letters, lopsided_llama, pieces, training_text, write_dflash

FACTS = TargetFacts(3, 32, 32, 259, 10000.0, (256, 257, 258))
VARIANTS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "shifted": {"sample_from_anchor": True},
    "causal": {"causal": True},
    "convolution": {"conv_kernel_size": 2, "conv_group_size": 8},
}
CHAINS: dict[str, dict[str, Any]] = {
    "selector": {"selector_rank": 6, "selector_top_k": 4},
    "markov": {"markov_rank": 6},
    "gated": {"markov_rank": 6, "markov_kind": "gated"},
}


def random_text(head: Any) -> StatedText:
    """Two sequences of random tokens with random states."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 48, (2, 14), generator=generator)
    states = tuple(torch.randn(2, 14, 32, generator=generator) for _ in range(4))
    teacher: Any = SimpleNamespace(
        hidden_size=32, num_layers=3, vocab_size=48, embed=head.target.embed, logits=head.target.lm_head
    )
    lengths = torch.tensor([14, 11])
    return StatedText(teacher, tokens, lengths, torch.tensor([3, 4]), states[:3], states[3], states[3], tokens)


@pytest.mark.parametrize("variant", [*VARIANTS, *CHAINS])
def test_drafts_along_a_text_are_those_of_the_plain_reference(variant: str) -> None:
    head = random_head(**{**VARIANTS, **CHAINS}[variant])
    text = random_text(head)
    anchors = text.anchors(4)
    with torch.no_grad():
        drafts = draft(head, text, anchors, 4).tokens
    tensors = tensors_of(head)
    rows = zip(anchors.row.tolist(), anchors.column.tolist(), drafts.tolist(), strict=True)
    for row, column, tokens in rows:
        features, anchor = text.features((1, 3))[row, :column], int(text.tokens[row, column])
        expected = drafted(tensors, head.config, features, anchor)
        if variant in CHAINS:  # the reference follows its own tokens, the linter the text's
            expected = expected[:1]
        assert tokens[: len(expected)] == expected[:4]
        assert tokens[len(expected) :] == [-1] * (4 - len(expected)) or variant in CHAINS


@pytest.mark.slow
def test_later_drafts_follow_the_tokens_of_the_text() -> None:
    head = random_head(markov_rank=6)
    text = random_text(head)
    anchors = text.anchors(3)
    with torch.no_grad():
        drafts = draft(head, text, anchors, 3)
    tensors, labels = tensors_of(head), text.labels(anchors, 3)
    for index, (row, column) in enumerate(zip(anchors.row.tolist(), anchors.column.tolist(), strict=True)):
        features = text.features((1, 3))[row, :column]
        states = block_states(tensors, head.config, features, int(text.tokens[row, column]))
        logits = block_logits(tensors, head.config, states)
        for place, token in enumerate(drafts.tokens[index].tolist()):
            previous = int(text.tokens[row, column + place])
            bias = tensors["markov_head.markov_w2.weight"] @ tensors["markov_head.markov_w1.weight"][previous]
            assert token == int((logits[1 + place] + bias).argmax())
            expected = (logits[1 + place] + bias).softmax(dim=-1)[labels[index, place]]
            assert float(drafts.probs[index, place]) == pytest.approx(float(expected), rel=1e-4)


# --- planted mistakes -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text() -> StatedText:
    return stated(Teacher(lopsided_llama(strength=1.0)), pieces(letters(2, seed=2)))


@pytest.fixture(scope="module")
def training(text: StatedText) -> StatedText:
    return training_text(text.teacher)


@pytest.fixture(scope="module")
def layouts(training: StatedText, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    folder: Path = tmp_path_factory.mktemp("dflash")
    return {
        layout: read_checkpoint(write_dflash(folder / layout, training, layout=layout))
        for layout in ("original", "speculators")
    }


def edited(files: Checkpoint, **changes: Any) -> Checkpoint:
    """Keys in every section that has them."""
    sections = {
        name: {**value, **{key: changes[key] for key in changes if key in value}}
        for name, value in files.config.items()
        if isinstance(value, dict)
    }
    own = {key: value for key, value in changes.items() if key in files.config}
    return replace(files, config={**files.config, **sections, **own})


MISTAKES: dict[str, tuple[dict[str, Any], str | None]] = {
    "correct": ({}, None),
    "layers": ({"target_layer_ids": [1], "aux_hidden_state_layer_ids": [2]}, "layers one lower"),
    "mask": ({"mask_token_id": 199}, "mask token 200"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "mistake"), [("original", "correct"), ("original", "mask"), ("speculators", "layers")]
)
def test_a_wrong_line_of_a_block_drafter_is_named(
    text: StatedText, layouts: dict[str, Checkpoint], layout: str, mistake: str
) -> None:
    files = layouts[layout]
    changes, named = MISTAKES[mistake]
    result = lint(edited(files, **changes), text, FACTS)
    assert [change.tried.reading.name for change in result.changes] == ([named] if named else [])
    assert result.files.config == files.config
    if named:
        assert result.changes[0].tried.reading.change.startswith("config.json: ")
        assert result.changes[0].probability < 1e-3


@pytest.mark.parametrize("layout", ["original", "speculators"])
def test_every_trap_of_a_block_is_a_reading(layouts: dict[str, Checkpoint], layout: str) -> None:
    """Rows shifted or in place, causal or not, mask token, block size, scale, layers, rotary layout and base, norms."""
    files = layouts[layout]
    names = " ".join(reading.name for reading in readings(files, FACTS))
    for trap in (
        "rows shifted by one", "causal on", "mask token 199", "mask token 256", "block size 8", "embedding times",
        "layers one higher", "layers one lower", "rope interleaved", "rope theta", "norms around zero",
    ):  # fmt: skip
        assert trap in names
    shifted = next(reading for reading in readings(files, FACTS) if reading.name == "rows shifted by one").edit(files)
    assert config_of(shifted).sample_from_anchor and config_of(shifted).max_draft_tokens == 4
    causal = next(reading for reading in readings(files, FACTS) if reading.name == "causal on").edit(files)
    assert config_of(causal).is_causal and not config_of(files).is_causal


def test_convolutions_exchanged_norms_and_single_layers_are_readings(tmp_path: Path) -> None:
    """Twice the same exchange is none, and a moved layer stays between its neighbours."""
    save_head(random_head(conv_kernel_size=2, conv_group_size=8), tmp_path)
    files = read_checkpoint(tmp_path)
    found = {reading.name: reading for reading in readings(files, FACTS)}
    for name in ("convolution taps reversed", "convolution sides reversed", "hidden_norm and norm exchanged"):
        once = found[name].edit(files)
        twice = found[name].edit(once)
        assert any(not torch.equal(once.tensors[key], value) for key, value in files.tensors.items()), name
        assert all(torch.equal(twice.tensors[key], value) for key, value in files.tensors.items()), name
    moved = config_of(found["layer 1 of 2 one higher"].edit(files)).feature_layers
    assert moved == (2, 3) and config_of(files).feature_layers == (1, 3)
    assert "layer 1 of 2 three higher" not in found
