"""`vllm bench serve`, the benchmark most engines are measured with, against the server."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import pytest

from tests.serve.running import CHAT, COMPLETIONS, NAME, RunningServer
from tests.support.tiny import byte_tokenizer

bench = pytest.importorskip("vllm.benchmarks.serve", reason="needs vLLM: make test-engines")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

NUM_PROMPTS, NUM_TOKENS = 6, 8


@pytest.mark.parametrize("backend, endpoint", [("openai", COMPLETIONS), ("openai-chat", CHAT)])
def test_every_request_is_answered_and_counted(
    tiny_server: RunningServer, tmp_path: Path, backend: str, endpoint: str
) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    parser = argparse.ArgumentParser()
    bench.add_cli_args(parser)
    flags = f"--backend {backend} --base-url {tiny_server.url} --endpoint {endpoint} --model {NAME} --ignore-eos"
    flags += f" --tokenizer {tmp_path} --dataset-name random --random-input-len 12 --random-output-len {NUM_TOKENS}"
    flags += f" --num-prompts {NUM_PROMPTS} --max-concurrency 3 --disable-tqdm --ready-check-timeout-sec 60"
    result = asyncio.run(bench.main_async(parser.parse_args(flags.split())))
    assert result["completed"] == NUM_PROMPTS and not result.get("failed")
    assert result["total_output_tokens"] == NUM_PROMPTS * NUM_TOKENS
    assert result["mean_ttft_ms"] > 0 and result["mean_tpot_ms"] > 0
