"""Is what the whole engine generates distributed exactly as the target says?

The toy looks two tokens back, so the law of any three tokens given the two before them can be enumerated. Sequences
are cut into pieces of three tokens; each piece is one sample, counted under its own context. Given the contexts, the
samples are independent, and the sum of the chi² of every context is itself chi² distributed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from paceline.core.draft_length import DraftLengthPolicy, FixedDraftLength
from paceline.core.protocols import Drafter
from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence
from paceline.core.stats import SpecStats
from paceline.drafting.draft_model import DraftModel
from paceline.drafting.ngram import Ngram
from paceline.drafting.no_draft import NoDraft
from paceline.runners.table import TableRunner
from tests.support import chi2
from tests.support.build import sequence, toy_engine

FALSE_ALARM = 1e-6  # the probability that correct code fails one test
DRAFT_LENGTHS = (3, 0, 2)  # of the sequences of a batch, in turn
PROMPT = [0, 1, 2, 0, 1]
PIECE = 3
NEW_TOKENS = 300
NEW_TOKENS_PLAIN = 60  # sequences without drafts have to be in the batch, but need not fill it
BATCH_SIZE, LARGE_BATCH_SIZE = 24, 96  # a step of a large batch costs less a sample, and one alone is 7,000 of them
MANY = 20_000  # samples, from which on batches are large
RARE = 5.0  # expected counts below this are pooled: the statistic is not chi² distributed with them

Tokens = tuple[int, ...]
Counts = Counter[tuple[Tokens, Tokens]]  # by context and piece
MakeDrafter = Callable[[TableRunner], Drafter]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One chi² test: its statistic, and what it would have to pass."""

    statistic: float
    freedom: int
    samples: int
    stats: SpecStats

    @property
    def limit(self) -> float:
        return float(chi2.isf(FALSE_ALARM, self.freedom))

    @property
    def passed(self) -> bool:
        return self.statistic < self.limit

    def __str__(self) -> str:
        p_value = chi2.sf(self.statistic, self.freedom)
        return (
            f"chi² {self.statistic:.1f} with {self.freedom} degrees of freedom over {self.samples} samples: "
            f"p = {p_value:.2g}; correct code fails this with probability {FALSE_ALARM:g}"
        )


def toy_target() -> TableRunner:
    return TableRunner(vocab_size=3, order=2, seed=11)


def blurred(target: TableRunner) -> TableRunner:
    """A draft of the toy: near it, and different."""
    return TableRunner(target.info.vocab_size, target.order, target.seed, blur=0.3)


def draft_model(target: TableRunner) -> Drafter:
    return DraftModel(blurred(target), target.info.vocab_size)


def ngram(target: TableRunner) -> Drafter:
    return Ngram(longest=3, shortest=1)


def ngram_tree(target: TableRunner) -> Drafter:
    return Ngram(longest=3, shortest=1, branches=3)


def no_draft(target: TableRunner) -> Drafter:
    return NoDraft()


def measured(
    rule: str,
    make_drafter: MakeDrafter,
    samples: int,
    sampling: SamplingParams | None = None,
    policy: DraftLengthPolicy | None = None,
) -> Outcome:
    """Generate with 3, 0 and 2 draft tokens a step in one batch, and compare every three tokens with their law.

    policy: decides in place of the 3 and the 2.
    """
    target, sampling = toy_target(), sampling or SamplingParams(temperature=1.0)
    drafter, draft_length = make_drafter(target), policy or FixedDraftLength(3)
    value = draft_length.draft_value()
    if value is not None:
        drafter.use_value(value)
    batch_size = LARGE_BATCH_SIZE if samples >= MANY else BATCH_SIZE
    engine = toy_engine(target, drafter, draft_length, max_num_seqs=batch_size, prefix_cache_tokens=0)
    counts: Counts = Counter()
    total = SpecStats()
    while counts.total() < samples:
        seqs = [_sequence(sampling, index, counts.total() + index, rule, policy is None) for index in range(batch_size)]
        with torch.inference_mode():
            engine.run(seqs)
        for seq in seqs:
            total.add(seq.stats)
            counts.update(_pieces(seq, target.order))
    return _compare(counts, target, sampling, total)


def _sequence(sampling: SamplingParams, index: int, seed: int, rule: str, is_fixed: bool) -> Sequence:
    num_draft_tokens = DRAFT_LENGTHS[index % len(DRAFT_LENGTHS)]
    new_tokens = NEW_TOKENS if num_draft_tokens else NEW_TOKENS_PLAIN
    own, k = replace(sampling, seed=seed), num_draft_tokens if is_fixed or not num_draft_tokens else None
    return sequence(PROMPT, new_tokens, own, rule=rule, num_draft_tokens=k)


def _pieces(seq: Sequence, order: int) -> list[tuple[Tokens, Tokens]]:
    starts = range(seq.prompt_length, len(seq.ids) - PIECE + 1, PIECE)
    return [(tuple(seq.ids[at - order : at]), tuple(seq.ids[at : at + PIECE])) for at in starts]


def _compare(counts: Counts, target: TableRunner, sampling: SamplingParams, total: SpecStats) -> Outcome:
    statistic, freedom = 0.0, 0
    for context in sorted({context for context, _ in counts}):
        law = target.exact(list(context), PIECE, sampling)
        count = sum(counts[context, piece] for piece in law)
        common = {piece: count * p for piece, p in law.items() if count * p >= RARE}
        pooled = count - sum(common.values())
        cells = [(counts[context, piece], expected) for piece, expected in common.items()]
        rare = count - sum(observed for observed, _ in cells)
        if pooled >= RARE:
            cells.append((rare, pooled))
        elif pooled < 1e-6:
            assert rare == 0, f"after {context} a piece was generated that has no probability at all"
        statistic += sum((observed - expected) ** 2 / expected for observed, expected in cells)
        freedom += max(0, len(cells) - 1)
    return Outcome(statistic, freedom, counts.total(), total)
