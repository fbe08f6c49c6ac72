"""Which directories are read as models that continue text, as a user meets it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import SpeculativeDecoder
from paceline.cli import main
from paceline.errors import ModelError
from paceline.runners.huggingface_class import model_class
from tests.support.tiny import byte_tokenizer, tiny_llama


def written(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def test_an_encoder_decoder_model_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=259, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    folder = written(T5ForConditionalGeneration(config), tmp_path / "t5")
    assert main(["generate", "hello", "--model", str(folder), "--max-new-tokens", "4"]) != 0
    said = capsys.readouterr().err.strip()
    assert "encoder-decoder" in said and "Traceback" not in said


def test_a_model_of_another_kind_is_refused_by_its_type(tmp_path: Path) -> None:
    from transformers import ViTConfig

    ViTConfig(hidden_size=16).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="vit"):
        model_class(tmp_path, "that model")


@pytest.mark.slow
def test_a_model_that_could_read_images_continues_text(tmp_path: Path) -> None:
    from transformers import LlavaConfig, LlavaForConditionalGeneration
    from transformers.models.clip import CLIPVisionConfig

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = CLIPVisionConfig(image_size=8, patch_size=4, projection_dim=16, **sizes)
    config = LlavaConfig(vision_config=vision, text_config=tiny_llama().config, image_token_id=250)
    with torch.random.fork_rng():
        model = LlavaForConditionalGeneration(config).eval()
    prompt = [5, 7, 8, 5, 7, 8, 5]
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    with SpeculativeDecoder(str(written(model, tmp_path / "llava")), method="ngram", num_draft_tokens=3) as decoder:
        result = decoder.generate(prompt, max_new_tokens=12, ignore_eos=True)
    assert result.token_ids == expected[0, len(prompt) :].tolist()


def test_what_transformers_cannot_build_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The config of dbrx lacks a setting that its own model reads in this release; others lack a package."""
    from safetensors.torch import save_file
    from transformers import DbrxConfig

    DbrxConfig(d_model=16, n_heads=2, n_layers=1, vocab_size=259).save_pretrained(tmp_path)
    save_file({"lm_head.weight": torch.zeros(259, 16)}, tmp_path / "model.safetensors", {"format": "pt"})
    byte_tokenizer().save_pretrained(tmp_path)
    assert main(["generate", "hello", "--model", str(tmp_path), "--max-new-tokens", "4"]) != 0
    said = capsys.readouterr().err.strip()
    assert "Traceback" not in said and "cannot be loaded" in said
