"""The algorithm: tensors in, tensors out. Knows no model, no tokenizer, no file, no clock."""

from paceline.core.cost_model import CostModel, StepTiming
from paceline.core.draft_length import AdaptiveDraftLength, DraftLengthPolicy, FixedDraftLength
from paceline.core.draft_tree import DraftTree
from paceline.core.protocols import Drafter, Engine, Runner
from paceline.core.sampling import History, SamplingParams, distribution, draw
from paceline.core.sequence import Constraint, Sequence
from paceline.core.stats import SpecStats
from paceline.core.stopping import Stop, StopRules
from paceline.core.types import (
    Capability,
    ModelInfo,
    ModelOutput,
    Request,
    RequestOutput,
    Row,
    RowOutput,
    SequenceCache,
    StepResult,
    TokenLogprob,
    VerifyResult,
)
from paceline.core.verify import RULE_NAMES, RULES, LossyTypical, accept, verify_block_rule

__all__ = [
    "RULES",
    "RULE_NAMES",
    "Capability",
    "AdaptiveDraftLength",
    "DraftLengthPolicy",
    "Constraint",
    "CostModel",
    "DraftTree",
    "Drafter",
    "Engine",
    "FixedDraftLength",
    "History",
    "LossyTypical",
    "ModelInfo",
    "RowOutput",
    "ModelOutput",
    "RequestOutput",
    "Request",
    "StepResult",
    "Row",
    "Runner",
    "SamplingParams",
    "Sequence",
    "SequenceCache",
    "Stop",
    "StopRules",
    "SpecStats",
    "StepTiming",
    "TokenLogprob",
    "VerifyResult",
    "accept",
    "verify_block_rule",
    "distribution",
    "draw",
]
