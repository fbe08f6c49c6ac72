"""A directory that does not hold the model its config describes is an error of one line, never a text."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline import SpeculativeDecoder, cli
from paceline.errors import ModelError
from tests.support.tiny import byte_tokenizer, write_tiny_model

Damage = Callable[[Path], None]
NORM = "model.layers.1.input_layernorm.weight"


def changed_tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Damage:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def changed_config(**changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        document = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(document | changes))

    return damage


def without(name: str) -> Damage:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]

    return changed_tensors(change)


def generation_document(content: str) -> Damage:
    return lambda folder: (folder / "generation_config.json").write_text(content) and None


def cut_short(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-2000])


def set_value(value: float) -> Damage:
    return changed_tensors(lambda tensors: tensors[NORM].__setitem__(3, value))


DAMAGES: dict[str, tuple[Damage, str]] = {
    "missing tensor": (without(NORM), NORM),
    "surplus tensor": (changed_tensors(lambda tensors: tensors.update({"model.extra.weight": torch.ones(2)})), "extra"),
    "NaN": (set_value(float("nan")), NORM),
    "infinity": (set_value(float("-inf")), NORM),
    "fewer layers in the config": (changed_config(num_hidden_layers=2), "model.layers.2."),
    "more layers in the config": (changed_config(num_hidden_layers=4), "model.layers.3."),
    "negative layers": (changed_config(num_hidden_layers=-1), "num_hidden_layers = -1"),
    "no layers": (changed_config(num_hidden_layers=0), "num_hidden_layers = 0"),
    "layers in words": (changed_config(num_hidden_layers="three"), "num_hidden_layers = 'three'"),
    "negative heads": (changed_config(num_attention_heads=-4), "num_attention_heads = -4"),
    "no heads": (changed_config(num_attention_heads=0), "num_attention_heads = 0"),
    "negative key-value heads": (changed_config(num_key_value_heads=-2), "num_key_value_heads = -2"),
    "negative vocabulary": (changed_config(vocab_size=-259), "vocab_size = -259"),
    "config that is a list": (lambda folder: (folder / "config.json").write_text("[]") and None, "config.json"),
    "config cut short": (lambda folder: (folder / "config.json").write_text('{"model') and None, "config.json"),
    "weights cut short": (cut_short, "cut short"),
    "generation config that is no JSON": (generation_document('{"eos_token_id": 2'), "generation_config.json"),
    "generation config that is a list": (generation_document("[1, 2]"), "generation_config.json"),
    "end token in words": (generation_document('{"eos_token_id": "</s>"}'), "eos_token_id"),
}


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["auto", "hf"])
@pytest.mark.parametrize("case", DAMAGES)
def test_damage_is_one_line_that_names_it(
    case: str, runner: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, name = DAMAGES[case]
    damage(write_tiny_model(tmp_path / "model"))
    options = ["--max-new-tokens", "4", "--device", "cpu", "--runner", runner]
    status = cli.main(["generate", "-m", str(tmp_path / "model"), *options, "hello"])
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if line.startswith("paceline: error: ")]
    assert (status, printed.out) == (2, "") and len(lines) == 1 and name in lines[0], printed.err
    assert "Traceback" not in printed.err


@pytest.mark.parametrize("runner", ["auto", "hf"])
def test_tensors_that_old_checkpoints_carry_are_no_damage(runner: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    changed_tensors(lambda tensors: tensors.update(buffer))(tmp_path / "model")
    with SpeculativeDecoder(str(tmp_path / "model"), device="cpu", runner=runner) as decoder:
        assert decoder.generate("hello", max_new_tokens=2).token_ids


@pytest.mark.slow
def test_a_tied_head_is_not_missed(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", tie_word_embeddings=True)
    with SpeculativeDecoder(str(tmp_path / "model"), device="cpu", runner="hf") as decoder:
        assert decoder.generate("hello", max_new_tokens=2).token_ids


@pytest.mark.slow
def test_a_head_that_is_missing_is_named(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    without("lm_head.weight")(tmp_path / "model")
    for runner in ("auto", "hf"):
        with pytest.raises(ModelError, match=r"lm_head\.weight"):
            SpeculativeDecoder(str(tmp_path / "model"), device="cpu", runner=runner)


def test_weights_too_large_for_the_precision_are_named(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    set_value(1e6)(tmp_path / "model")
    with pytest.raises(ModelError, match=f"{NORM} holds values that are no numbers in float16"):
        SpeculativeDecoder(str(tmp_path / "model"), device="cpu", dtype="float16")


def test_large_weights_whose_sum_overflows_are_taken(tmp_path: Path) -> None:
    """The sum of many float16 values is beyond float16; none of them is."""
    write_tiny_model(tmp_path / "model")
    changed_tensors(lambda tensors: tensors.update({NORM: torch.full_like(tensors[NORM], 30000.0)}))(tmp_path / "model")
    SpeculativeDecoder(str(tmp_path / "model"), device="cpu", dtype="float16").close()


@pytest.mark.slow
def test_an_architecture_of_transformers_alone_is_checked_too(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=259, n_embd=16, n_layer=2, n_head=2)).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    SpeculativeDecoder(str(tmp_path), device="cpu").close()
    without("transformer.h.1.mlp.c_fc.weight")(tmp_path)
    with pytest.raises(ModelError, match=r"h\.1\.mlp\.c_fc\.weight"):
        SpeculativeDecoder(str(tmp_path), device="cpu")


QUANTIZED: dict[str, tuple[dict[str, Any], str]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "pip install gptqmodel optimum"),
    "awq": ({"quant_method": "awq", "bits": 4}, "pip install gptqmodel accelerate"),
    "hqq": ({"quant_method": "hqq", "quant_config": {}}, "pip install hqq"),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "pip install bitsandbytes accelerate"),
    "old bitsandbytes": ({"load_in_4bit": True}, "pip install bitsandbytes accelerate"),
    "compressed-tensors": ({"quant_method": "compressed-tensors"}, "pip install compressed-tensors"),
    "aqlm": ({"quant_method": "aqlm"}, "pip install 'aqlm[gpu,cpu]' accelerate"),
    "quanto": ({"quant_method": "quanto", "weights": "int8"}, "pip install optimum-quanto accelerate"),
}


@pytest.mark.parametrize("case", QUANTIZED)
def test_a_quantized_checkpoint_names_the_package_it_needs(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quantization, pip_line = QUANTIZED[case]
    monkeypatch.setattr("paceline.quantization.packages._installed", lambda module: False)
    changed_config(quantization_config=quantization)(write_tiny_model(tmp_path / "model"))
    command = ["generate", "-m", str(tmp_path / "model"), "--device", "cpu", "--runner", "hf", "hello"]
    assert cli.main(command) == 2
    message = capsys.readouterr().err.strip()
    assert message.endswith(pip_line) and "damaged" not in message and os.linesep not in message


def test_a_quantization_that_nobody_knows_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers warns and runs the weights as if they were not quantized."""
    changed_config(quantization_config={"quant_method": "some-new-kind"})(write_tiny_model(tmp_path / "model"))
    assert cli.main(["generate", "-m", str(tmp_path / "model"), "--device", "cpu", "hello"]) == 2
    message = capsys.readouterr().err.strip()
    assert "quantized with some-new-kind" in message and "damaged" not in message


def test_whatever_transformers_raises_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    def broken(*arguments: Any, **options: Any) -> None:
        raise AttributeError("'Config' object has no attribute 'index_topk'")

    write_tiny_model(tmp_path / "model")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", broken)
    assert cli.main(["generate", "-m", str(tmp_path / "model"), "--runner", "hf", "--device", "cpu", "hello"]) == 2
    message = capsys.readouterr().err.strip()
    assert message.endswith("has no attribute 'index_topk'") and "damaged" not in message
