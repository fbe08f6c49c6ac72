"""Method auto over a head whose steps a device takes in a row, under a made-up clock: against the head alone.

The engine is the real one. The target writes given texts, a head's trees are right as often as they say, and lookups
really look up. The device takes what a model of 7 billion weights takes for a pass on a large GPU; the host adds its
time where it works while the device waits.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.core.cost_model import CostCurve, CostModel
from paceline.core.draft_length import AdaptiveDraftLength, DraftLengthPolicy, FixedDraftLength
from paceline.core.draft_tree import ROOT, DraftTree, empty
from paceline.core.looped_steps import LoopedStep, LoopedSteps, LoopInput, PlainGroups, PlainSteps
from paceline.core.protocols import Drafter, Runner
from paceline.core.sequence import Sequence, loop_input
from paceline.core.types import Capability, ModelInfo, ModelOutput, Row, RowOutput, SequenceCache, VerifyResult
from paceline.drafting.auto import AutoDrafter
from paceline.drafting.prediction import Prediction
from paceline.drafting.suffix import Suffix
from paceline.engines.local import engine as engine_module
from paceline.engines.local import multi_step, step_timing
from paceline.engines.local.engine import LocalEngine
from paceline.runners.native.plain_steps import PLAIN_GROUP
from tests.support.build import sequence, toy_engine
from tests.support.toy import ToyRunner

NODES = 15
PASS, PASS_NODE, BLOCK = 4.30e-3, 0.008e-3, 1.70e-3  # of a target of 7 billion weights, of a draft token, of a head
READING, READING_HOST = 8e-3, 6e-3  # of a prompt
CALL, SINGLE, LOOKUP = 0.2e-3, 0.8e-3, 0.15e-3  # the host's, of a call of the engine, of a single pass, of a lookup
BEGIN, QUEUE = 1.2e-3, 0.6e-3  # the host's, of a loop and of each of its steps


@dataclass
class Clock:
    """The host's time, and when the device has done all that was queued."""

    host: float = 0.0
    device: float = 0.0

    def work(self, seconds: float) -> None:
        self.host += seconds

    def queue(self, seconds: float) -> float:
        """When that is done."""
        self.device = max(self.device, self.host) + seconds
        return self.device

    def wait(self, until: float) -> None:
        self.host = max(self.host, until)


@dataclass
class Text:
    """A prompt and its continuation, and of every place there: the nodes of the head's tree that are right."""

    prompt: list[int]
    written: list[int]
    paths: list[list[int]]
    prediction: list[int] | None = None
    domain: str = ""

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.written

    def path(self, place: int, num_nodes: int) -> list[int]:
        """Of a tree of so many nodes behind the first `place` tokens."""
        index = place - len(self.prompt)
        own = self.paths[index] if index < len(self.paths) else []
        return [node for node in own if node < num_nodes]


class WrittenRunner(ToyRunner):
    """Writes the given text, in passes that take the device's time."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(decode_steps=4)
        self.clock, self.text, self.row_start = clock, Text([], [], []), 0
        self.info = ModelInfo("written", 1 << 20, frozenset(), 1 << 16, 1, 1, "cpu", "float32")

    def next_token(self, place: int) -> int:
        return self.text.ids[place] if place < len(self.text.ids) else 0

    def pass_seconds(self, nodes: int) -> float:
        return PASS + PASS_NODE * (nodes - 1)

    def forward(self, rows: list[Row], *, last_only: bool = False) -> ModelOutput:
        [row] = rows
        self.row_start = row.seq_cache.length
        if last_only:
            self.clock.work(READING_HOST)
            self.clock.queue(READING)
            row.seq_cache.length += len(row.parents)
            return ModelOutput(torch.zeros(1, 1), [1])
        self.clock.work(SINGLE)
        self.clock.wait(self.clock.queue(self.pass_seconds(len(row.parents))))
        best = torch.tensor(self._best(row))
        row.seq_cache.length += len(row.parents)
        return ModelOutput(torch.zeros(len(row.parents), 1), [len(row.parents)], best=best)

    def _best(self, row: Row) -> list[int]:
        first, ids = row.seq_cache.length, self.text.ids
        tokens = ([] if row.lead is None else [row.lead]) + row.tokens.tolist()
        depth: list[int] = []  # -1: off the text
        for token, parent in zip(tokens, row.parents):
            place = 0 if parent == ROOT else depth[parent] + 1
            is_right = (
                first + place < len(ids) and ids[first + place] == token and (parent == ROOT or depth[parent] >= 0)
            )
            depth.append(place if is_right else -2)
        return [self.next_token(first + own + 1) if own >= 0 else 0 for own in depth]

    def commit(self, seq_cache: SequenceCache, nodes: list[int]) -> None:
        seq_cache.length = self.row_start + len(nodes)

    def truncate(self, seq_cache: SequenceCache, length: int) -> None:
        seq_cache.length = length

    def plain_loop(self, inputs: list[LoopInput], num_steps: int) -> PlainGroups | None:
        return self._plain_groups(inputs[0], num_steps // PLAIN_GROUP)

    def _plain_groups(self, loop: LoopInput, num_groups: int) -> PlainGroups:
        self.clock.work(SINGLE)
        place, group, ends = len(loop.ids), 0, [self._group()]
        while group < num_groups:
            if group + 1 < num_groups:
                ends.append(self._group())
            self.clock.wait(ends[group])
            tokens = [self.next_token(place + step) for step in range(PLAIN_GROUP)]
            place, group = place + PLAIN_GROUP, group + 1
            if not loop.has_ended():
                loop.seq_cache.length += PLAIN_GROUP
            if (yield [PlainSteps(tokens, RowOutput(torch.empty(0, 0)))]):
                num_groups = min(num_groups, group + 1)

    def _group(self) -> float:
        self.clock.work(QUEUE)
        return self.clock.queue(PLAIN_GROUP * PASS)


@dataclass
class LoopedHead(Drafter):
    """A head whose blocks are trees, in loops as step_loops.py has them: the host is one step behind."""

    runner: WrittenRunner
    needs = frozenset({Capability.HIDDEN_STATES})
    ks: list[int] = field(default_factory=list)  # of its loops

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        """A step by itself."""
        [seq], [k] = seqs, num_draft_tokens
        if not k:
            return [empty()]
        self.runner.clock.work(QUEUE)
        self.runner.clock.queue(BLOCK)
        step = self._looped(len(seq.ids), self.runner.text.path(len(seq.ids), k), min(k, NODES))
        return [DraftTree(torch.tensor(step.draft_tokens), step.parents or [])]

    def draft_loop(
        self, target: Runner, seqs: list[Sequence], num_draft_tokens: list[int], num_steps: int
    ) -> LoopedSteps | None:
        [seq], [k] = seqs, num_draft_tokens
        self.ks.append(k)
        return self._steps(loop_input(seq, k), min(k, NODES), num_steps)

    def _steps(self, loop: LoopInput, k: int, num_steps: int) -> LoopedSteps:
        clock, place = self.runner.clock, len(loop.ids)
        clock.work(BEGIN)
        ends, step = [self._queue(k)], 0
        while step < num_steps:
            if step + 1 < num_steps:
                ends.append(self._queue(k))
            clock.wait(ends[step])
            path = self.runner.text.path(place, k)
            looped = self._looped(place, path, k)
            place, step = place + len(path) + 1, step + 1
            if not loop.has_ended():
                loop.seq_cache.length += len(path) + 1
            if (yield [looped]):
                num_steps = min(num_steps, step + 1)

    def _queue(self, k: int) -> float:
        self.runner.clock.work(QUEUE)
        return self.runner.clock.queue(BLOCK + self.runner.pass_seconds(1 + k))

    def _looped(self, place: int, path: list[int], k: int) -> LoopedStep:
        """The nodes that are right hang together, the others are children of the sequence."""
        tokens, parents = [0] * k, [ROOT] * k
        for depth, node in enumerate(path):
            tokens[node], parents[node] = self.runner.next_token(place + depth), path[depth - 1] if depth else ROOT
        accepted = [tokens[node] for node in path]
        verified = VerifyResult(list(path), self.runner.next_token(place + len(path)), accepted)
        return LoopedStep(tokens, verified, parents=parents)


class TimedSuffix(Suffix):
    """Takes the host's time."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[Any]:
        self._clock.work(LOOKUP)
        return super().propose(seqs, num_draft_tokens)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    use_clock(made, monkeypatch)
    return made


def use_clock(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that the engine reads, and that stands still unless somebody works or waits."""
    for module in (engine_module, multi_step, step_timing):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.host))


def measured_costs(seed: int, noise: float = 0.004) -> CostModel:
    """What a measurement at load returns."""
    dice = random.Random(seed)
    passes = {width: PASS + PASS_NODE * (width - 1) for width in range(1, NODES + 2)}
    return CostModel(CostCurve({width: 1.05 * cost * (1 + noise * dice.gauss(0, 1)) for width, cost in passes.items()}))


def written(clock: Clock, texts: list[Text], method: str, k: int | None = None, seed: int = 0) -> list[float]:
    """Seconds of every text, in one process that meets them one after another. k: None lets the policy decide."""
    runner = WrittenRunner(clock)
    head = LoopedHead(runner)
    lookups: dict[str, Drafter] = {"prediction": Prediction(), "suffix": TimedSuffix(clock)}
    auto = AutoDrafter(lookups, {"dflash": head}, clock=lambda: clock.host)
    drafter: Drafter = {"auto": auto, "dflash": head, "suffix": lookups["suffix"]}[method]
    policy: DraftLengthPolicy = (
        FixedDraftLength(k) if k is not None else AdaptiveDraftLength(measured_costs(seed), NODES)
    )
    engine = toy_engine(runner, drafter, policy, max_num_seqs=1, prefix_cache_tokens=0)
    if (value := policy.draft_value()) is not None:
        drafter.use_value(value)
    return [seconds_of(engine, runner, text, method) for text in texts]


def seconds_of(engine: LocalEngine, runner: WrittenRunner, text: Text, method: str) -> float:
    runner.text, began = text, runner.clock.host
    prediction = text.prediction if method == "auto" else None
    seq = sequence(text.prompt, len(text.written), prediction=prediction)
    state = engine.add(seq)
    while engine.has_work:
        runner.clock.work(CALL)
        engine.step()
    assert state.error is None and seq.generated == text.written
    return runner.clock.host - began


# --- texts ------------------------------------------------------------------------------------------------------------

WORDS, NEW_TOKENS = 400, 110
SPINE = (0, 1, 2, 4, 6, 9, 12)  # of a tree of 15 nodes: where its likeliest path lies among the other nodes


def code_like(seed: int) -> Text:
    """New tokens, and now and then some that were there before, after which it goes on in another way: what lookups
    are sure of is right for a while. A head is right four times in a row, and more often where lookups are too."""
    dice = random.Random(seed)
    ids, easy = [dice.randrange(WORDS) for _ in range(60)], list[bool]()
    while len(easy) < NEW_TOKENS:
        is_copy = dice.random() < 0.4
        size = dice.randint(8, 16) if is_copy else dice.randint(4, 10)
        start = dice.randrange(len(ids) - 17)
        stretch = ids[start : start + size] if is_copy else [dice.randrange(WORDS) for _ in range(size)]
        ids, easy = ids + stretch, easy + [is_copy] * size
    depths = [max(0, min(len(SPINE), round(dice.gauss(5.5 if own else 3.5, 2.0)))) for own in easy]
    paths = [list(SPINE[:depth]) for depth in depths]
    return Text(ids[:60], ids[60 : 60 + NEW_TOKENS], paths)


@pytest.mark.slow
def test_auto_takes_hardly_longer_than_its_head_where_lookups_gain_little(clock: Clock) -> None:
    """From the first text of a process on, of which some hundred steps follow."""
    alone = auto = 0.0
    for seed in range(6):
        texts = [code_like(10 * seed + number) for number in range(5)]
        alone += sum(written(clock, texts, "dflash", NODES))
        auto += sum(written(clock, texts, "auto", seed=seed))
    assert alone / auto >= 0.985


def test_what_is_known_of_a_head_serves_sequences_with_a_prediction_too(clock: Clock) -> None:
    texts = [code_like(number) for number in range(4)]
    for text in texts[2:]:
        text.prediction = [WORDS] * 20  # of no use
    alone = written(clock, texts, "dflash", NODES)
    auto = written(clock, texts, "auto")
    assert sum(alone[2:]) / sum(auto[2:]) >= 0.93
