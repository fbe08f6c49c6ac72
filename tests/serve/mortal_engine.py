"""An engine whose worker is a process of its own, so that a test can kill it, as `kill -9` and the OOM killer do.

Run as a module it is `paceline serve` with that engine in the registry under the name `mortal`.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from paceline.config import EngineConfig
from paceline.core.types import Request, RequestOutput
from paceline.engines import registry
from paceline.engines.registry import BuildLocal, EngineSpec
from paceline.errors import EngineFailed
from tests.serve.toy_engine import INFO, ReversingEngine

WORKER = "import sys\nfor line in sys.stdin: sys.stdout.write(line.rstrip()[::-1] + chr(10)); sys.stdout.flush()"
SILENT = "silent"  # a prompt that the worker never answers: its reader does not notice that the worker dies


class MortalEngine(ReversingEngine):
    """Reverses prompts in a child process."""

    def __init__(self) -> None:
        super().__init__()
        self.info = replace(INFO, max_seq_len=4096)
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.worker = subprocess.Popen([sys.executable, "-c", WORKER], **pipes)
        self.num_silent = 0

    def kill(self) -> None:
        self.worker.kill()
        self.worker.wait()

    def check_health(self) -> None:
        status = self.worker.poll()
        if status is not None:
            raise EngineFailed(f"the worker process has ended with status {status}")

    async def close(self) -> None:
        self.kill()
        await super().close()

    async def _outputs(self, request: Request) -> AsyncIterator[RequestOutput]:
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        text = self.tokenizer.decode(request.prompt)
        if text == SILENT:
            yield RequestOutput("s", (ord("s"),))
            self.num_silent += 1
            await asyncio.Event().wait()
        try:
            reply = await asyncio.to_thread(self._ask, text)
        except OSError as error:
            raise EngineFailed(f"the worker process is gone: {error}") from error
        tokens = tuple(self.tokenizer.encode(reply))
        yield self._output(request, tokens, finish_reason="length")

    def _ask(self, text: str) -> str:
        assert self.worker.stdin is not None and self.worker.stdout is not None
        self.worker.stdin.write(f"{text}\n")
        self.worker.stdin.flush()
        return self.worker.stdout.readline().rstrip()


def open_mortal(config: EngineConfig, build: BuildLocal) -> MortalEngine:
    engine = MortalEngine()
    print(f"worker {engine.worker.pid}", flush=True)
    return engine


if __name__ == "__main__":
    from paceline.cli import main

    registry.register(EngineSpec("mortal", "dies when it is told to", open_mortal))
    sys.exit(main(["serve", *sys.argv[1:]]))
