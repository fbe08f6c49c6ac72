"""The algorithm: tensors in, tensors out. Knows no model, no tokenizer, no file, no clock."""

from paceline.core.acceptance import RULE_NAMES, RULES, LossyTypical, accept, accept_block
from paceline.core.budget import AdaptiveBudget, Budget, FixedBudget
from paceline.core.costs import Costs, Timing
from paceline.core.distribution import History, SamplingParams, distribution, draw
from paceline.core.protocols import (
    Ability,
    Drafter,
    Engine,
    ModelCard,
    Output,
    Outputs,
    Piece,
    Request,
    Round,
    Row,
    Runner,
    Slot,
    TokenLogprob,
    Verdict,
)
from paceline.core.sequence import Constraint, Sequence
from paceline.core.stopping import Stop, StopRules
from paceline.core.tally import Tally
from paceline.core.tree import DraftTree

__all__ = [
    "RULES",
    "RULE_NAMES",
    "Ability",
    "AdaptiveBudget",
    "Budget",
    "Constraint",
    "Costs",
    "DraftTree",
    "Drafter",
    "Engine",
    "FixedBudget",
    "History",
    "LossyTypical",
    "ModelCard",
    "Output",
    "Outputs",
    "Piece",
    "Request",
    "Round",
    "Row",
    "Runner",
    "SamplingParams",
    "Sequence",
    "Slot",
    "Stop",
    "StopRules",
    "Tally",
    "Timing",
    "TokenLogprob",
    "Verdict",
    "accept",
    "accept_block",
    "distribution",
    "draw",
]
