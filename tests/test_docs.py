"""What the documents say works, works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from paceline.core.draft_length import FixedDraftLength
from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence
from paceline.core.stopping import StopRules
from paceline.drafting.no_draft import NoDraft
from paceline.engines.local.generate import run
from paceline.engines.local.step import EngineParts
from paceline.engines.local.verifier import Verifier
from paceline.runners.table import TableRunner

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def blocks(document: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)


def written(drafter: Any) -> list[int]:
    text = Sequence([1, 1, 2], SamplingParams(), StopRules(20))
    for _ in run([text], EngineParts(TableRunner(), drafter, FixedDraftLength(3), Verifier())):
        pass
    return text.written


def test_the_drafter_of_the_page_is_a_drafter() -> None:
    names: dict[str, Any] = {}
    exec(blocks(ROOT / "docs" / "writing-a-drafter.md")[0], names)
    assert written(names["RepeatLast"]()) == written(NoDraft())


def test_the_lines_of_the_readme_run(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = blocks(ROOT / "README.md")[0].replace('"default"', repr(str(tiny_folder)))
    exec(lines, {})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
        assert link.startswith("http") or (document.parent / link).exists(), f"{document.name} points to {link}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_no_figure_is_left_to_be_filled_in(document: Path) -> None:
    """A document was once committed with marks where its tables should have been."""
    assert "" not in document.read_text()
