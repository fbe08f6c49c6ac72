"""What a draft is worth: the seconds it saves against a plain step, and how much of it to send.

A token is worth the seconds that a token has taken lately. A draft token brings that with the probability that it and
all before it are accepted (confidence.py), and costs what it adds to the pass. Draft tokens are sent in falling order
of that probability as long as each is worth more than it costs.

Whether a draft token is sent depends on what was known before it was drawn: the confidences up to its own, which a
drafter states before it draws, and never on those after it. That keeps the output exact.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

from paceline.core.acceptance import PositionRates
from paceline.core.asked_length import best_length, useful_length
from paceline.core.confidence import CENTRES
from paceline.core.cost_model import CostModel, StepTiming
from paceline.core.draft_tree import ROOT, DraftTree, depths, select
from paceline.core.looped_steps import ChainLimits, LeafLimits
from paceline.core.sequence import Sequence
from paceline.core.source_record import ByBatchSize, DraftStats, SourceRecord, seconds_each
from paceline.core.token_worth import TokenWorth
from paceline.core.types import StepResult

PREDICTION = "prediction"
AHEAD = (1, 2, 4, 8)  # draft tokens over which a step in the cost of a pass is spread
MANY = 4  # draft tokens of a sequence over which what one adds to a pass is measured
LEAST_LEAF = 0.03  # tokens: what a second choice must promise, however cheap the curve says that it is
LEAST_SURVIVAL = 0.02  # a draft token that is nearly never accepted is not sent, however cheap the curve says it is


def kind_of(seq: Sequence) -> str:
    """Sequences that are drafted for in one way learn from each other: those of a method, those with a prediction."""
    return seq.params.method or (PREDICTION if seq.params.prediction else "")


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A draft token that may be sent."""

    survival: float  # the probability that it and all before it are accepted
    index: int  # of its sequence
    node: int


@dataclass(frozen=True, slots=True)
class CutDrafts:
    """The trees of a batch as they are sent, the survival of their nodes, and what each adds to the pass in seconds."""

    trees: list[DraftTree]
    survival: list[list[float]]
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
        self.worth = TokenWorth(costs)
        self._weighed: _Weighed | None = None  # the last draft of this step whose gain was asked for

    # --- what is known ------------------------------------------------------------------------------------------------

    def record(self, seq: Sequence, source: str = "") -> SourceRecord:
        key = (kind_of(seq), source)
        record = self._records.get(key)
        if record is None:
            record = self._records[key] = self._new_record(source)
        return record

    def _new_record(self, source: str) -> SourceRecord:
        """A source of a name drafts much alike for sequences of all kinds: a kind begins with what is known of it."""
        known = [record for (_, other), record in self._records.items() if source and other == source]
        return deepcopy(known[-1]) if known else SourceRecord()

    def token_seconds(self, num_seqs: int) -> float:
        """What a token takes lately in a batch of this size."""
        return self.worth.of_any(num_seqs)

    def survival(self, seq: Sequence, tree: DraftTree) -> list[float]:
        """Of every node: the probability that it and all before it are accepted."""
        record = self.record(seq, tree.source)
        if tree.confidence is None:
            return _survival_by_depth(record.rates, tree)
        first_leaf, survival = len(tree) - tree.leaves, list[float]()
        rates = record.table.rates(tree.confidence[:first_leaf])
        if tree.leaves:
            rates += record.leaf_table.rates(tree.confidence[first_leaf:])
        for rate, parent in zip(rates, tree.parents):
            survival.append(rate if parent == ROOT else survival[parent] * rate)
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
        return sum(drafts.survival[0]) * self.worth.of(tree.source, 1) - drafts.added[0]

    def _gain_among(self, seq: Sequence, tree: DraftTree, num_seqs: int) -> float:
        survival, nodes, costs = self.survival(seq, tree), list(range(len(tree))), self.costs.of(num_seqs)
        if is_cuttable(seq, tree):
            nodes = [candidate.node for candidate in self._sent(num_seqs, [survival], num_seqs)]
        tokens = sum([survival[node] for node in nodes if node < len(survival)])
        added = costs.pass_of(num_seqs + len(nodes)) - costs.pass_of(num_seqs)
        return tokens * self.worth.of(tree.source, num_seqs) - added

    def gain_behind(self, seq: Sequence, tree: DraftTree, num_tokens: int, num_seqs: int) -> float:
        """Seconds that the nodes of a draft behind its first so many tokens will save, if these come true."""
        survival, depth_of = self.survival(seq, tree), depths(tree.parents)
        nodes = [survival[node] for node in range(len(survival)) if depth_of[node] >= num_tokens]
        costs = self.costs.of(num_seqs)
        added = costs.pass_of(num_seqs + len(nodes)) - costs.pass_of(num_seqs)
        return sum(nodes) * self.token_seconds(num_seqs) - added

    def usual_gain(self, stats: ByBatchSize[DraftStats], num_seqs: int = 1, source: str = "") -> float:
        """Seconds that such drafts save lately, less those of making them. 0 before the first one. source: of tokens
        that are worth more than usual here."""
        usual = stats.of(num_seqs)
        return usual.tokens * self.worth.of(source, num_seqs) - usual.cost

    def goes_on(self, seq: Sequence, confidences: list[float], source: str = "") -> bool:
        """Whether a draft token after these, about as sure as the last, is worth making and sending."""
        if seq.params.num_draft_tokens is not None:
            return True  # as many as the client asked for
        record, survival, count = self.record(seq, source), 1.0, len(confidences)
        for confidence in (*confidences, confidences[-1]):
            survival *= record.table.rate(confidence)
        making = max(0.0, record.draft.at(count + 1) - record.draft.at(count))
        return _pays(self.costs.pass_alone, count + 1, survival * self.worth.of(source, 1) - making)

    def chain_limits(self, seqs: list[Sequence], source: str = "") -> ChainLimits | None:
        """The same for a loop on a device, which decides by itself: one more draft token of all sequences is worth
        making if it promises as many tokens as its seconds would bring. None: the client asked for a number."""
        if any(seq.params.num_draft_tokens is not None for seq in seqs):
            return None
        record, num_seqs = self.record(seqs[0], source), len(seqs)
        costs = self.costs.of(num_seqs)
        added = (costs.pass_of(num_seqs * (1 + MANY)) - costs.pass_of(num_seqs)) / MANY
        seconds = seconds_each(record.drafts.of(num_seqs)) * num_seqs or seconds_each(self.costs.draft)
        worth, record.stops_itself = self.token_seconds(num_seqs), True
        rates, leaf_rates = (tuple(map(table.rate, CENTRES)) for table in (record.table, record.leaf_table))
        leaves = LeafLimits(max(LEAST_LEAF, added / worth), leaf_rates) if num_seqs == 1 else None
        return ChainLimits((seconds + added) / worth, rates, leaves)

    def useful_length(self, seq: Sequence, limit: int, source: str = "") -> int:
        """Draft tokens to ask a source for whose drafts are cut: all there is room for, unless most is in vain."""
        return useful_length(self.record(seq, source), self.costs, limit)

    def best_length(self, seq: Sequence, limit: int, source: str = "") -> int:
        """Draft tokens to ask a source for that states no confidences: the most tokens a second, one at least."""
        return best_length(self.record(seq, source), self.costs, limit)

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
        trees = [select(tree, sorted(own)) for tree, own in zip(trees, nodes)]
        survival = [[own[node] for node in sorted(kept) if node < len(own)] for own, kept in zip(weights, nodes)]
        return CutDrafts(trees, survival, self._added([len(own) for own in nodes]))

    def whole(self, seqs: list[Sequence], trees: list[DraftTree]) -> CutDrafts:
        """The trees as they are. What a step in a row adds was measured by the length of its chain."""
        survival = [self.survival(seq, tree) if len(tree) else [] for seq, tree in zip(seqs, trees)]
        lengths = [len(tree) if tree.is_chain else max(depths(tree.parents)) + 1 for tree in trees]
        return CutDrafts(trees, survival, self._added(lengths))

    def _cut_alone(self, seq: Sequence, tree: DraftTree) -> CutDrafts:
        """The same for one sequence, for which several drafts may be weighed in a step: it is quick."""
        if not len(tree):
            return CutDrafts([tree], [[]], [0.0])
        survival, nodes = self.survival(seq, tree), list(range(len(tree)))
        if is_cuttable(seq, tree):
            nodes = self._sent_alone(survival, self.worth.of(tree.source, 1))
        sent = [survival[node] for node in nodes if node < len(survival)]
        added = self.costs.pass_alone(1 + len(nodes)) - self.costs.pass_alone(1)
        return CutDrafts([select(tree, nodes)], [sent], [added])

    def _sent_alone(self, survival: list[float], worth: float) -> list[int]:
        """As `_sent`, the nodes of one sequence in their order."""
        order = sorted(range(len(survival)), key=survival.__getitem__, reverse=True)
        pass_of, tokens = self.costs.pass_alone, 1.0
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
                reach = max(depths(sent.parents[: sent.num_draft_tokens])) + 1
                record.reached(sent.num_draft_tokens, reach)
                record.rates.observe(reach, accepted)
            return
        table, record.states_confidence = record.table, True
        if proposed.probs is not None:
            for depth, confidence in enumerate(proposed.confidence[: min(accepted + 1, len(sent))]):
                table.observe(confidence, depth < accepted)
            return
        record.compare(proposed, [*result.verified.tokens, result.verified.next_token])

    def stepped(self, timing: StepTiming, results: list[StepResult], draft_seconds: float) -> None:
        """A step took about this long to draft. Costs are the learned ones: no hiccups."""
        self._weighed = None
        self.worth.stepped(timing, results, draft_seconds)


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
