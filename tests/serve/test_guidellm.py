"""guidellm, which measures servers under load, against the server: its command runs, and every request counts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.serve.running import CHAT, COMPLETIONS, NAME, RunningServer
from tests.support.tiny import byte_tokenizer

pytest.importorskip("guidellm", reason="pip install guidellm")
pytestmark = pytest.mark.slow

NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS, STREAMS = 6, 12, 8, 3


def guidellm(*flags: str, seconds: float = 240) -> str:
    """Run a guidellm command in a process of its own: it starts worker processes, and sets a loop policy."""
    command = [sys.executable, "-m", "guidellm", *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def report_of(server: RunningServer, folder: Path, request_format: str) -> dict[str, Any]:
    """The one benchmark of guidellm's report after a run with several streams."""
    byte_tokenizer().save_pretrained(folder / "tokenizer")
    report = folder / "report.json"
    guidellm(
        "run",
        f"--backend=kind=openai_http,target={server.url},model={NAME},request_format={request_format}",
        f"--tokenizer=kind=hf_auto,model={folder / 'tokenizer'}",
        f"--data=kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        f"--profile=kind=concurrent,streams={STREAMS}",
        f"--constraint=kind=max_requests,count={NUM_REQUESTS}",
        f"--output=kind=json,path={report}",
        "--disable-console",
    )
    (benchmark,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    return dict(benchmark)


@pytest.mark.parametrize("request_format", [CHAT, COMPLETIONS, "/v1/responses"])
def test_every_request_is_answered_timed_and_counted(
    tiny_server: RunningServer, tmp_path: Path, request_format: str
) -> None:
    benchmark = report_of(tiny_server, tmp_path, request_format)
    requests = benchmark["requests"]
    assert len(requests["successful"]) == NUM_REQUESTS
    assert not requests["errored"] and not requests["incomplete"]
    for request in requests["successful"]:
        assert request["output_metrics"]["text_tokens"] == OUTPUT_TOKENS
        assert request["input_metrics"]["text_tokens"] >= PROMPT_TOKENS
