"""Blocks of GGUF files as the packed kernel reads them: the file's numbers to the last bit, in about the file's bytes.

Without a GPU the kernel runs through Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from paceline import SpeculativeDecoder, cli
from paceline.build import open_runner
from paceline.config import ModelConfig
from paceline.core.types import Row
from paceline.errors import WeightsError
from paceline.hub import locate
from paceline.hub.gguf_index import GgufSource, read_index
from paceline.layers import cpu_kernels
from paceline.layers.cpu_kernels import GGUF_KINDS, WeightKind
from paceline.layers.gemm import GemmLauncher
from paceline.layers.gemm_types import Epilogue
from paceline.layers.linear_triton import argmax
from paceline.models.checkpoint import ModelCheckpoint
from paceline.models.decoder import DecoderModel
from paceline.quantization import gguf as gguf_format
from paceline.quantization.gguf_codes import read_blocks
from paceline.quantization.packed import PackedEmbedding, PackedLinear, pack_weight
from paceline.quantization.packed_pieces import PackedPieces
from paceline.quantization.packed_triton import unpack
from paceline.runners.native import NativeRunner, read_config
from paceline.runners.native import loading as native_loading
from tests.runners.native.fused import eager_graphs
from tests.runners.native.models import tiny
from tests.support.gguf import HALVES, MIXES, random_blocks, write_gguf

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = list(GGUF_KINDS)
PROMPT = [5, 17, 200, 33, 2, 71, 8, 140] * 4
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
SIZES |= {"vocab_size": 261, "num_hidden_layers": 2}


def stored(kind: str, rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(random_blocks(kind, rows, columns, seed))


def reference(kind: str, rows: Tensor) -> Tensor:
    """What the gguf package makes of the same bytes."""
    return torch.from_numpy(gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType[kind]))


def packed_of(kind: str, rows: int, columns: int, seed: int = 0) -> PackedLinear:
    return pack_weight(read_blocks(stored(kind, rows, columns, seed).to(DEVICE), GGUF_KINDS[kind], "x.weight"))


def launcher(dtype: torch.dtype = torch.float32) -> GemmLauncher:
    return GemmLauncher(dtype, torch.device(DEVICE), 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_packed_blocks_are_those_of_the_gguf_package_to_the_last_bit(kind: str) -> None:
    read = stored(kind, 21, 768)
    linear, expected = packed_of(kind, 21, 768), reference(kind, read)
    assert torch.equal(linear._unpacked().dequantize(torch.float32).cpu(), expected), "by torch's own operations"
    assert torch.equal(unpack(linear, torch.float32).cpu(), expected), "by the kernel that unpacks a weight"
    whole = packed_of(kind, 32, 768)  # tiles
    assert whole.nbytes <= 1.04 * stored(kind, 32, 768).nbytes, "no more than the file has, but for an eighth of a bit"


@pytest.mark.slow
def test_what_unpacks_and_multiplies_them_compiles_for_a_gpu() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    kinds = ["Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ4_XS", "Q8_0"]  # one of each way to unpack
    command = [sys.executable, "-m", "tests.support.compiled_packed", *kinds]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == kinds, done.stderr[-2000:]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("columns", [32, 96])
def test_rows_that_are_no_whole_step_are_read_as_the_gguf_package_reads_them(kind: str, columns: int) -> None:
    weight = torch.randn(24, columns).numpy()
    read = torch.from_numpy(gguf.quantize(weight, gguf.GGMLQuantizationType[kind]))
    linear = pack_weight(read_blocks(read.to(DEVICE), GGUF_KINDS[kind], "x.weight"))
    assert torch.equal(unpack(linear, torch.float32).cpu(), reference(kind, read))
    x = torch.randn(3, columns, device=DEVICE)
    exact = x.double() @ reference(kind, read).to(DEVICE).double().t()
    torch.testing.assert_close(launcher().product(x, linear, Epilogue()).out.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_files_numbers(kind: str) -> None:
    gemm, rows = launcher(), 3
    x, bias = torch.randn(rows, 512, device=DEVICE), torch.randn(37, device=DEVICE)
    linear, pair = packed_of(kind, 37, 512), packed_of(kind, 74, 512, seed=1)
    exact, both = (
        x.double() @ reference(kind, stored(kind, size, 512, seed)).to(DEVICE).double().t()
        for size, seed in ((37, 0), (74, 1))
    )
    residual = torch.randn(rows, 37, device=DEVICE)
    added = gemm.product(x, linear, Epilogue(residual=residual, bias=bias)).out.double()
    torch.testing.assert_close(added, exact + residual + bias, rtol=1e-4, atol=1e-3)
    gate, up = both.chunk(2, dim=-1)
    gated = gemm.product(x, pair, Epilogue(gate=True)).out.double()
    torch.testing.assert_close(gated, F.silu(gate) * up, rtol=1e-3, atol=1e-2)
    logits = gemm.product(x, linear, Epilogue(argmax=True))
    torch.testing.assert_close(logits.out.double(), exact, rtol=1e-4, atol=1e-3)
    assert torch.equal(argmax(gemm, logits).token, logits.out.argmax(dim=-1))


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are packed as on a GPU, wherever their tensors lie."""
    monkeypatch.setattr(gguf_format, "on_host", lambda device: False)


class Stored:
    """The tensors of a checkpoint on a GPU: random blocks of a kind by name, or a matrix in floating point."""

    dtype, quantization = torch.float32, {}

    def __init__(self, kinds: dict[str, str], rows: int, columns: int) -> None:
        self.tensors = {
            f"{name}.weight:{kind}" if kind in KINDS else f"{name}.weight": (
                stored(kind, rows, columns, seed) if kind in KINDS else torch.randn(rows, columns).half()
            )
            for seed, (name, kind) in enumerate(kinds.items())
        }

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def raw(self, name: str) -> Tensor:
        return self.tensors[name].to(DEVICE)

    def weight(self) -> Tensor:
        parts = [reference(name.split(":")[1], rows) if ":" in name else rows for name, rows in self.tensors.items()]
        return torch.cat([part.float() for part in parts]).to(DEVICE)


@pytest.mark.slow
@pytest.mark.usefixtures("as_on_a_gpu")
def test_layers_of_different_kinds_are_joined_and_each_stays_as_it_is() -> None:
    """Q4_K_M: queries and keys in Q4_K, values in Q6_K."""
    tensors = Stored({"q": "Q4_K", "k": "Q4_K", "v": "Q6_K"}, 24, 256)
    joined = gguf_format.load(tensors, ["q", "k", "v"])
    assert isinstance(joined, PackedPieces) and [piece.out_features for piece in joined.pieces] == [48, 24]
    assert (joined.out_features, joined.in_features, joined.kernel_rows) == (72, 256, 64)
    assert torch.equal(joined.dequantize(torch.float32), tensors.weight())
    assert joined.nbytes == sum(piece.nbytes for piece in joined.pieces)
    gemm, x, bias = launcher(), torch.randn(3, 256, device=DEVICE), torch.randn(72, device=DEVICE)
    residual = torch.randn(3, 72, device=DEVICE)
    exact = x.double() @ tensors.weight().double().t()
    out = gemm.product(x, joined, Epilogue(bias=bias, residual=residual)).out.double()
    torch.testing.assert_close(out, exact + bias + residual, rtol=1e-4, atol=1e-3)
    gate, up = exact.chunk(2, dim=-1)
    gated = gemm.product(x, joined, Epilogue(gate=True)).out.double()
    torch.testing.assert_close(gated, F.silu(gate) * up, rtol=1e-3, atol=1e-2)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_of_a_whole_pass_reads_two_kinds_and_leaves_the_others_alone(kind: str) -> None:
    """Alone and beside one that it reads; a model with any other kind runs through the packed kernel."""
    assert (packed_of(kind, 32, 256).pass_pieces is not None) == (kind in ("Q4_K", "Q6_K"))
    joined = gguf_format.load(Stored({"q": kind, "v": "Q6_K" if kind == "Q4_K" else "Q4_K"}, 32, 256), ["q", "v"])
    assert joined is not None and (joined.pass_pieces is not None) == (kind in ("Q4_K", "Q6_K"))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_layer_beside_one_in_floating_point_is_unpacked_with_it() -> None:
    tensors = Stored({"q": "Q4_K", "k": "F16"}, 24, 256)
    joined = gguf_format.load(tensors, ["q", "k"])
    assert joined is not None and torch.equal(joined.dequantize(torch.float32), tensors.weight())
    assert gguf_format.load(Stored({"o": "F16"}, 8, 64), ["o"]) is None, "all in floating point: not this format's"


def test_experts_are_unpacked_for_the_kernel_that_multiplies_by_all_of_them() -> None:
    rows = stored("Q4_K", 16, 256)
    weights = [gguf_format.StoredWeight(f"mlp.experts.3.{name}", WeightKind.Q4_K, rows) for name in ("gate", "up")]
    linear = gguf_format._packed(weights, torch.bfloat16)
    assert linear.matrix is not None and torch.equal(linear.matrix, torch.cat([reference("Q4_K", rows)] * 2).bfloat16())


@pytest.mark.parametrize("kind", KINDS)
def test_an_embedding_unpacks_the_rows_asked_for(kind: str) -> None:
    embedding, tokens = PackedEmbedding(packed_of(kind, 50, 256), torch.float32), torch.tensor([[49, 0], [7, 7]])
    expected = reference(kind, stored(kind, 50, 256))[tokens]
    assert torch.equal(embedding[tokens.to(DEVICE)].cpu(), expected)
    rows = unpack(embedding.linear, torch.float32, tokens.flatten().to(DEVICE))
    assert torch.equal(rows.cpu(), expected.flatten(0, 1)), "by the kernel too"


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_that_is_no_number_is_refused(kind: str) -> None:
    for place in HALVES[kind]:
        tensors = Stored({"x": kind}, 16, 512)
        tensors.tensors[f"x.weight:{kind}"][3, place : place + 2] = torch.tensor([0, 0x7C], dtype=torch.uint8)
        with pytest.raises(WeightsError, match=r"x\.weight holds values that are no numbers"):
            gguf_format.load(tensors, ["x"])


# --- whole models -----------------------------------------------------------------------------------------------------


def small_mixture(name: str) -> str:
    """What it falls back to where rows are no multiple of 256."""
    kinds = {"attn_q": "Q5_0", "attn_k": "Q5_1", "attn_v": "Q8_0", "attn_output": "IQ4_NL", "ffn_up": "Q4_0"}
    kinds |= {"ffn_down": "Q4_1", "token_embd": "Q8_0", "ffn_gate": "Q4_1"}
    return next((kinds[part] for part in kinds if part in name), "Q5_1")


MIXTURES: dict[str, tuple[dict[str, Any], Any]] = {
    **{name: (SIZES, kinds) for name, kinds in MIXES.items()},
    "q5_k-tied": (SIZES | {"tie_word_embeddings": True}, lambda name: "Q5_K"),
    "small": (SIZES | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}, small_mixture),
}


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    sizes, kinds = MIXTURES[request.param]
    return write_gguf(tmp_path / "tiny.gguf", tiny("qwen2", **sizes), kinds=kinds)


def packed_model(path: Path) -> DecoderModel:
    """The model of a file in packed weights, float32 where there is no GPU: its interpreter has no bfloat16."""
    folder = locate(str(path)).folder
    source = GgufSource(folder, gguf_format.KINDS, DEVICE)
    checkpoint = ModelCheckpoint(source, source.names(), torch.float32, DEVICE, stored=gguf_format)
    return native_loading._load(checkpoint, read_config(folder, "tiny"))


@pytest.mark.slow
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("written", MIXTURES, indirect=True)
def test_a_packed_file_runs_as_the_model_of_its_unpacked_weights(written: Path) -> None:
    """A pass through the fused kernels against one through the gguf package's own numbers in float32."""
    model = packed_model(written)
    assert all(isinstance(linear, PackedLinear | PackedPieces) for linear in model.linears())
    assert isinstance(model.embedding, PackedEmbedding) and not model.quantizes_input
    exact = open_runner(ModelConfig(str(written), dtype="float32"), DEVICE, 1024)
    assert isinstance(exact, NativeRunner)
    runner = NativeRunner(model, replace(exact.info, device=DEVICE), exact.blocks)
    expected = exact.forward([Row.chain(exact.new_cache(), PROMPT[:6])]).logits.clone()
    runner.decode_graphs = eager_graphs(runner)
    fused = runner.forward([Row.chain(runner.new_cache(), PROMPT[:6])]).logits
    torch.testing.assert_close(fused, expected, rtol=1e-3, atol=2e-3 * float(expected.abs().max()))
    matrices = sum(tensor.size for tensor in read_index(locate(str(written)).folder) if len(tensor.shape) > 1)
    tied = model.lm_head is model.embedding.linear
    nbytes = sum(linear.nbytes for linear in model.linears()) + (0 if tied else model.embedding.linear.nbytes)
    whole_steps = model.config.hidden_size % 128 == 0  # shorter rows are padded to one
    assert nbytes < (1.1 if whole_steps else 2.0) * matrices


@pytest.mark.slow
@pytest.mark.parametrize("written", ["small"], indirect=True)
def test_where_there_are_no_kernels_a_file_is_unpacked_exactly_and_said_so(
    written: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """As on an x86 CPU: float32 holds every number of the file, so nothing is rounded, and the memory is named."""
    for module in (cpu_kernels, gguf_format):
        monkeypatch.setattr(module, "library", lambda: None)
    with SpeculativeDecoder(str(written), device="cpu", dtype="float32") as decoder:
        expected = decoder.generate("hello", max_new_tokens=12).token_ids
    assert not caplog.records, "a dtype that is named is no surprise"
    arguments = ["generate", "-m", str(written), "--device", "cpu", "--max-new-tokens", "12", "--json", "--no-chat"]
    assert cli.main([*arguments, "hello"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["token_ids"] == expected
    assert "unpacked to float32" in caplog.text and "llama_cpp" in caplog.text
    runner = open_runner(ModelConfig(str(written)), "cpu", 64)
    index = {tensor.name: tensor for tensor in read_index(locate(str(written)).folder)}
    assert runner.info.dtype == "float32"
    rows = runner.embed(torch.arange(261))  # type: ignore[attr-defined]
    assert torch.equal(rows, index["model.embed_tokens.weight"].dequantized())


def test_on_cuda_a_file_is_kept_as_it_is_unless_a_dtype_is_named() -> None:
    assert gguf_format.runs_on("cuda") and not gguf_format.runs_on("mps")


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(512, 768), (4608, 3584), (3584, 8192)])
def test_a_row_in_bfloat16_has_the_same_bits_in_every_pass(kind: str, sizes: tuple[int, int]) -> None:
    linear, gemm = packed_of(kind, *sizes), launcher(torch.bfloat16)
    x = torch.randn(64, sizes[1], device=DEVICE, dtype=torch.bfloat16)
    for epilogue in (Epilogue(), Epilogue(gate=True), Epilogue(argmax=True)):
        widths = (1, 2, 6, 16, 17, 33, 64)
        outputs = {rows: gemm.product(x[:rows].contiguous(), linear, epilogue).out for rows in widths}
        assert all(torch.equal(out, outputs[64][:rows]) for rows, out in outputs.items())
    exact = x.double() @ linear.dequantize(torch.float32).double().t()
    assert (gemm.product(x, linear, Epilogue()).out.double() - exact).norm() / exact.norm() < 0.005


@pytest.mark.gpu
@pytest.mark.parametrize("written", MIXTURES, indirect=True)
def test_on_a_gpu_a_file_runs_as_it_is_and_drafted_text_is_plain_text(written: Path) -> None:
    texts, drafted = [], {"draft_model": str(written), "num_draft_tokens": 5}
    for method in ({}, {"method": "ngram", "num_draft_tokens": 7}, drafted):
        with SpeculativeDecoder(str(written), device="cuda", **method) as decoder:
            assert decoder.info.dtype == "gguf"
            texts.append(decoder.generate(PROMPT, max_new_tokens=100, ignore_eos=True).token_ids)
    assert texts[0] == texts[1] == texts[2]
