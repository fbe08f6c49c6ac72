"""LoRA adapters against models with the adapter merged into their weights, in float64."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline import SpeculativeDecoder
from paceline.build import build_engine, open_runner
from paceline.config import EngineConfig, ModelConfig
from paceline.core.cost_model import CostModel
from paceline.core.sampling import SamplingParams
from paceline.core.types import Request, Row
from paceline.errors import CapabilityError, ModelNotFound, OptionError, WeightsError
from paceline.layers.lora import LoraLinear, LoraRows, LowRank
from paceline.models.llama import config_from_hf
from paceline.models.lora import read_adapter
from paceline.quantization import registry as formats
from paceline.runners.native import NativeRunner
from paceline.runners.native.lora_runner import LoraRunner
from tests.support.lora import ALL, SOME, merged, write_adapter
from tests.support.tiny import byte_tokenizer, tiny_llama

PROMPT = "to be or not to be, that is the question: to be or not"
LONG = PROMPT * 4  # several blocks of the prefix cache
TOKENS = list(range(40, 90))
ONE_MODEL = config_from_hf(tiny_llama().config)


@dataclass(frozen=True, slots=True)
class Adapters:
    """The folder of the model, those of its adapters, and those of the models that result from merging them."""

    model: Path
    loras: dict[str, str]
    merged: dict[str | None, Path]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    root = tmp_path_factory.mktemp("lora")
    folders = {
        "all": write_adapter(root / "all", tiny_llama(), 1),
        "some": write_adapter(root / "some", tiny_llama(), 2, rank=3, modules=SOME, use_rslora=True),
    }
    results: dict[str | None, Path] = {}
    for name in (None, *folders):
        model = tiny_llama() if name is None else merged(tiny_llama(), folders[name])
        results[name] = root / f"merged-{name}"
        model.save_pretrained(results[name])
        byte_tokenizer().save_pretrained(results[name])
    return Adapters(results[None], {name: str(folder) for name, folder in folders.items()}, results)


@pytest.fixture(scope="module")
def runner(adapters: Adapters) -> LoraRunner:
    lora_runner = LoraRunner.of_model(tiny_llama(), "tiny", kv_cache_tokens=4096)
    assert isinstance(lora_runner, LoraRunner)
    lora_runner.read_adapters(adapters.loras)
    return lora_runner


def row_of(runner: NativeRunner, lora: str | None, tokens: list[int], parents: list[int] | None = None) -> Row:
    seq_cache = runner.new_cache()
    seq_cache.lora = lora
    row = Row.chain(seq_cache, tokens)
    return row if parents is None else Row(seq_cache, row.tokens, parents)


def expected_logits(adapters: Adapters, lora: str | None, tokens: list[int]) -> torch.Tensor:
    """Of transformers' model with the adapter merged, computed in float64."""
    model = tiny_llama().double() if lora is None else merged(tiny_llama().double(), Path(adapters.loras[lora]))
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float()


# --- passes -----------------------------------------------------------------------------------------------------------


def test_a_batch_that_mixes_adapters_computes_the_merged_models(runner: LoraRunner, adapters: Adapters) -> None:
    loras = ["all", None, "some", "all", None]
    prompts = [TOKENS[start : start + length] for start, length in ((0, 30), (3, 20), (5, 1), (9, 12), (2, 25))]
    rows = [row_of(runner, lora, prompt) for lora, prompt in zip(loras, prompts)]
    for lora, prompt, output in zip(loras, prompts, runner.forward(rows)):
        torch.testing.assert_close(output.logits, expected_logits(adapters, lora, prompt), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(expected_logits(adapters, "all", TOKENS), expected_logits(adapters, None, TOKENS), atol=1)


@pytest.mark.slow
def test_the_next_rows_read_keys_and_values_of_their_own_adapter(runner: LoraRunner, adapters: Adapters) -> None:
    loras = ["some", None, "all"]
    rows = [row_of(runner, lora, TOKENS[:20]) for lora in loras]
    runner.forward(rows, last_only=True)
    for row in rows:
        runner.commit(row.seq_cache, list(range(20)))
    trees = [Row(row.seq_cache, torch.tensor([50, 60, 70]), [-1, 0, 0]) for row in rows]
    for lora, output in zip(loras, runner.forward(trees)):
        for node, path in ((1, [50, 60]), (2, [50, 70])):
            expected = expected_logits(adapters, lora, [*TOKENS[:20], *path])[-1]
            torch.testing.assert_close(output.logits[node], expected, rtol=1e-3, atol=1e-3)


def test_rows_without_an_adapter_have_the_bits_of_a_runner_without_adapters(runner: LoraRunner) -> None:
    alone = NativeRunner.of_model(tiny_llama(), "tiny", kv_cache_tokens=4096)
    plain = alone.forward([row_of(alone, None, TOKENS)])[0]
    beside = runner.forward([row_of(runner, "all", TOKENS), row_of(runner, None, TOKENS)])[1]
    assert torch.equal(plain.logits, beside.logits)


def test_hidden_states_are_those_of_the_adapted_model(adapters: Adapters) -> None:
    """A head reads them: it stays the same, and sees what the adapter does."""
    exposed = LoraRunner.of_model(tiny_llama(), "tiny", kv_cache_tokens=1024)
    exposed.read_adapters(adapters.loras)
    exposed.expose(hidden=True, features=(1, 2))
    outputs = exposed.forward([row_of(exposed, "all", TOKENS), row_of(exposed, None, TOKENS)], last_only=True)
    for output, lora in zip(outputs, ("all", None)):
        model = tiny_llama().double()
        model = model if lora is None else merged(model, Path(adapters.loras[lora]))
        with torch.no_grad():
            states = model(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
        assert output.hidden is not None and output.features is not None
        torch.testing.assert_close(output.hidden, states[-1][0].float(), rtol=1e-3, atol=1e-3)
        features = torch.cat([states[1][0], states[2][0]], -1).float()
        torch.testing.assert_close(output.features, features, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("weight_format", [None, "int8", "int4"])
def test_an_adapter_adds_to_a_linear_layer_of_any_format(weight_format: str | None) -> None:
    generator = torch.Generator().manual_seed(0)
    model = LoraRunner.of_model(tiny_llama(), "tiny", kv_cache_tokens=256, weight_format=weight_format).model
    inner = next(model.linears())
    rank, size = 2, inner.in_features
    delta = LowRank(
        torch.randn(rank, size, generator=generator), torch.randn(inner.out_features, rank, generator=generator)
    )
    rows = LoraRows()
    linear = LoraLinear(inner, {"a": delta}, rows)
    x = torch.randn(6, size, generator=generator)
    rows.begin([None, "a", "a", "b"], [1, 2, 1, 2])
    expected = inner(x)
    expected[1:4] += (x[1:4] @ delta.down.T) @ delta.up.T
    torch.testing.assert_close(linear(x), expected)
    assert weight_format is None or weight_format in formats.names()


# --- the library ------------------------------------------------------------------------------------------------------


OPTIONS: dict[str, Any] = {"runner": "native", "tuned": CostModel(), "device": "cpu", "dtype": "fp32"}


def results_of(folder: Path, loras: list[str | None], prompt: str = PROMPT, **options: Any) -> list[Any]:
    with SpeculativeDecoder(folder, **OPTIONS, **options) as decoder:
        return [decoder.generate(prompt, max_new_tokens=24, ignore_eos=True, lora=lora) for lora in loras]


def text_of(folder: Path, prompt: str = PROMPT) -> list[int]:
    token_ids: list[int] = results_of(folder, [None], prompt)[0].token_ids
    return token_ids


@pytest.fixture(scope="module")
def expected(adapters: Adapters) -> dict[str | None, list[int]]:
    return {name: text_of(folder) for name, folder in adapters.merged.items()}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["none", "ngram", "suffix", "lookahead", "layerskip", "draft_model"])
def test_text_is_that_of_the_merged_model_with_every_method(
    adapters: Adapters, expected: dict[str | None, list[int]], method: str
) -> None:
    options: dict[str, Any] = {"num_draft_tokens": 3}
    if method == "draft_model":
        options["draft_model"] = str(adapters.model)
    if method == "layerskip":
        options["draft_options"] = {"layer": 1}
    loras = ["all", None, "some", "all"]
    results = results_of(adapters.model, loras, lora=adapters.loras, method=method, **options)
    assert [result.token_ids for result in results] == [expected[lora] for lora in loras]
    assert method == "none" or sum(result.stats.drafted for result in results) > 0
    assert expected["all"] != expected[None] != expected["some"]


@pytest.mark.slow
def test_sequences_of_different_adapters_run_in_one_batch(
    adapters: Adapters, expected: dict[str | None, list[int]]
) -> None:
    config = EngineConfig.create(
        adapters.model, **OPTIONS, lora=adapters.loras, method="ngram", num_draft_tokens=3, max_num_seqs=4
    )
    engine = build_engine(config)
    prompt, loras = engine.tokenizer.encode(PROMPT), ["all", None, "some", "all"]
    requests = [Request(prompt, SamplingParams(), 24, ignore_eos=True, lora=lora) for lora in loras]
    seqs = engine.run(requests)
    assert [seq.ids[len(prompt) :] for seq in seqs] == [expected[lora] for lora in loras]
    with pytest.raises(OptionError, match="no LoRA adapter 'other'; there is all, some"):
        engine.sequence(Request(prompt, SamplingParams(), 2, lora="other"))


@pytest.mark.slow
def test_the_prefix_cache_is_kept_by_adapter(adapters: Adapters) -> None:
    """One prompt under three adapters and again: a cached prefix is reused under its own adapter and no other."""
    alone = {name: text_of(folder, LONG) for name, folder in adapters.merged.items()}
    order = [None, "all", "some", "all", None]
    with SpeculativeDecoder(adapters.model, **OPTIONS, lora=adapters.loras) as decoder:
        hits = []
        for lora in order:
            result = decoder.generate(LONG, max_new_tokens=24, ignore_eos=True, lora=lora)
            hits.append(decoder._engine.stats().prefix_hits)
            assert result.token_ids == alone[lora], lora
    assert hits == [0, 0, 0, 1, 2]


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"peft_type": "IA3"}, CapabilityError, "not a LoRA adapter"),
        ({"use_dora": True}, CapabilityError, "use_dora True"),
        ({"bias": "all"}, CapabilityError, "bias 'all'"),
        ({"modules_to_save": ["lm_head"]}, CapabilityError, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, CapabilityError, "rank_pattern"),
        ({"r": None}, WeightsError, "needs r and lora_alpha"),
    ],
)
def test_what_an_adapter_does_beyond_the_projections_is_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    folder = write_adapter(tmp_path / "adapter", tiny_llama(), 0, **settings)
    with pytest.raises(error, match=message):
        LoraRunner.of_model(tiny_llama(), "tiny", 256).read_adapters({"it": str(folder)})


@pytest.mark.slow
def test_files_that_are_missing_damaged_or_of_another_model_are_errors_in_words(tmp_path: Path) -> None:
    lora_runner = LoraRunner.of_model(tiny_llama(), "tiny", 256)
    with pytest.raises(ModelNotFound, match=r"needs adapter_config\.json"):
        lora_runner.read_adapters({"it": str(tmp_path)})
    other = write_adapter(tmp_path / "other", tiny_llama(hidden_size=64), 0)
    with pytest.raises(WeightsError, match=r"is for another model: self_attn\.q_proj of layer 0"):
        lora_runner.read_adapters({"it": str(other)})
    deeper = write_adapter(tmp_path / "deeper", tiny_llama(num_hidden_layers=4), 0)
    with pytest.raises(CapabilityError, match=r"layers\.3\..* not supported here"):
        lora_runner.read_adapters({"it": str(deeper)})
    half = write_adapter(tmp_path / "half", tiny_llama(), 0)
    tensors = load_file(half / "adapter_model.safetensors")
    tensors.pop(next(iter(sorted(tensors))))
    save_file(tensors, half / "adapter_model.safetensors")
    with pytest.raises(WeightsError, match="only one of A and B"):
        lora_runner.read_adapters({"it": str(half)})
    (half / "adapter_model.safetensors").write_bytes(b"nothing")
    with pytest.raises(WeightsError, match="damaged"):
        lora_runner.read_adapters({"it": str(half)})
    (half / "adapter_model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"needs adapter_model\.safetensors"):
        lora_runner.read_adapters({"it": str(half)})
    (half / "adapter_config.json").write_text("{")
    with pytest.raises(WeightsError, match="cannot be read"):
        lora_runner.read_adapters({"it": str(half)})


def test_only_the_native_runner_takes_adapters(adapters: Adapters) -> None:
    with pytest.raises(CapabilityError, match="need a model that the native runner runs"):
        open_runner(ModelConfig(str(adapters.model), runner="hf", lora=adapters.loras), "cpu", 256)
    for lora in ({"a:b": "x"}, {"": "x"}, ["x"]):
        with pytest.raises(OptionError, match=r"LoRA|lora"):
            ModelConfig("model", lora=lora)  # type: ignore[arg-type]


def test_an_adapter_that_peft_has_written_is_read(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = peft.get_peft_model(
        tiny_llama(), peft.LoraConfig(r=3, lora_alpha=12, target_modules=list(ALL), init_lora_weights=False)
    )
    model.save_pretrained(tmp_path / "adapter")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["peft_type"] == "LORA"
    lora_runner = LoraRunner.of_model(tiny_llama(), "tiny", 256)
    lora_runner.read_adapters({"it": str(tmp_path / "adapter")})
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0]
    output = lora_runner.forward([row_of(lora_runner, "it", TOKENS)])[0]
    torch.testing.assert_close(output.logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("value", ["pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga"])
def test_an_adapter_of_base_weights_that_were_changed_is_refused(value: str, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", tiny_llama(), 1, init_lora_weights=value)
    with pytest.raises(CapabilityError, match=f"init_lora_weights '{value}'"):
        read_adapter("adapter", folder, ONE_MODEL, torch.float32, "cpu")


@pytest.mark.parametrize("value", [True, False, None, "gaussian", "eva", "orthogonal"])
def test_how_the_matrices_of_an_adapter_began_does_not_matter(value: bool | str | None, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", tiny_llama(), 1, init_lora_weights=value)
    assert read_adapter("adapter", folder, ONE_MODEL, torch.float32, "cpu").deltas
