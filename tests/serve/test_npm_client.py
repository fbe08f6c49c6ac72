"""The `openai` package of npm works with the server. NODE_PATH names the folder that holds it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.serve.running import NAME, RunningServer

SMOKE = Path(__file__).parent / "smoke.mjs"


@pytest.fixture(scope="module")
def node() -> str:
    executable = shutil.which("node")
    if executable is None:
        pytest.skip("needs node")
    modules = Path(os.environ.get("NODE_PATH", "node_modules"))
    if not (modules / "openai").is_dir():
        pytest.skip("needs the npm package: npm install openai, and NODE_PATH set to its node_modules")
    return executable


def test_the_npm_client_is_served(node: str, tiny_server: RunningServer) -> None:
    command = [node, str(SMOKE), f"{tiny_server.url}/v1", NAME]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    output = json.loads(result.stdout)
    assert output["whole"] == output["streamed"] and output["usage"]["completion_tokens"] == 8
    assert NAME in output["models"] and output["refused"] == 400
