"""`paceline serve --learn` as its users meet it: what it refuses, what it learns, and what a kill -9 leaves."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from paceline import SpeculativeDecoder
from paceline.cli import main
from paceline.heads.eagle3 import Eagle3Head
from paceline.heads.registry import load_head, save_head
from paceline.learning.files import LearnerOptions, LearningFolder, Proposal
from paceline.learning.ring import MAX_SEQ_LEN, read_ring
from tests.train.conftest import random_prompts

NEW_TOKENS = 32
SECONDS = 300.0  # a generous deadline: the machine may be busy
LEARNING = "paceline_learning_"


# --- refusals ---------------------------------------------------------------------------------------------------------


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["serve", *flags]) != 0
    *notes, message = capsys.readouterr().err.strip().splitlines()
    assert message.startswith("paceline: error: ") and all("loading" in note for note in notes)
    return message


def test_without_consent_it_says_what_would_be_stored(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refusal(capsys, str(target), "--method", "eagle", "--learn", str(tmp_path / "learn"))
    assert "token ids" in message and "back into text" in message and "--learn-consent" in message
    assert not (tmp_path / "learn").exists()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--method", "ngram"], "--method eagle"),
        (["--method", "eagle"], "needs a head to start from"),
        (["--method", "eagle", "--learn-ring-mb", "0"], "must be 1 or more"),
    ],
)
def test_what_cannot_learn_is_refused_before_a_model_is_loaded(
    flags: list[str], reason: str, tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learn = ["--learn", str(tmp_path / "learn"), "--learn-consent", "--port", "0"]
    assert reason in refusal(capsys, str(target), *learn, *flags)


def test_a_head_that_cannot_be_adapted_is_refused(
    target: Path, head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = load_head(head, Eagle3Head)
    save_head(Eagle3Head(replace(module.config, norm_output=True)), tmp_path / "normed")
    flags = ["--method", "eagle", "--draft-model", str(tmp_path / "normed"), "--port", "0"]
    message = refusal(capsys, str(target), *flags, "--learn", str(tmp_path / "learn"), "--learn-consent")
    assert "cannot be adapted" in message and not (tmp_path / "learn").exists()


def test_several_models_do_not_share_a_folder(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    learn = ["--learn", str(tmp_path / "learn"), "--learn-consent", "--method", "eagle"]
    assert "one model" in refusal(capsys, str(target), str(tmp_path / "other"), *learn)


def test_the_folder_of_another_model_is_refused(
    target: Path, head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.mkdir(exist_ok=True)
    LearningFolder(tmp_path).write("options", LearnerOptions("other", "eagle", str(head), "cpu", 10))
    flags = ["--method", "eagle", "--draft-model", str(head), "--learn", str(tmp_path), "--learn-consent"]
    assert "has learned for other" in refusal(capsys, str(target), *flags, "--port", "0")


# --- a server that learns ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LearningServer:
    """A `paceline serve --learn` process."""

    popen: subprocess.Popen[str]
    client: httpx.Client
    model: str

    def answers(self, prompts: list[list[int]]) -> list[list[int]]:
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(self._answer, prompts))

    def _answer(self, prompt: list[int]) -> list[int]:
        body = {"model": self.model, "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
        response = self.client.post("/v1/completions", json={**body, "return_token_ids": True}).raise_for_status()
        token_ids: list[int] = response.json()["choices"][0]["token_ids"]
        return token_ids

    def metric(self, name: str) -> float:
        match = re.search(rf"^{LEARNING}{name}{{.*}} (\S+)$", self.client.get("/metrics").text, re.MULTILINE)
        assert match is not None, name
        return float(match.group(1))


@contextmanager
def learning_server(target: Path, head: Path, folder: Path) -> Iterator[LearningServer]:
    flags = ["--method", "eagle", "--draft-model", str(head), "-k", "3", "--port", "0", "--log-level", "error"]
    flags += ["--learn", str(folder), "--learn-consent", "--learn-steps", "40"]
    command = [sys.executable, "-m", "paceline", "serve", str(target), *flags]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert popen.stdout is not None
        match = re.search(r"(http://\S+)/v1", popen.stdout.readline())
        assert match is not None
        with httpx.Client(base_url=match.group(1), timeout=SECONDS) as client:
            yield LearningServer(popen, client, str(target))
    finally:
        popen.kill()
        popen.communicate()


def wait_for(condition: Callable[[], bool], folder: Path | None = None) -> None:
    """folder: of trainers that must not wait until the machine has nothing else to do."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        for trainer in trainers(folder) if folder else ():
            with contextlib.suppress(OSError):  # it has ended, or only root may
                os.sched_setscheduler(trainer, os.SCHED_OTHER, os.sched_param(0))
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.1)


def trainers(folder: Path) -> list[int]:
    """Processes that train in a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"paceline.learning.trainer" in arguments and str(folder).encode() in arguments:
            found.append(int(path.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_server_killed_while_it_learns_goes_on_learning_and_no_text_differs(
    target: Path, head: Path, write_head: Callable[[Path, int], Path], tmp_path: Path
) -> None:
    prompts, folder = random_prompts(184), LearningFolder(tmp_path / "learn")
    with SpeculativeDecoder(target, method="none", max_num_seqs=16) as decoder:
        results = decoder.generate(prompts, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        expected = [list(result.token_ids) for result in results]

    with learning_server(target, head, folder.path) as server:
        assert server.answers(prompts[:96]) == expected[:96]
        before = server.metric("acceptance")
        wait_for(lambda: any(os.sched_getscheduler(pid) == os.SCHED_IDLE for pid in trainers(folder.path)))
        wait_for(lambda: (folder.attempt / "training" / "checkpoint.pt").is_file(), folder.path)
        assert server.metric("ring_sequences") == 96
        (trainer,) = trainers(folder.path)
        server.popen.kill()
    wait_for(lambda: trainer not in trainers(folder.path))
    traffic, plan = read_ring(folder.ring, MAX_SEQ_LEN), (folder.attempt / "plan.json").stat().st_mtime_ns
    assert len(traffic.train) + len(traffic.held_out) == 96, "nothing of the traffic is lost"

    with learning_server(target, head, folder.path) as server:
        assert server.metric("ring_sequences") == 96 and server.metric("head") == 0
        assert (folder.attempt / "plan.json").stat().st_mtime_ns == plan, "the attempt goes on"
        wait_for(lambda: server.metric("swaps_total") == 1, folder.path)
        assert server.answers(prompts[96:160]) == expected[96:160]
        wait_for(lambda: not folder.state.on_trial)
        learned = server.metric("acceptance")
        assert learned >= before + 0.08

        bad = write_head(folder.path / "heads" / "000009", 9)
        folder.write("proposal", Proposal(int(bad.name), 1, 0.5, 0.9, 0.001))
        wait_for(lambda: server.metric("swaps_total") == 2)
        assert server.answers(prompts[160:]) == expected[160:]
        wait_for(lambda: server.metric("rollbacks_total") == 1 and server.metric("head") == 1)
        assert server.answers(prompts[:16]) == expected[:16]
        assert server.metric("acceptance") >= before + 0.08, "the learned head is back"
