"""transformers' logits processors and stopping criteria, applied to single nodes of a draft tree.

A processor is a function of the tokens so far and of the logits after them. So the distribution after a draft token is
what the processors make of its logits when its path is taken for granted: exactly what plain decoding would sample
from, had it come that way. Rows have the padding of the call in front, because processors count positions in them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.core.sampling import SamplingParams
from paceline.core.sequence import ScoreProcessor
from paceline.core.stopping import StopRules
from paceline.errors import OptionError

NO_LIMIT = 1 << 20
# transformers' class -> (where it keeps its value, our setting)
VECTORISED = {
    "TemperatureLogitsWarper": ("temperature", "temperature"),
    "TopKLogitsWarper": ("top_k", "top_k"),
    "TopPLogitsWarper": ("top_p", "top_p"),
    "MinPLogitsWarper": ("min_p", "min_p"),
    "RepetitionPenaltyLogitsProcessor": ("penalty", "repetition_penalty"),
}
# Processors that keep a state from call to call: they cannot be asked about draft tokens.
STATEFUL = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "SynthIDTextWatermarkLogitsProcessor": "a SynthID watermarking_config",
}


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A row of the batch: its place, and how many there are."""

    index: int
    num_rows: int = 1

    def source(self, num_prompts: int) -> int:
        """The prompt that the row was made from: num_return_sequences repeats each."""
        return self.index * num_prompts // self.num_rows


@dataclass(frozen=True, slots=True)
class Processing:
    """What a list of processors asks for.

    sampling  our settings for those that we have; a draft is drawn with these alone
    exact     whether they are all there is: nothing need be processed node by node
    """

    sampling: SamplingParams
    exact: bool


def processing_of(processors: Any, do_sample: bool) -> Processing:
    """Our settings for a list of transformers' processors. Raises OptionError for one that keeps a state."""
    settings: dict[str, Any] = {"temperature": 1.0}
    exact = True
    for processor in processors or ():
        kind = type(processor).__name__
        if kind in STATEFUL:
            raise OptionError(f"hf_generate cannot verify draft tokens with {STATEFUL[kind]}: call generate without it")
        if kind not in VECTORISED or getattr(processor, "prompt_ignore_length", None):
            exact = False
            continue
        attribute, setting = VECTORISED[kind]
        exact = exact and setting not in settings.keys() - {"temperature"}  # twice is more than one setting says
        settings[setting] = getattr(processor, attribute)
    chosen = settings if do_sample else {**settings, "temperature": 0.0}
    return Processing(SamplingParams(**chosen), exact)


@dataclass(slots=True)
class ScoreRecord:
    """What was computed for the accepted tokens of one sequence, in the order of transformers' output fields."""

    logits: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)


@dataclass(slots=True)
class NodeProcessor(ScoreProcessor):
    """Processors over one row of the batch.

    prompt  int64 [prompt]: the row as it was given, padding included
    row     its place in the batch: some processors answer for the rows one by one
    record  where logits and scores of accepted tokens go; None: not kept
    """

    processors: list[Any]
    prompt: Tensor
    row: BatchRow
    record: ScoreRecord | None = None
    _generated: list[int] = field(default_factory=list)
    _computed: dict[tuple[int, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.processors = [_for_row(processor, self.row) for processor in self.processors]

    def process(self, path: list[int], scores: Tensor) -> Tensor:
        added = torch.tensor(self._generated + path, dtype=self.prompt.dtype, device=self.prompt.device)
        ids = torch.cat([self.prompt, added])[None].to(scores.device)
        processed = scores[None].clone()
        for processor in self.processors:
            processed = processor(ids, processed)
        if self.record is not None:
            self._computed[tuple(path)] = (scores.clone(), processed[0].clone())
        return processed[0]

    def advance(self, tokens: list[int]) -> None:
        if self.record is not None:
            for depth in range(len(tokens)):
                logits, scores = self._computed[tuple(tokens[:depth])]
                self.record.logits.append(logits)
                self.record.scores.append(scores)
            self._computed.clear()
        self._generated += tokens


def _for_row(processor: Any, row: BatchRow) -> Any:
    """A processor that is called with one row at a time, and not with the batch."""
    narrow = BY_ROW.get(type(processor).__name__)
    return processor if narrow is None else narrow(copy.copy(processor), row)


def _prefix_constrained(processor: Any, row: BatchRow) -> Any:
    allowed = processor._prefix_allowed_tokens_fn
    return type(processor)(lambda _, ids: allowed(row.index, ids), 1)


def _encoder_repetition_penalty(processor: Any, row: BatchRow) -> Any:
    source = row.source(len(processor.encoder_input_ids))
    processor.encoder_input_ids = processor.encoder_input_ids[source : source + 1]
    return processor


def _encoder_no_repeat(processor: Any, row: BatchRow) -> Any:
    processor.generated_ngrams = [processor.generated_ngrams[row.source(processor.batch_size)]]
    processor.batch_size = 1
    return processor


BY_ROW = {
    "PrefixConstrainedLogitsProcessor": _prefix_constrained,
    "EncoderRepetitionPenaltyLogitsProcessor": _encoder_repetition_penalty,
    "EncoderNoRepeatNGramLogitsProcessor": _encoder_no_repeat,
}


def stop_rules_of(criteria: Any, prompt: Tensor) -> StopRules:
    """What ends a sequence, from a list of transformers' criteria. prompt: the row as it was given, [prompt]"""
    max_new_tokens, eos, others = NO_LIMIT, frozenset[int](), []
    for criterion in criteria or ():
        kind = type(criterion).__name__
        if kind == "MaxLengthCriteria":
            max_new_tokens = min(max_new_tokens, criterion.max_length - len(prompt))
        elif kind == "EosTokenCriteria":
            eos |= frozenset(criterion.eos_token_id.tolist())
        else:
            others.append(criterion)

    def ends(generated: list[int]) -> bool:
        ids = torch.cat([prompt, torch.tensor(generated, dtype=prompt.dtype, device=prompt.device)])[None]
        return any(bool(torch.as_tensor(criterion(ids, None)).any()) for criterion in others)

    return StopRules(max_new_tokens, eos, ends=ends if others else None)
