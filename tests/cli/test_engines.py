"""generate and chat over engines that the commands know only by the registry and the protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.config import EngineConfig
from paceline.core.protocols import Engine
from paceline.core.stats import EngineStats, SpecStats
from paceline.core.types import ModelInfo, Request, RequestOutput
from paceline.engines import registry
from paceline.engines.registry import BuildLocal, EngineSpec
from paceline.errors import OptionError
from paceline.hub.tokenizer import Tokenizer
from paceline.tuned import TunedProfile, write_profile
from tests.support.foreign_engine import OPENED, register_foreign
from tests.support.tiny import byte_tokenizer


class Remote(Engine):
    """Runs a model that is not on this machine: it answers with its name."""

    def __init__(self, config: EngineConfig) -> None:
        self.info = ModelInfo(str(config.model.model), 259, frozenset({257}), 512, 1, 1, "remote", "unknown")
        self.methods = (config.speculative.method or "none",)
        if self.methods != ("none",):
            raise OptionError(f"the engine remote has no method {self.methods[0]}")

    @property
    def tokenizer(self) -> Any:  # type: ignore[override]
        return Tokenizer(byte_tokenizer())

    async def generate(self, request: Request) -> AsyncIterator[RequestOutput]:  # type: ignore[override]
        tokens = tuple(self.tokenizer.encode(self.info.name))
        stats = SpecStats(new_tokens=len(tokens), steps=len(tokens), seconds=0.1)
        yield RequestOutput(self.info.name, tokens, finish_reason="stop", stats=stats)

    def stats(self) -> EngineStats:
        return EngineStats()

    async def close(self) -> None:
        return None


@pytest.fixture(autouse=True)
def _engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def open_remote(config: EngineConfig, build: BuildLocal) -> Engine:
        return Remote(config)

    monkeypatch.chdir(tmp_path)
    with register_foreign():
        registry.register(EngineSpec("remote", "elsewhere", open_remote, reads_files=False, methods=("none",)))
        yield
    registry._REGISTERED.pop("remote")


def test_an_engine_that_opens_its_model_itself_has_nothing_downloaded_for_it(
    run_command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        raise AssertionError(f"{name} was looked for")

    monkeypatch.setattr("paceline.build.locate", fail)  # first: importing build reads the others
    monkeypatch.setattr("paceline.hub.locate", fail)
    monkeypatch.setattr("paceline.hub.generation_config.locate", fail)
    result = run_command("generate", "hello", "-m", "somebody/elsewhere", "--engine", "remote", "--json")
    assert result.json()["text"] == "somebody/elsewhere"
    chat = run_command("chat", "somebody/elsewhere", "--engine", "remote", stdin="hello\n")
    assert chat.status == 0 and "somebody/elsewhere" in chat.out


def test_chat_decodes_plainly_on_an_engine_without_the_method_auto(run_command: Any) -> None:
    """The command's own choice of method is none of the user's, so an engine need not have it."""
    assert run_command("chat", "somebody/elsewhere", "--engine", "remote", stdin="hello\n").status == 0


@pytest.mark.slow
def test_a_profile_of_another_engine_is_used_only_where_that_engine_is_asked_for(
    run_command: Any, tiny_folder: Path
) -> None:
    profile = TunedProfile(str(tiny_folder), "cpu", "ngram", 3, engine="foreign")
    write_profile(profile, Path("paceline.toml"))
    command = ["generate", "abcabcabc", "-m", "TINY", "--device", "cpu", "--max-new-tokens", "8", "--json"]
    own = run_command(*command)
    assert own.json()["method"] == "none"
    assert "paceline.toml is not used: it was measured with engine foreign" in own.err
    assert "add --engine foreign" in own.err
    other = run_command(*command, "--engine", "foreign")
    assert (other.json()["method"], other.json()["num_draft_tokens"]) == ("ngram", 3)
    assert other.json()["text"] == own.json()["text"]
    assert [config.speculative.method for config in OPENED] == ["ngram"]


@pytest.mark.slow
def test_a_profile_of_our_own_engine_is_not_used_for_another(run_command: Any, tiny_folder: Path) -> None:
    write_profile(TunedProfile(str(tiny_folder), "cpu", "ngram", 3), Path("paceline.toml"))
    command = ["generate", "abc", "-m", "TINY", "--device", "cpu", "--max-new-tokens", "4", "--json"]
    result = run_command(*command, "--engine", "foreign")
    assert result.json()["method"] == "none" and "measured with engine local" in result.err
