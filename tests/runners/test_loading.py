"""What a start costs: our own run of a model never imports transformers' models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from paceline import SpeculativeDecoder
output = SpeculativeDecoder({folder!r}, method="ngram").generate("abcabc", max_new_tokens=8)
assert len(output.token_ids) > 0
print([name for name in ("transformers.modeling_utils", "scipy", "matplotlib", "fastapi") if name in sys.modules])
"""


@pytest.mark.slow
def test_our_own_runner_does_without_transformers_models(tiny_folder: Path) -> None:
    program = PROGRAM.format(folder=str(tiny_folder))
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
