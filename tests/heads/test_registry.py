"""Published layouts load, what does not fit is named, and what is written is read back the same."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import ModelNotFound, OptionError, WeightsError
from paceline.heads import registry
from paceline.heads.checkpoint import Checkpoint, WithoutRandomWeights
from paceline.heads.eagle import EagleHead
from paceline.heads.eagle1 import Eagle1Head
from paceline.heads.eagle3 import Eagle3Head
from paceline.heads.exit_adapter import ExitAdapter, ExitConfig
from paceline.heads.medusa import MedusaHeads
from paceline.heads.registry import HeadSpec, kind_in, load_head, register, save_head
from tests.heads import checkpoints, dflash_checkpoints
from tests.heads.checkpoints import REDUCED, VOCABULARY, WIDTH, write

EAGLES = ("eagle1", "eagle3", "specforge", "eagle3.1", "speculators")
MEDUSAS = ("medusa", "medusa_vllm")


@pytest.mark.parametrize("layout", EAGLES)
def test_published_eagle_heads_load(layout: str, tmp_path: Path) -> None:
    head = load_head(write(tmp_path, layout), EagleHead)
    config = head.config
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 8)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (WIDTH, 48, VOCABULARY)
    assert isinstance(head, Eagle1Head if layout == "eagle1" else Eagle3Head)
    assert config.draft_vocab_size == (VOCABULARY if layout == "eagle1" else REDUCED)
    if isinstance(head, Eagle3Head):
        assert head.config.norm_before_residual == (layout == "speculators")
        assert head.config.feature_layers == ((0, 1, 2) if layout in ("specforge", "speculators") else ())
        assert (head.config.fc_norm, head.config.norm_output) == ((layout == "eagle3.1"),) * 2
    prefix = "midlayer." if layout in ("eagle3", "specforge", "eagle3.1") else "layers.0."
    published = checkpoints.TENSORS[layout]()
    assert torch.equal(head.midlayer.self_attn.v_proj.weight, published[f"{prefix}self_attn.v_proj.weight"])
    assert torch.equal(head.fc.weight, published["fc.weight"])


def test_norms_that_the_config_names_and_the_file_lacks_are_named(tmp_path: Path) -> None:
    """A head of EAGLE-3.1 without its norms would run, and draft badly."""
    with pytest.raises(WeightsError, match=r"fc_norm\.0\.weight, fc_norm\.1\.weight, fc_norm\.2\.weight are missing"):
        load_head(write(tmp_path, "eagle3.1", checkpoints.eagle3()), Eagle3Head)


def test_offsets_map_the_reduced_vocabulary(tmp_path: Path) -> None:
    head = load_head(write(tmp_path, "eagle3"), Eagle3Head)
    assert head.to_target_ids(torch.tensor([0, 1, 63])).tolist() == [1, 5, 253]
    assert head.t2d[head.target_ids].all() and int(head.t2d.sum()) == REDUCED


@pytest.mark.parametrize("layout", MEDUSAS)
def test_published_medusa_heads_load_and_are_counted(layout: str, tmp_path: Path) -> None:
    heads = load_head(write(tmp_path, layout), MedusaHeads)
    assert (heads.config.num_heads, heads.config.num_layers) == (3, 1), "the tensors say 3, whatever the config says"
    state = torch.randn(WIDTH)
    published = checkpoints.TENSORS[layout]()
    first = "2.0.linear.weight" if layout == "medusa" else "blocks.2.layers.0.weight"
    last = "2.1.weight" if layout == "medusa" else "lm_heads.2.weight"
    inner = published[first] @ state + published.get("2.0.linear.bias", torch.zeros(WIDTH))
    expected = published[last] @ (state + torch.nn.functional.silu(inner))
    assert torch.allclose(heads(state)[2], expected, atol=1e-5)
    ids = heads.to_target_ids(torch.tensor([5]))
    assert ids.tolist() == ([5] if layout == "medusa" else [15])


@pytest.mark.parametrize("layout", (*EAGLES, *MEDUSAS))
def test_the_kind_of_a_folder_is_known(layout: str, tmp_path: Path) -> None:
    kind = next(kind for kind in ("eagle1", "medusa", "eagle3") if layout.startswith(kind) or kind == "eagle3")
    assert kind_in(write(tmp_path / "head", layout)) == kind


def test_a_block_head_is_known_in_both_formats_and_a_whole_model_is_none(tmp_path: Path, tiny_folder: Path) -> None:
    tensors = dflash_checkpoints.dflash()
    assert kind_in(dflash_checkpoints.write(tmp_path / "head", "dflash2")) == "dflash"
    assert kind_in(dflash_checkpoints.write_gguf(tmp_path / "head.gguf", tensors)) == "dflash"
    assert kind_in(dflash_checkpoints.write_gguf(tmp_path / "model.gguf", tensors, architecture="llama")) is None
    assert kind_in(tiny_folder) is None
    (tmp_path / "nothing").mkdir()
    assert kind_in(tmp_path / "nothing") is None


def test_vllm_heads_may_share_one_matrix(tmp_path: Path) -> None:
    tensors = {name: value for name, value in checkpoints.medusa_vllm().items() if not name.startswith("lm_heads")}
    tensors["lm_head.weight"] = checkpoints.random(REDUCED, WIDTH)
    heads = load_head(write(tmp_path, "medusa_vllm", tensors, original_lm_head=True), MedusaHeads)
    assert heads.config.num_heads == 3
    assert torch.equal(heads.lm_heads[1].weight, tensors["lm_head.weight"])


@pytest.mark.parametrize("layout", (*EAGLES, *MEDUSAS))
def test_every_missing_tensor_is_named(layout: str, tmp_path: Path) -> None:
    whole = checkpoints.TENSORS[layout]()
    # Without these a checkpoint is still whole: what they say follows from the others, or need not be said.
    optional = {"fc.bias", "t2d"}
    for name in whole.keys() - optional:
        rest = {other: value for other, value in whole.items() if other != name}
        with pytest.raises(WeightsError, match=name.replace(".", r"\.")):
            load_head(write(tmp_path, layout, rest), nn.Module)


@pytest.mark.parametrize("layout", (*EAGLES, *MEDUSAS))
def test_a_surplus_tensor_is_named(layout: str, tmp_path: Path) -> None:
    whole = {**checkpoints.TENSORS[layout](), "layers.7.odd.weight": torch.ones(2)}
    with pytest.raises(WeightsError, match=r"layers\.7\.odd\.weight is surplus"):
        load_head(write(tmp_path, layout, whole), nn.Module)


@pytest.mark.parametrize("layout", (*EAGLES, *MEDUSAS))
def test_a_misshapen_tensor_is_named(layout: str, tmp_path: Path) -> None:
    whole = checkpoints.TENSORS[layout]()
    name = next(name for name in whole if "o_proj" in name or name.endswith("2.0.linear.weight") or "blocks.2" in name)
    whole[name] = torch.zeros(WIDTH, WIDTH + 3)
    with pytest.raises(WeightsError, match=f"{name.replace('.', '[.]')} has shape .*{WIDTH + 3}"):
        load_head(write(tmp_path, layout, whole), nn.Module)


def test_ids_instead_of_offsets_are_noticed(tmp_path: Path) -> None:
    tensors = checkpoints.eagle3()
    tensors["d2t"] = tensors["d2t"] + torch.arange(REDUCED) * 2
    with pytest.raises(WeightsError, match="offsets"):
        load_head(write(tmp_path, "eagle3", tensors), Eagle3Head)


def test_what_is_no_head_says_what_it_is(tmp_path: Path) -> None:
    tensors = checkpoints.eagle3("layers.0.")
    for config, word in (
        ({"dflash_config": {"mask_token_id": 1}}, "dflash"),
        ({"speculators_model_type": "mtp"}, "mtp"),
    ):
        with pytest.raises(WeightsError, match=word):
            load_head(write(tmp_path / word, "eagle3", tensors, **config), nn.Module)
    with pytest.raises(WeightsError, match="no head of the kinds exit_adapter, medusa, "):
        load_head(write(tmp_path / "other", "eagle3", {"model.weight": torch.ones(2)}), nn.Module)
    with pytest.raises(ModelNotFound, match="no directory"):
        load_head(tmp_path / "nowhere", nn.Module)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        load_head(tmp_path / "empty", nn.Module)
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        load_head(tmp_path / "empty", nn.Module)


def test_the_wrong_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="MedusaHeads, and EagleHead is needed"):
        load_head(write(tmp_path, "medusa"), EagleHead)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, "eagle3")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(WeightsError, match="damaged"):
        load_head(folder, nn.Module)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(marker),)

    folder = write(tmp_path / "bomb", "eagle1")
    torch.save({"fc.weight": Bomb()}, folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match="refused"):
        load_head(folder, nn.Module)
    assert not marker.exists()


@pytest.mark.parametrize("layout", EAGLES)
@pytest.mark.parametrize("written", ["original", "speculators"])
def test_eagle_heads_survive_writing(layout: str, written: str, tmp_path: Path) -> None:
    head = load_head(write(tmp_path / "old", layout), EagleHead)
    if layout == "eagle1" and written == "speculators":
        with pytest.raises(OptionError, match="speculators"):
            save_head(head, tmp_path / "new", layout=written)
        return
    save_head(head, tmp_path / "new", layout=written)
    again = load_head(tmp_path / "new", EagleHead)
    assert again.config == head.config
    assert_same(head, again)
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert layout == "eagle1" or "norm_before_residual" in config


def test_heads_are_written_in_half_precision_and_read_in_full(tmp_path: Path) -> None:
    head = load_head(write(tmp_path / "old", "eagle3"), Eagle3Head)
    save_head(head, tmp_path / "new", dtype=torch.float16)
    again = load_head(tmp_path / "new", Eagle3Head)
    assert again.fc.weight.dtype == torch.float32 and again.d2t.dtype == torch.int64
    assert torch.equal(again.fc.weight, head.fc.weight.half().float())


@pytest.mark.parametrize("layout", MEDUSAS)
@pytest.mark.parametrize("written", ["original", "vllm"])
def test_medusa_heads_survive_writing(layout: str, written: str, tmp_path: Path) -> None:
    heads = load_head(write(tmp_path / "old", layout), MedusaHeads)
    if layout == "medusa_vllm" and written == "original":
        with pytest.raises(OptionError, match="reduced vocabulary"):
            save_head(heads, tmp_path / "new", layout=written)
        return
    save_head(heads, tmp_path / "new", layout=written)
    again = load_head(tmp_path / "new", MedusaHeads)
    assert again.config == heads.config
    assert_same(heads, again)


def test_exit_adapters_survive_writing(tmp_path: Path) -> None:
    adapter = ExitAdapter(ExitConfig(7, WIDTH, 8))
    torch.nn.init.normal_(adapter.up.weight)
    save_head(adapter, tmp_path)
    again = load_head(tmp_path, ExitAdapter)
    assert again.config == adapter.config
    assert_same(adapter, again)


def test_an_interrupted_write_leaves_the_old_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = load_head(write(tmp_path / "old", "eagle3"), Eagle3Head)
    save_head(head, tmp_path / "new")
    before = (tmp_path / "new" / "model.safetensors").read_bytes()
    monkeypatch.setattr(os, "replace", _out_of_power)
    with torch.no_grad():
        head.fc.weight.zero_()
    with pytest.raises(KeyboardInterrupt):
        save_head(head, tmp_path / "new")
    assert (tmp_path / "new" / "model.safetensors").read_bytes() == before


def _out_of_power(*_: object) -> None:
    raise KeyboardInterrupt


def assert_same(one: EagleHead | MedusaHeads | ExitAdapter, other: EagleHead | MedusaHeads | ExitAdapter) -> None:
    theirs = other.state_dict()
    assert one.state_dict().keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in one.state_dict().items())


def test_a_kind_is_added_at_run_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One module with a spec is all it takes; it is tried before the built-in kinds."""

    class Toy(nn.Module):
        pass

    def matches(checkpoint: Checkpoint) -> bool:
        return checkpoint.config.get("speculators_model_type") == "toy"

    monkeypatch.setattr(registry, "_registered", {})
    register(HeadSpec("toy", Toy, matches, lambda checkpoint: Toy(), lambda head, folder, **options: None))
    folder = write(tmp_path, "eagle3", speculators_model_type="toy")
    assert registry.names()[0] == "toy"
    assert isinstance(load_head(folder, Toy), Toy)
    with pytest.raises(OptionError, match="not written in the layout 'tree'"):
        save_head(Toy(), tmp_path, layout="tree")
    with pytest.raises(OptionError, match="no head of kind 'nothing'"):
        registry.spec("nothing")


def test_weights_that_are_loaded_right_after_are_not_filled_first() -> None:
    """Filling them took most of the time of loading a head. Nothing drawn: the state of the dice is what it was."""
    before = torch.get_rng_state()
    with WithoutRandomWeights():
        nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 16))
    assert torch.equal(torch.get_rng_state(), before)
