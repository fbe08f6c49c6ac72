"""Is what the whole machinery writes distributed exactly as the target says?

The toy looks two tokens back, so the law of any three tokens given the two before them can be enumerated. Texts are
cut into pieces of three; each piece is one sample, counted under its own context. Given the contexts, the samples are
independent, and the sum of the chi² of every context is itself chi² distributed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from scipy.stats import chi2

from paceline.core.draft_length import FixedDraftLength
from paceline.core.protocols import Drafter
from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence
from paceline.core.stats import SpecStats
from paceline.core.stopping import StopRules
from paceline.drafting.draft_model import DraftModel
from paceline.drafting.ngram import Ngram
from paceline.drafting.no_draft import NoDraft
from paceline.engines.local.generate import run
from paceline.engines.local.step import EngineParts
from paceline.engines.local.verifier import Verifier
from paceline.runners.table import TableRunner

FALSE_ALARM = 1e-6  # the probability that correct code fails one test
BUDGETS = (3, 0, 2)  # of the texts of a batch, in turn
PROMPT = [0, 1, 2, 0, 1]
PIECE = 3
LENGTH = 300  # tokens a text
LENGTH_UNGUESSED = 60  # texts with a budget of 0 have to be in the batch, but need not fill it
AT_ONCE = 24  # texts a batch
RARE = 5.0  # expected counts below this are pooled: the statistic is not chi² distributed with them

Token = tuple[int, ...]
Seen = Counter[tuple[Token, Token]]  # by context and piece
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
        uniforms = chi2.sf(self.statistic, self.freedom)
        return (
            f"chi² {self.statistic:.1f} with {self.freedom} degrees of freedom over {self.samples} samples: "
            f"p = {uniforms:.2g}; correct code fails this with probability {FALSE_ALARM:g}"
        )


def blurred(target: TableRunner) -> TableRunner:
    return TableRunner(target.info.vocab_size, target.order, target.seed, blur=0.3)


def draft_model(target: TableRunner) -> Drafter:
    return DraftModel(blurred(target), target.info.vocab_size)


def ngram(target: TableRunner) -> Drafter:
    return Ngram(longest=3, shortest=1)


def ngram_tree(target: TableRunner) -> Drafter:
    return Ngram(longest=3, shortest=1, branches=3)


def nothing(target: TableRunner) -> Drafter:
    return NoDraft()


def toy_target() -> TableRunner:
    return TableRunner(vocab_size=3, order=2, seed=11)


def measured(rule: str, make_drafter: MakeDrafter, samples: int, sampling: SamplingParams | None = None) -> Outcome:
    """Write texts with budgets 3, 0 and 2 together, and compare every three tokens with the enumerated law."""
    target, how = toy_target(), sampling or SamplingParams(temperature=1.0)
    parts = EngineParts(target, make_drafter(target), FixedDraftLength(3), Verifier(rule))
    seen: Seen = Counter()
    total = SpecStats()
    while seen.total() < samples:
        seqs = [_text(how, seq_id, seed=seen.total() + seq_id) for seq_id in range(AT_ONCE)]
        with torch.inference_mode():
            for _ in run(seqs, parts, max_num_seqs=AT_ONCE):
                pass
        for seq in seqs:
            total.add(seq.stats)
            seen.update(_pieces(seq, target.order))
    return _compare(seen, target, how, total)


def _text(sampling: SamplingParams, seq_id: int, seed: int) -> Sequence:
    budget = BUDGETS[seq_id % len(BUDGETS)]
    own = SamplingParams(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, seed=seed)
    seq = Sequence(PROMPT, own, StopRules(LENGTH if budget else LENGTH_UNGUESSED))
    seq.num_draft_tokens = budget
    return seq


def _pieces(seq: Sequence, order: int) -> list[tuple[Token, Token]]:
    starts = range(seq.prompt_length, len(seq.ids) - PIECE + 1, PIECE)
    return [(tuple(seq.ids[at - order : at]), tuple(seq.ids[at : at + PIECE])) for at in starts]


def _compare(seen: Seen, target: TableRunner, sampling: SamplingParams, total: SpecStats) -> Outcome:
    statistic, freedom = 0.0, 0
    for context in sorted({context for context, _ in seen}):
        law = target.exact(list(context), PIECE, sampling)
        count = sum(seen[context, output] for output in law)
        common = {output: count * uniforms for output, uniforms in law.items() if count * uniforms >= RARE}
        pooled = count - sum(common.values())
        cells = [(seen[context, output], expected) for output, expected in common.items()]
        rare = count - sum(found for found, _ in cells)
        if pooled >= RARE:
            cells.append((rare, pooled))
        elif pooled < 1e-6:
            assert rare == 0, f"after {context} a piece was written that has no probability at all"
        statistic += sum((found - expected) ** 2 / expected for found, expected in cells)
        freedom += max(0, len(cells) - 1)
    return Outcome(statistic, freedom, seen.total(), total)
