"""The target generates its training data through the engine: a SequenceWriter over LocalEngine.

A plan becomes one or two requests: the invented question, if there is one, and the answer to it. The engine does the
rest: batches, KV blocks, sampling.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedModel

from paceline.config import EngineConfig
from paceline.core.sampling import SamplingParams
from paceline.core.types import Request
from paceline.engines.local.engine import LocalEngine
from paceline.engines.local.request_state import RequestState
from paceline.errors import OutOfMemory, PacelineError
from paceline.hub.model_config import DecoderSizes, decoder_sizes
from paceline.kv.block_manager import BLOCK_SIZE, UNBOUNDED
from paceline.runners.native import is_native
from paceline.train.collect import SHORT_SEQ_LEN, CollectOptions
from paceline.train.placement import free_bytes, num_seqs_in_memory, on_gpu
from paceline.train.sequence_writer import (
    MAX_LOGIT_GAP,
    SHORTEST_CUT_ANSWER,
    GeneratedSequence,
    GenerationPlan,
    WriterLimits,
)

BuildEngine = Callable[[EngineConfig], LocalEngine]

MIN_P = math.exp(-MAX_LOGIT_GAP)
WAITING_PER_SEQ = 4  # requests that are read ahead, for each sequence generated at a time, where kinds take turns
MOST_NUM_SEQS = 256  # the host's work per sequence is least up to here; more sequences generate fewer tokens a second


class EngineWriters:
    """Opens writers over one engine of a loaded model: the WriterFactory of training.

    The engine is built when the first sequence is needed: data that is complete costs nothing.
    """

    def __init__(self, build: BuildEngine, model: PreTrainedModel, tokenizer: Any, options: CollectOptions) -> None:
        """build: makes the engine of a configuration."""
        self._build, self._model, self._tokenizer, self._options = build, model, tokenizer, options

    @property
    def sizes(self) -> DecoderSizes:
        return decoder_sizes(self._model.config)

    @cached_property
    def engine(self) -> LocalEngine:
        config = engine_config(self._model, self._tokenizer, self._options)
        try:
            return self._build(config)
        except OutOfMemory as error:
            raise _too_many(config.max_num_seqs) from error

    def num_seqs_that_fit(self, max_len: int) -> int:
        """By the blocks of the KV cache; where the runner's pool only counts, by the free memory."""
        target = self.engine.parts.target
        if target.blocks.num_blocks >= UNBOUNDED:
            return num_seqs_in_memory(self._model, in_whole_blocks(max_len), MOST_NUM_SEQS)
        return max(1, target.free_tokens() // in_whole_blocks(max_len))

    def open(self, limits: WriterLimits) -> EngineWriter:
        return EngineWriter(self.engine, limits)


def engine_config(model: PreTrainedModel, tokenizer: Any, options: CollectOptions) -> EngineConfig:
    """Without speculation, with blocks for as many sequences as are generated at a time."""
    native = is_native(model.config) and _copy_fits(model)
    short_len = min(SHORT_SEQ_LEN, options.max_seq_len)
    reserved = _weight_bytes(model) if native else 0
    num_seqs = options.max_num_seqs or num_seqs_in_memory(model, in_whole_blocks(short_len), MOST_NUM_SEQS, reserved)
    return EngineConfig.create(
        model,
        tokenizer=tokenizer,
        runner="native" if native else "auto",
        kv_cache_tokens=max(num_seqs * in_whole_blocks(short_len), in_whole_blocks(options.max_seq_len)),
        prefix_cache_tokens=0,
        max_num_seqs=num_seqs,
        warmup="none",  # it prepares for a first sequence that comes alone; here many come at once
    )


def in_whole_blocks(tokens: int) -> int:
    """Tokens that the blocks of a sequence of this length hold."""
    return -(-tokens // BLOCK_SIZE) * BLOCK_SIZE


def _copy_fits(model: PreTrainedModel) -> bool:
    """Whether the native runner's copy of the weights leaves at least half of a GPU's free memory."""
    device = next(model.parameters()).device
    return not on_gpu(device) or _weight_bytes(model) < free_bytes(device) // 2


def _weight_bytes(model: PreTrainedModel) -> int:
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())


def _too_many(num_seqs: int) -> OutOfMemory:
    return OutOfMemory(f"generating {num_seqs} sequences at a time does not fit; choose fewer with --max-num-seqs")


@dataclass(frozen=True, slots=True)
class _ActivePlan:
    """A plan whose question or answer is being generated. start: where the answer starts; None: in the question."""

    plan: GenerationPlan
    start: int | None


class _Waiting:
    """Requests that wait for their turn.

    Where the target takes several greedy steps without the host, one sampled sequence in the batch would end that:
    greedy and sampled requests then take turns, many of each at a time. Elsewhere they are mixed, in their order.
    """

    def __init__(self, *, apart: bool) -> None:
        self.apart = apart
        self._requests: dict[bool, deque[tuple[Request, _ActivePlan]]] = {False: deque(), True: deque()}
        self._greedy = False  # whose turn it is

    def __len__(self) -> int:
        return sum(map(len, self._requests.values()))

    def add(self, request: Request, active: _ActivePlan) -> None:
        self._requests[self.apart and request.sampling.greedy].append((request, active))

    def begin_turn(self) -> None:
        """The kind that more requests wait of is next."""
        self._greedy = len(self._requests[True]) > len(self._requests[False])

    def next(self) -> tuple[Request, _ActivePlan] | None:
        """The next request of the kind whose turn it is."""
        requests = self._requests[self._greedy]
        return requests.popleft() if requests else None


class EngineWriter:
    """Generates sequences through one engine: a SequenceWriter."""

    def __init__(self, engine: LocalEngine, limits: WriterLimits) -> None:
        self._engine, self._num_seqs = engine, _num_seqs(engine, limits)
        self._active: dict[RequestState, _ActivePlan] = {}
        self._waiting = _Waiting(apart=engine.parts.target.decode_steps > 1)

    def write(self, plans: Iterator[GenerationPlan], stop: Callable[[], bool]) -> Iterator[GeneratedSequence]:
        """See SequenceWriter. The data is a function of the plans and of torch's seed."""
        try:
            while not stop():
                self._take(plans)
                if not self._active:
                    return
                self._engine.step()
                yield from self._finished()
            yield from self._unfinished()
        finally:
            self._abort()

    def _take(self, plans: Iterator[GenerationPlan]) -> None:
        """Start requests until as many sequences as allowed are generated, or the plans run out."""
        if self._waiting.apart and not self._active:
            self._read(plans, WAITING_PER_SEQ * self._num_seqs)
            self._waiting.begin_turn()
        while len(self._active) < self._num_seqs:
            if not self._waiting.apart:
                self._read(plans, 1)
            waiting = self._waiting.next()
            if waiting is None:
                return
            request, active = waiting
            self._active[self._engine.add(request)] = active

    def _read(self, plans: Iterator[GenerationPlan], count: int) -> None:
        """Read plans until so many requests wait."""
        while len(self._waiting) < count:
            plan = next(plans, None)
            if plan is None:
                return
            if plan.question_max_len > 0:
                self._waiting.add(_question(plan), _ActivePlan(plan, None))
            else:
                self._answer(plan, list(plan.prompt))

    def _answer(self, plan: GenerationPlan, tokens: list[int]) -> None:
        """The answer waits for its turn, where there is room for one."""
        room = min(plan.max_len, self._engine.info.max_seq_len) - len(tokens)
        if room > 0:
            self._waiting.add(Request(tokens, _sampling(plan.temperature), room), _ActivePlan(plan, len(tokens)))

    def _finished(self) -> Iterator[GeneratedSequence]:
        """Finished answers; a finished question goes on to its answer."""
        for state in [state for state in self._active if state.error is not None or state.seq.finished]:
            active = self._active.pop(state)
            if state.error is not None:
                raise self._explained(state.error)
            if active.start is None:
                self._answer(active.plan, _bridged(active.plan, state.seq.ids))
            else:
                yield GeneratedSequence(state.seq.ids, active.start, active.plan)

    def _unfinished(self) -> Iterator[GeneratedSequence]:
        """Answers that were cut off: their first part is as good as any other data."""
        for state, active in self._active.items():
            if active.start is not None and len(state.seq.ids) - active.start >= SHORTEST_CUT_ANSWER:
                yield GeneratedSequence(list(state.seq.ids), active.start, active.plan)

    def _abort(self) -> None:
        for state in self._active:
            self._engine.abort(state)
        self._active.clear()

    def _explained(self, error: PacelineError) -> PacelineError:
        return _too_many(self._num_seqs) if isinstance(error, OutOfMemory) else error


def _num_seqs(engine: LocalEngine, limits: WriterLimits) -> int:
    """As many sequences as allowed whose blocks fit together: a preempted sequence would be read a second time."""
    return max(1, min(limits.num_seqs, engine.parts.target.free_tokens() // in_whole_blocks(limits.max_len)))


def _question(plan: GenerationPlan) -> Request:
    """The rest of a question. Without a bridge the sequence simply continues, past end-of-sequence tokens too."""
    size = len(plan.prompt)
    return Request(
        list(plan.prompt),
        _sampling(1.0),
        max(1, plan.question_max_len - size),
        ignore_eos=not plan.bridge,
        min_new_tokens=max(0, plan.question_min_len - size),
    )


def _bridged(plan: GenerationPlan, tokens: list[int]) -> list[int]:
    """The bridge replaces the question's end-of-sequence token; a question cut at its limit ends like any other."""
    return [*tokens[:-1], *plan.bridge] if plan.bridge else tokens


def _sampling(temperature: float) -> SamplingParams:
    return SamplingParams(temperature, min_p=MIN_P if temperature > 0 else 0.0)
