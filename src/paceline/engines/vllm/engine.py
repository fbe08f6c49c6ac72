"""AsyncLLM in this process behind `Engine`: its loop runs in a thread of ours, so that readers of any loop are served.

vLLM's own processes hold the model. Requests cross to its loop, steps cross back to the loop of their reader, where
characters are made and stop strings are found.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import itertools
import logging
import os
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config import NONE, EngineConfig
from paceline.core.protocols import ExternalEngine
from paceline.core.sequence import Sequence
from paceline.core.stats import EngineStats
from paceline.core.types import ModelInfo, Request, RequestOutput
from paceline.engines.vllm.arguments import NEWER, VllmArguments, thread_binding, vllm_arguments
from paceline.engines.vllm.requests import RequestTranslator, VllmRequest
from paceline.engines.vllm.speculation import num_draft_tokens
from paceline.engines.vllm.steps import ABORT, SequenceReader, Step, StepRecorder, step_of
from paceline.errors import EngineClosed, EngineFailed, MissingExtra, ModelError, OptionError, PacelineError, StepFailed
from paceline.hub.tokenizer import Tokenizer, load_tokenizer
from paceline.runners.native.loading import eos_token_ids_in

LOG = logging.getLogger(__name__)
SHOW_LOG = "VLLM_LOGGING_LEVEL=INFO shows vLLM's own log"
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "CRITICAL",  # errors are raised here, in a user's words
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout belongs to the command
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",  # of vLLM's own processes: this one has read its setting already
}
SHUTDOWN_SECONDS = 20.0  # for vLLM's processes to end by themselves; then they are killed
DEATH = "the vLLM engine has died with one of its processes"
DIED = "one of vLLM's processes has died, and the requests under way are lost"


def open_vllm(config: EngineConfig) -> VllmEngine:
    """Start vLLM. Raises MissingExtra, OptionError or ModelError before any request."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    platform = _platform()
    chosen = vllm_arguments(config, platform)
    binding = thread_binding(config, platform, os.sched_getaffinity(0))
    if binding is not None:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", binding)
    thread = _LoopThread()
    recorder = StepRecorder()
    try:
        llm = thread.call(_start(chosen, recorder))
    except BaseException:
        thread.stop()
        raise
    return VllmEngine(config, chosen.folder, llm, thread, recorder)


def _platform() -> str:
    """What the installed vLLM runs on: cpu, cuda, …"""
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtra("vllm", "vllm")
    try:
        with warnings.catch_warnings(action="ignore"):
            importlib.import_module("vllm.v1.engine.async_llm")
            from vllm.platforms import current_platform

        return str(current_platform.device_type)
    except Exception as error:  # a build for another machine fails in its own ways
        raise ModelError(f"vLLM is installed and cannot be used: {_first_line(error)}") from error


async def _start(chosen: VllmArguments, recorder: StepRecorder) -> Any:
    """vLLM's engine, in the loop that runs this."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    known = set(AsyncEngineArgs.__dataclass_fields__)
    arguments = {name: value for name, value in chosen.arguments.items() if name in known or name not in NEWER}
    unknown = sorted(set(arguments) - known)
    if unknown:
        raise OptionError(f"vLLM's AsyncEngineArgs has no {unknown[0]!r} (--engine-option engine_args=...)")
    try:
        vllm_config = AsyncEngineArgs(**arguments).create_engine_config()
    except (ValueError, TypeError, AssertionError, NotImplementedError, ImportError) as error:
        raise OptionError(f"vLLM does not take this: {_first_line(error)}") from error
    if chosen.kv_cache_tokens is not None:
        cache = vllm_config.cache_config
        cache.num_gpu_blocks_override = -(-chosen.kv_cache_tokens // cache.block_size)
    try:
        return AsyncLLM.from_vllm_config(
            vllm_config, stat_loggers=[lambda *_, **__: recorder], disable_log_stats=True
        )
    except Exception as error:  # whatever its processes die of
        raise ModelError(f"vLLM did not start: {_first_line(error)} ({SHOW_LOG})") from error


def _first_line(error: BaseException) -> str:
    """The line of an error that says what is wrong; pydantic's begin with a count."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    line = lines[2] if "validation error" in lines[0] and len(lines) > 2 else lines[0]
    return line.removeprefix("Value error, ").split(" [type=")[0]


# --- the engine -------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _RunningRequest:
    """A request in vLLM. collector: what vLLM puts its outputs into, once it has taken the request."""

    request_id: str
    num_logprobs: int | None
    deliver: Callable[[Step | PacelineError], None]
    collector: Any = None
    ended: bool = False


class VllmEngine(ExternalEngine):
    """Generates with vLLM. Its method and number of draft tokens are those it was started with."""

    def __init__(
        self, config: EngineConfig, folder: Path, llm: Any, thread: _LoopThread, recorder: StepRecorder
    ) -> None:
        self._llm: Any = llm
        self._config, self._thread, self._recorder = llm.vllm_config, thread, recorder
        method, k = config.speculative.method or NONE, _k(llm, config)
        self.methods: tuple[str, ...] = (method if k else NONE,)
        self.info = _model_info(str(config.model.model), folder, llm)
        tokenizer = config.model.tokenizer or folder
        self.tokenizer = Tokenizer(
            load_tokenizer(Path(tokenizer), self.info.name, trust_remote_code=config.model.trust_remote_code)
        )
        self._requests = RequestTranslator(self.info, self.tokenizer, self.methods[0], k)
        self._running: dict[str, _RunningRequest] = {}
        self._ids = itertools.count()
        self._closing = threading.Event()

    # --- Engine -------------------------------------------------------------------------------------------------------

    def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        if self._closing.is_set():
            raise EngineClosed("the engine has been closed")
        self.check_health()
        translated = self._requests.translate(request)
        return self._stream(translated.seq, self._params(translated))

    def stats(self) -> EngineStats:
        num_blocks = self._config.cache_config.num_gpu_blocks or 0
        return self._recorder.snapshot(self.methods[0], len(self._running), num_blocks)

    def check_health(self) -> None:
        """Raise EngineFailed where one of vLLM's processes has died: no request can succeed any more."""
        if self._has_died:
            raise EngineFailed(DIED)

    async def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        for request in list(self._running.values()):
            request.deliver(Step([], finish_reason=ABORT))
        await asyncio.to_thread(self._shutdown)

    def _shutdown(self) -> None:
        self._llm.shutdown(timeout=SHUTDOWN_SECONDS)
        self._thread.stop()
        self._llm.shutdown = lambda: None  # its destructor calls this again, when its modules may be gone

    @property
    def _has_died(self) -> bool:
        return not self._closing.is_set() and bool(self._llm.errored)

    # --- the reader's side --------------------------------------------------------------------------------------------

    def _params(self, translated: VllmRequest) -> Any:
        """vLLM's sampling parameters, checked by vLLM: what it refuses is refused before any work."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

        settings = dict(translated.settings)
        structured = settings.pop("structured", None)
        try:
            if structured is not None:
                settings["structured_outputs"] = StructuredOutputsParams(**structured)
            params = SamplingParams(output_kind=RequestOutputKind.DELTA, **settings)
            params.clone().verify(
                self._config.model_config,
                self._config.speculative_config,
                self._config.structured_outputs_config,
                self.tokenizer.hf_tokenizer,
            )
        except (ValueError, TypeError) as error:
            raise OptionError(f"vLLM does not take this request: {_first_line(error)}") from error
        return params

    async def _stream(self, seq: Sequence, params: Any) -> AsyncIterator[RequestOutput]:
        loop = asyncio.get_running_loop()
        steps: asyncio.Queue[Step | PacelineError] = asyncio.Queue()

        def deliver(step: Step | PacelineError) -> None:
            try:
                loop.call_soon_threadsafe(steps.put_nowait, step)
            except RuntimeError:  # the reader's loop has closed
                LOG.debug("a sequence ended after its reader")

        request = _RunningRequest(f"paceline-{next(self._ids)}", seq.params.logprobs, deliver)
        stopping, skips = seq.params.stopping, seq.params.skip_special_tokens
        detokenizer = self.tokenizer.stream(
            stopping.stop_strings, skip_special_tokens=skips, include_stop=stopping.include_stop
        )
        reader = SequenceReader(seq, detokenizer)
        self._begin(request, seq.ids, params)
        try:
            while not seq.finished:
                step = await steps.get()
                if isinstance(step, PacelineError):
                    raise step
                for output in reader.outputs(step):
                    yield output
        finally:
            self._end(request)

    def _begin(self, request: _RunningRequest, prompt: list[int], params: Any) -> None:
        self._recorder.began(len(prompt), first=not self._running)
        self._running[request.request_id] = request
        if self._closing.is_set():  # it may have looked for running requests already
            request.deliver(Step([], finish_reason=ABORT))
        else:
            self._thread.submit(self._add(request, list(prompt), params))

    def _end(self, request: _RunningRequest) -> None:
        """The reader is done with it: abort what vLLM still does for it."""
        self._running.pop(request.request_id, None)
        if not request.ended and not self._closing.is_set():
            self._thread.submit(self._abort(request))

    # --- the side of vLLM's loop --------------------------------------------------------------------------------------

    async def _add(self, request: _RunningRequest, prompt: list[int], params: Any) -> None:
        from vllm.inputs.engine import tokens_input

        try:
            collector = await self._llm.add_request(request.request_id, tokens_input(prompt), params)
        except Exception as error:  # vLLM has died, or refuses the request
            self._fail(request, error)
            return
        request.collector, waiting = collector, collector.output
        # A collector joins steps that its reader has not fetched yet; where a step ends tells what was drafted.
        collector.put = lambda output: self._received(request, output)
        if waiting is not None:
            self._received(request, waiting)
        if request.ended:
            await self._llm.abort(collector.request_id, internal=True)

    def _received(self, request: _RunningRequest, output: Any) -> None:
        if isinstance(output, Exception):
            self._fail(request, output)
            return
        step = step_of(output.outputs[0], request.num_logprobs)
        step.num_cached_tokens = output.num_cached_tokens
        request.ended = request.ended or bool(output.finished)
        if step.finish_reason == ABORT:  # not from a pass
            request.deliver(step)
        else:
            self._recorder.add(step, request.deliver)

    def _fail(self, request: _RunningRequest, error: Exception) -> None:
        request.ended = True
        self._recorder.failed()
        if self._has_died:
            request.deliver(EngineFailed(DIED))
        else:
            request.deliver(StepFailed(f"vLLM failed this request: {_first_line(error)} ({SHOW_LOG})"))

    async def _abort(self, request: _RunningRequest) -> None:
        if request.ended:
            return
        request.ended = True
        if request.collector is not None:
            await self._llm.abort(request.collector.request_id, internal=True)


def _k(llm: Any, config: EngineConfig) -> int:
    """Draft tokens a step, as vLLM was started; 0: plain decoding."""
    speculative = llm.vllm_config.speculative_config
    return 0 if speculative is None else int(speculative.num_speculative_tokens or num_draft_tokens(config.speculative))


def _model_info(name: str, folder: Path, llm: Any) -> ModelInfo:
    model = llm.vllm_config.model_config
    return ModelInfo(
        name,
        int(model.get_vocab_size()),
        eos_token_ids_in(folder, model.hf_text_config),
        int(model.max_model_len),
        int(model.get_total_num_hidden_layers()),
        int(model.get_hidden_size()),
        str(llm.vllm_config.device_config.device_type),
        str(model.dtype).removeprefix("torch."),
    )


# --- a loop in a thread -----------------------------------------------------------------------------------------------


class _LoopThread:
    """An event loop in a thread of its own, for all of vLLM's coroutines."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="paceline-vllm", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine and wait for its result."""
        return self.submit(work).result()

    def stop(self) -> None:
        """Cancel what runs in the loop, and end it. Stopping twice is harmless."""
        if not self._loop.is_closed():
            self.call(_cancel_all())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _cancel_all() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
