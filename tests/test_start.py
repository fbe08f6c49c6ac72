"""The second start with a model, through the doors that users take: it imports neither transformers nor a compiler,
nor what only a first start needs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

HEAVY = ("transformers", "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy", "filelock")
REPORT = """
import atexit, json, sys
atexit.register(lambda: print(json.dumps([name for name in {heavy} if name in sys.modules]), file=sys.stderr))
"""
CLI = "from paceline.cli import main; sys.exit(main(sys.argv[1:]))"
LIBRARY = """
from paceline import SpeculativeDecoder
with SpeculativeDecoder(sys.argv[-1], method="ngram", num_draft_tokens=3) as decoder:
    result = decoder.generate([{"role": "user", "content": "Hi"}], max_new_tokens=4)
    print(json.dumps([result.token_ids, result.text]))
"""
SERVER = """
from paceline.cli.flags import CommandParser
from paceline.cli.serve import configure, engine_config_from_args, open_served_engine
from paceline.serve.token_text import token_text
from paceline.serve.vocabulary import vocabulary
parser = CommandParser()
configure(parser)
engine = open_served_engine(engine_config_from_args(parser.parse_args(sys.argv[1:])))
print(token_text(engine.tokenizer).encode("Hi"), vocabulary(engine.tokenizer).special_tokens)
"""
GENERATE = ["generate", "def add(a, b):", "--max-new-tokens", "8", "--no-chat", "-m"]
DOORS = {
    "generate": (CLI, GENERATE),
    "generate --chat": (
        CLI,
        ["generate", "--chat", "Hi", "--method", "ngram", "-k", "2", "--max-new-tokens", "4", "-m"],
    ),
    "library": (LIBRARY, []),
    "serve": (SERVER, ["--method", "ngram", "-m"]),
}


@dataclass(frozen=True, slots=True)
class Start:
    """What a fresh process printed, and which heavy packages it had imported at its end."""

    output: str
    imported: list[str]


def start(program: str, arguments: list[str], cache: Path) -> Start:
    command = [sys.executable, "-c", REPORT.format(heavy=HEAVY) + program, *arguments]
    environment = {**os.environ, "PACELINE_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr
    return Start(result.stdout, json.loads(result.stderr.splitlines()[-1]))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def first(tiny_folder: Path, cache: Path) -> Start:
    return start(CLI, [*GENERATE, str(tiny_folder)], cache)


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
def test_the_second_start_does_without_transformers(door: str, first: Start, tiny_folder: Path, cache: Path) -> None:
    program, arguments = DOORS[door]
    second = start(program, [*arguments, str(tiny_folder)], cache)
    assert "transformers" in first.imported and second.imported == [] and second.output.strip()
    assert door != "generate" or second.output == first.output


@pytest.mark.slow
def test_a_changed_model_is_read_by_transformers_again(
    first: Start, tiny_folder: Path, cache: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 3.0
    (folder / "config.json").write_text(json.dumps(config))
    changed, again = (start(CLI, [*GENERATE, str(folder)], cache) for _ in range(2))
    assert "transformers" in changed.imported and again.imported == []
    assert changed.output == again.output != first.output
