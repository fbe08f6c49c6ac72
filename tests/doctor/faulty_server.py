"""Our own server with one fault put into it: what the doctor must find.

Each fault is a context manager that changes the running package and puts it back.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch

from paceline.core.draft_tree import DraftTree
from paceline.core.stopping import StopRules
from paceline.core.types import Request, RequestOutput, SequenceCache, VerifyResult
from paceline.core.verify import RULES, verify_tokens
from paceline.engines.local.async_engine import AsyncEngine
from paceline.engines.local.kv_manager import KVManager
from paceline.kv.prefix_cache import PrefixMatch
from paceline.runners.huggingface import HuggingFaceRunner
from paceline.serve.config import RequestLimits, ServerConfig
from paceline.serve.responses import ChoiceDelta, Json, ResponseBuilder
from tests.serve.running import RunningServer, serving_model
from tests.serve.scripted import TOOL_TEMPLATE, tokenizer_with
from tests.support.tiny import byte_tokenizer, tiny_llama
from tests.support.wrong_rules import wrong_rule

CONTEXT = 1280
DRAFT_TOKENS = 3
STALE_TOKENS = 8
SHARPER = 1.7
NOISE = 0.5  # of the draft model's head, relative to that of the target


@contextmanager
def tiny_server() -> Iterator[RunningServer]:
    """A random model that reads bytes, a draft model close to it, and room for a few prompts in the cache."""
    limits = RequestLimits(max_choices=8, stall_timeout=60, request_timeout=120, drain_timeout=5)
    config = ServerConfig(("tiny",), limits=limits, num_draft_tokens=DRAFT_TOKENS, max_num_seqs=16)
    options = {"method": "draft_model", "draft_model": draft_llama(), "kv_cache_tokens": 16 * 1024}
    with serving_model(printable_llama(), tokenizer_with(TOOL_TEMPLATE), config, **options) as server:
        yield server


def printable_llama() -> Any:
    """A tiny random model that hardly ever generates bytes which are no printable characters."""
    model, tokenizer = tiny_llama(max_position_embeddings=CONTEXT), byte_tokenizer()
    printable = {tokenizer.encode(chr(code))[-1] for code in range(32, 127)}
    with torch.no_grad():
        for token, row in enumerate(model.lm_head.weight):
            row *= SHARPER if token in printable else 0.0
    return model


def draft_llama() -> Any:
    """The same model with noise on its head: most of its draft tokens are accepted, and some are not."""
    model = printable_llama()
    generator = torch.Generator().manual_seed(1)
    head = model.lm_head.weight
    with torch.no_grad():
        head *= 1 + NOISE * torch.randn(head.shape, generator=generator)
    return model


# --- the prefix cache -------------------------------------------------------------------------------------------------


def _changed_hits(change: Callable[[HuggingFaceRunner, SequenceCache, int], None]) -> AbstractContextManager[Any]:
    """The KV of every cache hit is changed."""
    right = KVManager._open

    def opened(manager: KVManager, match: PrefixMatch | None, lora: str | None) -> SequenceCache:
        seq_cache = right(manager, match, lora)
        if match is not None:
            with torch.inference_mode():
                change(manager._target, seq_cache, match.length)  # type: ignore[arg-type]
        return seq_cache

    return patch.object(KVManager, "_open", opened)


@contextmanager
def stale_kv() -> Iterator[None]:
    """After a cache hit the last tokens of the prefix have the KV of others."""

    def change(runner: HuggingFaceRunner, seq_cache: Any, length: int) -> None:
        last = list(range(length - STALE_TOKENS, length))
        runner._buffers.move(seq_cache.row, [place - STALE_TOKENS for place in last], last, runner._device)

    with _changed_hits(change):
        yield


@contextmanager
def lost_last_token() -> Iterator[None]:
    """After a cache hit the last token of the prefix has no KV."""

    def change(runner: HuggingFaceRunner, seq_cache: Any, length: int) -> None:
        for layer in runner._buffers.layers:
            for buffer in (layer.keys, layer.values):
                buffer[seq_cache.row, :, length - 1] = 0.0

    with _changed_hits(change):
        yield


# --- speculation ------------------------------------------------------------------------------------------------------


@contextmanager
def off_by_one_rollback() -> Iterator[None]:
    """Where draft tokens are rejected, the KV of the first of them stays in place of the last accepted one."""
    right = HuggingFaceRunner.commit

    def commit(runner: HuggingFaceRunner, seq_cache: Any, nodes: list[int]) -> None:
        read = seq_cache.length - seq_cache.last_row_start
        right(runner, seq_cache, nodes)
        if len(nodes) < read and len(nodes) > 1:
            place = seq_cache.length
            with torch.inference_mode():
                runner._buffers.move(seq_cache.row, [place], [place - 1], runner._device)

    with patch.object(HuggingFaceRunner, "commit", commit):
        yield


@contextmanager
def wrong_q() -> Iterator[None]:
    """Draft tokens are verified as if the draft model had given them an eighth of their probability."""

    def verify(tree: DraftTree, target: torch.Tensor, uniforms: torch.Tensor) -> VerifyResult:
        wrong = tree if tree.probs is None else replace(tree, probs=tree.probs / 8)
        return verify_tokens(wrong, target, uniforms)

    with patch.dict(RULES, {"token": wrong_rule(verify)}):
        yield


# --- requests and responses -------------------------------------------------------------------------------------------


@contextmanager
def dropped_stop() -> Iterator[None]:
    """A stop string counts only where it lies inside one token."""

    def holds(rules: StopRules, generated: Any, count: int) -> bool:
        assert rules.decode is not None
        return any(stop in rules.decode(list(generated[count - 1 : count])) for stop in rules.stop_strings)

    with patch.object(StopRules, "_holds_stop_string", holds), patch.object(AsyncEngine, "generate", _unstopped()):
        yield


def _unstopped() -> Any:
    """The detokenizer holds back stop strings as well: it is not told of them."""
    right = AsyncEngine.generate
    return lambda engine, request: right(engine, replace(request, stop=()))


def _changed_outputs(change: Callable[[RequestOutput, int], RequestOutput]) -> AbstractContextManager[Any]:
    """Outputs of the engine are changed; the number says how many requests are running."""
    right, running = AsyncEngine.generate, [0]

    def generate(engine: AsyncEngine, request: Request) -> AsyncIterator[RequestOutput]:
        outputs = right(engine, request)

        async def changed() -> AsyncGenerator[RequestOutput, None]:
            running[0] += 1
            try:
                async for output in outputs:
                    yield change(output, running[0])
            finally:
                running[0] -= 1

        return changed()

    return patch.object(AsyncEngine, "generate", generate)


@contextmanager
def swapped_streams() -> Iterator[None]:
    """Of requests that run at the same time, one gets a piece of text of another now and then."""
    held: list[str] = []

    def change(output: RequestOutput, running: int) -> RequestOutput:
        if running < 2 or not output.text:
            return output
        held.append(output.text)
        return replace(output, text=held.pop(0)) if len(held) > 1 else output

    with _changed_outputs(change):
        yield


@contextmanager
def wrong_logprobs() -> Iterator[None]:
    """Accepted draft tokens are reported with the log-probability 0."""

    def change(output: RequestOutput, running: int) -> RequestOutput:
        if not output.from_draft or output.logprobs is None:
            return output
        return replace(output, logprobs=tuple(replace(entry, logprob=0.0) for entry in output.logprobs))

    with _changed_outputs(change):
        yield


@contextmanager
def ignored_seed() -> Iterator[None]:
    """Seeds are not used."""
    right = AsyncEngine.generate

    def generate(engine: AsyncEngine, request: Request) -> AsyncIterator[RequestOutput]:
        return right(engine, replace(request, sampling=replace(request.sampling, seed=None)))

    with patch.object(AsyncEngine, "generate", generate):
        yield


@contextmanager
def lost_temperature() -> Iterator[None]:
    """Sampled tokens are verified at temperature 1, whatever the request says."""
    right = AsyncEngine.generate

    def generate(engine: AsyncEngine, request: Request) -> AsyncIterator[RequestOutput]:
        if request.num_draft_tokens == 0 or not request.sampling.temperature:
            return right(engine, request)
        return right(engine, replace(request, sampling=replace(request.sampling, temperature=1.0)))

    with patch.object(AsyncEngine, "generate", generate):
        yield


@contextmanager
def cut_stream() -> Iterator[None]:
    """A stream ends before its last piece of text."""
    right = ResponseBuilder._delta_chunks

    def chunks(builder: ResponseBuilder, delta: ChoiceDelta) -> Iterator[Json]:
        if delta.output.finish_reason:
            delta = replace(delta, output=replace(delta.output, text=""))
        return right(builder, delta)

    with patch.object(ResponseBuilder, "_delta_chunks", chunks):
        yield


@dataclass(frozen=True, slots=True)
class PlantedFault:
    """A fault, the scenario that is made for it, and a seed of prompts that show it.

    Prompts that a server has seen before are in its prefix cache, so the two faults of the cache have two seeds.
    """

    fault: Callable[[], AbstractContextManager[None]]
    scenario: str
    seed: int


FAULTS = {
    "stale KV after a cache hit": PlantedFault(stale_kv, "prefix-cache", 1),
    "lost last token of a prefix": PlantedFault(lost_last_token, "prefix-cache", 2),
    "off-by-one rollback": PlantedFault(off_by_one_rollback, "speculation", 3),
    "wrong q": PlantedFault(wrong_q, "sampling", 6),
    "lost temperature": PlantedFault(lost_temperature, "sampling", 6),
    "dropped stop": PlantedFault(dropped_stop, "stop-strings", 7),
    "swapped streams": PlantedFault(swapped_streams, "concurrency", 8),
    "wrong logprobs": PlantedFault(wrong_logprobs, "logprobs", 9),
    "ignored seed": PlantedFault(ignored_seed, "seeds", 10),
    "cut stream": PlantedFault(cut_stream, "streaming", 11),
}
