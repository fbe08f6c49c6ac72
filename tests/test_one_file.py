"""The one-file rule: an architecture, a weight format, a drafter and an engine each come from one file, and work
through the library and the command line without a change anywhere else. This is that file, four times over."""

from __future__ import annotations

import ast
import importlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import paceline
from paceline import SpeculativeDecoder
from paceline.cli import main
from paceline.config import EngineConfig
from paceline.core.draft_tree import DraftTree, chain
from paceline.core.protocols import Drafter, Engine
from paceline.core.sequence import Sequence
from paceline.core.stats import EngineStats, SpecStats
from paceline.core.types import ModelInfo, Request, RequestOutput
from paceline.drafting import registry as drafters
from paceline.engines import registry as engines
from paceline.engines.registry import BuildLocal, EngineSpec
from paceline.hub.tokenizer import Tokenizer
from tests.support.tiny import byte_tokenizer, tiny_llama

SOURCE = Path(paceline.__file__).parent
PROMPT = "to be or not to be"
needs_final_drafters = pytest.mark.skipif(not hasattr(drafters, "register"), reason="the drafter registry is interim")


def final_command_line() -> None:
    pytest.importorskip("paceline.cli.flags", reason="the command line is interim")


def json_of_generate(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """`paceline generate … --json`: its last line on stdout."""
    assert main(["generate", PROMPT, "--max-new-tokens", "12", "--json", *arguments]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return document


@contextmanager
def registered(registry: Any, name: str, add: Callable[[], None]) -> Iterator[None]:
    """The registry as it was, after the test."""
    tables = [value for key, value in vars(registry).items() if key.startswith("_") and isinstance(value, dict)]
    tables = [table for table in tables if not any(key in ("__name__", "__builtins__") for key in table)]
    add()
    try:
        yield
    finally:
        for table in tables:
            table.pop(name, None)


# --- a drafter --------------------------------------------------------------------------------------------------------


class Echo(Drafter):
    """Drafts the last token again and again."""

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        return [chain([seq.ids[-1]] * count) for seq, count in zip(seqs, num_draft_tokens)]


@pytest.fixture
def echo() -> Iterator[None]:
    def add() -> None:
        spec = drafters.DrafterSpec(
            name="echo",
            summary="the last token again",
            weights=drafters.WeightsNeeded.NONE,
            build=lambda context: Echo(),
        )
        drafters.register(spec)

    with registered(drafters, "echo", add):
        yield


@needs_final_drafters
def test_a_drafter_is_one_file(echo: None, tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "echo" in drafters.names()
    with SpeculativeDecoder(tiny_folder) as plain:
        expected = plain.generate(PROMPT, max_new_tokens=12).token_ids
    with SpeculativeDecoder(tiny_folder, method="echo", num_draft_tokens=2) as decoder:
        result = decoder.generate(PROMPT, max_new_tokens=12)
    assert result.token_ids == expected and result.stats.drafted > 0
    final_command_line()
    document = json_of_generate(capsys, "--model", str(tiny_folder), "--method", "echo", "-k", "2")
    assert document["token_ids"] == expected and document["method"] == "echo" and document["drafted"] > 0
    assert main(["generate", "--help"]) == 0 and "echo" in capsys.readouterr().out


# --- an engine --------------------------------------------------------------------------------------------------------


class Parrot:
    """An engine with a loop of its own: it answers with the prompt, one token an output."""

    def __init__(self, config: EngineConfig) -> None:
        self.info = ModelInfo(str(config.model.model), 259, frozenset({257}), 512, 1, 1, "cpu", "float32")
        self.tokenizer = Tokenizer(byte_tokenizer())
        self.methods = ("none",)
        self.closed = False

    async def generate(self, request: Request) -> AsyncIterator[RequestOutput]:  # type: ignore[override]
        tokens = request.prompt[: request.max_new_tokens]
        for index, token in enumerate(tokens):
            last = index == len(tokens) - 1
            stats = SpecStats(new_tokens=len(tokens), steps=len(tokens), seconds=0.1) if last else None
            text = self.tokenizer.decode([token])
            yield RequestOutput(text, (token,), finish_reason="length" if last else None, stats=stats)

    def stats(self) -> EngineStats:
        return EngineStats()

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def parrot() -> Iterator[None]:
    def open_parrot(config: EngineConfig, build: BuildLocal) -> Engine:
        return Parrot(config)

    with registered(
        engines, "parrot", lambda: engines.register(EngineSpec("parrot", "repeats the prompt", open_parrot))
    ):
        yield


def test_an_engine_is_one_file(parrot: None, tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "parrot" in engines.names()
    with SpeculativeDecoder(tiny_folder, engine="parrot") as decoder:
        assert decoder.generate(PROMPT, max_new_tokens=12).text == PROMPT[:12]
        assert "".join(output.text for output in decoder.stream(PROMPT, max_new_tokens=5)) == PROMPT[:5]
        assert decoder.decode([7, 8], max_new_tokens=2).tolist() == [7, 8, 7, 8]
    final_command_line()
    assert json_of_generate(capsys, "--model", str(tiny_folder), "--engine", "parrot")["text"] == PROMPT[:12]


# --- an architecture --------------------------------------------------------------------------------------------------


@pytest.fixture
def toy_architecture(tmp_path: Path) -> Iterator[Path]:
    """A model of a type that nobody knows: Llama under another name."""
    models = pytest.importorskip("paceline.models.registry", reason="models/ does not exist yet")
    from transformers import AutoConfig, LlamaConfig

    from paceline.models import llama

    class ToyConfig(LlamaConfig):
        model_type = "toy_llama"

    AutoConfig.register("toy_llama", ToyConfig, exist_ok=True)
    folder = tmp_path / "toy"
    tiny_llama().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "toy_llama", "architectures": ["Toy"]}))
    architecture = SimpleNamespace(
        MODEL_TYPES=("toy_llama",),
        unsupported=lambda config: None,
        config_from_hf=llama.config_from_hf,
        load=llama.load,
    )
    with registered(models, "toy_llama", lambda: models.register("toy_llama", architecture)):
        yield folder


def test_an_architecture_is_one_file(
    toy_architecture: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with SpeculativeDecoder(tiny_folder, runner="native") as known:
        expected = known.generate(PROMPT, max_new_tokens=12).token_ids
    with SpeculativeDecoder(toy_architecture, method="ngram", num_draft_tokens=3) as decoder:
        assert decoder.generate(PROMPT, max_new_tokens=12).token_ids == expected
    final_command_line()
    assert json_of_generate(capsys, "--model", str(toy_architecture))["token_ids"] == expected


# --- a weight format --------------------------------------------------------------------------------------------------


@pytest.fixture
def toy_format() -> Iterator[None]:
    """Weights rounded to sixteenths, multiplied as they are."""
    formats = pytest.importorskip("paceline.quantization.registry", reason="quantization/ does not exist yet")
    linear = importlib.import_module("paceline.layers.linear")

    def quantize(weight: torch.Tensor) -> Any:
        return linear.UnquantizedLinear((weight * 16).round() / 16)

    module = SimpleNamespace(quantize=quantize, matches=lambda config: False, load=lambda tensors, names: None)
    with registered(formats, "sixteenths", lambda: formats.register("sixteenths", module)):
        yield


def test_a_weight_format_is_one_file(toy_format: None, tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with SpeculativeDecoder(tiny_folder, dtype="sixteenths", method="ngram", num_draft_tokens=3) as decoder:
        assert decoder.info.dtype == "sixteenths"
        rounded = decoder.generate(PROMPT, max_new_tokens=12).token_ids
    with SpeculativeDecoder(tiny_folder, dtype="sixteenths") as plain:
        assert plain.generate(PROMPT, max_new_tokens=12).token_ids == rounded
    final_command_line()
    assert json_of_generate(capsys, "--model", str(tiny_folder), "--dtype", "sixteenths")["token_ids"] == rounded


# --- names are written down once --------------------------------------------------------------------------------------

# Words that are also English, or name a thing beside the method.
AMBIGUOUS = ("none", "auto", "prediction", "draft_model", "suffix", "eagle", "dflash", "medusa", "mtp", "layerskip")


def translates(path: Path) -> bool:
    """Whether a file belongs to an engine of others, which has its own names for methods."""
    return path.is_relative_to(SOURCE / "engines") and not path.is_relative_to(SOURCE / "engines" / "local")


@needs_final_drafters
@pytest.mark.parametrize("name", [name for name in drafters.names() if name not in AMBIGUOUS])
def test_a_methods_name_is_in_its_own_file_and_the_registry_only(name: str) -> None:
    own = importlib.import_module(drafters.NAMES[name]).__file__
    # The registry, the method's own file, and the default of the transformers integration.
    allowed = {Path(own or ""), Path(drafters.__file__), SOURCE / "integrations" / "transformers.py"}
    places = {path for path in SOURCE.rglob("*.py") if not translates(path) and names(path, name)}
    assert {path.relative_to(SOURCE).as_posix() for path in places - allowed} == set()


def names(path: Path, name: str) -> bool:
    """Whether a whole string of a file is this name: inside a sentence it is none."""
    text = path.read_text()
    if name not in text:
        return False
    return any(isinstance(node, ast.Constant) and node.value == name for node in ast.walk(ast.parse(text)))
