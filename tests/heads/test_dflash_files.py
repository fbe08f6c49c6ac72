"""DFlash heads as other projects write them: every spelling is the same head, and every known trap is read right."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from paceline.drafting.block_rows import block_rows
from paceline.errors import OptionError, WeightsError
from paceline.heads.block_attention import FULL, SLIDING
from paceline.heads.dflash import DFlashConfig, DFlashHead
from paceline.heads.registry import load_head, save_head
from tests.heads import dflash_checkpoints
from tests.heads.dflash_checkpoints import CONFIGS, HIDDEN, INNER_KEYS, MASK, REDUCED, TENSORS, VOCABULARY, write
from tests.heads.dflash_reference import random_head

WINDOWS: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}


def read(folder: Path, layout: str, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> DFlashHead:
    return load_head(write(folder, layout, tensors, **config), DFlashHead)


def config_of(folder: Path, layout: str, **config: Any) -> DFlashConfig:
    return read(folder, layout, **config).config


@pytest.mark.parametrize("layout", CONFIGS)
def test_every_tensor_is_where_it_belongs(layout: str, tmp_path: Path) -> None:
    head, given = read(tmp_path, layout), TENSORS[layout]()
    state = head.state_dict()
    renamed = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
    assert {renamed.get(name, name) for name in given} == state.keys()
    assert all(torch.equal(state[renamed.get(name, name)], value) for name, value in given.items())
    config = head.config
    assert (config.feature_layers, config.block_size, config.mask_token_id) == ((1, 3), 5, MASK)
    assert (config.rope_theta, config.head_dim, config.target_hidden_size) == (5000.0, 8, HIDDEN)


def test_spellings_of_one_head_are_one_head(tmp_path: Path) -> None:
    """Layer ids: outputs of layers 0 and 2 in one file are the inputs of layers 1 and 3 in another."""
    configs = [config_of(tmp_path / layout, layout) for layout in ("z-lab", "z-lab-nested", "meta", "speculators")]
    assert all(config == configs[0] for config in configs)


def test_rows_of_dspark_are_shifted_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    for layout in ("deepspec", "specforge", "speculators-dspark"):
        config = config_of(tmp_path / layout, layout)
        assert config.sample_from_anchor and config.max_draft_tokens == 5
        assert config.confidence_head and config.confidence_reads_markov
    for layout in ("z-lab", "speculators", "dflash2"):
        config = config_of(tmp_path / layout, layout)
        assert not config.sample_from_anchor and config.max_draft_tokens == 4
    assert not config_of(tmp_path / "said", "speculators-dspark", sample_from_anchor=False).sample_from_anchor


@pytest.mark.parametrize(
    ("layout", "keys", "causal"),
    [
        ("z-lab", {}, (True, False)),
        ("z-lab", {"is_causal": False}, (False, False)),
        ("z-lab", {"dflash_config": {**INNER_KEYS, "causal": True}}, (True, True)),
        ("z-lab", {"is_causal": False, "dflash_config": {**INNER_KEYS, "causal": True}}, (False, False)),
        ("speculators", {}, (True, False)),
        ("speculators", {"sliding_window_non_causal": True}, (False, False)),
        ("speculators-dflash2", {}, (False, False)),
    ],
)
def test_causality_of_windows(layout: str, keys: dict[str, Any], causal: tuple[bool, bool], tmp_path: Path) -> None:
    inner = {**CONFIGS[layout].get("transformer_layer_config", {}), **WINDOWS}
    windows = {"transformer_layer_config": inner} if "speculators" in layout else WINDOWS
    config = config_of(tmp_path, layout, **windows, **keys)
    seen = [config.visibility(index) for index in range(2)]
    assert tuple(kind.causal for kind in seen) == causal
    assert [kind.window for kind in seen] == [4, 0]


def test_other_spellings_of_options(tmp_path: Path) -> None:
    inner = {**INNER_KEYS, "use_swa": True, "swa_window_size": 6, "input_embedding_scale": 2.0}
    config = config_of(tmp_path, "z-lab", dflash_config={**inner, "final_logit_softcapping": 20.0}, logit_scale=0.5)
    assert config.visibility(1).window == 6
    assert (config.input_embedding_scale, config.output_multiplier, config.logit_softcap) == (2.0, 0.5, 20.0)


def test_layers_that_the_file_does_not_name(tmp_path: Path) -> None:
    inner = {"mask_token_id": MASK}
    assert config_of(tmp_path, "z-lab", dflash_config=inner, num_target_layers=30).feature_layers == (2, 28)
    with pytest.raises(WeightsError, match="target_layer_ids"):
        read(tmp_path, "z-lab", dflash_config=inner, num_target_layers=None)


def test_states_in_another_order_are_put_in_order(tmp_path: Path) -> None:
    """A target joins its states low to high, whatever order the file lists them in."""
    given = dflash_checkpoints.dflash()
    swapped = {**given, "fc.weight": torch.cat(given["fc.weight"].chunk(2, dim=1)[::-1], dim=1)}
    keys = {**INNER_KEYS, "target_layer_ids": [2, 0]}
    head = read(tmp_path, "z-lab", swapped, dflash_config=keys)
    assert head.config.feature_layers == (1, 3)
    assert torch.equal(head.fc.weight, given["fc.weight"])


def test_a_mask_embedding_of_its_own_file_is_read(tmp_path: Path) -> None:
    write(tmp_path, "z-lab")
    vector = torch.randn(1, HIDDEN)
    torch.save(vector, tmp_path / "mask_embedding.pt")
    head = load_head(tmp_path, DFlashHead)
    assert head.mask_embedding is not None and torch.equal(head.mask_embedding, vector[0])
    torch.save({"mask_token_id": MASK, "embedding": 2 * vector[0]}, tmp_path / "mask_embedding.pt")
    head = load_head(tmp_path, DFlashHead)
    assert head.mask_embedding is not None and torch.equal(head.mask_embedding, 2 * vector[0])
    (tmp_path / "mask_embedding.pt").write_bytes(b"no pickle")
    with pytest.raises(WeightsError, match=r"mask_embedding\.pt"):
        load_head(tmp_path, DFlashHead)


def test_tables_of_the_whole_vocabulary_are_cut_to_the_draft_vocabulary(tmp_path: Path) -> None:
    maps = dflash_checkpoints.vocabulary()
    ids = maps["d2t"] + torch.arange(REDUCED)
    given = {**dflash_checkpoints.dflash2(), **maps}
    head = read(tmp_path, "dflash2", given)
    assert head.candidate_selector is not None
    successors = given["candidate_selector.successor_codebook"]
    assert torch.equal(head.candidate_selector.successor_codebook, successors[ids])
    assert head.candidate_selector.predecessor_codebook.shape[0] == VOCABULARY


@pytest.mark.slow
@pytest.mark.parametrize("layout", CONFIGS)
def test_every_missing_tensor_is_named(layout: str, tmp_path: Path) -> None:
    whole = TENSORS[layout]()
    # Without these a checkpoint is another whole one: a head of another variant, or what they say follows from others.
    optional = {"t2d", "lm_head.weight", "d2t", "markov_head.markov_w1.weight", "confidence_head.proj.weight"}
    for name in whole.keys() - optional:
        rest = {other: value for other, value in whole.items() if other != name}
        said = {"layers.0.attention_conv.base_kernel": "attention_conv"}.get(name, name)
        said = "candidate_selector" if name.endswith("predecessor_codebook") else said
        said = said.removeprefix("encoder.").replace("output_norm_enc", "hidden_norm")
        with pytest.raises(WeightsError, match=said.replace(".", r"\.")):
            load_head(write(tmp_path, layout, rest), nn.Module)


@pytest.mark.parametrize("layout", CONFIGS)
def test_a_surplus_tensor_is_named(layout: str, tmp_path: Path) -> None:
    whole = {**TENSORS[layout](), "prefix_gru.weight": torch.ones(2)}
    with pytest.raises(WeightsError, match=r"prefix_gru\.weight is surplus"):
        load_head(write(tmp_path, layout, whole), nn.Module)


def test_copies_of_the_targets_weights_are_left_out(tmp_path: Path) -> None:
    copies = {"verifier_norm.weight": torch.ones(HIDDEN), "verifier_lm_head.weight": torch.ones(VOCABULARY, HIDDEN)}
    assert "verifier_norm.weight" not in read(tmp_path, "z-lab", {**dflash_checkpoints.dflash(), **copies}).state_dict()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"dflash_config": {"target_layer_ids": [0, 2]}}, "no mask_token_id"),
        ({"dflash_config": {**INNER_KEYS, "mask_token_id": 77}}, "mask_token_id is 77"),
        ({"dflash_config": {**INNER_KEYS, "target_layer_ids": [0, 1, 2]}}, r"fc\.weight reads 64 values"),
        ({"vocab_size": None}, "vocab_size"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window"),
        ({"block_size": 1}, "2 tokens or more"),
    ],
)
def test_a_config_that_does_not_fit_is_named(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=message):
        read(tmp_path, "z-lab", **config)


def test_ids_instead_of_offsets_are_noticed(tmp_path: Path) -> None:
    given = {**dflash_checkpoints.dflash(), **dflash_checkpoints.vocabulary()}
    given["d2t"] = given["d2t"] + torch.arange(REDUCED)
    with pytest.raises(WeightsError, match="offsets"):
        read(tmp_path, "speculators-reduced", given)


# --- writing ----------------------------------------------------------------------------------------------------------

WRITTEN: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash2": {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4, "causal": False},
    "dspark": {"sample_from_anchor": True, "markov_rank": 5, "markov_kind": "gated", "confidence_head": True},
    "rnn": {"markov_rank": 5, "markov_kind": "rnn", "confidence_head": True, "confidence_reads_markov": True},
    "windows": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 4, "causal": False},
    "options": {"input_embedding_scale": 2.0, "output_multiplier": 0.5, "logit_softcap": 20.0, "rope_theta": 77.0},
    "own": {"own_embeddings": True, "own_lm_head": True, "attention_sinks": True, "attention_bias": True},
    "mask": {"own_mask_embedding": True},
}


@pytest.mark.parametrize("layout", ["original", "speculators"])
@pytest.mark.parametrize("variant", WRITTEN)
def test_heads_survive_writing(variant: str, layout: str, tmp_path: Path) -> None:
    head = random_head(**WRITTEN[variant])
    save_head(head, tmp_path, layout=layout)
    again = load_head(tmp_path, DFlashHead)
    assert again.config == head.config
    assert_same(head, again)


@pytest.mark.parametrize("window", [{}, {"layer_types": (SLIDING, FULL), "sliding_window": 7}])
@pytest.mark.parametrize("layout", ["original", "speculators"])
def test_a_causal_head_survives_writing(layout: str, window: dict[str, Any], tmp_path: Path) -> None:
    head = random_head(causal=True, **window)
    save_head(head, tmp_path, layout=layout)
    assert load_head(tmp_path, DFlashHead).config == head.config


@pytest.mark.parametrize("causal", [True, None])
def test_speculators_masks_a_block_as_the_head_was_trained(causal: bool | None, tmp_path: Path) -> None:
    """speculators: a layer is causal if it slides and sliding_window_non_causal is false; vLLM: by the latter alone."""
    save_head(random_head(causal=causal), tmp_path, layout="speculators")
    config = json.loads((tmp_path / "config.json").read_text())
    layer = config["transformer_layer_config"]
    assert config["sliding_window_non_causal"] is not bool(causal)
    assert set(layer["layer_types"]) == {SLIDING if causal else FULL}
    assert not causal or layer["sliding_window"] > layer["max_position_embeddings"], "the window holds any sequence"


def test_borrowed_output_rows_are_written_only_for_those_who_need_them(tmp_path: Path) -> None:
    head = random_head(draft_vocab_size=20, selector_rank=6)
    save_head(head, tmp_path / "ours")
    again = load_head(tmp_path / "ours", DFlashHead)
    assert again.lm_head is None and again.config == head.config
    save_head(head, tmp_path / "theirs", layout="speculators")
    theirs = load_head(tmp_path / "theirs", DFlashHead)
    assert theirs.lm_head is not None and head.lm_head is not None
    assert torch.equal(theirs.lm_head.weight, head.lm_head.weight)
    with pytest.raises(OptionError, match="reduced vocabulary"):
        save_head(again, tmp_path / "never", layout="speculators")


def assert_same(one: DFlashHead, other: DFlashHead) -> None:
    theirs = other.state_dict()
    assert one.state_dict().keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in one.state_dict().items())


# --- GGUF -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "file"), [("z-lab", "file"), ("dflash2", "directory"), ("deepspec", "file")])
def test_a_gguf_file_is_the_same_head(layout: str, file: str, tmp_path: Path) -> None:
    """Layer ids are stored with one added; the rows of DSpark are shifted; a file may be named or its directory."""
    pytest.importorskip("gguf")
    expected = read(tmp_path / "hf", layout, is_causal=None)
    path = dflash_checkpoints.write_gguf(tmp_path / "head.gguf", TENSORS[layout]())
    head = load_head(path if file == "file" else tmp_path, DFlashHead)
    assert replace(head.config, selector_top_k=expected.config.selector_top_k) == replace(
        expected.config, rms_norm_eps=head.config.rms_norm_eps
    )
    assert layout != "dflash2" or head.config.selector_top_k == 4
    assert_same(expected, head)


def test_a_gguf_file_of_a_model_is_no_head(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    path = dflash_checkpoints.write_gguf(tmp_path / "model.gguf", dflash_checkpoints.dflash(), "qwen3")
    with pytest.raises(WeightsError, match="architecture qwen3, not a trained head"):
        load_head(path, DFlashHead)
    odd = {**dflash_checkpoints.dflash(), "dense.weight": torch.ones(2)}
    with pytest.raises(WeightsError, match=r"dense\.weight is surplus"):
        load_head(dflash_checkpoints.write_gguf(tmp_path / "odd.gguf", odd), DFlashHead)


# --- files that speculators 0.9.0 has written, and what it computes with them -----------------------------------------

WRITTEN_BY_SPECULATORS = Path(__file__).parent / "written_by_speculators"


def bound_to(folder: Path) -> tuple[DFlashHead, dict[str, torch.Tensor]]:
    """The head of a folder over the target its expected values were computed with."""
    head, expected = load_head(folder, DFlashHead), load_file(folder / "expected.safetensors")
    head.bind_target(lambda tokens: expected["embed"][tokens], lambda states: states @ expected["lm_head"].T)
    return head, expected


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
def test_a_file_of_speculators_is_read_tensor_for_tensor(kind: str) -> None:
    folder = WRITTEN_BY_SPECULATORS / kind
    state = load_head(folder, DFlashHead).state_dict()
    written = load_file(folder / "model.safetensors")
    assert state.keys() == written.keys()
    assert all(torch.equal(state[name], value) for name, value in written.items())


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
def test_a_head_of_speculators_drafts_what_speculators_says(kind: str) -> None:
    """A reduced vocabulary; a window, a convolution and a selector; shifted rows, a gated Markov head, confidences."""
    head, expected = bound_to(WRITTEN_BY_SPECULATORS / kind)
    count, size = expected["features"].shape[0], head.config.block_size
    ids = torch.tensor([[int(expected["anchor"])] + [head.config.mask_token_id] * (size - 1)])
    rows = torch.arange(count, count + size)[None]
    stores = head.context_stores(head.context(expected["features"])[None], torch.arange(count)[None])
    states = head.forward_block(ids, stores, rows, head.layer_masks(None, rows, torch.arange(count + size)[None]))
    torch.testing.assert_close(states[0], expected["states"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(head.logits(states)[0], expected["logits"], rtol=1e-4, atol=1e-4)
    block = block_rows(head, states[:, head.config.first_row :], ids[:, 0]).greedy(with_confidence=True)
    assert block.tokens[0].tolist() == expected["tokens"].tolist()
    if kind == "dspark":
        assert block.confidence is not None
        torch.testing.assert_close(block.confidence[0], expected["confidence"], rtol=1e-4, atol=1e-4)
