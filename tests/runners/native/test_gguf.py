"""GGUF files run as they are: the model of the unpacked weights, the same text with and without drafts, no copy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gguf import GGUFReader, dequantize
from torch import Tensor

from paceline import SpeculativeDecoder, cli
from paceline.build import open_runner
from paceline.config import ModelConfig
from paceline.core.types import Row
from paceline.errors import WeightsError
from paceline.hub import locate
from paceline.hub.gguf_index import StoredTensor, read_index
from paceline.layers import cpu_kernels
from paceline.layers.gemm_types import Linear
from paceline.runners.native import NativeRunner
from tests.runners.native.models import tiny
from tests.support.gguf import MIXES, gguf_name, write_gguf

pytestmark = pytest.mark.skipif(cpu_kernels.library() is None, reason="no compiled kernels on this machine")
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
SIZES |= {"vocab_size": 261}
SMALL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 261}
PROMPT = [5, 17, 200, 33, 2, 71, 8, 140] * 4


def small_mixture(name: str) -> str | None:
    """What it falls back to where rows are no multiple of 256; one matrix is not quantized, as some files have it."""
    kinds = {"attn_q": "Q5_0", "attn_k": "Q5_1", "attn_v": "Q8_0", "attn_output": "IQ4_NL", "ffn_up": "Q4_0"}
    kinds |= {"ffn_down": "Q4_1", "token_embd": "Q8_0", "ffn_gate": "Q4_1"}
    return None if name == "blk.1.ffn_up.weight" else next((kinds[part] for part in kinds if part in name), "Q5_1")


MIXTURES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "llama-q4_k_m": ("llama", SIZES, MIXES["q4_k_m"]),
    "qwen2-q4_k_m": ("qwen2", SIZES, MIXES["q4_k_m"]),
    "llama-q3_k_m": ("llama", SIZES, MIXES["q3_k_m"]),
    "qwen2-q2_k-tied": ("qwen2", SIZES | {"tie_word_embeddings": True}, MIXES["q2_k"]),
    "qwen3-iq4_xs": ("qwen3", SIZES, MIXES["iq4_xs"]),
    "qwen3-q5_k-tied": ("qwen3", SIZES | {"tie_word_embeddings": True}, lambda name: "Q5_K"),
    "llama-small": ("llama", SMALL, small_mixture),
    "qwen2-small-tied": ("qwen2", SMALL | {"tie_word_embeddings": True}, small_mixture),
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


def written(folder: Path, mixture: str = "llama-q4_k_m", **options: Any) -> Path:
    kind, sizes, kinds = MIXTURES[mixture]
    return write_gguf(folder / "tiny.gguf", tiny(kind, **sizes), kinds=kinds, **options)


def runner_of(path: Path, dtype: str = "auto") -> NativeRunner:
    runner = open_runner(ModelConfig(str(path), dtype=dtype), "cpu", 1024)
    assert isinstance(runner, NativeRunner)
    return runner


def weights_bytes(runner: NativeRunner) -> int:
    """Bytes of all matrices; an embedding that is the LM head too counts once."""
    pieces = {id(piece.data): piece for linear in runner.model.linears() for piece in linear.blocks or ()}
    embedding: Any = runner.model.embedding
    pieces[id(embedding.blocks.data)] = embedding.blocks
    return sum(piece.data.nbytes for piece in pieces.values())


class RoundedInputs:
    """A matrix in floating point that is multiplied as blocks are: by inputs in 8 bits, one scale for every 32."""

    def __init__(self, linear: Linear) -> None:
        self._weight = linear.dequantize(torch.float32)

    def __getattr__(self, name: str) -> Any:
        return {"quantizes_input": True, "matrix": None, "blocks": None, "pass_pieces": None}[name]

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        groups = x.view(x.shape[0], -1, 32)
        scales = groups.abs().amax(dim=-1, keepdim=True).clamp_min(1e-20) / 127
        rounded = ((groups / scales).round() * scales).view(x.shape)
        return F.linear(rounded, self._weight, bias)


def logits_of(runner: NativeRunner) -> Tensor:
    return runner.forward([Row.chain(runner.new_cache(), PROMPT)]).logits


def unpacked_twin(runner: NativeRunner) -> NativeRunner:
    """The model of a file operation by operation, with every matrix unpacked and every input rounded."""

    def wrap(name: str, linear: Linear) -> Any:
        return RoundedInputs(linear)

    layers = [layer.with_linears(wrap) for layer in runner.model.layers]
    model = replace(runner.model, layers=layers, lm_head=RoundedInputs(runner.model.lm_head))
    return NativeRunner(model, runner.info, runner.blocks)


@pytest.mark.slow
@pytest.mark.parametrize("mixture", [name for name in MIXTURES if name != "llama-small"])
def test_a_file_runs_as_the_model_of_its_unpacked_weights(tmp_path: Path, mixture: str) -> None:
    """But for inputs that a last bit rounds to the next of 255 values."""
    path = written(tmp_path, mixture)
    packed, exact = runner_of(path), runner_of(path, "float32")
    assert packed.info.dtype == "gguf" and exact.info.dtype == "float32" and packed.eager._compiled is not None
    assert relative_error(logits_of(packed), logits_of(unpacked_twin(packed))) < 0.02
    assert relative_error(logits_of(packed), logits_of(exact)) < 0.1, "inputs of 8 bits are all that is rounded"
    assert torch.equal(packed.embed(torch.tensor(PROMPT)), exact.embed(torch.tensor(PROMPT)))


def relative_error(output: Tensor, expected: Tensor) -> float:
    return float((output - expected).norm() / expected.norm())


@pytest.mark.slow
@pytest.mark.parametrize("mixture", MIXTURES)
def test_the_unpacked_weights_are_those_of_the_gguf_package(tmp_path: Path, mixture: str) -> None:
    """transformers' model with an independent reading of the file in it."""
    path, (kind, sizes, _) = written(tmp_path, mixture), MIXTURES[mixture]
    stored = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in GGUFReader(path).tensors}
    model = tiny(kind, **sizes)
    model.load_state_dict({name: hugging_face_rows(name, stored, model.config) for name in model.state_dict()})
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits_of(runner_of(path, "float32")), expected, rtol=1e-4, atol=1e-3)


def hugging_face_rows(name: str, stored: dict[str, Any], config: Any) -> Tensor:
    """A tensor under its Hugging Face name; llama.cpp keeps the rotary pairs of a Llama side by side."""
    tied = name == "lm_head.weight" and config.tie_word_embeddings
    rows = torch.from_numpy(stored["token_embd.weight" if tied else gguf_name(name, config.model_type)].copy())
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if config.model_type == "llama" and heads:
        return rows.view(heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("mixture", MIXTURES)
def test_a_chain_is_the_same_bits_at_every_width(tmp_path: Path, mixture: str) -> None:
    runner = runner_of(written(tmp_path, mixture))
    whole = runner.forward([Row.chain(runner.new_cache(), PROMPT)]).logits
    seq_cache = runner.new_cache()
    single = torch.cat([runner.forward([Row.chain(seq_cache, [token])]).logits for token in PROMPT])
    assert torch.equal(whole, single)


def test_weights_take_no_more_than_the_file_has(tmp_path: Path) -> None:
    path = written(tmp_path)
    runner = runner_of(path)
    matrices = sum(tensor.size for tensor in read_index(locate(str(path)).folder) if len(tensor.shape) > 1)
    assert matrices < path.stat().st_size and weights_bytes(runner) < 1.04 * matrices
    assert not list((tmp_path / "cache").rglob("*.safetensors")), "nothing is unpacked on disk"


@pytest.mark.slow
def test_drafts_give_the_text_of_plain_decoding(tmp_path: Path) -> None:
    path = str(written(tmp_path))
    outputs = {}
    for method, options in {"none": {}, "ngram": {}, "draft_model": {"draft_model": path}}.items():
        with SpeculativeDecoder(path, method=method, num_draft_tokens=4, device="cpu", **options) as decoder:
            outputs[method] = decoder.generate(PROMPT, max_new_tokens=40, ignore_eos=True)
    assert outputs["ngram"].token_ids == outputs["draft_model"].token_ids == outputs["none"].token_ids
    assert outputs["draft_model"].stats.tokens_per_step == 5.0, "the file drafts for itself: all is accepted"


@pytest.mark.slow
def test_the_command_line_runs_a_file_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path)
    with SpeculativeDecoder(str(path), device="cpu") as decoder:
        text = decoder.generate("hello", max_new_tokens=12).text
    assert cli.main(["generate", "-m", str(path), "--max-new-tokens", "12", "--json", "--no-chat", "hello"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1])["text"] == text
    assert "converting" not in captured.err


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_dtype_that_is_named_is_converted_to(tmp_path: Path, dtype: str) -> None:
    path = written(tmp_path)
    runner = runner_of(path, dtype)
    assert runner.info.dtype == dtype and list((tmp_path / "cache").rglob("model.safetensors"))
    assert runner.forward([Row.chain(runner.new_cache(), PROMPT)]).logits.isfinite().all()


@pytest.mark.slow
def test_the_rows_of_queries_and_keys_are_those_of_hugging_face(tmp_path: Path) -> None:
    """llama.cpp keeps rotary pairs side by side: packed rows are put in order like unpacked ones."""
    index = {tensor.name: tensor for tensor in read_index(locate(str(written(tmp_path))).folder)}
    query, output = (index[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qo")
    assert (query.heads, output.heads) == (4, 0)
    plain = StoredTensor(**{name: getattr(query, name) for name in query.__slots__} | {"heads": 0})
    order = torch.arange(256).view(4, 32, 2).transpose(1, 2).flatten()
    assert torch.equal(query.stored(), plain.stored()[order])
    assert torch.equal(query.dequantized(), plain.dequantized()[order])


@pytest.mark.slow
def test_a_model_in_several_files_is_the_model_in_one(tmp_path: Path) -> None:
    whole = written(tmp_path)
    (tmp_path / "parts").mkdir()
    written(tmp_path / "parts", tensors_a_file=7)
    parts = sorted((tmp_path / "parts").iterdir())
    assert len(parts) == 3 and parts[0].name == "tiny-00001-of-00003.gguf"
    outputs = []
    for path in (whole, parts[0]):
        with SpeculativeDecoder(str(path), device="cpu") as decoder:
            outputs.append(decoder.generate(PROMPT, max_new_tokens=12, ignore_eos=True).token_ids)
    assert outputs[0] == outputs[1]
    with pytest.raises(WeightsError, match="name the first of them"):
        locate(str(parts[1]))
    parts[2].rename(tmp_path / "elsewhere.gguf")
    parts[0].touch()  # another modification time: what was read before is not used
    with pytest.raises(WeightsError, match=r"tiny-00003-of-00003\.gguf is not beside it"):
        locate(str(parts[0]))


@pytest.mark.slow
def test_a_weight_that_is_no_number_is_named(tmp_path: Path) -> None:
    path = written(tmp_path)
    index = {tensor.name: tensor for tensor in read_index(locate(str(path)).folder)}
    entry = index["model.layers.0.mlp.up_proj.weight"]
    content = bytearray(path.read_bytes())
    content[entry.offset : entry.offset + 2] = b"\x00\x7c"
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=r"mlp\.up_proj\.weight holds values that are no numbers"):
        SpeculativeDecoder(str(path), device="cpu")


@pytest.mark.slow
def test_an_audit_of_a_file_finds_it_lossless(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(written(tmp_path, "llama-small"))
    methods = ["--methods", "ngram,draft_model", "--draft-model", path, "--acceptance", "token"]
    assert cli.main(["audit", path, *methods, "--draws", "500", "--seconds", "300", "--quick", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["outcome"] == "lossless"
