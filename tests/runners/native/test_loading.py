"""A config that an earlier start read is the same config, and is never used for other files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from paceline.errors import WeightsError
from paceline.hub.gguf_index import StoredTensor, write_index
from paceline.hub.resolved_config import ResolvedConfig
from paceline.models import llama, registry
from paceline.quantization import gguf
from paceline.quantization import registry as formats
from paceline.runners.native import read_config, stored_dtype
from paceline.runners.native.loading import comparable, eos_token_ids_in
from tests.support.families import Variant, tiny_family_config, variants

SHIPPED = [name for name in registry.model_types() if name in CONFIG_MAPPING]
NATIVE = [variant for variant in variants() if variant.model_type in SHIPPED]
SCALED_ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


def folder_of(model_type: str, path: Path, **changes: Any) -> Path:
    """A directory with the config that transformers' own class has by default."""
    CONFIG_MAPPING[model_type]().save_pretrained(path)
    return changed(path, **changes)


def changed(folder: Path, **changes: Any) -> Path:
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(document | changes))
    return folder


def reading(config: Any) -> list[Any]:
    """Everything that loading a model reads from its config."""
    architecture = registry.get(config.model_type)
    assert architecture is not None
    if (reason := architecture.unsupported(config)) is not None:
        return [reason]
    sizes = comparable(architecture.config_from_hf(config))
    return [sizes, formats.quantization_of(config), formats.format_of(config), getattr(config, "eos_token_id", None)]


def check_second_reading(folder: Path) -> None:
    first, second = read_config(folder, "model"), read_config(folder, "model")
    assert not isinstance(first, ResolvedConfig) and reading(second) == reading(first)


@pytest.mark.parametrize("model_type", SHIPPED)
def test_the_second_reading_of_every_architecture_is_that_of_transformers(model_type: str, tmp_path: Path) -> None:
    check_second_reading(folder_of(model_type, tmp_path / "model"))


@pytest.mark.parametrize("variant", NATIVE, ids=lambda variant: variant.id)
def test_the_second_reading_of_every_variant_is_that_of_transformers(variant: Variant, tmp_path: Path) -> None:
    tiny_family_config(variant.model_type, variant.changes).save_pretrained(tmp_path / "model")
    check_second_reading(tmp_path / "model")


def test_the_weight_format_of_a_checkpoint_is_kept(tmp_path: Path) -> None:
    stored = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": None}
    folder = folder_of("qwen3", tmp_path / "model", quantization_config=stored)
    first, second = read_config(folder, "model"), read_config(folder, "model")
    assert isinstance(second, ResolvedConfig) and reading(second) == reading(first) and reading(second)[1] == stored


def test_the_second_reading_of_llama_does_without_transformers(tmp_path: Path) -> None:
    folder = folder_of("llama", tmp_path / "model")
    assert not isinstance(read_config(folder, "model"), ResolvedConfig)
    assert isinstance(read_config(folder, "model"), ResolvedConfig)


def test_most_architectures_are_kept(tmp_path: Path) -> None:
    kept = []
    for name in SHIPPED:
        folder = folder_of(name, tmp_path / name)
        read_config(folder, name)
        kept += [name] * isinstance(read_config(folder, name), ResolvedConfig)
    missing = set(SHIPPED) - set(kept)
    unsupported = {name for name in missing if registry.unsupported(CONFIG_MAPPING[name]()) is not None}
    assert missing - unsupported <= {"gpt_oss", "ministral3"}  # their ropes are scaled: transformers computes those


def test_a_changed_config_is_read_again(tmp_path: Path) -> None:
    folder = folder_of("llama", tmp_path / "model")
    read_config(folder, "model")
    changed(folder, rms_norm_eps=0.25, eos_token_id=[7, 8])
    again = read_config(folder, "model")
    assert not isinstance(again, ResolvedConfig) and (again.rms_norm_eps, again.eos_token_id) == (0.25, [7, 8])
    kept = read_config(folder, "model")
    assert isinstance(kept, ResolvedConfig) and reading(kept) == reading(again)


@pytest.mark.parametrize("changes", [{"rope_parameters": SCALED_ROPE}, {"auto_map": {"AutoConfig": "config.Mine"}}])
def test_what_needs_more_of_transformers_than_attributes_is_read_by_it(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = folder_of("llama", tmp_path / "model", **changes)
    first, second = read_config(folder, "model"), read_config(folder, "model")
    assert not isinstance(second, ResolvedConfig) and reading(first) == reading(second)


def test_an_architecture_from_elsewhere_gets_the_config_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of("llama", tmp_path / "model")
    read_config(folder, "model")
    own: Any = type("Own", (), {"unsupported": llama.unsupported, "config_from_hf": llama.config_from_hf})()
    monkeypatch.setitem(registry._architectures, "llama", own)
    assert not isinstance(read_config(folder, "model"), ResolvedConfig)


def test_a_damaged_entry_is_made_again(tmp_path: Path) -> None:
    folder = folder_of("llama", tmp_path / "model")
    read_config(folder, "model")
    (entry,) = (tmp_path / "cache" / "resolved").iterdir()
    for damage in ("", "[]", '{"values": 3, "configs": {}}', entry.read_text()[:-20]):
        entry.write_text(damage)
        assert not isinstance(read_config(folder, "model"), ResolvedConfig)
        assert isinstance(read_config(folder, "model"), ResolvedConfig)


def test_a_damaged_config_is_named_as_ever(tmp_path: Path) -> None:
    folder = folder_of("llama", tmp_path / "model")
    read_config(folder, "model")
    (folder / "config.json").write_text('{"model_type": "llama"')
    with pytest.raises(WeightsError, match=r"model has no readable config.json"):
        read_config(folder, "model")


def test_records_compare_by_their_tensors() -> None:
    sizes = [llama.config_from_hf(CONFIG_MAPPING["llama"](rope_theta=theta)) for theta in (1e4, 1e4, 2e4)]
    assert comparable(sizes[0]) == comparable(sizes[1]) != comparable(sizes[2])
    assert comparable((torch.ones(2), (torch.zeros(1), 3))) == [[1.0, 1.0], [[0.0], 3]]


def test_end_tokens_are_the_generation_configs_or_the_models_or_its_text_decoders(tmp_path: Path) -> None:
    text = {"eos_token_id": 257}
    folder = folder_of("qwen3_5", tmp_path / "model", text_config=text)
    for _ in range(2):  # as transformers reads it, and as an earlier start kept it
        assert eos_token_ids_in(folder, read_config(folder, "model")) == {257}
    changed(folder, eos_token_id=[5, 6])
    assert eos_token_ids_in(folder, read_config(folder, "model")) == {5, 6}
    (folder / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert eos_token_ids_in(folder, read_config(folder, "model")) == {9}


@pytest.mark.parametrize(
    "kinds, runs, dtype, unpacked",
    [
        (("F32", "Q4_K", "Q6_K"), True, "gguf", ""),
        (("F32", "IQ4_XS", "Q3_K", "Q2_K"), True, "gguf", ""),
        (("F32", "IQ3_S", "IQ2_XXS", "Q3_K", "Q6_K"), True, "gguf", "IQ2_XXS, IQ3_S"),
        (("F32", "IQ3_XXS"), True, "float32", "IQ3_XXS"),
        (("F32", "Q4_K"), False, "float32", "Q4_K"),
        (("F32", "BF16"), True, "float32", ""),
    ],
)
def test_blocks_of_a_gguf_file_that_are_unpacked_are_named(
    kinds: tuple[str, ...],
    runs: bool,
    dtype: str,
    unpacked: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also where others of the same file stay packed: these weights then take eight times the file's memory."""
    monkeypatch.setattr(gguf, "runs_on", lambda device: runs)
    file = tmp_path / "model.gguf"
    file.touch()
    write_index(tmp_path, [StoredTensor(kind, kind, kind, (256, 256), str(file), 0, 0) for kind in kinds])
    assert stored_dtype(tmp_path, None, "cpu") == dtype
    assert [f"blocks of {unpacked} on" in line for line in caplog.messages] == ([True] if unpacked else [])
    caplog.clear()
    assert stored_dtype(tmp_path, "float32", "cpu") == "float32" and not caplog.messages
