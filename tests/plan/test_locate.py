"""From a name to sizes: files on disk, the catalogue, and what happens when there is neither."""

from __future__ import annotations

import json
import struct

import pytest

from paceline.errors import ModelNotFound, OptionError, WeightsError
from paceline.plan.locate import find_sizes
from paceline.plan.precision import find_precision, weight_bytes

from .test_model_sizes import SMOLLM2_135M


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    # The variable HF_HUB_OFFLINE would come too late where another test has imported the library already.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))


def write_config(folder, **changes):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**SMOLLM2_135M, **changes}))
    return folder


def write_gguf(path):
    """A real GGUF file of a tiny Llama, written by the gguf package."""
    gguf = pytest.importorskip("gguf")
    numpy = pytest.importorskip("numpy")
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_file_type(1)
    writer.add_token_list([f"t{i}" for i in range(48)])
    shapes = {"token_embd": (48, 32), "blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32)}
    shapes |= {"blk.0.attn_output": (32, 32), "blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32)}
    shapes |= {"blk.0.ffn_down": (32, 64), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,), "output_norm": (32,)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", numpy.zeros(shape, dtype=numpy.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", ["default", "SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m"])
def test_the_catalogue_answers_to_every_name_in_any_case(name):
    assert find_sizes(name).parameters == 134515008


def test_a_directory_and_a_config_file_give_the_same_sizes(tmp_path):
    folder = write_config(tmp_path / "mine")
    assert find_sizes(str(folder)) == find_sizes(str(folder / "config.json"))
    assert find_sizes(str(folder)).parameters == 134515008


def test_weights_beside_the_config_are_used_instead_of_the_formula(tmp_path):
    folder = write_config(tmp_path / "mine", torch_dtype="bfloat16")
    header = json.dumps({"a": {"dtype": "BF16", "shape": [10, 10], "data_offsets": [0, 200]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(200))
    assert weight_bytes(find_sizes(str(folder)), find_precision("bf16")) == 200
    assert weight_bytes(find_sizes(str(folder)), find_precision("fp32")) == 4 * 134515008


def test_a_truncated_safetensors_file_is_named(tmp_path):
    folder = write_config(tmp_path / "mine")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 10_000) + b"{}")
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        find_sizes(str(folder))


def test_a_gguf_header_gives_sizes_bytes_and_type(tmp_path):
    sizes = find_sizes(str(write_gguf(tmp_path / "tiny.gguf")))
    assert (sizes.num_layers, sizes.hidden_size, sizes.vocab_size, sizes.num_kv_heads, sizes.tied_embeddings) == (
        1,
        32,
        48,
        2,
        True,
    )
    assert sizes.stored_bytes == 2 * sizes.parameters
    assert weight_bytes(sizes, find_precision("F16")) == sizes.stored_bytes


def test_a_gguf_cut_anywhere_in_its_header_is_a_clear_error(tmp_path):
    whole = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    for size in range(0, 900, 37):
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(whole[:size])
        with pytest.raises(WeightsError, match=r"cut\.gguf"):
            find_sizes(str(cut))


def test_a_gguf_that_lies_about_its_counts_does_not_exhaust_memory(tmp_path):
    liar = tmp_path / "liar.gguf"
    liar.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60))
    with pytest.raises(WeightsError, match="damaged"):
        find_sizes(str(liar))


def test_a_missing_part_of_a_split_gguf_is_named(tmp_path):
    write_gguf(tmp_path / "big-00001-of-00002.gguf")
    with pytest.raises(WeightsError, match="big-00002-of-00002"):
        find_sizes(str(tmp_path / "big-00001-of-00002.gguf"))


def test_both_parts_of_a_split_gguf_are_added_up(tmp_path):
    single = find_sizes(str(write_gguf(tmp_path / "one.gguf")))
    write_gguf(tmp_path / "big-00001-of-00002.gguf")
    write_gguf(tmp_path / "big-00002-of-00002.gguf")
    assert find_sizes(str(tmp_path / "big-00001-of-00002.gguf")).stored_bytes == 2 * single.stored_bytes


def test_a_config_that_is_not_json_is_a_clear_error(tmp_path):
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(OptionError, match=r"config\.json"):
        find_sizes(str(tmp_path))


def test_an_empty_directory_is_not_a_model(tmp_path):
    with pytest.raises(ModelNotFound, match=r"neither"):
        find_sizes(str(tmp_path))


@pytest.mark.parametrize("name", ["", "no-such-model", "nobody/no-such-model", "/no/such/path"])
def test_an_unknown_name_is_model_not_found(name, no_network):
    with pytest.raises(ModelNotFound, match="no model called"):
        find_sizes(name)


def test_a_misspelt_name_gets_a_suggestion(no_network):
    with pytest.raises(ModelNotFound, match=r"llama-3\.1-8b"):
        find_sizes("lama-3.1-8b")
