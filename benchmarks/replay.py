"""A lab for draft-length policies: `auto` and each method alone over recorded drafts, under a made-up clock.

    python benchmarks/replay.py record DRAFTS.json --dtype int8     what a head drafts at every place of greedy outputs
    python benchmarks/replay.py run DRAFTS.json                     every method over these outputs, in seconds

On a shared machine a few percent between two policies cannot be seen. Here lookups, policy and calibration are the
real ones, while drafts of the head and the tokens of the target are replayed and a step takes what was measured when
they were recorded, with some noise (--noise). Prompts, rows and table are those of domains.py. Parts are put together
by hand: no figure of this is one that a user gets.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a program, it knows only its own folder
from benchmarks.domains import DomainPrompt, DomainRow, domain_prompts, table
from benchmarks.fresh_process import AUTO, PLAIN
from paceline.core.cost_model import CostCurve, CostModel, StepTiming
from paceline.core.draft_length import AdaptiveDraftLength, DraftLengthPolicy, FixedDraftLength
from paceline.core.draft_tree import ROOT, DraftTree, chain, empty
from paceline.core.draft_value import DraftValue
from paceline.core.protocols import Drafter
from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence, SequenceParams
from paceline.core.stopping import StopRules
from paceline.core.types import Request, RowOutput, StepResult, VerifyResult
from paceline.core.verify import verify_greedy
from paceline.drafting.auto import AutoDrafter
from paceline.drafting.ngram import Ngram
from paceline.drafting.no_draft import NoDraft
from paceline.drafting.prediction import Prediction
from paceline.drafting.suffix import Suffix

LOOKUPS: dict[str, Callable[[], Drafter]] = {"ngram": Ngram, "suffix": Suffix, "prediction": Prediction}
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 11, 15)  # draft tokens whose time is measured
TIMED_PLACES = 40  # of the first prompt
LOOKUP_SECONDS = 0.06e-3
NO_OUTPUT = RowOutput(torch.empty(0, 0))


@dataclass(frozen=True, slots=True)
class RecordedText:
    """A prompt, its greedy continuation, and by the length of the sequence what a head drafts there."""

    domain: str
    prompt: list[int]
    written: list[int]
    prediction: list[int] | None
    drafts: dict[int, tuple[list[int], list[float]]]  # tokens and confidences

    @property
    def ids(self) -> list[int]:
        return [*self.prompt, *self.written]


@dataclass(frozen=True, slots=True)
class Recording:
    """passes, drafts: seconds by tokens in a pass of the target, and by draft tokens of the head"""

    method: str
    dtype: str
    passes: dict[int, float]
    drafts: dict[int, float]
    texts: list[RecordedText]

    @classmethod
    def read(cls, path: Path) -> Recording:
        document = json.loads(path.read_text())
        for name in ("passes", "drafts"):
            document[name] = {int(size): seconds for size, seconds in document[name].items()}
        for text in document["texts"]:
            text["drafts"] = {int(place): draft for place, draft in text["drafts"].items()}
        document["texts"] = [RecordedText(**text) for text in document["texts"]]
        return cls(**document)


# --- recording --------------------------------------------------------------------------------------------------------


class Recorder(Drafter):
    """Notes what a drafter drafts before every step, and sends none of it."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self.needs = drafter, drafter.needs
        drafter.use_value(DraftValue(CostModel()))  # confidences are wanted
        self.drafts: dict[int, tuple[list[int], list[float]]] = {}
        self.seconds: dict[int, list[float]] = {length: [] for length in LENGTHS}

    def begin(self, seq: Sequence, prompt: RowOutput | None) -> None:
        self.drafts = {}
        self._drafter.begin(seq, prompt)

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        [tree] = self._drafter.propose(seqs, [LENGTHS[-1]])
        self.drafts[len(seqs[0].ids)] = (tree.tokens.tolist(), list(tree.confidence or []))
        if len(self.seconds[LENGTHS[0]]) < TIMED_PLACES:
            for length in LENGTHS:
                began = time.perf_counter()
                self._drafter.propose(seqs, [length])
                self.seconds[length].append(time.perf_counter() - began)
        return [empty()]

    def observe(self, seqs: list[Sequence], results: list[StepResult]) -> None:
        self._drafter.observe(seqs, results)

    def end(self, seq: Sequence) -> None:
        self._drafter.end(seq)


def record(args: argparse.Namespace) -> Recording:
    from paceline.build import build_engine
    from paceline.config import EngineConfig
    from paceline.engines.local.engine import LocalEngine

    config = EngineConfig.create(args.model, method=args.method, dtype=args.dtype, draft_model=args.draft)
    built = build_engine(config)
    costs = built.parts.draft_length.costs  # type: ignore[attr-defined]
    recorder = Recorder(built.parts.drafter)
    parts = replace(built.parts, drafter=recorder, draft_length=FixedDraftLength(1))
    engine, texts = LocalEngine(parts, built.tokenizer, config, built.methods), []
    for prompt in domain_prompts(args.limit_prompts):
        texts.append(recorded(engine, recorder, prompt, args.max_new_tokens))
        print(f"{prompt.domain}: {len(texts[-1].written)} tokens", file=sys.stderr, flush=True)
    drafts = {length: statistics.median(seconds) for length, seconds in recorder.seconds.items() if seconds}
    return Recording(args.method, args.dtype, costs.verify.as_dict(), drafts, texts)


def recorded(engine: Any, recorder: Recorder, prompt: DomainPrompt, max_new_tokens: int) -> RecordedText:
    ids = engine.tokenizer.encode([{"role": "user", "content": prompt.text}])
    [seq] = engine.run([Request(ids, SamplingParams(temperature=0.0), max_new_tokens)])
    prediction = None if prompt.prediction is None else engine.tokenizer.encode_continuation(prompt.prediction)
    return RecordedText(prompt.domain, seq.ids[: seq.prompt_length], seq.generated, prediction, recorder.drafts)


# --- replaying --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Machine:
    """A clock, and what things take on this machine."""

    recording: Recording
    noise: float
    dice: random.Random
    now: float = 0.0
    text: RecordedText | None = None  # that is being written
    passes: CostCurve = field(init=False)
    drafts: CostCurve = field(init=False)

    def __post_init__(self) -> None:
        self.passes, self.drafts = CostCurve(self.recording.passes), CostCurve(self.recording.drafts)

    def __call__(self) -> float:
        return self.now

    def take(self, seconds: float) -> None:
        self.now += self.sampled(seconds)

    def sampled(self, seconds: float) -> float:
        return seconds * max(0.7, 1.0 + self.noise * self.dice.gauss(0.0, 1.0))


class ReplayedHead(Drafter):
    """Drafts what was recorded."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._states_confidence = machine, False

    def use_value(self, value: DraftValue, source: str = "") -> None:
        self._states_confidence = True

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        return [self._draft(seq, k) if k else empty() for seq, k in zip(seqs, num_draft_tokens)]

    def _draft(self, seq: Sequence, k: int) -> DraftTree:
        assert self._machine.text is not None
        self._machine.take(self._machine.drafts.at(k))
        tokens, confidence = self._machine.text.drafts.get(len(seq.ids), ([], []))
        if not tokens:
            return empty()
        return chain(tokens[:k], confidence=confidence[:k] if self._states_confidence else None)


class TimedLookup(Drafter):
    """A real lookup, which takes a little time."""

    looks_up = True

    def __init__(self, lookup: Drafter, machine: Machine) -> None:
        self._lookup, self._machine, self.needs = lookup, machine, lookup.needs
        self.begin, self.observe, self.end = lookup.begin, lookup.observe, lookup.end  # type: ignore[method-assign]
        self.use_value = lookup.use_value  # type: ignore[method-assign]

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        self._machine.take(LOOKUP_SECONDS)
        return self._lookup.propose(seqs, num_draft_tokens)


def drafter_of(method: str, machine: Machine) -> Drafter:
    if method == PLAIN:
        return NoDraft()
    if method == AUTO:
        lookups = {name: TimedLookup(LOOKUPS[name](), machine) for name in ("prediction", "suffix")}
        return AutoDrafter(lookups, {machine.recording.method: ReplayedHead(machine)}, machine)
    return TimedLookup(LOOKUPS[method](), machine) if method in LOOKUPS else ReplayedHead(machine)


def policy_of(k: str, machine: Machine) -> DraftLengthPolicy:
    if k != AUTO:
        return FixedDraftLength(int(k))
    measured = {width: machine.sampled(seconds) for width, seconds in machine.recording.passes.items()}
    return AdaptiveDraftLength(CostModel(CostCurve(measured)))


def replayed(name: str, recording: Recording, noise: float, seed: int) -> DomainRow:
    """One row over all texts, as one process would meet them."""
    method, _, k = name.partition(":")
    machine = Machine(recording, noise, random.Random(seed))
    drafter, policy = drafter_of(method, machine), policy_of("0" if method == PLAIN else k or AUTO, machine)
    value = policy.draft_value()
    if value is not None:
        drafter.use_value(value)
    row = DomainRow(name)
    for text in recording.texts:
        seq = sequence_of(text, predicted=method in (AUTO, "prediction"))
        began, machine.text = machine.now, text
        drafter.begin(seq, None)
        while not seq.finished:
            step(seq, drafter, policy, machine)
        drafter.end(seq)
        policy.forget(seq)
        row.tokens[text.domain] = row.tokens.get(text.domain, 0) + len(text.written)
        row.seconds[text.domain] = row.seconds.get(text.domain, 0.0) + machine.now - began
    return row


def sequence_of(text: RecordedText, *, predicted: bool) -> Sequence:
    prediction = text.prediction if predicted else None
    stopping, greedy = StopRules(len(text.written)), SamplingParams(temperature=0.0)
    return Sequence(text.prompt, SequenceParams(greedy, stopping=stopping, prediction=prediction))


def step(seq: Sequence, drafter: Drafter, policy: DraftLengthPolicy, machine: Machine) -> None:
    """Plan, propose, verify and observe, as the engine does."""
    assert machine.text is not None
    began = machine.now
    [k] = policy.plan([seq])
    trees = policy.cut([seq], drafter.propose([seq], [k])) if k else [empty()]
    drafted, verify = machine.now - began, machine.sampled(machine.passes.at(1 + len(trees[0])))
    machine.now += verify
    verified = verified_by(machine.text.ids, len(seq.ids), trees[0])
    emitted = seq.extend([*verified.tokens, verified.next_token], len(verified.accepted))
    result = StepResult(trees[0], verified, NO_OUTPUT, emitted, min(len(verified.accepted), len(emitted)))
    drafter.observe([seq], [result])
    count = trees[0].num_draft_tokens
    policy.observe([seq], [result], StepTiming(drafted, verify, 1 + len(trees[0]), count, 1, int(count > 0)))


def verified_by(ids: list[int], place: int, tree: DraftTree) -> VerifyResult:
    """The target's argmax after a node is the token that was written there, if the node's path was."""
    count = tree.num_draft_tokens
    tokens, depth = tree.tokens.tolist()[:count], [0] * count
    for node, parent in enumerate(tree.parents[:count]):
        depth[node] = 1 if parent == ROOT else depth[parent] + 1
    after = [*ids[place:], *[ROOT] * (count + 1)]
    return verify_greedy(tokens, tree.parents[:count], [after[0], *(after[own] for own in depth)])


# --- the command ------------------------------------------------------------------------------------------------------


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "run"))
    parser.add_argument("file", type=Path, metavar="DRAFTS.json")
    parser.add_argument("--model", default="default")
    parser.add_argument("--method", default="dflash", help="of the head or draft model that is recorded (dflash)")
    parser.add_argument("--draft", help="its weights, where none are shipped")
    parser.add_argument("--dtype", default="int4")
    parser.add_argument("--limit-prompts", type=int, default=6, metavar="N", help="of each domain (6)")
    parser.add_argument("--max-new-tokens", type=int, default=96, metavar="N")
    parser.add_argument("--rows", help="default: plain, the lookups, the head with k = 3 and auto, and auto")
    parser.add_argument("--noise", type=float, default=0.08, help="of every duration, as a share of it (0.08)")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="runs that are added up (3)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.action == "record":
        args.file.write_text(json.dumps(asdict(record(args))))
        return 0
    recording = Recording.read(args.file)
    head = recording.method
    names = args.rows or f"{PLAIN},ngram:auto,suffix:auto,{head}:3,{head}:auto,prediction:auto,{AUTO}"
    rows = [summed(name, recording, args) for name in names.split(",")]
    print("\n".join(f"| {' | '.join(cells)} |" for cells in table(recording.dtype, rows)))
    return 0


def summed(name: str, recording: Recording, args: argparse.Namespace) -> DomainRow:
    total = DomainRow(name)
    for seed in range(args.seeds):
        row = replayed(name, recording, args.noise, seed)
        for domain in row.tokens:
            total.tokens[domain] = total.tokens.get(domain, 0) + row.tokens[domain]
            total.seconds[domain] = total.seconds.get(domain, 0.0) + row.seconds[domain]
    return total


if __name__ == "__main__":
    sys.exit(main())
