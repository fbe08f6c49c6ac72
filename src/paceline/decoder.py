"""SpeculativeDecoder, the Python face: any Engine, without asyncio."""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import threading
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeVar, overload

from paceline.build import open_engine
from paceline.config import AUTO, NONE, EngineConfig, checked_num_draft_tokens, unknown_names
from paceline.core.protocols import Engine
from paceline.core.sampling import SamplingParams
from paceline.core.stats import EngineStats, SpecStats
from paceline.core.token_arrays import TokenArray, append_generated, as_token_array, prompts_of
from paceline.core.types import ModelInfo, Request, RequestOutput, StructuredOutput, TokenLogprob
from paceline.drafting.registry import reads_prediction
from paceline.engines.registry import spec
from paceline.errors import EngineClosed, OptionError, PromptError
from paceline.hub.generation_config import FILE_NAME, GenerationDefaults, generation_defaults
from paceline.hub.tokenizer import Message, Tokenizer

LOG = logging.getLogger("paceline")
DEFAULT_NEW_TOKENS = 256
CLOSED = "the decoder has been closed"
CLOSE_SECONDS = 10.0  # that closing waits for what others of its callers do
SAMPLING_NAMES = frozenset(SamplingParams.__dataclass_fields__)
SAMPLING_CHOICES = SAMPLING_NAMES - {"seed", "logit_bias"} | {"do_sample"}  # a call that names one has chosen
REQUEST_NAMES = (
    "max_new_tokens",
    "min_new_tokens",
    "stop",
    "ignore_eos",
    "logprobs",
    "logprob_token_ids",
    "num_draft_tokens",
    "lora",
    "method",
    "prediction",
    "prompt_logprobs",
    "structured_output",
    "stop_token_ids",
    "include_stop",
    "skip_special_tokens",
    "bad_words",
    "allowed_token_ids",
)
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Result:
    """One finished sequence. stats holds every rate: acceptance_rate, tokens_per_step, tokens_per_second, …"""

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: SpecStats
    prompt_tokens: int
    from_draft: list[bool]  # for each token: whether it is an accepted draft token
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None  # of every prompt token but the first


class SpeculativeDecoder:
    """Generates with a language model, several tokens a pass, without changing what it would have generated.

        with SpeculativeDecoder("default", method="ngram") as decoder:
            print(decoder.generate([{"role": "user", "content": "Explain attention."}], max_new_tokens=64).text)

    model             a name (`default`, a Hub id, a directory, a .gguf file) or a loaded AutoModelForCausalLM
    draft_model       a smaller model, named the same way, or None
    method            how to draft, such as "ngram"; None: `draft_model` if there is one, else `none`
    num_draft_tokens  draft tokens a step, 0 to 128, or "auto": chosen from measured costs, 0 where drafts are slower
    Further options are the fields of `paceline.config`. One decoder may be used from several threads.

    Decoding is greedy unless a call says otherwise. `generation_defaults.settings` is what the model's authors ask for:
    pass it on as `**decoder.generation_defaults.settings` to follow them.
    """

    def __init__(self, model: Any = "default", draft_model: Any = None, **options: Any) -> None:
        if draft_model is not None:
            options["draft_model"] = draft_model
        self.config = EngineConfig.create(model, **options)
        _mention_unused_length(self.config)
        self._engine: Engine = open_engine(self.config)
        self.generation_defaults: GenerationDefaults = _defaults(self.config)
        self._mentions_defaults = not self.generation_defaults.is_greedy
        self._loop = _LoopThread()
        self._abandoned = weakref.finalize(self, _close_beside, self._engine, self._loop)
        self._abandoned.atexit = False  # where the program ends, the engine sees to its own threads

    # --- what it is ---------------------------------------------------------------------------------------------------

    @property
    def info(self) -> ModelInfo:
        return self._engine.info

    @property
    def tokenizer(self) -> Tokenizer:
        tokenizer: Any = self._engine.tokenizer
        return tokenizer  # type: ignore[no-any-return]

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of methods that a call may give, the decoder's own first."""
        return self._engine.methods

    def stats(self) -> EngineStats:
        """What was done since the decoder was opened."""
        return self._engine.stats()

    def __repr__(self) -> str:
        info = self.info
        method = self.config.speculative.method
        return (
            f"SpeculativeDecoder(model={info.name!r}, method={method!r}, device={info.device!r}, dtype={info.dtype!r})"
        )

    def __enter__(self) -> SpeculativeDecoder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop and give the memory back. Closing twice is harmless; a decoder that is dropped is closed too."""
        self._abandoned.detach()
        self._loop.stop(self._engine.close())

    # --- text in, text out --------------------------------------------------------------------------------------------

    @overload
    def generate(
        self, prompt: str | list[Message], sampling_params: SamplingParams | None = None, **settings: Any
    ) -> Result: ...
    @overload
    def generate(
        self, prompt: list[str] | list[list[Message]], sampling_params: SamplingParams | None = None, **settings: Any
    ) -> list[Result]: ...
    def generate(
        self, prompt: Any, sampling_params: SamplingParams | None = None, **settings: Any
    ) -> Result | list[Result]:
        """Generate the continuation of a string, the answer to chat messages, or of a list of either, batched.

        A string is continued as it is; messages go through the model's chat template, which a chat model expects.
        settings: max_new_tokens, stop, ignore_eos, logprobs, num_draft_tokens and the other fields of Request, and the
        fields of SamplingParams (temperature, top_k, top_p, min_p, penalties, logit_bias, seed). sampling_params gives
        those that the call does not name. do_sample=False means temperature 0, do_sample=True temperature 1 where none
        is given. In a list, sequence i has seed + i. prediction: the output that is expected, text or token ids.
        structured_output: a JSON schema as a dictionary, or a StructuredOutput of paceline.core.types, which also takes
        regular expressions, choices and grammars.
        """
        prompt = _without_arrays(prompt)
        several = _is_list_of_prompts(prompt)
        prompts = prompt if several else [prompt]
        settings = _with_params(sampling_params, settings)
        requests = [self._request(item, index, settings) for index, item in enumerate(prompts)]
        results = self._loop.call(self._collect_all(requests))
        return results if several else results[0]

    def stream(
        self, prompt: str | list[Message], sampling_params: SamplingParams | None = None, **settings: Any
    ) -> Iterator[RequestOutput]:
        """Yield outputs as they are generated; `output.from_draft`: its tokens are accepted draft tokens."""
        settings = _with_params(sampling_params, settings)
        outputs = self._engine.generate(self._request(_without_arrays(prompt), 0, settings))
        return self._held_open(self._loop.iterate(outputs))

    def _held_open(self, outputs: Iterator[RequestOutput]) -> Iterator[RequestOutput]:
        """The same; who reads them may have dropped the decoder."""
        yield from outputs

    # --- ids in, ids out ----------------------------------------------------------------------------------------------

    def decode(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        sampling_params: SamplingParams | None = None,
        **settings: Any,
    ) -> Any:
        """Token ids [batch, length] or [length] in; prompt and continuation out, padded on the right.

        A tensor or a numpy array gives the same kind back, as transformers' generate does; attention_mask marks padding
        in front.
        """
        array: TokenArray = as_token_array(input_ids)
        prompts, settings = prompts_of(array.ids, attention_mask), _with_params(sampling_params, settings)
        requests = [self._request(prompt, index, settings) for index, prompt in enumerate(prompts)]
        results = self._loop.call(self._collect_all(requests))
        generated = [result.token_ids for result in results]
        return array.like_input(append_generated(array.ids, generated, self._pad_token()))

    # --- requests -----------------------------------------------------------------------------------------------------

    def _request(self, prompt: Any, index: int, settings: dict[str, Any]) -> Request:
        """One request, or an OptionError or PromptError."""
        chosen = dict(settings)
        self._mention_defaults(chosen)
        if (do_sample := chosen.pop("do_sample", None)) is not None:
            chosen["temperature"] = chosen.get("temperature", 1.0) if do_sample else 0.0
        own = {name: chosen.pop(name) for name in REQUEST_NAMES if name in chosen}
        if unknown := set(chosen) - SAMPLING_NAMES:
            raise unknown_names("setting", unknown, [*SAMPLING_NAMES, *REQUEST_NAMES, "do_sample"])
        sampling = SamplingParams(**chosen)
        if sampling.seed is not None and index:
            sampling = replace(sampling, seed=sampling.seed + index)
        num_draft_tokens = own.pop("num_draft_tokens", None)
        if num_draft_tokens is not None:
            number = checked_num_draft_tokens(num_draft_tokens)
            num_draft_tokens = None if number == AUTO else number
        if isinstance(prediction := own.get("prediction"), str):
            own["prediction"] = self.tokenizer.encode_continuation(prediction) or None
        if own.get("prediction") and not index and not any(map(reads_prediction, self._engine.methods)):
            LOG.warning("the prediction is not used: the method %s does not draft from it", self._engine.methods[0])
        own["structured_output"] = _structured(own.get("structured_output"))
        own.setdefault("max_new_tokens", DEFAULT_NEW_TOKENS)
        return Request(self.tokenizer.encode(prompt), sampling, num_draft_tokens=num_draft_tokens, **own)

    def _mention_defaults(self, settings: dict[str, Any]) -> None:
        """Say once that decoding is greedy where the model's authors ask for something else."""
        if not self._mentions_defaults or SAMPLING_CHOICES & set(settings):
            return
        self._mentions_defaults = False
        LOG.warning(
            "decoding is greedy; %s of %s asks for %s (pass **decoder.generation_defaults.settings, or temperature=0)",
            FILE_NAME, self.info.name, self.generation_defaults,
        )  # fmt: skip

    async def _collect_all(self, requests: list[Request]) -> list[Result]:
        # All requests are checked before any starts, so that a wrong one costs nothing.
        streams = [self._engine.generate(replace(request, whole=True)) for request in requests]
        tasks = [asyncio.ensure_future(_collect(stream, request)) for stream, request in zip(streams, requests)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    def _pad_token(self) -> int:
        tokenizer = self.tokenizer.hf_tokenizer
        for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        return min(self.info.eos_token_ids, default=0)


def _mention_unused_length(config: EngineConfig) -> None:
    """Say that draft tokens were asked for and nothing drafts them. A server that is running drafts as it was told."""
    k = config.speculative.num_draft_tokens
    if config.speculative.method == NONE and k not in (AUTO, 0) and not spec(config.engine).remote:
        LOG.warning(
            "num_draft_tokens %s is not used: nothing drafts; name a method, such as ngram, or a draft model", k
        )


def _defaults(config: EngineConfig) -> GenerationDefaults:
    """Those of the model's files; an engine that opens the model itself has none that could be read here."""
    return generation_defaults(config.model.model) if spec(config.engine).reads_files else GenerationDefaults()


async def _collect(stream: AsyncIterator[RequestOutput], request: Request) -> Result:
    """Join the outputs of one request."""
    outputs = [output async for output in stream]
    last = outputs[-1]
    assert last.finish_reason is not None
    logprobs = None
    if request.logprobs is not None:
        logprobs = [logprob for output in outputs for logprob in output.logprobs or ()]
    return Result(
        "".join(output.text for output in outputs),
        [token for output in outputs for token in output.token_ids],
        last.finish_reason,
        last.stats or SpecStats(),
        len(request.prompt),
        [output.from_draft for output in outputs for _ in output.token_ids],
        logprobs,
        None if request.prompt_logprobs is None else list(outputs[0].prompt_logprobs or ()),
    )


def _with_params(params: SamplingParams | None, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a call, and the sampling parameters that it gives as one object."""
    if params is None:
        return settings
    if not isinstance(params, SamplingParams):
        raise OptionError(f"sampling_params is one paceline.SamplingParams for all prompts, not {params!r}")
    return {name: getattr(params, name) for name in SAMPLING_NAMES} | settings


def _structured(value: Any) -> StructuredOutput | None:
    """What the output must match; a dictionary is a JSON schema."""
    if isinstance(value, dict):
        try:
            return StructuredOutput("json_schema", json.dumps(value))
        except (TypeError, ValueError) as error:
            raise OptionError(f"structured_output is not JSON: {error}") from error
    if value is None or isinstance(value, StructuredOutput):
        return value
    raise OptionError(
        f"structured_output is a JSON schema as a dictionary or paceline.core.types.StructuredOutput(kind, value); "
        f"not {value!r}"
    )


def _is_list_of_prompts(prompt: Any) -> bool:
    """A list of prompts, as against one prompt that is a list of messages or of token ids."""
    if isinstance(prompt, list | tuple) and not prompt:
        raise PromptError("the list of prompts is empty")
    return isinstance(prompt, list | tuple) and not isinstance(prompt[0], dict | int)


def _without_arrays(prompt: Any) -> Any:
    """Token ids in arrays of numpy or torch, one prompt or a batch of them, as lists; anything else as it is."""
    if not isinstance(prompt, str | dict) and hasattr(prompt, "tolist"):
        return _without_arrays(prompt.tolist())
    if isinstance(prompt, list | tuple):
        return [_without_arrays(part) for part in prompt]
    return prompt


def _close_beside(engine: Engine, loop: _LoopThread) -> None:
    """Close what no caller can close. In a thread of its own: garbage is collected in any thread, and closing waits."""
    threading.Thread(target=lambda: loop.stop(engine.close()), name="paceline-close", daemon=True).start()


# --- an event loop in a thread ----------------------------------------------------------------------------------------


class _LoopThread:
    """An event loop that callers of any thread hand their work to."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="paceline-decoder", daemon=True)
        self._thread.start()
        self._lock = threading.Lock()  # of whether it takes work, and of what is under way
        self._takes_work = True
        self._under_way: set[Future[Any]] = set()

    def call(self, work: Coroutine[Any, Any, Value]) -> Value:
        """Run a coroutine and wait for its result. An interrupt cancels it."""
        future = self._begin(work)
        try:
            return future.result()
        except CancelledError as error:  # what was still under way when the loop was stopped
            raise EngineClosed(CLOSED) from error
        except BaseException:
            future.cancel()
            raise

    def iterate(self, stream: AsyncIterator[RequestOutput]) -> Iterator[RequestOutput]:
        """The items of an asynchronous iterator; leaving early closes it."""
        items: queue.SimpleQueue[RequestOutput | BaseException | None] = queue.SimpleQueue()
        future = self._begin(_forward(stream, items))
        future.add_done_callback(lambda done: items.put(EngineClosed(CLOSED) if done.cancelled() else None))
        try:
            while (item := items.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            future.cancel()

    def stop(self, last: Coroutine[Any, Any, None]) -> None:
        """Run `last`, which ends all work under way, and stop after that. Harmless when called twice."""
        with self._lock:
            is_first, self._takes_work = self._takes_work, False
        if is_first:
            try:
                asyncio.run_coroutine_threadsafe(last, self._loop).result()
            finally:
                self._end_work()
                self._loop.call_soon_threadsafe(self._loop.stop)
        else:
            last.close()
        self._thread.join()
        self._loop.close()

    def _begin(self, work: Coroutine[Any, Any, Value]) -> Future[Value]:
        """Raises EngineClosed where the loop takes no more work: nothing would ever run it."""
        with self._lock:
            if not self._takes_work:
                work.close()
                raise EngineClosed(CLOSED)
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return future

    def _end_work(self) -> None:
        """Wait for work that is coming to its end; cancel what does not."""
        under_way = tuple(self._under_way)
        for future in wait(under_way, CLOSE_SECONDS).not_done:
            future.cancel()


async def _forward(
    stream: AsyncIterator[RequestOutput], items: queue.SimpleQueue[RequestOutput | BaseException | None]
) -> None:
    """Put every item into the queue, then what ended it: an error, or None."""
    try:
        async for item in stream:
            items.put(item)
        items.put(None)
    except BaseException as error:  # the reader raises it, whatever it is
        items.put(error)
        if isinstance(error, asyncio.CancelledError):
            raise
    finally:
        await stream.aclose()  # type: ignore[attr-defined]
