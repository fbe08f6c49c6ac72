"""What `paceline check --head` makes of planted mistakes and of correct copies of the shipped heads.

    python benchmarks/lint_plants.py --state DIR [--head dflash] [--tokens 2000] [--seeds 0 1 2] [--only copies]

Every mistake is planted on text of the first seed, every copy is read on the text of every seed. DIR keeps the texts,
what each reading has reached and the results: a run that was cut off goes on where it was, and heads whose weights and
settings are the same are measured once. The last line on stdout is one JSON document; exit status 1: a mistake was not
named, or a copy raised an alarm.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.lint_planted import COPIES, HEADS, ShippedHead
from paceline.build import build_engine
from paceline.cli.terminal import quiet_transformers
from paceline.heads.checkpoint import Checkpoint, read_checkpoint
from paceline.heads.registry import spec_of
from paceline.lint import run
from paceline.lint.comparison import Acceptance
from paceline.lint.session import open_target
from paceline.lint.target import StatedText, TargetFacts, stated
from paceline.lint.text import written_answers
from paceline.train.corpus import TrainingSequence
from paceline.train.task import TrainingTarget

KINDS = ("mistakes", "copies")


@dataclass(frozen=True, slots=True)
class Trial:
    """One head on one text. kind: of KINDS; expected: the readings that must be named, none for a copy."""

    head: str
    kind: str
    name: str
    seed: int
    expected: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TrialResult:
    """named: the readings the linter names; gain: tokens per step from the files as they are to the corrected ones."""

    trial: Trial
    named: tuple[str, ...]
    places: int
    tokens_per_step: float
    gain: float
    z: float
    probability: float
    seconds: float

    @property
    def right(self) -> bool:
        return self.named == self.trial.expected

    def line(self) -> str:
        trial = self.trial
        named = " + ".join(self.named) or ("no difference found" if trial.kind == "mistakes" else "no alarm")
        change = f"τ {self.gain:+.2f}  z {self.z:4.1f}" if self.named else " " * 14
        outcome = "right" if self.right else "WRONG"
        return (
            f"{trial.head:7} {trial.kind:9} {trial.name:24} text {trial.seed}  {self.places} places  "
            f"τ {self.tokens_per_step:.2f}  {change}  {outcome}  {self.seconds:5.1f} s  {named}"
        )


class Texts:
    """What the target writes for a seed, kept on disk, with the target's states over it, one text at a time."""

    def __init__(self, target: TrainingTarget, folder: Path, num_tokens: int) -> None:
        self._target, self._folder, self._num_tokens = target, folder, num_tokens
        self._last: dict[int, StatedText] = {}

    def stated(self, seed: int) -> StatedText:
        if seed not in self._last:
            self._last = {seed: stated(self._target.teacher, self._sequences(seed))}
        return self._last[seed]

    def _sequences(self, seed: int) -> list[TrainingSequence]:
        """The first answers that have so many tokens together."""
        path = self._folder / f"text-{seed}.json"
        if not path.exists():
            answers = written_answers(self._target, build_engine, self._num_tokens, seed)
            path.write_text(json.dumps([[answer.seq.start, answer.seq.tokens] for answer in answers]))
        seqs, num_tokens = [], 0
        for start, tokens in json.loads(path.read_text()):
            if num_tokens < self._num_tokens:
                seqs.append(TrainingSequence(tokens, start, greedy=True))
                num_tokens += len(tokens) - start
        return seqs


class Measurements:
    """What heads reach on a text, kept on disk by what the loaded head is, whatever its files call it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def acceptance(self, files: Checkpoint, text: StatedText, k: int = run.POSITIONS) -> Acceptance:
        """In place of lint.run's."""
        head = run.loaded_head(files)
        path = self._folder / f"{fingerprint(head, text, k)}.pt"
        if path.exists():
            return Acceptance(**torch.load(path, weights_only=True), k=k)
        measured = run.head_acceptance(spec_of(files).name, head, text, k)
        torch.save({"lengths": measured.lengths, "expected": measured.expected}, path)
        return measured


def fingerprint(head: Any, text: StatedText, k: int) -> str:
    digest = hashlib.blake2b(text.tokens.numpy().tobytes(), digest_size=16)
    digest.update(json.dumps([str(head.config), text.lengths.tolist(), k]).encode())
    for name, value in sorted(head.state_dict().items()):
        digest.update(name.encode() + value.contiguous().numpy().tobytes())
    return digest.hexdigest()


def trials(name: str, seeds: list[int], kinds: tuple[str, ...]) -> list[Trial]:
    mistakes = HEADS[name].mistakes
    planted = [Trial(name, "mistakes", plant, seeds[0], mistake.names) for plant, mistake in mistakes.items()]
    copies = [Trial(name, "copies", copy, seed) for seed in seeds for copy in COPIES]
    return [trial for trial in planted + copies if trial.kind in kinds]


def checkpoint_of(trial: Trial, head: ShippedHead, folder: Path) -> Checkpoint:
    """The files of a trial; folder: for a copy."""
    if trial.kind == "mistakes":
        return head.mistakes[trial.name].plant(read_checkpoint(head.folder))
    COPIES[trial.name](head.folder, folder)
    return read_checkpoint(folder)


def linted(trial: Trial, text: StatedText, facts: TargetFacts) -> TrialResult:
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        result = run.lint(checkpoint_of(trial, HEADS[trial.head], Path(folder) / "head"), text, facts)
    given, changes = result.as_given, result.changes
    return TrialResult(
        trial,
        tuple(change.tried.reading.name for change in changes),
        0 if given.acceptance is None else given.acceptance.num_anchors,
        given.tokens_per_step,
        result.best.tokens_per_step - given.tokens_per_step,
        changes[0].tried.z if changes else 0.0,
        max((change.probability for change in changes), default=0.0),
        time.process_time() - started,
    )


class Results:
    """One line of JSON for every trial that is over."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def known(self) -> dict[Trial, TrialResult]:
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        return {result.trial: result for result in map(_parsed, lines)}

    def add(self, result: TrialResult) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")


def _parsed(line: str) -> TrialResult:
    record = json.loads(line)
    trial = Trial(**{**record.pop("trial"), "expected": ()})
    trial = Trial(trial.head, trial.kind, trial.name, trial.seed, _expected(trial))
    return TrialResult(trial, tuple(record.pop("named")), **record)


def _expected(trial: Trial) -> tuple[str, ...]:
    return HEADS[trial.head].mistakes[trial.name].names if trial.kind == "mistakes" else ()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, required=True, metavar="DIR")
    parser.add_argument("--head", nargs="+", choices=list(HEADS), default=list(HEADS))
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--name", nargs="+", help="of the mistakes and copies; default: all")
    parser.add_argument("--tokens", type=int, default=2000, help="of each text")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the prompts of each text")
    parser.add_argument("--model", default="default")
    args = parser.parse_args()
    quiet_transformers()
    args.state.mkdir(parents=True, exist_ok=True)
    target = open_target(args.model, "cpu")
    facts, texts = TargetFacts.of(target), Texts(target, args.state, args.tokens)
    run.acceptance = Measurements(args.state).acceptance  # type: ignore[assignment]
    results = Results(args.state / f"results-{args.tokens}.jsonl")
    chosen = [trial for name in args.head for trial in trials(name, args.seeds, tuple(args.only))]
    chosen = [trial for trial in chosen if not args.name or trial.name in args.name]
    known = results.known()
    for trial in chosen:
        if trial not in known:
            known[trial] = linted(trial, texts.stated(trial.seed), facts)
            results.add(known[trial])
        print(known[trial].line(), flush=True)
    return summary([known[trial] for trial in chosen])


def summary(results: list[TrialResult]) -> int:
    """Print the counts by head and kind; returns the exit status."""
    groups = {(result.trial.head, result.trial.kind) for result in results}
    counts = {
        f"{head} {kind}": [sum(result.right for result in group), len(group)]
        for head, kind in sorted(groups)
        for group in [[result for result in results if (result.trial.head, result.trial.kind) == (head, kind)]]
    }
    for name, (right, total) in counts.items():
        print(f"{name}: {right} of {total} right")
    seconds = sum(result.seconds for result in results)
    print(json.dumps({"right": counts, "cpu_seconds": round(seconds, 1), "results": [asdict(r) for r in results]}))
    return 0 if all(result.right for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
