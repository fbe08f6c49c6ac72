"""An architecture is one file: registered, it loads and runs like every other."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.types import Row
from paceline.models import llama, registry
from paceline.models.checkpoint import ModelCheckpoint
from paceline.models.config import ArchConfig
from paceline.models.decoder import DecoderModel
from paceline.runners.native import NativeRunner, is_native, read_config
from tests.runners.native.fused import eager_graphs
from tests.runners.native.models import tiny


class Toy:
    """Llama whose embedding is scaled by the root of its size."""

    def unsupported(self, config: Any) -> str | None:
        return llama.unsupported(config)

    def config_from_hf(self, config: Any) -> ArchConfig:
        return llama.config_from_hf(config)

    def load(self, checkpoint: ModelCheckpoint, config: ArchConfig) -> DecoderModel:
        model, scale = llama.load(checkpoint, config), math.sqrt(config.hidden_size)
        parts = (model.config, model.embedding, model.layers, model.final_norm, model.lm_head)
        return DecoderModel(*parts, scale_embedding=lambda rows: rows * scale)


@pytest.fixture
def toy_folder(tmp_path: Path) -> Any:
    tiny("llama").save_pretrained(tmp_path)
    document = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(document | {"model_type": "toy", "architectures": ["Toy"]}))
    registry.register("toy", Toy())
    yield tmp_path
    registry.unregister("toy")


def test_a_registered_architecture_loads_although_transformers_does_not_have_it(toy_folder: Path) -> None:
    assert "toy" in registry.model_types() and is_native(read_config(toy_folder, "toy"))
    runner = NativeRunner.load(toy_folder, "toy", "float32", "cpu", 128)
    reference = tiny("llama")
    with torch.no_grad():
        embedded = reference.model.embed_tokens(torch.tensor([[1, 2, 3]])) * math.sqrt(48)
        expected = reference(inputs_embeds=embedded).logits[0]
    logits = runner.forward([Row.chain(runner.new_cache(), [1, 2, 3])]).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_fused_passes_scale_the_embedding_too(toy_folder: Path) -> None:
    from paceline.core.types import DraftInput

    runner = NativeRunner.load(toy_folder, "toy", "float32", "cpu", 256)
    prompt, seq_cache = [5, 6, 7], runner.new_cache()
    output = runner.forward([Row.chain(seq_cache, prompt)], last_only=True)
    steps = []
    for _ in range(3):
        steps.append(int(output.logits[0].argmax()))
        output = runner.forward([Row.chain(seq_cache, steps[-1:])])
    runner.decode_graphs = eager_graphs(runner)
    drafted = runner.draft([DraftInput(runner.new_cache(), prompt)], 3)
    assert drafted is not None and drafted.tokens[0].tolist() == steps


def test_an_unknown_model_type_has_no_architecture() -> None:
    assert registry.get("toy") is None
