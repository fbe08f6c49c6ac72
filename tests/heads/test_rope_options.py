"""The rope of a head out of the forms that configs have for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import WeightsError
from paceline.heads.attention import Rotary, RotarySettings
from paceline.heads.dflash import DFlashHead
from paceline.heads.eagle3 import Eagle3Config, Eagle3Head
from paceline.heads.registry import load_head, save_head
from paceline.heads.rope_options import rope_options
from tests.heads import dflash_checkpoints

PLAIN = {"rope_type": "default", "rope_theta": 5e5}
SLOW = {"rope_type": "default", "rope_theta": 1e6}
YARN = {"rope_type": "yarn", "rope_theta": 1e7, "factor": 4.0, "original_max_position_embeddings": 1024}
BY_LAYER = {"full_attention": SLOW, "sliding_attention": PLAIN}
FOLDER = Path("head")


@pytest.mark.parametrize(
    "config, theta, scaling",
    [
        ({}, 1e4, None),
        ({"rope_theta": 2e4, "rope_scaling": None}, 2e4, None),
        ({"rope_parameters": PLAIN}, 5e5, None),
        ({"rope_parameters": {"full_attention": PLAIN, "sliding_attention": dict(PLAIN)}}, 5e5, None),
        ({"rope_parameters": BY_LAYER, "layer_types": ["full_attention"]}, 1e6, None),
        ({"rope_parameters": {"full_attention": YARN, "sliding_attention": None}}, 1e7, YARN),
        ({"rope_parameters": YARN}, 1e7, YARN),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 1e4, {"type": "linear", "factor": 2.0}),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}, "rope_theta": 1e6}, 1e6, None),
        ({"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.25}}, 5e5, None),
    ],
)
def test_every_form_of_a_rope_is_read(config: dict[str, Any], theta: float, scaling: dict[str, Any] | None) -> None:
    options = rope_options(config, FOLDER)
    assert options == {"rope_theta": theta, "rope_scaling": scaling}
    assert Rotary(RotarySettings(16, theta, 4096, scaling)).frequencies.shape == (8,)


@pytest.mark.parametrize(
    "config, reason",
    [
        ({"rope_parameters": BY_LAYER}, "rope_parameters"),
        ({"rope_parameters": {**YARN, "partial_rotary_factor": 0.25}}, "partial_rotary_factor of 0.25"),
        ({"rope_parameters": YARN, "partial_rotary_factor": 0.5}, "partial_rotary_factor of 0.5"),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "rope_type is 'su'"),
    ],
)
def test_a_rope_that_no_head_has_is_refused_by_its_key(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(WeightsError, match=reason):
        rope_options(config, FOLDER)


def test_the_files_of_both_kinds_of_layers_are_read_so(tmp_path: Path) -> None:
    save_head(Eagle3Head(Eagle3Config(16, 24, 4, 2, 4, 20, 12, 16)), tmp_path / "eagle", layout="speculators")
    dflash_checkpoints.write(tmp_path / "dflash", "speculators-dflash2")
    for name, head in (("eagle", Eagle3Head), ("dflash", DFlashHead)):
        file = tmp_path / name / "config.json"
        config = json.loads(file.read_text())
        layer = config["transformer_layer_config"]
        for key in ("rope_theta", "rope_scaling"):
            layer.pop(key, None)
        layer["rope_parameters"] = {"full_attention": SLOW, "sliding_attention": dict(SLOW)}
        file.write_text(json.dumps(config))
        assert load_head(tmp_path / name, head).config.rope_theta == 1e6


def test_a_partial_rotary_factor_changes_nothing_in_the_layers_of_trainers() -> None:
    """The reason why it is not followed: Llama's and Qwen3's layers rotate whole heads."""
    from transformers import LlamaConfig, Qwen3Config
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    rope = {**PLAIN, "partial_rotary_factor": 0.25}
    for config, rotary in ((LlamaConfig, LlamaRotaryEmbedding), (Qwen3Config, Qwen3RotaryEmbedding)):
        assert rotary(config(head_dim=16, rope_parameters=rope)).inv_freq.shape == (8,)
