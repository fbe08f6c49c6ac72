"""What transformers made of a model's files is kept under what it was made of, and never outlives it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.hub import resolved
from paceline.hub.resolved import FOLDER, MAX_FILES, keep_resolved, read_resolved, resolved_file


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text("{}")
    return path


def kept_at(source: Path, kind: str = "config") -> Path:
    path = resolved_file(kind, [source])
    assert path is not None
    return path


def test_what_is_kept_is_read_again(source: Path, cache: Path) -> None:
    assert read_resolved(kept_at(source)) is None
    keep_resolved(kept_at(source), "text\nµ")
    assert read_resolved(kept_at(source)) == "text\nµ"
    assert [path.name for path in (cache / FOLDER).iterdir()] == [kept_at(source).name]  # no partial file beside it


def test_a_changed_file_of_the_same_size_and_time_is_another_one(source: Path) -> None:
    before, status = kept_at(source), source.stat()
    source.write_text("[]")
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert kept_at(source) != before


def test_names_kinds_and_versions_are_part_of_the_key(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, renamed = kept_at(source), source.rename(source.with_name("other.json"))
    assert len({before, kept_at(renamed), kept_at(renamed, "tokenizer")}) == 3
    current = kept_at(renamed)
    monkeypatch.setattr(resolved, "versions", lambda: ("99.0", "1"))
    assert kept_at(renamed) != current


def test_a_development_version_keeps_nothing(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolved, "versions", lambda: ("5.99.0.dev0", "1"))
    assert resolved_file("config", [source]) is None


def test_a_missing_file_keeps_nothing(tmp_path: Path) -> None:
    assert resolved_file("config", [tmp_path / "missing"]) is None


def test_a_cache_that_cannot_be_written_is_no_error(source: Path, cache: Path) -> None:
    cache.write_text("a file where the folder would be")
    keep_resolved(kept_at(source), "text")
    assert read_resolved(kept_at(source)) is None


def test_bytes_that_are_no_text_count_as_nothing(source: Path) -> None:
    path = kept_at(source)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\xff\xfe\xff")
    assert read_resolved(path) is None


def test_what_was_used_longest_ago_goes_first(cache: Path) -> None:
    folder = cache / FOLDER
    for age in range(MAX_FILES):
        keep_resolved(folder / f"config-{age}.json", "{}")
        os.utime(folder / f"config-{age}.json", (1_000_000 - age, 1_000_000 - age))
    read_resolved(folder / f"config-{MAX_FILES - 1}.json")  # the oldest is used again
    keep_resolved(folder / "config-new.json", "{}")
    names = {path.name for path in folder.iterdir()}
    assert len(names) == MAX_FILES and {"config-new.json", f"config-{MAX_FILES - 1}.json"} <= names
    assert f"config-{MAX_FILES - 2}.json" not in names
