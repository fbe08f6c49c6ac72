"""What the documents say works, works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from paceline import SpeculativeDecoder, cli

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


def test_the_drafter_of_the_page_can_be_registered(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.drafting import registry

    drafter, _, registration = blocks(ROOT / "docs" / "writing-a-drafter.md")
    monkeypatch.setattr(registry, "_registered", {})
    run(registration, tiny_folder, run(drafter, tiny_folder))
    with SpeculativeDecoder(str(tiny_folder), method="repeat", num_draft_tokens=2) as decoder:
        assert decoder.generate("aaaa", max_new_tokens=8).stats.drafted


def test_the_lines_of_the_readme_run(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(blocks(ROOT / "README.md")[0], tiny_folder)
    assert capsys.readouterr().out.strip()


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
