"""`paceline plan` and `paceline pairs` as a user meets them."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import cli
from paceline.cli import pairs as pairs_command
from paceline.cli import plan as plan_command
from paceline.cli.flags import CommandParser
from paceline.engines import registry as engines
from paceline.errors import ModelNotFound, OptionError, PairError
from tests.plan.test_locate import write_gguf

SOURCE = Path(__file__).resolve().parents[2] / "src"


def run(module, *arguments):
    parser = argparse.ArgumentParser()
    module.configure(parser)
    return module.main(parser.parse_args(arguments))


def run_json(capsys, module, *arguments):
    assert run(module, *arguments, "--json") == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


PAIR = ("llama-3.1-70b", "--draft-model", "llama-3.2-1b")


@pytest.fixture
def divides(monkeypatch):
    """An engine that divides a model over up to eight GPUs is installed."""
    spec = engines.EngineSpec("divides", "for these tests", lambda config, build: None, max_gpus=8)
    monkeypatch.setitem(engines._REGISTERED, "divides", spec)


@pytest.mark.usefixtures("divides")
def test_the_json_adds_up(capsys):
    document = run_json(capsys, plan_command, *PAIR, "--hardware", "h100", "--num-gpus", "2")
    assert sum(part["bytes"] for part in document["parts"]) == document["total_bytes"]
    assert document["fit"]["outcome"] == "fits"
    assert document["speed"]["is_estimate"] is True
    assert document["target"]["parameters"] == 70553706496
    assert (document["engine"], document["runner"]) == ("divides", "native")


@pytest.mark.usefixtures("divides")
def test_stages_and_shares_are_planned_and_shown_by_gpu(capsys):
    division = ["--hardware", "h100", "--num-gpus", "4", "--pipeline-parallel-size", "2"]
    document = run_json(capsys, plan_command, *PAIR, *division)
    assert (document["tensor_parallel_size"], document["pipeline_parallel_size"]) == (2, 2)
    first, last = document["stages"]
    assert (first["layers"], last["layers"], first["num_gpus"]) == ([0, 39], [40, 79], 2)
    assert document["fullest_bytes"] == max(first["bytes_each"], last["bytes_each"])
    assert "draft weights" in last["parts"] and "draft weights" not in first["parts"]
    assert run(plan_command, *PAIR, *division) == 0
    shown = capsys.readouterr().out
    assert "stage 1: 2 GPUs, layers 0 to 39" in shown
    assert "--tensor-parallel-size 2 --pipeline-parallel-size 2" in shown


def test_an_engine_that_is_not_installed_divides_nothing(capsys, monkeypatch):
    spec = engines.EngineSpec("absent", "", lambda config, build: None, max_gpus=8, packages=("no_such_package",))
    monkeypatch.setitem(engines._REGISTERED, "absent", spec)
    with pytest.raises(OptionError, match="no engine that is installed divides a model"):
        run(plan_command, *PAIR, "--hardware", "h100", "--num-gpus", "2")


def test_several_gpus_are_planned_only_for_an_engine_that_divides_a_model(capsys):
    with pytest.raises(OptionError, match=r"no engine that is installed divides a model .*local: 1"):
        run(plan_command, *PAIR, "--hardware", "h100", "--num-gpus", "2")
    document = run_json(capsys, plan_command, *PAIR, "--hardware", "h100")
    assert document["engine"] == "local"
    assert not any("--num-gpus" in change["options"] for change in document["fit"]["changes"])
    advice = run_json(capsys, plan_command, "--advise", "many-gpus")["advice"][0]
    assert "--num-gpus" not in str(advice) and "local" in advice["why"]


@pytest.mark.usefixtures("divides")
def test_an_engine_that_divides_a_model_is_recommended_by_name(capsys):
    document = run_json(capsys, plan_command, *PAIR, "--hardware", "h100")
    assert any("--num-gpus 2" in change["options"] for change in document["fit"]["changes"])
    assert "--engine divides" in str(run_json(capsys, plan_command, "--advise", "many-gpus"))


def test_a_pair_that_the_engine_refuses_is_not_planned(capsys):
    with pytest.raises(PairError, match="--method cross_vocab"):
        run(plan_command, "llama-3.1-8b", "--draft-model", "phi-3-mini")
    document = run_json(capsys, plan_command, "llama-3.1-8b", "--draft-model", "phi-3-mini", "--method", "cross_vocab")
    assert document["method"] == "cross_vocab"


@pytest.mark.parametrize("dtype", ["nf4", "Q4_K_M"])
def test_a_dtype_that_no_engine_runs_is_not_planned(dtype):
    with pytest.raises(OptionError, match="cannot run in"):
        run(plan_command, "llama-3.1-8b", "--dtype", dtype)
    with pytest.raises(OptionError, match="cannot run in int4"):
        run(plan_command, "gpt2-xl", "--dtype", "int4")


def test_a_gguf_is_counted_as_it_would_be_loaded(capsys, tmp_path):
    path = str(write_gguf(tmp_path / "tiny.gguf"))
    document = run_json(capsys, plan_command, path)
    assert document["target"]["precision"] == "bf16" and any("packed" in note for note in document["notes"])
    assert run_json(capsys, plan_command, path, "--hardware", "cpu-laptop")["target"]["precision"] == "fp32"


@pytest.mark.parametrize("file_type, mixture", [("Q4_K_M", "q4_k_m"), ("Q3_K_M", "q3_k_m"), ("IQ4_XS", "iq4_xs")])
def test_a_gguf_of_blocks_that_stay_packed_on_a_gpu_is_counted_by_its_file(capsys, tmp_path, file_type, mixture):
    gguf = pytest.importorskip("gguf")
    from paceline.engines.local import SPEC
    from paceline.hub.gguf_architectures import PACKED_ON_GPUS
    from paceline.layers.cpu_kernels import GGUF_KINDS
    from tests.runners.native.models import tiny
    from tests.support.gguf import MIXES
    from tests.support.gguf import write_gguf as write_blocks

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 261}
    number = gguf.LlamaFileType[f"MOSTLY_{file_type}"]
    kinds = {"kinds": MIXES[mixture], "metadata": lambda writer: writer.add_file_type(number)}
    path = str(write_blocks(tmp_path / "tiny.gguf", tiny("qwen2", **sizes), **kinds))
    document = run_json(capsys, plan_command, path, "--hardware", "h100")
    assert (document["target"]["precision"], document["engine"]) == (file_type, "local")
    assert run_json(capsys, plan_command, path, "--hardware", "cpu-laptop")["target"]["precision"] == "fp32"
    assert SPEC.gguf_kinds == set(GGUF_KINDS) and SPEC.gguf_types == PACKED_ON_GPUS


def test_the_default_dtype_is_the_one_a_device_would_run(capsys):
    assert run_json(capsys, plan_command, "default", "--hardware", "h100")["target"]["precision"] == "bf16"
    assert run_json(capsys, plan_command, "default", "--hardware", "cpu-laptop")["target"]["precision"] == "fp32"


def test_the_published_figures_of_a_pair_are_found(capsys):
    document = run_json(capsys, plan_command, "vicuna-7b", "--draft-model", "vicuna-68m", "--hardware", "a100")
    assert document["published_speedup"] == 1.49 and "Spec-Bench" in document["speed"]["basis"]


def test_a_model_that_nothing_runs_says_so(capsys):
    document = run_json(capsys, plan_command, "qwen-1.8b")
    assert document["engine"] is None and any("neither paceline nor transformers" in note for note in document["notes"])


def parses(command):
    """Whether the command line is one that its command understands."""
    for part in command.split(" && "):
        _, name, *arguments = part.split()
        parser = CommandParser(prog=name)
        importlib.import_module(f"paceline.cli.{name}").configure(parser)
        parser.parse_args(arguments)
    return name in cli.COMMANDS


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama-3.1-8b", "mistral-7b", "gpt2-xl", "my/own-model"])
def test_every_recommended_command_is_one_that_its_command_takes(capsys, model):
    for situation in ("single-gpu", "many-gpus", "no-draft", "cpu", "apple", "api"):
        advice = run_json(capsys, plan_command, model, "--advise", situation)["advice"][0]
        assert all(parses(command) for command in advice["commands"])
    if model == "gpt2-xl":
        assert "--dtype int8" not in str(run_json(capsys, plan_command, model, "--advise", "cpu"))


@pytest.mark.slow
def test_every_pair_says_how_it_runs_and_its_command_is_understood(capsys):
    for pair in run_json(capsys, pairs_command)["pairs"]:
        assert pair["engine"] == "local" and pair["runner"] in ("native", "transformers")
        assert parses(pair["command"])
        if pair["method"] in ("eagle", "medusa") and pair["target"] != "smollm2-135m":
            assert pair["command"].startswith(f"paceline train {pair['method']} "), "no head comes with paceline"


def test_pairs_of_what_cannot_run_are_left_out_and_named(capsys, monkeypatch):
    from paceline.drafting import registry
    from paceline.models import registry as models

    monkeypatch.setattr(registry, "NAMES", {name: registry.NAMES[name] for name in ("draft_model", "eagle", "ngram")})
    monkeypatch.setattr("paceline.cli.runnable.transformers_types", lambda: frozenset({"gpt2"}))
    monkeypatch.setattr(models, "_architectures", {"llama": "paceline.models.llama"})
    document = run_json(capsys, pairs_command)
    targets = {pair["target"] for pair in document["pairs"]}
    assert "gpt2-xl" in targets and "qwen3-32b" not in targets and "gemma-2-27b" not in targets
    assert not any(pair["method"] == "medusa" for pair in document["pairs"])
    assert {"qwen3-32b", "vicuna-7b"} <= {pair["target"] for pair in document["refused"]}


def test_a_head_that_paceline_trains_is_named_with_its_command(capsys):
    assert run(plan_command, "llama-3.1-8b", "--method", "mtp") == 0
    shown = capsys.readouterr().out
    assert "`paceline train mtp`" in shown and "published" not in shown


@pytest.mark.usefixtures("divides")
def test_the_report_has_a_bar_and_a_fit_and_calls_the_speed_an_estimate(capsys):
    assert run(plan_command, *PAIR, "--hardware", "h100", "--num-gpus", "2") == 0
    shown = capsys.readouterr().out
    for phrase in ("█", "target weights", "draft KV cache", "Fits.", "free", "an estimate"):
        assert phrase in shown


def test_what_does_not_fit_shows_what_would(capsys):
    assert run(plan_command, "qwen2.5-32b", "--hardware", "rtx-4090") == 0
    shown = capsys.readouterr().out
    assert "missing" in shown
    assert "--dtype int4" in shown


def test_without_hardware_the_sizes_are_shown_and_the_option_is_named(capsys):
    assert run(plan_command, "default") == 0
    assert "--hardware" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ("default", "--max-seq-len", "-5"), ("default", "--hardware", "rtx-9999"),
        ("default", "--num-gpus", "0"), ("default", "--dtype", "q99"), ("default", "--memory", "-1"),
        ("default", "--acceptance-rate", "1.5"), ("default", "--max-num-seqs", "0"),
        ("default", "--method", "draft_model"),
        ("default", "--draft-model", "gpt2", "--method", "ngram"),
    ],
)  # fmt: skip
def test_nonsense_is_an_option_error(arguments):
    with pytest.raises(OptionError):
        run(plan_command, *arguments)


def test_without_a_model_the_default_one_is_planned(capsys):
    assert run_json(capsys, plan_command)["target"]["name"] == "smollm2-135m"


def test_a_draft_model_needs_no_method_and_a_head_needs_no_draft_model(capsys):
    assert run_json(capsys, plan_command, *PAIR)["method"] == "draft_model"
    assert run_json(capsys, plan_command, "default", "--method", "eagle")["draft"]["name"].startswith("eagle head")


def test_an_unknown_model_is_not_found():
    with pytest.raises(ModelNotFound):
        run(plan_command, "no-such-model")
    with pytest.raises(ModelNotFound, match="no-such-model"):
        run(pairs_command, "no-such-model")


@pytest.mark.parametrize("which", ["models", "hardware", "precisions"])
def test_catalogues_are_listed(capsys, which):
    assert run(plan_command, "--list", which) == 0
    assert len(capsys.readouterr().out.splitlines()) > 15
    assert len(run_json(capsys, plan_command, "--list", which)[which]) > 15


def test_advice_for_a_named_situation_and_for_all(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert [a["situation"] for a in run_json(capsys, plan_command, "--advise", "apple")["advice"]] == ["apple"]
    assert len(run_json(capsys, plan_command, "--advise")["advice"]) == 6
    implied = run_json(capsys, plan_command, "llama-3.1-8b", "--advise", "--hardware", "m4-max")
    assert implied["advice"][0]["situation"] == "apple"


def test_advice_asks_again_after_a_wrong_answer(capsys, monkeypatch):
    replies = iter(["what?", "1", "2"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda prompt: next(replies))
    assert run(plan_command, "--advise") == 0
    shown = capsys.readouterr().out
    assert "Please type a number" in shown
    assert "no-draft" in shown


def test_pairs_are_listed_with_their_sources(capsys):
    document = run_json(capsys, pairs_command)
    assert len(document["pairs"]) > 30
    assert all(pair["source"] and "paceline serve" in pair["command"] for pair in document["pairs"])
    assert run(pairs_command, "llama-3.1-8b") == 0
    assert "5877" in capsys.readouterr().out


def test_pairs_can_be_limited_by_the_drafts_size(capsys):
    listed = run_json(capsys, pairs_command, "llama-3.1-70b", "--max-draft", "2")["pairs"]
    assert [pair["draft"] for pair in listed] == ["llama-3.2-1b"]
    with pytest.raises(OptionError, match="--max-draft"):
        run(pairs_command, "--max-draft", "-1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("plan", ["llama-3.1-70b", "--draft-model", "llama-3.2-1b", "--hardware", "h100", "--json"]),
        ("plan", ["default", "--method", "eagle", "--hardware", "m4-max"]),
        ("plan", ["--advise"]),
        ("pairs", []),
    ],
)
def test_planning_never_imports_torch(command, arguments):
    script = (
        "import argparse, importlib, sys\n"
        f"module = importlib.import_module('paceline.cli.{command}')\n"
        "parser = argparse.ArgumentParser()\n"
        "module.configure(parser)\n"
        f"code = module.main(parser.parse_args({arguments!r}))\n"
        "heavy = {'torch', 'transformers', 'numpy', 'fastapi', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imported {sorted(heavy)}' if heavy else code)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=60)
    assert result.returncode == 0, result.stderr


def test_a_mixture_of_experts_runs_natively_and_gains_less_from_draft_tokens(capsys):
    options = ("--method", "ngram", "-k", "5", "--hardware", "h200")
    mixed, dense = (run_json(capsys, plan_command, name, *options) for name in ("qwen3-30b-a3b", "qwen3-4b"))
    assert mixed["runner"] == "native" and mixed["target"]["parameters"] == pytest.approx(30.5e9, rel=0.01)
    assert mixed["speed"]["speedup"][1] < 0.6 * dense["speed"]["speedup"][1]
