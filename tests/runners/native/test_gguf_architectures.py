"""GGUF files of every architecture that runs as it is: transformers' text, packed weights, drafts, errors by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, dequantize
from torch import Tensor

from paceline import SpeculativeDecoder, cli
from paceline.build import open_runner
from paceline.config import ModelConfig
from paceline.core.types import Row
from paceline.errors import WeightsError
from paceline.hub import locate
from paceline.hub.convert import unpacked_folder
from paceline.hub.gguf_architectures import ARCHITECTURES, MODEL_TYPES, PACKED_ON_GPUS
from paceline.hub.gguf_index import read_index
from paceline.layers import cpu_kernels
from paceline.runners.native import NativeRunner
from tests.runners.native.models import tiny
from tests.support.gguf import ADDED_TO_NORMS, GGUF_NAMES, MIXES, Kinds, gguf_name, mix, write_gguf

needs_kernels = pytest.mark.skipif(cpu_kernels.library() is None, reason="no compiled kernels on this machine")
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
SIZES |= {"vocab_size": 261, "query_pre_attn_scalar": 64}
GEMMA3 = SIZES | {"num_hidden_layers": 7, "layer_types": None}
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
OTHER_BASE = {"rope_type": "default", "rope_theta": 20000.0}
OTHER_ROPES = {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": OTHER_BASE}}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3moe": ("qwen3_moe", SIZES | {"moe_intermediate_size": 256}),
    "gemma2": ("gemma2", SIZES | {"num_hidden_layers": 4, "attn_logit_softcapping": 20.0}),
    "gemma3": ("gemma3_text", GEMMA3),
    "gemma3 with other ropes": ("gemma3_text", GEMMA3 | OTHER_ROPES),
    "phi3": ("phi3", SIZES),
    "starcoder2": ("starcoder2", SIZES),
}
# As llama.cpp mixes kinds, and as files of small models have them.
KINDS: dict[str, Kinds | None] = {
    "q4_k_m": MIXES["q4_k_m"],
    "q8_0": mix("Q8_0"),
    "q4_0": mix("Q4_0", token_embd="Q8_0", output="Q6_K"),
    "floats": None,
}
GAIN = 16.0
PROMPT = [5, 17, 200, 33, 2, 71, 8, 140] * 4
TEXT = torch.randint(261, (80,), generator=torch.Generator().manual_seed(3)).tolist()  # five windows


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


def made(name: str) -> Any:
    return varied(*MODELS[name])


@torch.no_grad()
def varied(kind: str, changes: dict[str, Any]) -> Any:
    """A tiny model whose layers outweigh its embedding: Gemma multiplies that, and would repeat the last token."""
    model = tiny(kind, **changes)
    if kind in ADDED_TO_NORMS:
        model.get_input_embeddings().weight.div_(GAIN)
        for name, weight in model.named_parameters():
            weight.mul_(GAIN / 2 if name.endswith("layernorm.weight") else 1.0)
    return model


def kinds_of(kinds: str) -> Kinds | None:
    """llama.cpp never quantizes a router."""
    chosen = KINDS[kinds]
    return None if chosen is None else lambda name: None if "ffn_gate_inp" in name else chosen(name)


def written(folder: Path, name: str, kinds: str = "q4_k_m", **options: Any) -> Path:
    return write_gguf(folder / "tiny.gguf", made(name), kinds=kinds_of(kinds), **options)


def of_file(name: str, path: Path) -> Any:
    """transformers' model with the file's numbers, read by the gguf package."""
    model = made(name)
    stored = {tensor.name: _numbers(tensor) for tensor in GGUFReader(path).tensors}
    model.load_state_dict({key: _hugging_face(key, stored, model.config) for key in model.state_dict()})
    return model


def _numbers(tensor: Any) -> Tensor:
    shape = [int(size) for size in reversed(tensor.shape)]
    return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float().reshape(shape)


def _hugging_face(name: str, stored: dict[str, Tensor], config: Any) -> Tensor:
    if name.endswith("experts.gate_up_proj"):
        gate = gguf_name(name.replace("gate_up_proj", "gate_proj.weight"), config.model_type)
        return torch.cat([stored[gate], stored[gate.replace("gate", "up")]], dim=1)
    tied = name == "lm_head.weight" and config.tie_word_embeddings
    numbers = stored["token_embd.weight" if tied else gguf_name(name, config.model_type)]
    return numbers - ADDED_TO_NORMS.get(config.model_type, 0.0) if name.endswith("norm.weight") else numbers


@torch.no_grad()
def logits_by(model: Any, tokens: list[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def is_greedy(model: Any, text: list[int]) -> bool:
    """Whether a model prefers each token of a text, after the prompt and those before it."""
    logits = logits_by(model, [*PROMPT, *text])[len(PROMPT) - 1 : -1]
    return logits.argmax(dim=-1).tolist() == text


def generated(path: Path, count: int, **options: Any) -> Any:
    with SpeculativeDecoder(str(path), device="cpu", **options) as decoder:
        return decoder.generate(PROMPT, max_new_tokens=count, ignore_eos=True)


def runner_of(path: Path, dtype: str = "auto") -> NativeRunner:
    runner = open_runner(ModelConfig(str(path), dtype=dtype), "cpu", 1024)
    assert isinstance(runner, NativeRunner)
    return runner


def logits_of(runner: NativeRunner) -> Tensor:
    return runner.forward([Row.chain(runner.new_cache(), TEXT)]).logits


def test_every_architecture_is_tested() -> None:
    tested = {GGUF_NAMES.get(kind, kind) for kind, _ in MODELS.values()}
    assert tested | {"llama", "qwen2", "qwen3"} == set(ARCHITECTURES)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_the_text_is_that_of_the_unpacked_weights(tmp_path: Path, name: str, kinds: str) -> None:
    path = written(tmp_path, name, kinds)
    model = of_file(name, path)
    assert is_greedy(model, generated(path, 64, dtype="float32").token_ids)
    torch.testing.assert_close(logits_of(runner_of(path, "float32")), logits_by(model, TEXT), rtol=1e-4, atol=1e-3)


# What transformers' own route takes for granted: it does not read every key of a file.
READ_BY_TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3moe": ("qwen3_moe", SIZES | {"moe_intermediate_size": 768}),
    "gemma2": ("gemma2", SIZES | {"num_hidden_layers": 4, "head_dim": 256, "query_pre_attn_scalar": 256}),
    "gemma3": ("gemma3_text", GEMMA3 | {"head_dim": 256, "query_pre_attn_scalar": 256}),
    "phi3": ("phi3", SIZES | {"sliding_window": None}),
    "starcoder2": ("starcoder2", SIZES),
}


def as_transformers_reads(path: Path) -> Any:
    """What from_pretrained(…, gguf_file=…) gives, which also asks for the package accelerate."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    loaded = model.load_state_dict(tensors, strict=False)
    assert not loaded.unexpected_keys and set(loaded.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
def test_the_text_is_that_of_transformers_from_the_same_file(tmp_path: Path, name: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", varied(*READ_BY_TRANSFORMERS[name]), kinds=kinds_of("q4_k_m"))
    model = as_transformers_reads(path)
    assert is_greedy(model, generated(path, 64, dtype="float32").token_ids)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_norms_are_those_of_the_model_the_file_was_made_from(tmp_path: Path, name: str) -> None:
    """Bit for bit: weights near one lose nothing by the one that the file adds."""
    kind, changes = MODELS[name]
    model = tiny(kind, **changes).bfloat16().float()
    path = write_gguf(tmp_path / "tiny.gguf", model)
    index = {tensor.name: tensor for tensor in read_index(locate(str(path)).folder)}
    norms = {name: tensor for name, tensor in model.state_dict().items() if tensor.dim() == 1}
    assert norms and all(torch.equal(index[name].dequantized(), tensor) for name, tensor in norms.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_unpacked_for_others_it_is_the_same_model(tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    path = written(tmp_path, name, "floats")
    folder = unpacked_folder(locate(str(path)).folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logits, expected = logits_by(model, TEXT), logits_by(of_file(name, path), TEXT)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("kinds", ["q4_k_m", "q8_0", "q4_0"])
@pytest.mark.parametrize("name", MODELS)
def test_packed_it_is_the_model_of_its_unpacked_weights(tmp_path: Path, name: str, kinds: str) -> None:
    """But for inputs that are rounded to 8 bits, which seven layers of random weights make larger."""
    path = written(tmp_path, name, kinds)
    packed, exact = runner_of(path), runner_of(path, "float32")
    assert (packed.info.dtype, exact.info.dtype) == ("gguf", "float32")
    output, expected = logits_of(packed), logits_of(exact)
    assert float((output - expected).norm() / expected.norm()) < 0.25


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_weights_take_no_more_than_the_file_has(tmp_path: Path, name: str) -> None:
    path = written(tmp_path, name)
    runner = runner_of(path)
    matrices = sum(tensor.size for tensor in read_index(locate(str(path)).folder) if len(tensor.shape) > 1)
    assert matrices < path.stat().st_size and bytes_in_memory(runner) < 1.04 * matrices
    assert not list((tmp_path / "cache").rglob("*.safetensors")), "nothing is unpacked on disk"


def bytes_in_memory(runner: NativeRunner) -> int:
    """Bytes of all matrices; an embedding that is the LM head too counts once."""
    embedding: Any = runner.model.embedding
    parts: dict[int, int] = {id(embedding.blocks.data): embedding.blocks.data.nbytes}
    for linear in runner.model.linears():
        tensors = [linear.matrix] if linear.matrix is not None else [piece.data for piece in linear.blocks or ()]
        parts |= {id(tensor): tensor.nbytes for tensor in tensors}
    return sum(parts.values())


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_drafts_give_the_text_of_plain_decoding(tmp_path: Path, name: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", made(name), quantization=GGMLQuantizationType.Q4_0)
    plain = generated(path, 64, method="none")
    ngram = generated(path, 64, method="ngram", num_draft_tokens=4)
    itself = generated(path, 64, method="draft_model", num_draft_tokens=4, draft_model=str(path))
    assert ngram.token_ids == itself.token_ids == plain.token_ids
    assert itself.stats.tokens_per_step > 4.5, "the file drafts for itself"


@needs_kernels
@pytest.mark.slow
def test_drafts_of_several_sequences_give_the_text_of_each_alone(tmp_path: Path) -> None:
    """Gemma 2 caps scores, so its attention is products of matrices: their bits must not depend on other rows."""
    path = write_gguf(tmp_path / "tiny.gguf", made("gemma2"), quantization=GGMLQuantizationType.Q4_0)
    prompts = [PROMPT, TEXT[:32], TEXT[40:70]]
    texts = []
    for method in ("none", "ngram"):
        with SpeculativeDecoder(str(path), method=method, num_draft_tokens=4, device="cpu") as decoder:
            results = decoder.generate(prompts, max_new_tokens=32, ignore_eos=True)
            texts += [[result.token_ids for result in results]]
            alone = [decoder.generate(prompt, max_new_tokens=32, ignore_eos=True).token_ids for prompt in prompts]
            texts += [alone]
    assert texts[0] == texts[1] == texts[2] == texts[3]


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_chain_is_the_same_bits_at_every_width(tmp_path: Path, name: str) -> None:
    runner = runner_of(written(tmp_path, name))
    whole = logits_of(runner)
    seq_cache = runner.new_cache()
    single = torch.cat([runner.forward([Row.chain(seq_cache, [token])]).logits for token in TEXT])
    assert torch.equal(whole, single)


# --- keys and tensors -------------------------------------------------------------------------------------------------


def config_of(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((locate(str(path)).folder / "config.json").read_text())
    return config


@pytest.mark.parametrize(("name", "layers", "scalar"), [("gemma2", 46, 64), ("gemma3", 62, 64), ("gemma3", 7, 48)])
def test_the_largest_gemmas_scale_attention_by_their_width(tmp_path: Path, name: str, layers: int, scalar: int) -> None:
    """llama.cpp tells them by their number of layers: the scale is in no key."""
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 48, "num_hidden_layers": layers}
    kind, changes = MODELS[name]
    path = write_gguf(tmp_path / "tiny.gguf", tiny(kind, **(changes | sizes | {"intermediate_size": 32})))
    assert config_of(path)["query_pre_attn_scalar"] == scalar


@pytest.mark.parametrize("pattern", [3, [True, True, False, True, True, False, True]])
def test_the_file_may_say_which_layers_have_a_window(tmp_path: Path, pattern: Any) -> None:
    def metadata(writer: Any) -> None:
        writer.add_sliding_window_pattern(pattern)

    kinds = config_of(written(tmp_path, "gemma3", "floats", metadata=metadata))["layer_types"]
    assert [kind == "sliding_attention" for kind in kinds] == [True, True, False, True, True, False, True]


@pytest.mark.slow
def test_a_gemma3_without_windows_has_one_rope(tmp_path: Path) -> None:
    layers = {"layer_types": ["full_attention"] * 7}
    model = varied("gemma3_text", GEMMA3 | layers)
    path = write_gguf(tmp_path / "tiny.gguf", model, metadata=lambda writer: writer.kv_data[0].pop(f"gemma3.{WINDOW}"))
    assert is_greedy(model, generated(path, 32, dtype="float32").token_ids)


WINDOW = "attention.sliding_window"
KEYS: dict[str, tuple[str, Callable[[Any], None], str]] = {
    "unknown": ("gemma3", lambda writer: writer.add_float32("gemma3.some.new_thing", 2.0), "gemma3.some.new_thing"),
    "windows of others": (
        "gemma3", lambda writer: writer.add_sliding_window_pattern([True]), "gemma3.attention.sliding_window_pattern",
    ),
    "scale": ("gemma2", lambda writer: writer.add_float32("gemma2.attention.scale", 0.5), "gemma2.attention.scale"),
    "softcap": ("gemma3", lambda writer: writer.add_attn_logit_softcapping(50.0), "gemma3.attn_logit_softcapping"),
    "window": ("starcoder2", lambda writer: writer.add_sliding_window(16), "starcoder2.attention.sliding_window"),
    "shared expert": (
        "qwen3moe", lambda writer: writer.add_expert_shared_count(1), "qwen3moe.expert_shared_count",
    ),
    "size of experts": (
        "qwen3moe", lambda writer: writer.kv_data[0].pop("qwen3moe.expert_feed_forward_length"),
        "lacks the key qwen3moe.expert_feed_forward_length",
    ),
    "part of a head": ("phi3", lambda writer: writer.add_rope_dimension_count(16), "phi3.rope.dimension_count"),
}  # fmt: skip


@pytest.mark.parametrize("case", KEYS)
def test_a_key_that_is_not_understood_is_named(tmp_path: Path, case: str) -> None:
    name, change, words = KEYS[case]
    with pytest.raises(WeightsError, match=words.replace(".", r"\.")):
        locate(str(written(tmp_path, name, "floats", metadata=change)))


TENSORS: dict[str, tuple[str, dict[str, Any], str]] = {
    "frequencies": ("gemma3", {"added": {"rope_freqs.weight": np.ones(32, np.float32)}}, "rope_freqs.weight"),
    "long factors": (
        "phi3", {"added": {"rope_factors_long.weight": np.ones(32, np.float32)}}, "rope_factors_long.weight",
    ),
    "image": ("gemma3", {"added": {"v.patch_embd.weight": np.ones(32, np.float32)}}, "v.patch_embd.weight"),
    "norm": ("gemma2", {"without": ("blk.1.post_ffw_norm.weight",)}, "blk.1.post_ffw_norm.weight"),
    "bias": ("starcoder2", {"without": ("output_norm.bias",)}, "output_norm.bias"),
    "MLP": ("qwen3moe", {"added": {"blk.0.ffn_up.weight": np.ones((4, 4), np.float32)}}, "blk.0.ffn_up.weight"),
    "layer": ("gemma3", {"added": {"blk.7.attn_norm.weight": np.ones(4, np.float32)}}, "says 7 layers"),
    "not a number": (
        "gemma3", {"added": {"output_norm.weight": np.full(256, np.nan, np.float32)}}, "output_norm.weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_a_tensor_that_does_not_belong_is_named(tmp_path: Path, case: str) -> None:
    name, options, words = TENSORS[case]
    with pytest.raises(WeightsError, match=words.replace(".", r"\.")):
        locate(str(written(tmp_path, name, "floats", **options)))


# --- planning ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_counts_the_file_as_it_runs(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    from paceline.plan.locate import find_sizes

    path = written(tmp_path, name, metadata=lambda writer: writer.add_file_type(15))
    sizes, model = find_sizes(str(path)), made(name)
    assert sizes.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert sizes.architecture == model.config.model_type and sizes.stored_precision == "Q4_K_M"
    windows = [layer.window for layer in sizes.layers] or [None] * model.config.num_hidden_layers
    layers = runner_of(path, "float32").model.config
    assert windows == [layers.attention(index).window for index in range(layers.num_layers)]
    assert cli.main(["plan", str(path), "--hardware", "h100", "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    expected = "Q4_K_M" if model.config.model_type in PACKED_ON_GPUS else "bf16"
    assert (document["target"]["precision"], document["engine"]) == (expected, "local")


def test_all_but_experts_stay_packed_on_gpus() -> None:
    assert set(MODEL_TYPES.values()) - PACKED_ON_GPUS == {"qwen3_moe"}


def test_the_document_names_every_architecture() -> None:
    page = (Path(__file__).parents[3] / "docs" / "formats.md").read_text()
    sentence = page.partition("GGUF files of ")[2].partition(" run as they are")[0]
    names = re.split(", | and ", " ".join(sentence.split()).replace(" (text)", ""))
    assert names == [architecture.label for architecture in ARCHITECTURES.values()]
