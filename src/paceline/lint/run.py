"""Every reading of a head on one text, and the changes that make its files say what they were trained for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from paceline.errors import OptionError, WeightsError
from paceline.heads.checkpoint import Checkpoint
from paceline.heads.registry import head_from, spec_of
from paceline.lint.comparison import STATISTICS, Acceptance, accepts_more, error_probability, most_gained, paired
from paceline.lint.reading import HeadReading
from paceline.lint.registry import lint_of
from paceline.lint.target import StatedText, TargetFacts

POSITIONS = 3  # draft tokens after every anchor
ALPHA = 0.01  # chance of naming a change although no reading is better
WORTH = 0.01  # tokens per step more at which a change is named; other unused tokens as masks, for one, gain less
ALIKE = 2.0  # deviates within which two readings may accept as many tokens
MOST_CHANGES = 4
# A reading that a part of the text shows to be worse is not read on the whole. One that the whole text would show to be
# better at z = 4 is lost by each part once in 100 times.
BETTER, LOST = 4.0, 2.33  # deviates
SHARES = (0.15, 0.5)
TIED = 4.0  # standard errors within which nothing is gained
FEWEST_ANCHORS, BEGINNING_ANCHORS = 160, 64  # of a share; most wrong readings are told by the first few lines


@dataclass(frozen=True, slots=True, eq=False)
class TriedReading:
    """A reading on the text.

    acceptance  on the whole text, or on the part that showed it to be worse; None: the head does not load like this
    gain        tokens per step more than the reading it was tried against, on the same places of the text
    z           of that comparison, or of the same for drawn draft tokens; positive is better
    error       why it does not load
    """

    reading: HeadReading
    acceptance: Acceptance | None
    gain: float = 0.0
    z: float = 0.0
    error: str = ""

    @property
    def tokens_per_step(self) -> float:
        return 0.0 if self.acceptance is None else self.acceptance.tokens_per_step

    @property
    def expected(self) -> float:
        """Draft tokens accepted a step, expected of drawn ones."""
        return 0.0 if self.acceptance is None else float(self.acceptance.expected.mean())


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """A reading that is better than the one before it. probability: of naming it although it is not, corrected."""

    tried: TriedReading
    probability: float


@dataclass(frozen=True, slots=True, eq=False)
class LintResult:
    """The outcome for one head.

    as_given    the reading of the files as they are
    tried       all others, in the order of the head's kind
    changes     what the files should say instead, one change after the other; empty: they are right
    given       the files as they are
    files       the corrected files
    num_tested  comparisons made, which the error probabilities are corrected for
    """

    kind: str
    as_given: TriedReading
    tried: list[TriedReading]
    changes: list[Change]
    given: Checkpoint
    files: Checkpoint
    num_tested: int

    @property
    def correct(self) -> bool:
        return not self.changes

    @property
    def best(self) -> TriedReading:
        return self.changes[-1].tried if self.changes else self.as_given


Watcher = Callable[[TriedReading], None]
AS_GIVEN = HeadReading("as the files say", "", lambda files: files)


def lint(checkpoint: Checkpoint, text: StatedText, facts: TargetFacts, watch: Watcher = lambda _: None) -> LintResult:
    """Try every reading. Raises OptionError for a kind without readings, PairError for a head of another target."""
    kind = spec_of(checkpoint).name
    readings = lint_of(kind).readings
    files, changes, first_tried, num_tested = checkpoint, list[Change](), list[TriedReading](), 0
    as_given = base = _as_given(checkpoint, text)
    watch(as_given)
    while len(changes) < MOST_CHANGES:
        tried = _Trial(text, files, base).all(readings(files, facts), watch if not changes else lambda _: None)
        num_tested += len(tried)
        first_tried = first_tried or tried
        change = _best_change(_on_all_places(tried, base), num_tested)
        if change is None:
            break
        changes.append(change)
        files, base = change.tried.reading.edit(files), change.tried
    if as_given.error and not changes:
        raise WeightsError(f"{as_given.error}; no other reading of the files loads and drafts better")
    return LintResult(kind, as_given, first_tried, changes, checkpoint, files, num_tested)


def _on_all_places(tried: list[TriedReading], base: TriedReading) -> list[TriedReading]:
    """Those that were read to the end of the text; others may be better than the files, and worse than the best."""
    assert base.acceptance is not None
    whole = base.acceptance.num_anchors
    return [entry for entry in tried if entry.acceptance is not None and entry.acceptance.num_anchors == whole]


def _best_change(tried: list[TriedReading], num_tested: int) -> Change | None:
    tests = STATISTICS * num_tested
    better = [entry for entry in tried if error_probability(entry.z, tests) < ALPHA and entry.gain >= WORTH]
    if not better:
        return None
    best = _best(better)
    return Change(best, error_probability(best.z, tests))


def _best(tried: list[TriedReading]) -> TriedReading:
    """The most accepted tokens; of those that may be as good, the most expected ones, which vary less."""
    leader = max(tried, key=lambda entry: entry.tokens_per_step).acceptance
    assert leader is not None
    alike = [entry for entry in tried if entry.acceptance and accepts_more(leader, entry.acceptance) < ALIKE]
    return max(alike, key=lambda entry: entry.expected)


def _as_given(checkpoint: Checkpoint, text: StatedText) -> TriedReading:
    """A head that does not load as it is may load in another reading: until then nothing of it is accepted."""
    try:
        return TriedReading(AS_GIVEN, acceptance(checkpoint, text))
    except (WeightsError, OptionError) as error:
        nothing = Acceptance.nothing(len(text.anchors(POSITIONS)), POSITIONS)
        return TriedReading(AS_GIVEN, nothing, error=str(error))


def acceptance(checkpoint: Checkpoint, text: StatedText, k: int = POSITIONS) -> Acceptance:
    """What the target accepts of a head's drafts along a text. Raises WeightsError, OptionError or PairError."""
    return head_acceptance(spec_of(checkpoint).name, loaded_head(checkpoint), text, k)


def loaded_head(checkpoint: Checkpoint) -> nn.Module:
    """The head of a checkpoint, which keeps its tensors. Raises WeightsError or OptionError."""
    return head_from(replace(checkpoint, tensors=dict(checkpoint.tensors))).eval()


@torch.no_grad()
def head_acceptance(kind: str, head: nn.Module, text: StatedText, k: int = POSITIONS) -> Acceptance:
    """What the target accepts of a loaded head's drafts. Raises PairError for a head of another target."""
    anchors = text.anchors(k)
    drafts = lint_of(kind).draft(head.to(text.tokens.device), text, anchors, k)
    return Acceptance.of(drafts, text.labels(anchors, k))


class _Trial:
    """Readings of one checkpoint against what it says itself: a race over parts of the text, from short to long.

    A reading that a part shows to be worse than the best of all is not read further.
    """

    def __init__(self, text: StatedText, files: Checkpoint, base: TriedReading) -> None:
        assert base.acceptance is not None
        self._files, self._base = files, base.acceptance
        self._parts = _parts(text)

    def all(self, readings: list[HeadReading], watch: Watcher) -> list[TriedReading]:
        """In the order of `readings`; watched in the order in which they leave the race."""
        finished: dict[int, TriedReading] = {}
        running = dict(enumerate(readings))
        for part in self._parts:
            tried = {index: self._tried(reading, part) for index, reading in running.items()}
            ended = {index: entry for index, entry in tried.items() if self._ends(entry, part, tried)}
            for entry in ended.values():
                watch(entry)
            finished |= ended
            running = {index: reading for index, reading in running.items() if index not in ended}
        return [finished[index] for index in range(len(readings))]

    def _ends(self, entry: TriedReading, part: _Part, tried: dict[int, TriedReading]) -> bool:
        """Whether a reading is read no further: on the whole text, where it does not load, and where it is no better
        than what the files say, or than the best reading, or so little better that it would not be named."""
        if part.is_whole or entry.acceptance is None or entry.z <= part.worse:
            return True
        if most_gained(entry.acceptance, self._base.first(entry.acceptance.num_anchors), TIED) < WORTH:
            return True
        better = [other for other in tried.values() if other.gain >= max(WORTH, entry.gain)]
        best = max(better, key=lambda other: other.gain, default=entry)
        assert best.acceptance is not None
        return best is not entry and paired(entry.acceptance, best.acceptance) <= -LOST  # they are not tied

    def _tried(self, reading: HeadReading, part: _Part) -> TriedReading:
        try:
            return self._compared(reading, acceptance(reading.edit(self._files), part.text))
        except (WeightsError, OptionError) as error:
            return TriedReading(reading, None, error=str(error))

    def _compared(self, reading: HeadReading, other: Acceptance) -> TriedReading:
        base = self._base.first(other.num_anchors)
        return TriedReading(reading, other, other.tokens_per_step - base.tokens_per_step, paired(other, base))


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """The beginning of a text, or all of it. worse: the deviate at which a reading is given up."""

    text: StatedText
    worse: float
    is_whole: bool = False


def _parts(text: StatedText) -> list[_Part]:
    """From short to long; each has the first anchors of the next one. The last is the whole text."""
    per_seq = text.anchors(POSITIONS).row.bincount(minlength=len(text.lengths)).cumsum(dim=0)
    whole = int(per_seq[-1])
    texts = []
    if whole >= 2 * BEGINNING_ANCHORS and int(per_seq[0]) >= BEGINNING_ANCHORS:
        texts.append(text.beginning(BEGINNING_ANCHORS, POSITIONS))
    for share in SHARES:
        num_seqs = int((per_seq < max(FEWEST_ANCHORS, int(share * whole))).sum()) + 1
        if num_seqs < len(per_seq):
            texts.append(text.seqs(list(range(num_seqs))))
    shares = [len(part.anchors(POSITIONS)) / whole for part in texts]
    parts = [_Part(part, BETTER * math.sqrt(share) - LOST) for part, share in zip(texts, shares)]
    return [*parts, _Part(text, -math.inf, is_whole=True)]
