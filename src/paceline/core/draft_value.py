"""What a draft is worth: the seconds it saves against a plain step, and how much of it to send.

A token is worth the seconds that a token has taken lately. A draft token brings that with the probability that it and
all before it are accepted (confidence.py), and costs what it adds to the pass. Draft tokens are sent in falling order
of that probability as long as each is worth more than it costs.

Whether a draft token is sent depends on what was known before it was drawn: the confidences up to its own, which a
drafter states before it draws, and never on those after it. That keeps the output exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from paceline.core.acceptance import PositionRates
from paceline.core.confidence import CENTRES, ConfidenceTable
from paceline.core.cost_model import CostCurve, CostModel, HiccupFilter, StepTiming, draft_curve
from paceline.core.draft_tree import ROOT, DraftTree, depths, select
from paceline.core.sent_depths import SentDepths
from paceline.core.sequence import Sequence
from paceline.core.types import ChainLimits, StepResult

Kept = TypeVar("Kept")
PREDICTION = "prediction"
FADE = 0.98  # of what earlier steps gained, by each further step
DRAFT_WEIGHT = 0.06  # of one draft in what drafts bring and cost
MIN_SECONDS = 1e-9  # no step is quicker, whatever a clock says
AHEAD = (1, 2, 4, 8)  # draft tokens over which a step in the cost of a pass is spread
MAX_SPEEDUP = 32.0
MANY = 4  # draft tokens of a sequence over which what one adds to a pass is measured
WORTH_SAVING = 0.02  # of a plain pass: a drafter that is no quicker with fewer draft tokens makes all it may
LEAST_SURVIVAL = 0.02  # a draft token that is nearly never accepted is not sent, however cheap the curve says it is


def kind_of(seq: Sequence) -> str:
    """Sequences that are drafted for in one way learn from each other: those of a method, those with a prediction."""
    return seq.params.method or (PREDICTION if seq.params.prediction else "")


@dataclass(slots=True)
class DraftStats:
    """What a draft brought and took lately: tokens that are accepted, seconds of making and verifying them."""

    tokens: float = 0.0
    cost: float = 0.0
    num_drafts: int = 0

    def add(self, tokens: float, cost: float) -> None:
        """One more draft, and what is to be expected of it. The first few count alike, later ones fade."""
        if self.num_drafts == 1 and HiccupFilter.OUTLIER * cost < self.cost:
            self.num_drafts = 0  # the very first one was held up
        self.num_drafts += 1
        weight = max(DRAFT_WEIGHT, 1.0 / self.num_drafts)
        self.tokens += weight * (tokens - self.tokens)
        self.cost += weight * (cost - self.cost)


class ByBatchSize(Generic[Kept]):
    """What is known for each size of batch: a draft costs a sequence less among others, and its tokens save less there.

    Sizes up to the next power of two are taken to be alike.
    """

    def __init__(self, make: Callable[[], Kept]) -> None:
        self._make = make
        self._kept: dict[int, Kept] = {}

    def of(self, num_seqs: int) -> Kept:
        size = (num_seqs - 1).bit_length()
        if size not in self._kept:
            self._kept[size] = self._make()
        return self._kept[size]


def new_stats() -> ByBatchSize[DraftStats]:
    return ByBatchSize(DraftStats)


@dataclass(slots=True)
class SourceRecord:
    """What is known of the drafts of one source.

    table  acceptance by confidence, of drafts that state one
    rates  acceptance by depth, of the others
    drafts  seconds of making a draft, by its draft tokens: a sequence's share of them in a batch
    stats  what they brought and took
    states_confidence  its drafts do
    depths  how many of its draft tokens are worth making
    stops_itself  the device makes no draft token that is not worth it
    """

    table: ConfidenceTable = field(default_factory=ConfidenceTable)
    rates: PositionRates = field(default_factory=lambda: PositionRates(fade=0.98, weight=3.0))
    drafts: ByBatchSize[CostCurve] = field(default_factory=lambda: ByBatchSize(draft_curve))
    stats: ByBatchSize[DraftStats] = field(default_factory=new_stats)
    states_confidence: bool = False
    depths: SentDepths = field(default_factory=SentDepths)
    stops_itself: bool = False

    @property
    def draft(self) -> CostCurve:
        """Of a sequence alone."""
        return self.drafts.of(1)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A draft token that may be sent."""

    survival: float  # the probability that it and all before it are accepted
    index: int  # of its sequence
    node: int


@dataclass(frozen=True, slots=True)
class CutDrafts:
    """The trees of a batch as they are sent, the tokens that each is expected to bring, and its seconds in the pass."""

    trees: list[DraftTree]
    tokens: list[float]
    added: list[float]


@dataclass(frozen=True, slots=True)
class _Weighed:
    """A draft that was cut already: nothing is learned between the choice of a draft and its sending."""

    seq: Sequence
    tree: DraftTree
    drafts: CutDrafts

    def is_of(self, seqs: list[Sequence], trees: list[DraftTree]) -> bool:
        return len(seqs) == 1 and seqs[0] is self.seq and trees[0] is self.tree


class DraftValue:
    """Weighs drafts by their confidence, calibrated, and by the cost of the pass that verifies them."""

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        self._records: dict[tuple[str, str], SourceRecord] = {}
        self._tokens = self._seconds = 1.0  # of recent steps, of one sequence; the seconds in plain steps
        self._weighed: _Weighed | None = None  # the last draft of this step whose gain was asked for
        self._token_seconds: dict[int, float] = {}  # by size of batch, in this step

    # --- what is known ------------------------------------------------------------------------------------------------

    def record(self, seq: Sequence, source: str = "") -> SourceRecord:
        key = (kind_of(seq), source)
        record = self._records.get(key)
        if record is None:
            record = self._records[key] = SourceRecord()
        return record

    def token_seconds(self, num_seqs: int) -> float:
        """What a token takes in a batch of this size: less than in a plain step where drafts are accepted."""
        seconds = self._token_seconds.get(num_seqs)
        if seconds is None:
            speedup = min(max(1.0, self._tokens / self._seconds), MAX_SPEEDUP)
            plain = self.costs.plain_pass(num_seqs) or 1.0  # by a clock that stands still
            seconds = self._token_seconds[num_seqs] = plain / (num_seqs * speedup)
        return seconds

    def survival(self, seq: Sequence, tree: DraftTree) -> list[float]:
        """Of every node: the probability that it and all before it are accepted."""
        record = self.record(seq, tree.source)
        if tree.confidence is None:
            return _survival_by_depth(record.rates, tree)
        survival: list[float] = []
        for confidence, parent in zip(tree.confidence, tree.parents):
            survival.append((1.0 if parent == ROOT else survival[parent]) * record.table.rate(confidence))
        return survival

    # --- before the pass ----------------------------------------------------------------------------------------------

    def least_survival(self) -> float:
        """No draft token with a lower probability is ever sent to one sequence."""
        worth, plain = self.token_seconds(1), self.costs.width(1)
        cost = min([(self.costs.width(1 + count) - plain) / count for count in AHEAD])
        return max(0.0, cost) / worth if worth > 0 else 0.0

    def gain(self, seq: Sequence, tree: DraftTree, num_seqs: int = 1) -> float:
        """Seconds that a draft saves in a batch of so many if it is sent as far as it pays; what it took does not
        count."""
        if num_seqs > 1:
            return self._gain_among(seq, tree, num_seqs)
        drafts = self.cut([seq], [tree])
        self._weighed = _Weighed(seq, tree, drafts)
        return drafts.tokens[0] * self.token_seconds(1) - drafts.added[0]

    def _gain_among(self, seq: Sequence, tree: DraftTree, num_seqs: int) -> float:
        survival, nodes, costs = self.survival(seq, tree), list(range(len(tree))), self.costs.of(num_seqs)
        if is_cuttable(seq, tree):
            nodes = [candidate.node for candidate in self._sent(num_seqs, [survival], num_seqs)]
        tokens = sum([survival[node] for node in nodes if node < len(survival)])
        added = costs.pass_of(num_seqs + len(nodes)) - costs.pass_of(num_seqs)
        return tokens * self.token_seconds(num_seqs) - added

    def gain_behind(self, seq: Sequence, tree: DraftTree, num_tokens: int, num_seqs: int) -> float:
        """Seconds that the nodes of a draft behind its first so many tokens will save, if these come true."""
        survival, depth_of = self.survival(seq, tree), depths(tree.parents)
        nodes = [survival[node] for node in range(len(survival)) if depth_of[node] >= num_tokens]
        costs = self.costs.of(num_seqs)
        added = costs.pass_of(num_seqs + len(nodes)) - costs.pass_of(num_seqs)
        return sum(nodes) * self.token_seconds(num_seqs) - added

    def usual_gain(self, stats: ByBatchSize[DraftStats], num_seqs: int = 1) -> float:
        """Seconds that such drafts save lately, less those of making them. 0 before the first one."""
        usual = stats.of(num_seqs)
        return usual.tokens * self.token_seconds(num_seqs) - usual.cost

    def goes_on(self, seq: Sequence, confidences: list[float], source: str = "") -> bool:
        """Whether a draft token after these, about as sure as the last, is worth making and sending."""
        if seq.params.num_draft_tokens is not None:
            return True  # as many as the client asked for
        record, survival, count = self.record(seq, source), 1.0, len(confidences)
        for confidence in (*confidences, confidences[-1]):
            survival *= record.table.rate(confidence)
        making = max(0.0, record.draft.at(count + 1) - record.draft.at(count))
        return _pays(self.costs.pass_alone, count + 1, survival * self.token_seconds(1) - making)

    def chain_limits(self, seqs: list[Sequence], source: str = "") -> ChainLimits | None:
        """The same for a loop on a device, which decides by itself: one more draft token of all sequences is worth
        making if it promises as many tokens as its seconds would bring. None: the client asked for a number."""
        if any(seq.params.num_draft_tokens is not None for seq in seqs):
            return None
        record, num_seqs = self.record(seqs[0], source), len(seqs)
        costs = self.costs.of(num_seqs)
        added = (costs.pass_of(num_seqs * (1 + MANY)) - costs.pass_of(num_seqs)) / MANY
        seconds = _seconds_each(record.drafts.of(num_seqs)) * num_seqs or _seconds_each(self.costs.draft)
        worth, record.stops_itself = self.token_seconds(num_seqs), True
        return ChainLimits((seconds + added) / worth, tuple(map(record.table.rate, CENTRES)))

    def useful_length(self, seq: Sequence, limit: int, source: str = "") -> int:
        """Draft tokens to ask a source for whose drafts are cut: all there is room for, unless most is in vain.

        That fewer take less time must have been seen: a block takes one pass whatever its length.
        """
        record = self.record(seq, source)
        longest = min(limit, record.draft.largest)  # a head makes no more than its block holds, whatever is asked for
        if longest < 2 or record.stops_itself:
            return limit
        each = (record.draft.at(longest) - record.draft.at(1)) / (longest - 1)  # neighbours alone would be noise
        length = record.depths.length(longest, each)
        saved = record.draft.at(longest) - record.draft.at(length)
        return length if saved > WORTH_SAVING * self.costs.plain_pass(1) else limit

    def best_length(self, seq: Sequence, limit: int, source: str = "") -> int:
        """Draft tokens to ask a source for that states no confidences: the most tokens a second, one at least."""
        record, costs, tokens = self.record(seq, source), self.costs.of(1), 1.0
        best, best_rate, survival = 1, 0.0, 1.0
        for k, rate in enumerate(record.rates.rates(limit), start=1):
            survival *= rate
            tokens += survival
            speed = tokens / max(costs.pass_of(k + 1) + record.draft.at(k), MIN_SECONDS)
            if speed > best_rate:
                best, best_rate = k, speed
        return best

    def cut(self, seqs: list[Sequence], trees: list[DraftTree]) -> CutDrafts:
        """The trees with only those nodes that pay. Trees that must stay whole do."""
        if self._weighed is not None and self._weighed.is_of(seqs, trees):
            return self._weighed.drafts
        if len(seqs) == 1:
            return self._cut_alone(seqs[0], trees[0])
        whole = [not is_cuttable(seq, tree) for seq, tree in zip(seqs, trees)]
        weights = [self.survival(seq, tree) if len(tree) else [] for seq, tree in zip(seqs, trees)]
        width = len(seqs) + sum(len(tree) for tree, stays in zip(trees, whole) if stays)
        sent = self._sent(len(seqs), [[] if stays else own for own, stays in zip(weights, whole)], width)
        nodes = [list(range(len(tree))) if stays else [] for tree, stays in zip(trees, whole)]
        for candidate in sent:
            nodes[candidate.index].append(candidate.node)
        kept = [select(tree, sorted(own)) for tree, own in zip(trees, nodes)]
        tokens = [sum(own[node] for node in sent_nodes if node < len(own)) for own, sent_nodes in zip(weights, nodes)]
        return CutDrafts(kept, tokens, self._added([len(own) for own in nodes]))

    def whole(self, seqs: list[Sequence], trees: list[DraftTree]) -> CutDrafts:
        """The trees as they are. What a step in a row adds was measured by the length of its chain."""
        tokens = [sum(self.survival(seq, tree)) if len(tree) else 0.0 for seq, tree in zip(seqs, trees)]
        lengths = [len(tree) if tree.is_chain else max(depths(tree.parents)) + 1 for tree in trees]
        return CutDrafts(trees, tokens, self._added(lengths))

    def _cut_alone(self, seq: Sequence, tree: DraftTree) -> CutDrafts:
        """The same for one sequence, for which several drafts may be weighed in a step: it is quick."""
        if not len(tree):
            return CutDrafts([tree], [0.0], [0.0])
        survival, nodes = self.survival(seq, tree), list(range(len(tree)))
        if is_cuttable(seq, tree):
            nodes = self._sent_alone(survival)
        tokens = sum([survival[node] for node in nodes if node < len(survival)])
        added = self.costs.pass_alone(1 + len(nodes)) - self.costs.pass_alone(1)
        return CutDrafts([select(tree, nodes)], [tokens], [added])

    def _sent_alone(self, survival: list[float]) -> list[int]:
        """As `_sent`, the nodes of one sequence in their order."""
        order = sorted(range(len(survival)), key=survival.__getitem__, reverse=True)
        pass_of, worth, tokens = self.costs.pass_alone, self.token_seconds(1), 1.0
        for count, node in enumerate(order):
            worth = min(worth, pass_of(1 + count) / tokens)
            if survival[node] < LEAST_SURVIVAL or not _pays(pass_of, 1 + count, survival[node] * worth):
                return sorted(order[:count])
            tokens += survival[node]
        return sorted(order)

    def _sent(self, num_seqs: int, weights: list[list[float]], width: int) -> list[_Candidate]:
        """The draft tokens that pay, likeliest first, in a pass that is `width` tokens wide without them.

        Those of a chain come in its order, since none is likelier than the one before it; so whether one is sent does
        not depend on those after it. A token is worth no more than what this very step takes for one.
        """
        candidates = [
            _Candidate(survival, index, node) for index, own in enumerate(weights) for node, survival in enumerate(own)
        ]
        candidates.sort(key=lambda candidate: -candidate.survival)
        costs, worth, tokens = self.costs.of(num_seqs), self.token_seconds(num_seqs), float(num_seqs)
        for count, candidate in enumerate(candidates):
            if candidate.survival < LEAST_SURVIVAL:
                return candidates[:count]
            worth = min(worth, costs.pass_of(width + count) / tokens)
            if not _pays(costs.pass_of, width + count, candidate.survival * worth):
                return candidates[:count]
            tokens += candidate.survival
        return candidates

    def _added(self, counts: list[int]) -> list[float]:
        """Of each sequence: its draft tokens' share of what they all add to the pass."""
        num_seqs, total = len(counts), sum(counts)
        if not total:
            return [0.0] * num_seqs
        costs = self.costs.of(num_seqs)
        each = (costs.pass_of(num_seqs + total) - costs.pass_of(num_seqs)) / total
        return [each * count for count in counts]

    # --- after the pass -----------------------------------------------------------------------------------------------

    def learn(self, seq: Sequence, proposed: DraftTree, result: StepResult) -> None:
        """Calibrate: which draft tokens of a draft, sent or not, the target confirmed."""
        self._weighed = None
        record, accepted, sent = self.record(seq, proposed.source), len(result.verified.accepted), result.tree
        if proposed.confidence is None:
            if sent.num_draft_tokens:
                record.rates.observe(max(depths(sent.parents[: sent.num_draft_tokens])) + 1, accepted)
            return
        table, record.states_confidence = record.table, True
        if proposed.probs is not None:
            for depth, confidence in enumerate(proposed.confidence[: min(accepted + 1, len(sent))]):
                table.observe(confidence, depth < accepted)
            return
        # A chosen token is accepted as often as the target draws it itself: one that was not sent teaches as well.
        tokens, node = proposed.tokens.tolist(), ROOT
        for token in (*result.verified.tokens, result.verified.next_token):
            children = [child for child, parent in enumerate(proposed.parents) if parent == node]
            if not children:
                return
            for child in children:
                table.observe(proposed.confidence[child], tokens[child] == token)
            node = next((child for child in children if tokens[child] == token), len(tokens))

    def stepped(self, timing: StepTiming, emitted: int, draft_seconds: float) -> None:
        """A step took about this long to draft and emitted so many tokens. Costs are the learned ones: no hiccups."""
        self._weighed = None
        self._token_seconds.clear()
        plain = self.costs.plain_pass(timing.num_seqs)
        if plain > 0:
            alone = timing.num_seqs == 1
            costs = self.costs.pass_alone if alone else self.costs.of(timing.num_seqs).pass_of
            seconds = costs(timing.nodes) + draft_seconds
            self._tokens = FADE * self._tokens + emitted / timing.num_seqs
            self._seconds = FADE * self._seconds + seconds / plain


@dataclass(frozen=True, slots=True)
class ChainStop:
    """Tells a drafter that makes one draft token after another when to stop."""

    value: DraftValue
    source: str = ""

    def goes_on(self, seq: Sequence, confidences: list[float]) -> bool:
        return self.value.goes_on(seq, confidences, self.source)

    def of_loop(self, seqs: list[Sequence]) -> Callable[[], ChainLimits] | None:
        """What a loop over these sequences asks now and then; None: their clients asked for a number."""
        first = self.value.chain_limits(seqs, self.source)
        return None if first is None else lambda: self.value.chain_limits(seqs, self.source) or first


def _seconds_each(drafts: CostCurve) -> float:
    """Of one more draft token, over all numbers of them that were made; of one, before there were others."""
    longest = drafts.largest
    return (drafts.at(longest) - drafts.at(1)) / (longest - 1) if longest > 1 else drafts.at(1) if longest else 0.0


def is_cuttable(seq: Sequence, tree: DraftTree) -> bool:
    """Siblings that were drawn belong together, and a k that the client asked for is kept."""
    if tree.confidence is None or tree.probes or seq.params.num_draft_tokens is not None:
        return False
    return tree.probs is None or tree.is_chain


def _survival_by_depth(rates: PositionRates, tree: DraftTree) -> list[float]:
    """Of the first node of each depth; the others of that depth are alternatives, and count for nothing."""
    depth_of = depths(tree.parents[: tree.num_draft_tokens])
    by_depth, survival = rates.rates(max(depth_of, default=-1) + 1), 1.0
    weights: list[float] = []
    for node, depth in enumerate(depth_of):
        first = depth == 0 if node == 0 else depth > max(depth_of[:node])
        survival *= by_depth[depth] if first else 1.0
        weights.append(survival if first else 0.0)
    return weights


def _pays(pass_of: Callable[[int], float], width: int, worth: float) -> bool:
    """Whether one more token in a pass of this width costs less than it is worth, in seconds. Where the cost rises in
    steps, a token has its share of the next ones."""
    if worth <= 0:
        return False
    now = pass_of(width)
    return any(pass_of(width + count) - now < worth * count for count in AHEAD)
