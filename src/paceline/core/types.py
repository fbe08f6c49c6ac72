"""Records that the rooms exchange. Nothing here computes; protocols are in core/protocols.py.

Records are frozen. Token ids are tensors on the runner's device, parents are host lists, so that a step can be put
together without waiting for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from paceline.core.draft_tree import DraftTree, is_chain
from paceline.core.sampling import SamplingParams
from paceline.core.stats import SpecStats


class Capability(Enum):
    """What a runner can do beyond reading a chain. Checked once, when the engine is built."""

    TREE = "verify a draft tree in one pass"
    HIDDEN_STATES = "return hidden states"
    EARLY_EXIT = "stop after an inner layer"
    BATCH_INVARIANT = "compute the same bits for a sequence in every batch"
    SHARED_KEYS = "share the keys and values it has stored"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the rest of the program may know of a model.

    rows_rounded_alike  of a pass: more of them are rounded in another way. None: nothing depends on their number
    """

    name: str
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_seq_len: int
    num_layers: int
    hidden_size: int
    device: str
    dtype: str
    rows_rounded_alike: int | None = None


@dataclass(frozen=True, slots=True)
class WarmupPlan:
    """What to compile and capture before the first sequence.

    widths            tokens of one sequence in a pass
    num_draft_tokens  that a step may draft
    max_context       tokens that a sequence may hold
    num_seqs          sizes of batches
    quick_batches     sizes that are prepared too where that takes next to no time
    trees             whether draft tokens may be trees
    """

    widths: tuple[int, ...]
    num_draft_tokens: tuple[int, ...]
    max_context: int
    num_seqs: tuple[int, ...] = (1,)
    quick_batches: tuple[int, ...] = ()
    trees: bool = False


class SequenceCache:
    """The KV cache of one sequence in one runner: `length` tokens are stored. Runners subclass it.

    lora  the adapter that its tokens are read with; None: the model as it is
    """

    __slots__ = ("length", "lora")

    def __init__(self) -> None:
        self.length = 0
        self.lora: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LayerKeys:
    """Keys and values that one layer has stored for one sequence. Each [num_kv_heads, tokens, head_dim]"""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """Tokens to read after what a sequence cache holds. parents[i] == -1: node i follows the cache's last token.

    `lead` is a token the host knows that comes before `tokens`, which a device may still be computing: the runner joins
    them, so that building a row never touches the device.
    """

    seq_cache: SequenceCache
    tokens: Tensor
    parents: list[int]
    lead: int | None = None

    def ids(self) -> Tensor:
        """All token ids of the row, on the device of `tokens`."""
        if self.lead is None:
            return self.tokens
        first = torch.tensor([self.lead], dtype=torch.int64, device=self.tokens.device)
        return torch.cat([first, self.tokens]) if len(self.parents) > 1 else first

    @classmethod
    def chain(cls, seq_cache: SequenceCache, tokens: Tensor | list[int]) -> Row:
        ids = tokens if isinstance(tokens, Tensor) else torch.tensor(tokens, dtype=torch.int64)
        return cls(seq_cache, ids, list(range(-1, ids.shape[0] - 1)))

    @property
    def is_chain(self) -> bool:
        return is_chain(self.parents)


@dataclass(frozen=True, slots=True, eq=False)
class RowOutput:
    """The model output for one row.

    logits    [nodes, vocab], or [1, vocab] of the last node with last_only
    hidden    [nodes, hidden_size] after the final norm; None unless exposed
    features  [nodes, layers · hidden_size] hidden states entering the exposed layers, joined low to high, or None
    """

    logits: Tensor
    hidden: Tensor | None = None
    features: Tensor | None = None

    def clone(self) -> RowOutput:
        """The same in memory of its own: the next replay of a CUDA graph overwrites the output of this one."""
        hidden, features = (None if part is None else part.clone() for part in (self.hidden, self.features))
        return RowOutput(self.logits.clone(), hidden, features)


@dataclass(frozen=True, slots=True, eq=False)
class ModelOutput:
    """The output of one forward pass, packed row after row in one tensor.

    Work done for a whole batch (an argmax, a softmax) takes `logits` as it is: one launch instead of one a sequence.
    """

    logits: Tensor  # [all nodes, vocab]
    sizes: list[int]
    hidden: Tensor | None = None  # [all nodes, hidden_size]; with last_only still of every node
    features: Tensor | None = None
    read: list[int] | None = None  # nodes per row of hidden and features, where that differs from `sizes`
    best: Tensor | None = None  # int64 [all nodes]: the argmax of each row of logits, where the pass has computed it

    @classmethod
    def of(cls, outputs: list[RowOutput]) -> ModelOutput:
        """Pack outputs that were computed one by one."""
        hidden = [output.hidden for output in outputs if output.hidden is not None]
        features = [output.features for output in outputs if output.features is not None]
        return cls(
            torch.cat([output.logits for output in outputs]),
            [output.logits.shape[0] for output in outputs],
            torch.cat(hidden) if hidden else None,
            torch.cat(features) if features else None,
            [part.shape[0] for part in hidden or features] or None,
        )

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> RowOutput:
        if self.sizes == [1] and self.read is None and self.logits.shape[0] == 1:  # a plain step has no other part
            return RowOutput(self.logits, self.hidden, self.features)
        start, read = sum(self.sizes[:index]), self.read or self.sizes
        first = sum(read[:index])
        here = slice(first, first + read[index])
        return RowOutput(
            self.logits[start : start + self.sizes[index]],
            None if self.hidden is None else self.hidden[here],
            None if self.features is None else self.features[here],
        )

    def __iter__(self) -> Iterator[RowOutput]:
        return (self[index] for index in range(len(self.sizes)))


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """The accepted nodes of a draft tree, their token ids, and the target's own token after them."""

    accepted: list[int]
    next_token: int
    tokens: list[int] = field(default_factory=list)  # of the accepted nodes


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What one step did to one sequence. The drafter and the draft-length policy learn from it.

    emitted may be shorter than the accepted tokens plus the next token: an end token or a limit can cut inside the run.
    """

    tree: DraftTree
    verified: VerifyResult
    output: RowOutput
    emitted: list[int] = field(default_factory=list)
    accepted: int = 0  # draft tokens among the emitted ones

    @property
    def kept_rows(self) -> list[int]:
        """Of the output: the rows of tokens that now have an emitted one behind them. Without a tree there is one for
        each step, and several steps may have been taken as one."""
        if not len(self.tree):
            return list(range(len(self.emitted)))
        return [0, *(node + 1 for node in self.verified.accepted)][: len(self.emitted)]

    def add_to(self, stats: SpecStats) -> None:
        """Count this step. Several plain steps that were taken as one count as several."""
        if not len(self.tree):
            stats.add_plain(len(self.emitted))
        else:
            cut = len(self.emitted) < len(self.verified.accepted) + 1
            stats.add_step(self.tree, self.accepted, len(self.emitted), cut)


@dataclass(frozen=True, slots=True, eq=False)
class DraftInput:
    """A sequence to draft for: all its ids, and how its draft tokens are chosen."""

    seq_cache: SequenceCache
    ids: list[int]
    temperature: float = 0.0  # 0: the argmax
    uniforms: list[float] | None = None  # one number a step; needed where the temperature is above 0


@dataclass(frozen=True, slots=True, eq=False)
class DraftOutput:
    """Draft tokens on the device.

    tokens      [seqs, steps]
    probs       [seqs, steps, vocab]; None: chosen, not drawn
    confidence  [seqs, steps], where the drafter states it
    count       [1]: how many of the steps were taken, where the device decides it; what the others left means nothing
    second      the second choice of every step, where there is one, …
    second_confidence  … and how likely it is
    parents     [seqs, steps], of trees: the node before each, which comes before it. Node 0 is the sequence itself
    """

    tokens: Tensor
    probs: Tensor | None = None
    confidence: Tensor | None = None
    count: Tensor | None = None
    second: Tensor | None = None
    second_confidence: Tensor | None = None
    parents: Tensor | None = None


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Tokens of a prompt that the prefix cache held, and those that it keeps from now on."""

    found: int = 0
    written: int = 0


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """What the output must match.

    kind   "json_schema", "json_object", "regex", "choice", "grammar" (Lark or GBNF) or "structural_tag"
    value  the schema as JSON text, the expression, the choices as a JSON list, the grammar, the tags as JSON text;
           empty for "json_object"
    """

    kind: str
    value: str = ""


@dataclass(frozen=True, slots=True)
class ReasoningSpan:
    """Reasoning at the start of an output: what must match a grammar begins after it, and its length can be limited.

    begin, end      the marks around it, as characters
    opening_tokens  of `begin`
    closing_tokens  what is generated to close it once it has max_tokens
    is_open         the prompt has already opened it
    """

    begin: str
    end: str
    opening_tokens: tuple[int, ...]
    closing_tokens: tuple[int, ...]
    is_open: bool = False
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate."""

    prompt: list[int]
    sampling: SamplingParams
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_new_tokens: int = 0  # no end-of-sequence token before this many; stop strings still end the sequence
    method: str | None = None  # which drafter; None: the engine's default
    num_draft_tokens: int | None = None  # None: the engine's draft-length policy
    prediction: list[int] | None = None  # a draft the client brings
    logprobs: int | None = None  # alternatives to report for each token; None: no log-probabilities at all
    logprob_token_ids: tuple[int, ...] = ()  # the alternatives to report, where logprobs are; empty: the likeliest
    structured_output: StructuredOutput | None = None
    prompt_logprobs: int | None = None  # alternatives to report for each prompt token; None: none at all
    stop_token_ids: tuple[int, ...] = ()  # end the sequence as an end-of-sequence token does, also with ignore_eos
    include_stop: bool = False  # the text keeps the stop string or the stop token that ended it
    skip_special_tokens: bool = True  # in the text
    bad_words: tuple[str, ...] = ()  # their token ids never follow one another in the output
    allowed_token_ids: tuple[int, ...] | None = None  # no others are generated; None: any
    reasoning: ReasoningSpan | None = None
    lora: str | None = None  # which adapter of the engine; None: the model as it is
    priority: int = 0  # among requests that wait: a lower number is first
    whole: bool = False  # the reader wants all of it: outputs may come at once when the sequence has ended


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of one token under the target, and its best alternatives, the likeliest first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0  # 1: the likeliest token; 0: not computed


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A part of a generated sequence: tokens of one origin, and the characters they complete."""

    text: str
    token_ids: tuple[int, ...] = ()
    from_draft: bool = False
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: str | None = None
    stats: SpecStats | None = None  # on the last output
    num_drafted: int | None = None  # on the last output of a step: draft tokens verified in it, where that is known
    stop_reason: int | str | None = None  # on the last output: the stop token or stop string; None: an end token
    num_cached_tokens: int | None = None  # on the last output: prompt tokens that the prefix cache held, where known
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None  # on the first output: of every prompt token but the first
    num_cache_write_tokens: int | None = None  # on the last output: prompt tokens added to the prefix cache
