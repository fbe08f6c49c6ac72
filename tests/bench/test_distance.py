"""How far two distributions are apart over a text, by hand-computed figures and through `bench --against`."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import torch

from paceline.bench.distance import Estimate, engine_distance, log_probs, model_distance, text_windows
from paceline.bench.memory_use import MemoryUse
from paceline.cli import main
from paceline.core.types import TokenLogprob
from paceline.errors import OptionError
from paceline.runners.table import TableRunner
from tests.bench.test_results import SCHEMA
from tests.support.foreign_engine import register_foreign
from tests.support.gguf import write_gguf
from tests.support.tiny import tiny_llama, write_tiny_model

WINDOW = [0, 1, 2, 3, 0, 1, 2, 4]
SMALL = ["--limit", "2", "--max-new-tokens", "8", "--repeats", "1", "--device", "cpu", "--report", "none", "--json"]


def test_the_divergence_is_the_sum_of_its_definition() -> None:
    reference, tested = TableRunner(vocab_size=5, seed=3), TableRunner(vocab_size=5, seed=3, blur=0.5)
    distance = model_distance(reference, tested, [WINDOW])
    p, q = (log_probs(runner, WINDOW, 5).double() for runner in (reference, tested))
    expected = [
        sum(math.exp(p[i, t]) * float(p[i, t] - q[i, t]) for t in range(5)) for i in range(len(WINDOW) - 1)
    ]
    assert distance.positions == 7
    assert distance.divergence.mean == pytest.approx(sum(expected) / 7, rel=1e-4)
    assert distance.same_best.mean == sum(int(p[i].argmax()) == int(q[i].argmax()) for i in range(7)) / 7
    surprisal = -sum(float(p[i, WINDOW[i + 1]]) for i in range(7)) / 7
    assert distance.reference_perplexity == pytest.approx(math.exp(surprisal), rel=1e-4)


def test_a_model_is_at_no_distance_from_itself() -> None:
    distance = model_distance(TableRunner(vocab_size=5, seed=3), TableRunner(vocab_size=5, seed=3), [WINDOW, WINDOW])
    assert (distance.divergence.mean, distance.same_best.mean, distance.positions) == (0.0, 1.0, 14)


class TopTokens:
    """An engine that shows the likeliest tokens of a table, and nothing else."""

    def __init__(self, runner: TableRunner, number: int) -> None:
        self.runner, self.number = runner, number

    def generate(self, prompts: list[list[int]], **settings: Any) -> list[Any]:
        [context] = prompts
        values = log_probs(self.runner, [*context, 0], 5)[-1]
        top = torch.topk(values, self.number)
        pairs = tuple(zip(top.indices.tolist(), top.values.tolist()))
        return [SimpleNamespace(logprobs=[TokenLogprob(pairs[0][0], pairs[0][1], pairs)])]


def test_an_engine_that_shows_all_tokens_is_at_the_same_distance_and_one_that_shows_few_at_less() -> None:
    reference, tested = TableRunner(vocab_size=5, seed=3), TableRunner(vocab_size=5, seed=3, blur=0.5)
    exact = model_distance(reference, tested, [WINDOW]).divergence.mean
    whole, part = (engine_distance(reference, TopTokens(tested, number), [WINDOW]) for number in (5, 2))  # type: ignore[arg-type]
    assert whole.divergence.mean == pytest.approx(exact, rel=1e-4)
    assert 0 < part.divergence.mean < exact
    assert part.is_bound and part.same_best == whole.same_best


def test_errors_are_of_blocks_of_neighbouring_positions() -> None:
    values = [0.0] * 32 + [1.0] * 32
    assert Estimate.of(values) == Estimate(0.5, pytest.approx(0.5))  # stdev of (0, 1) over the root of 2
    assert Estimate.of(values[:32]).error is None


def test_a_text_is_cut_into_windows() -> None:
    assert [len(window) for window in text_windows(list(range(600)), 513)] == [256, 256]
    with pytest.raises(OptionError, match="too short"):
        text_windows([1], 100)


ADDS_64_MIB = """
from paceline.bench.memory_use import memory_use

before = memory_use()
block = bytearray(b"x" * (64 << 20))
print(memory_use().since(before).host_bytes, len(block))
"""


@pytest.mark.slow
def test_memory_is_what_was_added() -> None:
    """In a process of its own: one that has run other tests gives memory of theirs back at any moment."""
    done = subprocess.run([sys.executable, "-c", ADDS_64_MIB], capture_output=True, text=True, check=True)
    said = done.stdout.split()
    assert said[0] == "None" or 60 << 20 < int(said[0]) < 72 << 20
    assert MemoryUse(5, None).since(MemoryUse(9, None)) == MemoryUse(0, None)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model and two GGUF files of it: whole, and in four bits. All three have the GGUF's own tokenizer."""
    import gguf

    from paceline.hub import locate
    from paceline.hub.convert import unpacked_folder

    folder = tmp_path_factory.mktemp("quantised")
    model = tiny_llama(vocab_size=288, bos_token_id=257, eos_token_id=258, pad_token_id=259)
    whole = write_gguf(folder / "whole.gguf", model)
    small = write_gguf(folder / "small.gguf", model, quantization=gguf.GGMLQuantizationType.Q4_0)
    return {"original": unpacked_folder(locate(str(whole)).folder), "whole": whole, "small": small}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with register_foreign():
        yield


def against(capsys: pytest.CaptureFixture[str], model: Path, original: Path, *more: str) -> dict[str, Any]:
    assert main(["bench", str(model), "--against", str(original), "--text-tokens", "200", *SMALL, *more]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return document


@pytest.mark.slow
def test_a_gguf_file_is_measured_against_its_original(
    quantised: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    document = against(capsys, quantised["small"], quantised["original"])
    distance = document["against"]["distance"]
    assert distance["positions"] == 199 and not distance["is_bound"]
    assert distance["divergence"]["mean"] > 1e-4 and distance["divergence"]["error"] > 0
    assert 0.3 < distance["same_best"]["mean"] < 1
    assert document["against"]["speed_ratio"] > 0
    assert document["headline"] == document["against"]["sentence"]
    assert "nats, the same likeliest token at" in document["headline"]
    results = json.loads(Path("results.json").read_text())
    jsonschema.validate(results, json.loads(SCHEMA.read_text()))
    settings = results["runs"][0]["settings"]
    assert [setting["is_baseline"] for setting in settings] == [False, True]
    sizes = results["runs"][0]["against"]["memory"]
    assert sizes["tested"]["host_bytes"] is not None and sizes["original"]["host_bytes"] is not None
    same = against(capsys, quantised["whole"], quantised["original"])["against"]["distance"]
    assert same["divergence"]["mean"] == pytest.approx(0, abs=1e-6) and same["same_best"]["mean"] == 1


@pytest.mark.slow
def test_another_engines_distance_is_read_from_its_log_probabilities(
    quantised: dict[str, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("the tide goes out and the tide comes in")
    text = ["--text", "text.txt"]
    distances = [
        against(capsys, quantised["small"], quantised["original"], *text, *engine)["against"]["distance"]
        for engine in ([], ["--engine", "foreign"])
    ]
    exact, bound = distances
    assert bound["is_bound"] and bound["positions"] == exact["positions"]
    assert 0 < bound["divergence"]["mean"] <= exact["divergence"]["mean"] * 1.001
    assert bound["same_best"]["mean"] == exact["same_best"]["mean"]


@pytest.mark.slow
def test_weights_with_another_vocabulary_are_refused(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_tiny_model(tmp_path / "other", swapped=6)
    assert main(["bench", str(tiny_folder), "--against", str(other), *SMALL]) == 2
    assert "have different vocabularies (6 tokens differ)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "nowhere.txt"], "nowhere.txt cannot be read"),
        (["--text-tokens", "1"], "--text-tokens must be 2 or more"),
        (["--baselines", "hf"], "--against and --baselines"),
    ],
)
def test_what_does_not_go_with_against_is_said(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["bench", str(tiny_folder), "--against", str(tiny_folder), *SMALL, *arguments]) == 2
    assert message in capsys.readouterr().err
