"""`paceline plan` and `paceline pairs` as a user meets them."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli import pairs as pairs_command
from paceline.cli import plan as plan_command
from paceline.errors import ModelNotFound, OptionError

SOURCE = Path(__file__).resolve().parents[2] / "src"


def run(module, *arguments):
    parser = argparse.ArgumentParser()
    module.configure(parser)
    return module.main(parser.parse_args(arguments))


def run_json(capsys, module, *arguments):
    assert run(module, *arguments, "--json") == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


PAIR = ("llama-3.1-70b", "--draft-model", "llama-3.2-1b")


def test_the_json_adds_up(capsys):
    document = run_json(capsys, plan_command, *PAIR, "--hardware", "h100", "--num-gpus", "2")
    assert sum(part["bytes"] for part in document["parts"]) == document["total_bytes"]
    assert document["fit"]["outcome"] == "fits"
    assert document["speed"]["is_estimate"] is True
    assert document["target"]["parameters"] == 70553706496


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


def test_other_tokenizers_are_noted(capsys):
    document = run_json(capsys, plan_command, "llama-3.1-8b", "--draft-model", "phi-3-mini")
    assert any("different tokenizers" in note for note in document["notes"])


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
    assert all(pair["source"] and pair["command"].startswith("paceline serve") for pair in document["pairs"])
    assert run(pairs_command, "llama-3.1-8b") == 0
    assert "5877" in capsys.readouterr().out


def test_pairs_can_be_limited_by_the_drafts_size(capsys):
    listed = run_json(capsys, pairs_command, "llama-3.1-70b", "--max-draft", "2")["pairs"]
    assert [pair["draft"] for pair in listed] == ["llama-3.2-1b"]
    with pytest.raises(OptionError, match="--max-draft"):
        run(pairs_command, "--max-draft", "-1")


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
