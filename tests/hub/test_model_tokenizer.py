"""That two tokenizers are the same is kept, and never believed of other files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline.build import build_engine
from paceline.config import EngineConfig, ModelConfig
from paceline.drafting.cross_vocab import CrossVocab
from paceline.errors import PairError
from paceline.hub import model_tokenizer, resolved
from paceline.hub.model_tokenizer import compare_tokenizers, open_tokenizer
from paceline.hub.resolved import FOLDER
from tests.support.tiny import byte_tokenizer, write_tiny_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Folders whose tokenizers were opened."""
    names: list[str] = []
    open_folder = model_tokenizer._opened

    def counted(config: ModelConfig, files: Any, kept: Path | None) -> Any:
        names.append(files.folder.name)
        return open_folder(config, files, kept)

    monkeypatch.setattr(model_tokenizer, "_opened", counted)
    return names


@pytest.fixture
def pair(tiny_folder: Path, tmp_path: Path) -> tuple[ModelConfig, ModelConfig]:
    """A target and a draft model that a first start has compared."""
    draft = Path(shutil.copytree(tiny_folder, tmp_path / "draft"))
    configs = ModelConfig(str(tiny_folder)), ModelConfig(str(draft))
    comparison = compare_tokenizers(open_tokenizer(configs[0]), configs[1])
    assert comparison is not None and comparison.same
    return configs


def is_known(pair: tuple[ModelConfig, ModelConfig]) -> bool:
    comparison = compare_tokenizers(open_tokenizer(pair[0]), pair[1])
    assert comparison is None or comparison.same
    return comparison is None


def kept_comparison(cache: Path) -> Path:
    [path] = (cache / FOLDER).glob("vocabulary-*")
    return path


def test_a_second_start_does_not_open_the_tokenizer_of_the_draft_model(
    pair: tuple[ModelConfig, ModelConfig], opened: list[str]
) -> None:
    assert is_known(pair) and opened == [Path(str(pair[0].model)).name]


@pytest.mark.parametrize("changed", ["target", "draft"])
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_changed_file_of_either_is_compared_again(
    pair: tuple[ModelConfig, ModelConfig], changed: str, file: str, tmp_path: Path
) -> None:
    target = Path(shutil.copytree(str(pair[0].model), tmp_path / "target"))
    pair = ModelConfig(str(target)), pair[1]
    assert is_known(pair), "another folder of the same files"
    path = (target if changed == "target" else Path(str(pair[1].model))) / file
    document = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**document, "note": 1} if file != "tokenizer.json" else document, indent=7))
    assert not is_known(pair) and is_known(pair), "and kept again"


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"vocabulary-0.json: the same vocabulary\n"])
def test_a_damaged_file_is_no_comparison(
    pair: tuple[ModelConfig, ModelConfig], cache: Path, content: bytes
) -> None:
    path = kept_comparison(cache)
    whole = path.read_bytes()
    path.write_bytes(content or whole[:-1])
    assert not is_known(pair) and path.read_bytes() == whole


def test_another_version_compares_again(
    pair: tuple[ModelConfig, ModelConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolved, "versions", lambda: ("99.0", "1"))
    assert not is_known(pair)


def test_a_tokenizer_that_the_user_gave_or_may_have_changed_is_compared(pair: tuple[ModelConfig, ModelConfig]) -> None:
    target, draft = pair
    given = open_tokenizer(ModelConfig(target.model, tokenizer=byte_tokenizer()))
    again = open_tokenizer(ModelConfig(target.model, tokenizer=open_tokenizer(target)))
    assert compare_tokenizers(given, draft) is not None and compare_tokenizers(again, draft) is not None
    named = open_tokenizer(ModelConfig(target.model, tokenizer=str(target.model)))
    assert compare_tokenizers(named, draft) is None


def test_code_of_a_model_is_never_foreseen(pair: tuple[ModelConfig, ModelConfig]) -> None:
    target = open_tokenizer(pair[0])
    assert compare_tokenizers(target, ModelConfig(pair[1].model, trust_remote_code=True)) is not None
    trusted = open_tokenizer(ModelConfig(pair[0].model, trust_remote_code=True))
    assert compare_tokenizers(trusted, pair[1]) is not None


def test_different_vocabularies_are_refused_on_every_start_and_nothing_is_kept(
    tiny_folder: Path, tmp_path: Path, cache: Path
) -> None:
    options: dict[str, Any] = {"draft_model": str(write_tiny_model(tmp_path / "other", swapped=4)), "device": "cpu"}
    for _ in range(2):
        with pytest.raises(PairError, match="4 of 259"):
            build_engine(EngineConfig.create(str(tiny_folder), num_draft_tokens=2, warmup="none", **options))
    assert not list((cache / FOLDER).glob("vocabulary-*"))


def test_translating_drafters_still_open_both(pair: tuple[ModelConfig, ModelConfig], opened: list[str]) -> None:
    options: dict[str, Any] = {"draft_model": str(pair[1].model), "num_draft_tokens": 2, "warmup": "none"}
    names = [Path(str(config.model)).name for config in pair]
    for method, expected in (("cross_vocab", names), ("draft_model", names[:1])):
        opened.clear()
        engine = build_engine(EngineConfig.create(str(pair[0].model), method=method, device="cpu", **options))
        assert opened == expected and isinstance(engine.parts.drafter, CrossVocab) == (method == "cross_vocab")
