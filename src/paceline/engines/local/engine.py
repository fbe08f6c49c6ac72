"""LocalEngine: the one loop. The library, `hf_generate`, every command, the server and the trainer run it.

    schedule      admit requests, read a chunk of the prompts, choose draft lengths, reserve blocks
    propose       the drafter proposes draft tokens
    forward       the target reads the last token and the draft tokens of every sequence in one pass
    verify        the acceptance rule of each sequence decides
    postprocess   sequences grow, end, and report

Plain decoding is num_draft_tokens = 0 in this loop; where no sequence drafts, the target takes several steps in a row.
One thread owns an engine and calls `step` as long as it has work; async_engine.py is that thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from paceline.config import NONE, EngineConfig
from paceline.core.cost_model import StepTiming
from paceline.core.draft_length import DraftLengthPolicy
from paceline.core.draft_tree import DraftTree, empty
from paceline.core.protocols import Drafter, HeadUpdate, Runner
from paceline.core.sequence import Sequence
from paceline.core.stats import EngineStats
from paceline.core.types import (
    ModelOutput,
    Request,
    RowOutput,
    StepResult,
    VerifyResult,
)
from paceline.device.attention_plans import without_plans
from paceline.device.properties import device_in_use
from paceline.engines.local.embedding import Embedder
from paceline.engines.local.guarded_drafter import GuardedDrafter
from paceline.engines.local.kv_manager import KVManager
from paceline.engines.local.multi_step import MultiStep
from paceline.engines.local.prefill import step_row
from paceline.engines.local.prompt_logprobs import score_prompt
from paceline.engines.local.request_state import OnOutput, RequestState, ignore_output
from paceline.engines.local.scheduler import PrefillBatch, Scheduler, StepBatch, StepOfBatch
from paceline.engines.local.sequences import SequenceBuilder
from paceline.engines.local.step_timing import Pauses, StepBegun
from paceline.engines.local.verifier import Verifier, logprobs_of
from paceline.errors import CapabilityError, OutOfMemory, PacelineError, StepFailed
from paceline.hub.tokenizer import Tokenizer
from paceline.kv.prefix_cache import PrefixCache


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an engine is made of. build.py puts it together."""

    target: Runner
    drafter: Drafter
    draft_length: DraftLengthPolicy
    verifier: Verifier
    prefix_cache: PrefixCache


@dataclass(frozen=True, slots=True)
class _Drafts:
    """The draft trees of a batch, and the time they took."""

    trees: list[DraftTree]
    seconds: float


class LocalEngine:
    """Generates many sequences at a time with one model, each with its own settings, drafter and draft length."""

    def __init__(
        self, parts: EngineParts, tokenizer: Tokenizer, config: EngineConfig, methods: tuple[str, ...] = (NONE,)
    ) -> None:
        """methods: names a request may give, the default first."""
        self.info, self.tokenizer, self.methods = parts.target.info, tokenizer, methods
        self.config, self.parts = config, parts
        self._draft_length = parts.draft_length
        self._drafter = GuardedDrafter(parts.drafter, self.info.vocab_size)
        kv = KVManager(parts.target, parts.prefix_cache, config.model.lora)
        self._sequences = SequenceBuilder(self.info, tokenizer, config, methods, kv.capacity)
        self._scheduler = Scheduler(kv, self._drafter, parts.draft_length, config)
        self._embedder = Embedder(parts.target, kv, config.prefill_chunk)
        self._pauses = Pauses()
        self._multi_step = MultiStep(
            parts.target, self._drafter, parts.draft_length, self._scheduler, self._pauses
        )

    # --- requests -----------------------------------------------------------------------------------------------------

    def sequence(self, request: Request) -> Sequence:
        """The sequence of a request, or an OptionError or PromptError. Nothing is started; safe from any thread."""
        return self._sequences.build(request)

    def compilation(self, request: Request) -> Callable[[], None] | None:
        """Compiles the grammar of a request ahead, in any thread; None: there is nothing to compile."""
        return self._sequences.compilation(request)

    def add(self, request: Request | Sequence, on_output: OnOutput = ignore_output) -> RequestState:
        """Queue a request. Raises OptionError or PromptError."""
        seq = request if isinstance(request, Sequence) else self.sequence(request)
        state = RequestState(seq, on_output)
        self.enqueue(state)
        return state

    def enqueue(self, state: RequestState) -> None:
        self._scheduler.add(state)

    def abort(self, state: RequestState) -> None:
        """Stop working on a request. Harmless for one that has ended."""
        self._scheduler.abort(state)

    def abort_all(self) -> None:
        """End every sequence where it is, and free everything."""
        self._scheduler.abort_all()

    def end_loops_if(self, is_called: Callable[[], bool]) -> None:
        """is_called: whether a caller waits until it may say something between two steps."""
        self._scheduler.is_called = is_called

    def embed(self, token_ids: list[int], pooling: str) -> list[float]:
        """The pooled hidden states of a prompt, computed between two steps."""
        return self._embedder.embed(token_ids, pooling)

    def head_update(self, folder: str) -> HeadUpdate:
        """What gives the drafter's head the weights in a directory; to be called between two steps."""
        update = self._drafter.head_update(folder)
        if update is None:
            raise CapabilityError("the method of this engine has no trained head; use one that has, such as eagle")
        return update

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def stats(self) -> EngineStats:
        return self._scheduler.stats()

    def run(self, requests: Iterable[Request | Sequence], on_output: OnOutput = ignore_output) -> list[Sequence]:
        """Generate all of them to their end, in this thread. Raises the first error of any of them."""
        states: list[RequestState] = []
        try:
            for request in requests:
                states.append(self.add(request, on_output))
            with device_in_use(self.info.device):
                while self.has_work:
                    self.step()
        finally:
            for state in states:
                self.abort(state)
        for state in states:
            if state.error is not None:
                raise state.error
        return [state.seq for state in states]

    # --- the loop -----------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestState]:
        """Schedule, propose, forward, verify, postprocess. Returns the requests that took part.

        A pass that raises costs the sequences of that pass; all others go on.
        """
        with without_plans(self.info.device):
            return self._step()

    def _step(self) -> list[RequestState]:
        started = time.perf_counter()
        self._scheduler.admit()
        self._prefill()
        batch = self._scheduler.schedule()
        try:
            for part, results in self._steps(batch):
                self._scheduler.postprocess(part, results)
        except Exception as error:  # a model or a driver may raise anything at all
            self._recover(batch.requests, error)
            return batch.requests
        self._scheduler.add_seconds(time.perf_counter() - started)
        return batch.requests

    def _prefill(self) -> None:
        """One pass over the next tokens of prompts, if there are any."""
        batch = self._scheduler.prefill_batch()
        if batch is not None:
            self._pauses.interrupt()
        try:
            outputs = self._read(batch) if batch is not None else []
            self._scheduler.prefilled(batch, outputs)
        except Exception as error:
            self._recover(batch.requests if batch is not None else [], error)

    def _recover(self, requests: list[RequestState], error: Exception) -> None:
        """A pass raised. Where memory ran out and some can be freed it is tried again; else its sequences fail."""
        if not (isinstance(error, OutOfMemory) and self._scheduler.make_room()):
            self._scheduler.fail(requests, _explained(error))

    def _read(self, batch: PrefillBatch) -> list[RowOutput]:
        output = self.parts.target.forward(batch.rows, last_only=not batch.is_scored)
        for row in batch.rows:
            self.parts.target.commit(row.seq_cache, list(range(len(row.parents))))
        if not batch.is_scored:
            return list(output)
        return [score_prompt(request, row_output) for request, row_output in zip(batch.requests, output)]

    def _steps(self, batch: StepBatch) -> Iterator[StepOfBatch]:
        """One step, or several that the device takes in a row."""
        if not batch.requests:
            return
        begun = self._pauses.begin(batch.seqs)
        if any(batch.num_draft_tokens):
            yield from self._draft_steps(batch, begun)
            return
        if (plain := self._multi_step.plain(batch)) is not None:
            yield from plain
            return
        results = self._multi_step.at_once(batch, begun)
        yield StepOfBatch(batch, self._one_step(batch, begun) if results is None else results)

    def _draft_steps(self, batch: StepBatch, begun: StepBegun) -> Iterator[StepOfBatch]:
        started = time.perf_counter()  # asked for a loop, a drafter may choose already: that is drafting, no pass
        if (steps := self._multi_step.drafted(batch)) is not None:
            yield from steps
            return
        drafts = self._propose(batch, started)
        if not any(len(tree) for tree in drafts.trees) and (plain := self._multi_step.watched(batch)) is not None:
            yield from plain
            return
        yield StepOfBatch(batch, self._one_step(batch, begun, drafts))

    def _one_step(self, batch: StepBatch, begun: StepBegun, drafts: _Drafts | None = None) -> list[StepResult]:
        seqs, drafts = batch.seqs, drafts or self._propose(batch, time.perf_counter())
        output, trees = self._forward(seqs, drafts.trees)
        verified = self.parts.verifier.verify(seqs, trees, output)
        seconds = time.perf_counter() - begun.at - drafts.seconds
        self._pauses.end(seqs)
        results = [
            self._settle(seq, tree, output[index], result)
            for index, (seq, tree, result) in enumerate(zip(seqs, trees, verified))
        ]
        self._drafter.observe(seqs, results)
        timing = StepTiming(
            drafts.seconds,
            begun.pause + seconds,
            sum(output.sizes),
            max((tree.num_draft_tokens for tree in trees), default=0),
            len(seqs),
            sum(tree.num_draft_tokens > 0 for tree in trees),
            clean=begun.is_clean,
        )
        self._draft_length.observe(seqs, results, timing)
        return results

    def _propose(self, batch: StepBatch, started: float) -> _Drafts:
        """started: when drafting for this step began."""
        trees = self._drafter.propose(batch.seqs, batch.num_draft_tokens)
        trees = self._draft_length.cut(batch.seqs, trees)
        return _Drafts(trees, time.perf_counter() - started)

    def _forward(self, seqs: list[Sequence], trees: list[DraftTree]) -> tuple[ModelOutput, list[DraftTree]]:
        """The target's pass over the drafts; without them where they do not fit."""
        try:
            return self.parts.target.forward([step_row(seq, tree) for seq, tree in zip(seqs, trees)]), trees
        except OutOfMemory:
            if not any(len(tree) for tree in trees):
                raise
        plain = [empty() for _ in seqs]
        return self.parts.target.forward([step_row(seq, tree) for seq, tree in zip(seqs, plain)]), plain

    def _settle(self, seq: Sequence, tree: DraftTree, output: RowOutput, verified: VerifyResult) -> StepResult:
        """Keep the accepted tokens, let the sequence grow, and hold the invariant where its end cut inside the run."""
        assert seq.seq_cache is not None
        self.parts.target.commit(seq.seq_cache, [0] + [node + 1 for node in verified.accepted])
        if seq.params.logprobs is not None:
            seq.token_logprobs += logprobs_of(seq, output, verified, seq.params.logprobs)
        run = [*verified.tokens, verified.next_token]
        emitted = seq.extend(run, len(verified.accepted))
        if len(emitted) < len(run):
            self.parts.target.truncate(seq.seq_cache, len(seq.ids) - 1)
            del seq.token_logprobs[seq.num_new_tokens :]
        result = StepResult(tree, verified, output, emitted, min(len(verified.accepted), len(emitted)))
        result.add_to(seq.stats)
        return result


def _explained(error: Exception) -> PacelineError:
    if isinstance(error, PacelineError):
        return error
    failure = StepFailed(f"the model failed while generating ({type(error).__name__}: {error})")
    failure.__cause__ = error
    return failure
