"""How many draft tokens a source is asked for."""

from __future__ import annotations

from paceline.core.acceptance import expected_tokens
from paceline.core.cost_model import CostModel
from paceline.core.source_record import SourceRecord

MIN_SECONDS = 1e-9  # no step is quicker, whatever a clock says
FIRST_WHOLE = 4  # drafts that show what a source is worth at its best, before it is known how long they should be
WORTH_SAVING = 0.02  # of a plain pass: a drafter that is no quicker with fewer draft tokens makes all it may


def useful_length(record: SourceRecord, costs: CostModel, limit: int) -> int:
    """Where drafts are cut: all there is room for, unless most is in vain.

    That fewer take less time must have been seen: a block takes one pass whatever its length.
    """
    longest = min(limit, record.draft.largest)  # a head makes no more than its block holds, whatever is asked for
    if longest < 2 or record.stops_itself or record.stats.of(1).num_drafts < FIRST_WHOLE:
        return limit
    length = record.depths.length(longest, record.draft.at)
    saved = record.draft.at(longest) - record.draft.at(length)
    return length if saved > WORTH_SAVING * costs.plain_pass(1) else limit


def best_length(record: SourceRecord, costs: CostModel, limit: int) -> int:
    """Where drafts are sent as they are made: the most tokens a second, one at least."""
    if record.makes_trees:
        return _best_nodes(record, costs, limit)
    alone, tokens = costs.of(1), 1.0
    best, best_rate, survival = 1, 0.0, 1.0
    for k, rate in enumerate(record.rates.rates(limit), start=1):
        survival *= rate
        tokens += survival
        speed = tokens / max(alone.pass_of(k + 1) + record.draft.at(k), MIN_SECONDS)
        if speed > best_rate:
            best, best_rate = k, speed
    return best


def _best_nodes(record: SourceRecord, costs: CostModel, limit: int) -> int:
    """The same for trees, which take as long to make whatever their size.

    The likeliest nodes come first and lie at all depths: the k-th is taken to bring one k-th of what the first does.
    What a node adds to the pass is taken from all widths together: some were met in single steps, where the host's
    time counts, and others only in a row.
    """
    made = max(1, record.draft.largest)
    reach = max(1, round(made * record.depth_share))
    first = (expected_tokens(record.rates.rates(reach)) - 1.0) / sum(1.0 / k for k in range(1, made + 1))
    plain, making = costs.plain_pass(1), record.draft.at(min(limit, made))
    each = (costs.pass_alone(limit + 1) - plain) / max(1, limit)
    best, best_rate, tokens = 1, 0.0, 1.0
    for k in range(1, limit + 1):
        tokens += first / k
        speed = tokens / max(plain + each * k + making, MIN_SECONDS)
        if speed > best_rate:
            best, best_rate = k, speed
    return best
