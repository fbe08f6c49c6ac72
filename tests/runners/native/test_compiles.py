"""The kernels compile for the GPUs they are written for; see compile_for_hopper.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_kernels_compile_for_hopper() -> None:
    surroundings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = Path(__file__).with_name("compile_for_hopper.py")
    done = subprocess.run([sys.executable, str(program)], env=surroundings, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("compiled\n"), done.stderr[-2000:]
