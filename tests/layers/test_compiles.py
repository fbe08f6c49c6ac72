"""The kernels compile for the GPUs they are written for; see compile_for_hopper.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
def test_kernels_compile_for_hopper() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = Path(__file__).with_name("compile_for_hopper.py")
    result = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout.endswith("compiled\n"), result.stderr[-2000:]
