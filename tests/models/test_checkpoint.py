"""Tensors of a checkpoint are all there, of the right shape, and all used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.core.types import Row
from paceline.errors import WeightsError
from paceline.runners.native import NativeRunner
from tests.runners.native.models import tiny


def rewrite(folder: Path, added: dict[str, torch.Tensor]) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | added, file, metadata={"format": "pt"})


def load(folder: Path) -> NativeRunner:
    return NativeRunner.load(folder, "tiny", "float32", "cpu", 128)


def test_a_tensor_that_no_layer_uses_is_named(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    rewrite(tmp_path, {"model.layers.0.self_attn.o_proj.bias": torch.zeros(48)})
    with pytest.raises(WeightsError, match=r"model\.layers\.0\.self_attn\.o_proj\.bias"):
        load(tmp_path)


def test_rotary_buffers_of_old_checkpoints_are_harmless(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    rewrite(tmp_path, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)})
    assert load(tmp_path).info.num_layers == 2


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    rewrite(tmp_path, {"model.norm.weight": torch.ones(40)})
    with pytest.raises(WeightsError, match=r"model\.norm\.weight is \(40,\); the config says \(48,\)"):
        load(tmp_path)


@pytest.mark.parametrize("same", [True, False])
def test_a_head_that_is_stored_beside_the_embedding_it_is_tied_to_is_used(
    tmp_path: Path, same: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As transformers does: tied where the two are equal, each as it is stored where they are not."""
    model = tiny("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    head = model.model.embed_tokens.weight.detach().clone()
    rewrite(tmp_path, {"lm_head.weight": head if same else head.flip(0)})
    runner = load(tmp_path)
    assert ["lm_head.weight" in line for line in caplog.messages if "ties" in line] == ([] if same else [True])
    with torch.no_grad():
        expected = type(model).from_pretrained(tmp_path)(torch.tensor([[1, 2]])).logits[0]
    torch.testing.assert_close(
        runner.forward([Row.chain(runner.new_cache(), [1, 2])]).logits, expected, rtol=1e-4, atol=1e-4
    )
