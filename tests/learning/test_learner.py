"""Swaps and rollbacks beside an engine whose acceptance the test chooses, also across restarts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.core.sampling import SamplingParams
from paceline.core.stats import SpecStats
from paceline.core.types import Request, RequestOutput
from paceline.errors import WeightsError
from paceline.learning import learner as learner_module
from paceline.learning import trainer_process
from paceline.learning.decision import LOOKS
from paceline.learning.files import LearnerOptions, LearnerState, LearningFolder, Proposal, opened_folder
from paceline.learning.learner import Learner, LearnerSettings, head_in_use
from paceline.learning.ring import MAX_SEQ_LEN, read_ring
from tests.serve.toy_engine import ReversingEngine

OPTIONS = LearnerOptions("model", "eagle", "/heads/first", "cpu", 10)


class HeadEngine(ReversingEngine):
    """Accepts nine of ten first draft tokens with a good head, and one of ten with any other."""

    def __init__(self) -> None:
        super().__init__()
        self.heads: list[str] = []
        self.good = {"first", "000001"}
        self.refused: set[str] = set()

    async def update_head(self, folder: str) -> None:
        if Path(folder).name in self.refused:
            raise WeightsError("a tensor is missing")
        self.heads.append(Path(folder).name)

    def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        return self._outputs()

    async def _outputs(self) -> AsyncIterator[RequestOutput]:
        accepted = 9 if (self.heads or ["first"])[-1] in self.good else 1
        stats = SpecStats(10, 10, 10, accepted, offered_at=[10], accepted_at=[accepted])
        yield RequestOutput("", (5, 6, 7))
        yield RequestOutput("", (8,), finish_reason="stop", stats=stats)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LearningFolder:
    monkeypatch.setattr(trainer_process, "MAX_STARTS", 0)  # no trainer
    monkeypatch.setattr(learner_module, "POLL_SECONDS", 0.01)
    return opened_folder(tmp_path / "learn", OPTIONS)


def settings(folder: LearningFolder) -> LearnerSettings:
    return LearnerSettings(folder, OPTIONS, 1, pauses=True)


async def ask(learner: Learner, count: int, **fields: Any) -> None:
    for number in range(count):
        request = Request([1, 2, number], SamplingParams(), 4, **fields)
        async for _ in learner.engine.generate(request):
            pass


async def wait_for(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def beside(folder: LearningFolder, engine: HeadEngine, work: Callable[[Learner], Any]) -> Learner:
    """Do something while a learner watches the engine."""

    async def run() -> Learner:
        learner = Learner(engine, settings(folder))
        watch = asyncio.create_task(learner.watch())
        await asyncio.sleep(0)  # a task that is cancelled before it starts does nothing at all
        try:
            await work(learner)
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        return learner

    return asyncio.run(run())


def propose(folder: LearningFolder, number: int, start: int = 0) -> None:
    folder.head(number, OPTIONS).mkdir(parents=True)
    folder.write("proposal", Proposal(number, start, 0.5, 0.6, 0.001))


def events(folder: LearningFolder) -> list[str]:
    return [json.loads(line)["event"] for line in (folder.path / "history.jsonl").read_text().splitlines()]


def test_a_good_head_is_swapped_in_and_stays(folder: LearningFolder) -> None:
    async def work(learner: Learner) -> None:
        await ask(learner, 20)
        propose(folder, 1)
        await wait_for(lambda: learner.stats().swaps == 1)
        assert learner.stats().acceptance == 0.0, "counted anew"
        await ask(learner, LOOKS[-1])
        await wait_for(lambda: not folder.state.on_trial)

    engine = HeadEngine()
    learner = beside(folder, engine, work)
    assert engine.heads == ["000001"] and events(folder) == ["swap", "kept"]
    assert folder.proposal is None and head_in_use(settings(folder)).name == "000001"
    stats = learner.engine.stats().learning
    assert stats is not None and (stats.head, stats.swaps, stats.rollbacks) == (1, 1, 0)
    assert stats.acceptance == 0.9 and stats.ring_bytes > 0


@pytest.mark.parametrize("patience", [0.0, 1e9])
def test_a_swap_waits_for_a_pause_but_not_for_ever(
    folder: LearningFolder, monkeypatch: pytest.MonkeyPatch, patience: float
) -> None:
    """Loading a head takes processor time from the request that is under way."""
    monkeypatch.setattr(learner_module, "PATIENCE", patience)
    swaps_meanwhile: list[int] = []

    async def work(learner: Learner) -> None:
        propose(folder, 1)
        outputs = learner.engine.generate(Request([1, 2, 3], SamplingParams(), 4))
        await anext(outputs)
        if patience:
            await asyncio.sleep(20 * learner_module.POLL_SECONDS)
        else:
            await wait_for(lambda: learner.stats().swaps == 1)
        swaps_meanwhile.append(learner.stats().swaps)
        async for _ in outputs:
            pass
        await wait_for(lambda: learner.stats().swaps == 1)

    beside(folder, HeadEngine(), work)
    assert swaps_meanwhile == [0 if patience else 1]


def test_a_head_that_does_worse_live_is_rolled_back(folder: LearningFolder) -> None:
    async def work(learner: Learner) -> None:
        await ask(learner, 20)
        propose(folder, 2)
        await wait_for(lambda: learner.stats().swaps == 1)
        await ask(learner, LOOKS[0])
        await wait_for(lambda: learner.stats().rollbacks == 1)

    engine = HeadEngine()
    beside(folder, engine, work)
    assert engine.heads == ["000002", "first"] and events(folder) == ["swap", "rollback"]
    assert folder.state.head == 0 and not folder.state.on_trial
    assert not folder.head(2, OPTIONS).exists()


def test_a_server_killed_between_swap_and_comparison_goes_on_with_both(folder: LearningFolder) -> None:
    """The second server starts with the new head, and remembers what it is compared with."""
    propose(folder, 2)
    folder.write("state", LearnerState(2, 0, 1, 0, [[9, 10]] * 20, on_trial=True))  # the proposal was not deleted
    engine = HeadEngine()
    engine.heads.append(head_in_use(settings(folder)).name)

    async def work(learner: Learner) -> None:
        await ask(learner, LOOKS[0])
        await wait_for(lambda: learner.stats().rollbacks == 1)
        await wait_for(lambda: folder.proposal is None)

    beside(folder, engine, work)
    assert engine.heads == ["000002", "first"], "rolled back, and not swapped in again"


def test_a_head_that_cannot_be_read_is_refused_once(folder: LearningFolder) -> None:
    engine = HeadEngine()
    engine.refused.add("000003")

    async def work(learner: Learner) -> None:
        propose(folder, 3)
        await wait_for(lambda: folder.proposal is None)

    beside(folder, engine, work)
    assert engine.heads == [] and events(folder) == ["refused"] and folder.state == LearnerState()


def test_answers_of_adapters_are_not_kept_and_those_of_other_methods_are_not_compared(folder: LearningFolder) -> None:
    async def work(learner: Learner) -> None:
        await ask(learner, 3, lora="french")
        await ask(learner, 4, method="none")
        assert not learner.engine.live
        await ask(learner, 5)
        assert len(learner.engine.live) == 5

    beside(folder, HeadEngine(), work)
    traffic = read_ring(folder.ring, MAX_SEQ_LEN)
    assert traffic.end == 9, "4 and 5 of them, some equal"
    assert traffic.train.tokens[:7].tolist() == [1, 2, 0, 5, 6, 7, 8] or len(traffic.held_out)


def test_the_trainer_is_stopped_while_requests_run(folder: LearningFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(trainer_process.TrainerProcess, "pause", lambda self: told.append("pause"))
    monkeypatch.setattr(trainer_process.TrainerProcess, "go_on", lambda self: told.append("go on"))

    async def work(learner: Learner) -> None:
        streams = [learner.engine.generate(Request([1, 2], SamplingParams(), 4)) for _ in range(2)]
        for stream in streams:
            await anext(stream)
        for stream in streams:
            assert told == ["pause"]
            await stream.aclose()  # type: ignore[attr-defined]
        await wait_for(lambda: told == ["pause", "go on"])

    beside(folder, HeadEngine(), work)
