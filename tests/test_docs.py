"""What the documents say works, works."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline import SpeculativeDecoder, cli
from paceline.drafting import registry
from paceline.errors import MissingExtra, OptionError

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def blocks(document: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)


def run(block: str, folder: Path, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """Execute a code block with the tiny model instead of the default one."""
    names = {} if names is None else names
    exec(block.replace('"default"', repr(str(folder))), names)
    return names


def test_the_drafter_of_the_page_changes_no_token(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafter, usage, _ = blocks(ROOT / "docs" / "writing-a-drafter.md")
    names = run(drafter, tiny_folder)
    run(usage, tiny_folder, names)
    assert 0 <= float(capsys.readouterr().out) <= 1
    outputs = []
    for options in ({}, {"drafter": names["RepeatLast"](), "num_draft_tokens": 3}):
        with SpeculativeDecoder(str(tiny_folder), **options) as decoder:
            outputs.append(decoder.generate("aaaa", max_new_tokens=20))
    assert outputs[0].token_ids == outputs[1].token_ids and outputs[1].stats.drafted


@pytest.mark.slow
def test_the_drafter_of_the_page_drafts_for_a_batch(tiny_folder: Path) -> None:
    drafter = run(blocks(ROOT / "docs" / "writing-a-drafter.md")[0], tiny_folder)["RepeatLast"]()
    prompts = ["aaaa", "to be or not to be", "x", "one, one, one"]
    with SpeculativeDecoder(str(tiny_folder)) as plain:
        expected = [result.token_ids for result in plain.generate(prompts, max_new_tokens=20)]
    with SpeculativeDecoder(str(tiny_folder), drafter=drafter, num_draft_tokens=3) as decoder:
        results = decoder.generate(prompts, max_new_tokens=20)
        assert decoder.config.speculative.method == "custom"
    assert [result.token_ids for result in results] == expected
    assert all(result.stats.drafted for result in results)


def test_the_drafter_of_the_page_can_be_registered(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, _, description = blocks(ROOT / "docs" / "writing-a-drafter.md")
    monkeypatch.setattr(registry, "_registered", {})
    registry.register(run(description, tiny_folder, run(drafter, tiny_folder))["SPEC"])
    with SpeculativeDecoder(str(tiny_folder), method="repeat", num_draft_tokens=2) as decoder:
        assert decoder.generate("aaaa", max_new_tokens=8).stats.drafted


@pytest.mark.slow
def test_the_drafter_of_the_page_is_found_in_another_package(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = ROOT / "docs" / "writing-a-drafter.md"
    drafter, _, description = blocks(page)
    [project] = re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL)
    points = tomllib.loads(project)["project"]["entry-points"]["paceline.drafters"]
    install_package(tmp_path, "my_drafter", drafter + description, points)
    command = ["generate", "aaaa", "-m", str(tiny_folder), "--max-new-tokens", "8", "--json"]
    assert cli.main([*command, "--method", "repeat"]) == 2
    assert "there is no method 'repeat'" in capsys.readouterr().err
    monkeypatch.syspath_prepend(tmp_path)
    with fresh_entry_points():
        assert cli.main([*command, "--method", "repeat", "-k", "2"]) == 0
        document = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert document["method"] == "repeat" and document["drafted"] > 0
        assert cli.main(["generate", "--help"]) == 0 and "repeat" in capsys.readouterr().out
        assert cli.main(["plan", "default", "--method", "repeat", "--json"]) == 0


@pytest.mark.slow
def test_a_broken_package_is_named_and_harms_nothing_else(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install_package(tmp_path, "broken_drafter", "SPEC = 1 / 0\n", {"broken": "broken_drafter:SPEC"})
    monkeypatch.syspath_prepend(tmp_path)
    command = ["generate", "aaaa", "-m", str(tiny_folder), "--max-new-tokens", "4", "--method"]
    with fresh_entry_points():
        assert cli.main([*command, "broken"]) == 2
        printed = capsys.readouterr().err
        assert "method broken cannot be loaded from broken_drafter:SPEC" in printed and "Traceback" not in printed
        assert cli.main([*command, "ngram"]) == 0
        assert "ngram" in registry.names_needing(registry.WeightsNeeded.NONE)


def install_package(folder: Path, name: str, code: str, points: dict[str, str]) -> None:
    """What pip leaves behind of a package with one module."""
    (folder / f"{name}.py").write_text(code)
    information = folder / f"{name}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = "".join(f"{key} = {value}\n" for key, value in points.items())
    (information / "entry_points.txt").write_text(f"[paceline.drafters]\n{lines}")


@contextmanager
def fresh_entry_points() -> Iterator[None]:
    """Entry points are read once a process; here they are read again, before and after."""
    registry._installed.cache_clear()
    yield
    registry._installed.cache_clear()


@pytest.mark.parametrize("drafter", [object(), "ngram", 3])
def test_what_is_no_drafter_is_refused_in_words(tiny_folder: Path, drafter: Any) -> None:
    with pytest.raises(OptionError, match=r"subclass of paceline\.core\.protocols\.Drafter"):
        SpeculativeDecoder(str(tiny_folder), drafter=drafter)


# --- installing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_pip_lines_work_in_a_checkout(document: Path) -> None:
    """No package of this name is promised to be anywhere else, and every extra exists."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for line in re.findall(r"pip install [^#\n`]+", document.read_text()):
        match = re.fullmatch(r"pip install (?:-e )?'?\.(?:\[([\w,-]+)\])?'?", line.strip())
        assert match, line
        assert set((match[1] or "").split(",")) - {""} <= set(extras), line


def test_a_missing_extra_prints_the_line_of_the_readme() -> None:
    assert "pip install '.[serve]'" in str(MissingExtra("fastapi", "serve"))
    assert "pip install '.[serve]'" in (ROOT / "README.md").read_text()


def test_serve_without_its_extra_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("fastapi", "paceline.serve.app", "paceline.serve.run", "paceline.serve.access_log"):
        monkeypatch.setitem(sys.modules, name, None)
    assert cli.main(["serve"]) == 2
    assert "pip install '.[serve]'" in capsys.readouterr().err


def test_the_readme_says_where_the_command_is() -> None:
    text = (ROOT / "README.md").read_text()
    assert ".venv/bin/paceline" in text and "make shell" in text


def test_make_shell_has_the_command_on_its_path(tmp_path: Path) -> None:
    """In a copy whose environment counts as installed: nothing is downloaded."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "paceline"):
        (programs / name).write_text("#!/bin/sh\necho this is $0\n")
        (programs / name).chmod(0o755)
    for name in (".installed", ".installed-all"):
        (tmp_path / ".venv" / name).touch()
    environment = {"PATH": os.environ["PATH"], "SHELL": "/bin/sh"}
    result = subprocess.run(
        ["make", "shell"], cwd=tmp_path, input="paceline\n", capture_output=True, text=True, env=environment, timeout=30
    )
    assert f"this is {programs / 'paceline'}" in result.stdout, result.stderr


@pytest.mark.slow
def test_the_lines_of_the_readme_run(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(blocks(ROOT / "README.md")[0], tiny_folder)
    assert capsys.readouterr().out.strip()


@pytest.mark.slow
def test_the_first_example_of_the_readme_goes_through_the_chat_template(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts: list[str] = []
    generate = SpeculativeDecoder.generate

    def recorded(decoder: SpeculativeDecoder, prompt: Any, **settings: Any) -> Any:
        prompts.append(decoder.tokenizer.hf_tokenizer.decode(decoder.tokenizer.encode(prompt)))
        return generate(decoder, prompt, **settings)

    monkeypatch.setattr(SpeculativeDecoder, "generate", recorded)
    run(blocks(ROOT / "README.md")[0], tiny_folder)
    assert prompts == ["<s>user: Explain attention.</s><s>assistant: "]


def test_the_readme_lists_every_command() -> None:
    rows = re.findall(r"^\| `paceline (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(cli.COMMANDS)


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", "docs/log.md"])
def test_lines_of_prose_fit_the_screen(name: str) -> None:
    lines = (ROOT / name).read_text().splitlines()
    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
        assert link.startswith("http") or (document.parent / link).exists(), f"{document.name} points to {link}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_no_figure_is_left_to_be_filled_in(document: Path) -> None:
    """A document was once committed with marks where its tables should have been."""
    assert "@@" not in document.read_text()
