"""The draft-length policy over loops, on a device with a clock of its own: the default k is nearly the best one.

Passes and drafts take what they take on a GPU for a pair whose draft model costs half of the target, and the host adds
its time to every call of the engine. No real clock decides anything here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from paceline.core.cost_model import StepTiming
from paceline.core.draft_length import AdaptiveDraftLength, DraftLengthPolicy, FixedDraftLength
from paceline.core.protocols import Drafter
from paceline.core.sequence import Sequence
from paceline.core.types import DraftOutput, ModelOutput, Row, StepResult, WarmupPlan
from paceline.drafting.auto import AutoDrafter
from paceline.drafting.draft_model import DraftModel
from paceline.drafting.suffix import Suffix
from paceline.engines.local import engine as engine_module
from paceline.engines.local import step_timing, verifier
from paceline.engines.local.engine import LocalEngine
from paceline.engines.local.rehearsal import Rehearsal
from paceline.runners.native import NativeRunner, step_loops
from paceline.runners.native.decode_graphs import DraftBuffers, DraftKey, PassOutput
from paceline.runners.native.pass_inputs import PassInputs
from tests.runners.native.fused import TorchGraphs
from tests.runners.native.models import tiny
from tests.support.build import sequence, toy_engine

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="its device is made up")
HOST = 0.5e-3  # of a call of the engine
READING, READING_TOKEN = 4e-3, 0.03e-3  # of a prompt
PROMPTS = [[(place * step) % 101 for place in range(60)] for step in (3, 7, 11)]
NEW_TOKENS = 112  # whole steps of 3, 6 and 15 draft tokens: what the last one drafts past the end is another matter


@dataclass
class Clock:
    """The host's time, and when the device has done all that was queued."""

    host: float = 0.0
    device: float = 0.0
    calls: int = 0  # of the engine

    def queue(self, seconds: float) -> None:
        self.device = max(self.device, self.host) + seconds

    def wait(self, until: float | None = None) -> None:
        self.host = max(self.host, self.device if until is None else until)


class TimedGraphs(TorchGraphs):
    """Work that takes time of a made-up device."""

    def __init__(self, runner: NativeRunner, clock: Clock, plain: float, row: float) -> None:
        super().__init__(runner)
        self._clock, self._plain, self._row = clock, plain, row

    def _forward_work(self, inputs: PassInputs) -> PassOutput:
        self._clock.queue(self._plain + self._row * (int(inputs.batch.counts.sum()) - 1))
        return super()._forward_work(inputs)

    def _draft_work(self, buffers: DraftBuffers, key: DraftKey) -> DraftOutput:
        output = super()._draft_work(buffers, key)
        self._clock.queue(int(buffers.chain.count) * self._plain)
        return output


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that the engine reads, and that stands still unless somebody works or waits."""
    made = Clock()
    for module in (engine_module, step_timing):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: made.host))
    sent: dict[Any, float] = {}
    send, read, argmaxes = step_loops.StepReader.send, step_loops.StepReader.read, verifier.Argmaxes.of

    def timed_send(self: Any, step: int, result: Any) -> None:
        sent[self, step] = made.device
        send(self, step, result)

    def timed_read(self: Any, step: int) -> list[list[int]]:
        made.wait(sent.pop((self, step)))
        return read(self, step)

    def timed_argmaxes(*args: Any) -> verifier.Argmaxes:
        made.wait()
        return argmaxes(*args)

    step = LocalEngine.step

    def timed_step(self: LocalEngine) -> Any:
        made.host, made.calls = made.host + HOST, made.calls + 1
        return step(self)

    monkeypatch.setattr(LocalEngine, "step", timed_step)
    monkeypatch.setattr(step_loops.StepReader, "send", timed_send)
    monkeypatch.setattr(step_loops.StepReader, "read", timed_read)
    monkeypatch.setattr(verifier.Argmaxes, "of", timed_argmaxes)
    return made


def draft_alone(draft: DraftModel) -> Drafter:
    return draft


def suffix_alone(draft: DraftModel) -> Drafter:
    return Suffix()


def pair_engine(
    clock: Clock, policy: DraftLengthPolicy, noise: float, drafter: Callable[[DraftModel], Drafter] = draft_alone
) -> LocalEngine:
    """noise: on the weights of the draft model; the more, the fewer of its tokens are accepted."""
    runners = []
    for level, plain, row in ((0.0, 1.40e-3, 0.045e-3), (noise, 0.65e-3, 0.02e-3)):
        model, generator = tiny("llama"), torch.Generator().manual_seed(3)
        with torch.no_grad():
            for weight in model.parameters():
                weight += level * torch.randn(weight.shape, generator=generator)
        runner = NativeRunner.of_model(model, "tiny", kv_cache_tokens=4096)
        runner.decode_graphs = TimedGraphs(runner, clock, plain, row)
        runner._dispatch = partial(_timed_reading, clock, runner._dispatch)  # type: ignore[method-assign]
        runner.decode_steps = 8
        runners.append(runner)
    target, draft = runners
    alone = DraftModel(draft, target.info.vocab_size)
    made = drafter(alone)
    use_value(made, alone, policy)
    engine = toy_engine(target, made, policy, max_num_seqs=1)
    rehearsals = [Rehearsal(engine, part) for part in made.rehearsed()]
    for rehearsal in rehearsals:
        for prepare in rehearsal.preparations(WarmupPlan((1, 2), (1, 2, 3, 4, 6), 200)):
            prepare()
    policy.rehearsed(rehearsals[0].timings)
    use_value(made, alone, policy)
    return engine


def use_value(drafter: Drafter, draft: DraftModel, policy: DraftLengthPolicy) -> None:
    if (value := policy.draft_value()) is not None:
        drafter.use_value(value)
        if draft._stop is not None:  # as on a device with graphs
            draft._stop, draft._limits = None, draft._stop


def _timed_reading(clock: Clock, dispatch: Any, rows: list[Row], last_only: bool) -> ModelOutput:
    """Prompts, and what a draft model has missed, are read in passes that take longer than a step."""
    if last_only:
        clock.queue(READING + READING_TOKEN * sum(len(row.parents) for row in rows))
    output: ModelOutput = dispatch(rows, last_only)
    return output


@dataclass(frozen=True)
class Written:
    """Three texts: their tokens, tokens a second, and steps of draft tokens for each call of the engine."""

    texts: list[list[int]]
    rate: float
    steps_a_call: float


def written(
    clock: Clock, policy: DraftLengthPolicy, noise: float, drafter: Callable[[DraftModel], Drafter] = draft_alone
) -> Written:
    engine = pair_engine(clock, policy, noise, drafter)
    began, calls = clock.host, clock.calls
    seqs = [engine.run([sequence(prompt, NEW_TOKENS)])[0] for prompt in PROMPTS]
    rate = len(PROMPTS) * NEW_TOKENS / (clock.host - began)
    return Written([seq.generated for seq in seqs], rate, sum(seq.stats.steps for seq in seqs) / (clock.calls - calls))


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "share"), [(0.0, 0.93), (0.05, 0.85)])
def test_the_default_is_nearly_the_best_number_of_draft_tokens(clock: Clock, noise: float, share: float) -> None:
    """Three texts, each of which the draft model must read; where nothing pays, finding that out is all the loss."""
    rates = [written(clock, FixedDraftLength(k), noise).rate for k in (0, 3, 6)]
    assert written(clock, AdaptiveDraftLength(max_draft_tokens=15), noise).rate >= share * max(rates)


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "share"), [(0.0, 0.85), (0.05, 0.8)])
def test_auto_is_nearly_the_best_method_and_its_draft_model_drafts_in_loops(
    clock: Clock, noise: float, share: float
) -> None:
    """Within three texts of made-up language, which nothing is known of at first; its lookups never pay."""

    def auto_drafter(draft: DraftModel) -> Drafter:
        return AutoDrafter({"suffix": Suffix()}, {"draft_model": draft}, clock=lambda: clock.host)

    plain = written(clock, FixedDraftLength(0), noise)
    rates = [plain.rate, *(written(clock, FixedDraftLength(k), noise).rate for k in (3, 6))]
    auto = written(clock, AdaptiveDraftLength(max_draft_tokens=15), noise, auto_drafter)
    assert auto.texts == plain.texts and auto.rate >= share * max(rates)
    assert noise or auto.steps_a_call > 2


@pytest.mark.slow
def test_lookups_that_find_little_hardly_slow_plain_steps_down(clock: Clock) -> None:
    plain = written(clock, FixedDraftLength(0), 0.0)
    lookups = written(clock, AdaptiveDraftLength(max_draft_tokens=15), 0.0, suffix_alone)
    assert lookups.texts == plain.texts and lookups.rate >= 0.92 * plain.rate
    assert lookups.steps_a_call > 2, "steps are taken in a row while there is nothing to draft"


@dataclass
class Heard(FixedDraftLength):
    """Keeps what it hears of steps."""

    k: int
    emitted: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def observe(self, seqs: list[Sequence], results: list[StepResult], timing: StepTiming) -> None:
        self.emitted.append(sum(len(result.emitted) for result in results))
        if timing.clean:
            self.seconds.append(timing.seconds)


@pytest.mark.slow
def test_plain_steps_in_a_row_are_heard_of_one_by_one(clock: Clock) -> None:
    heard = Heard(0)
    text = written(clock, heard, 0.0).texts[-1]
    assert heard.emitted[-len(text) :] == [1] * len(text)


@pytest.mark.slow
def test_a_single_step_takes_the_pause_before_it_too(clock: Clock) -> None:
    heard = Heard(1)
    engine = pair_engine(clock, heard, 0.0, suffix_alone)
    heard.seconds.clear()
    engine._multi_step.watched = lambda batch: None  # type: ignore[method-assign]
    began = clock.host
    engine.run([sequence(PROMPTS[0], NEW_TOKENS)])
    assert sum(heard.seconds) == pytest.approx(clock.host - began, rel=0.1), "all time but that of the prompt"
