"""The three protocols.

Runner   how one model runs: many sequences, each with a sequence cache
Drafter  how draft tokens are made
Engine   requests in, outputs out

A class that implements one of them inherits from it: what has a sensible default then needs no code.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from paceline.core.draft_tree import DraftTree
from paceline.core.draft_value import DraftValue
from paceline.core.looped_steps import ChainLimits, LoopedSteps, LoopInput, LoopProgress, PlainGroups
from paceline.core.sequence import Sequence
from paceline.core.state_view import StateView
from paceline.core.stats import EngineStats
from paceline.core.types import (
    Capability,
    DraftInput,
    DraftOutput,
    LayerKeys,
    ModelInfo,
    ModelOutput,
    Request,
    RequestOutput,
    Row,
    RowOutput,
    SequenceCache,
    StepResult,
    WarmupPlan,
)
from paceline.errors import CapabilityError

Adapter = Callable[[Tensor], Tensor]
HeadUpdate = Callable[[], None]  # puts new weights of a head in place, between two steps
Preparation = Callable[[], None]  # compiles or captures one thing, and changes nothing that a sequence sees


class BlockPool(Protocol):
    """The blocks of a KV cache, as far as the scheduler uses them. kv/block_manager.py is the one implementation."""

    num_blocks: int
    block_size: int
    free: int

    @property
    def used(self) -> int: ...

    def num_held(self, holders: Iterable[Hashable]) -> int: ...
    def grow(self, holder: Hashable, tokens: int) -> bool: ...
    def shrink(self, holder: Hashable, tokens: int) -> None: ...
    def release(self, holder: Hashable) -> None: ...


class LoopSource(Protocol):
    """Where the draft tokens of a loop come from: all on the device, queued before the host has read a step.

    `begin`, then `draft` and `go_on` for every step in turn; `keep` for each sequence that goes on, when the host has
    read the step.
    """

    leaf_limits: Tensor | None = None  # on the device: which second choices a sequence alone sends too; None: none
    sends_trees: bool = False  # whether its draft tokens are trees, the first of them trees of fewer

    def begin(self, inputs: list[LoopInput], num_tokens: int) -> bool:
        """Make ready for steps of these sequences, in which each may grow by so many tokens; False: not possible for
        them."""

    def draft(self) -> DraftOutput:
        """Queue the draft tokens of a step, of these sequences or more, as many as were asked for or more."""

    def go_on(self, step: int, progress: LoopProgress, states: RowOutput) -> None:
        """Queue what the next step begins from.

        states: of the positions of `progress.best`, [sequences, draft tokens + 1, …], as far as the target returns any
        """

    def keep(self, step: int, index: int, num_tokens: int) -> None:
        """The sequence at this place has grown by so many tokens, and so has the target's cache of it."""


class ModelStates(Protocol):
    """What drafters that live on the target use, and embeddings: the states inside a model.

    A runner without them says so: needs are checked once, when the engine is built.
    """

    info: ModelInfo

    def expose(self, *, hidden: bool = False, features: tuple[int, ...] = ()) -> StateView:
        """From now on return last hidden states, and the states entering these layers (Capability.HIDDEN_STATES).

        Returns the view of outputs that holds what was asked for here, whatever others ask for.
        """
        raise _missing(self.info, Capability.HIDDEN_STATES)

    def hidden_view(self) -> Runner:
        """The same model on the same sequence caches, whose passes return last hidden states; this one's do not."""
        raise _missing(self.info, Capability.HIDDEN_STATES)

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Hidden states after the final norm -> logits."""
        raise _missing(self.info, Capability.HIDDEN_STATES)

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens -> input vectors."""
        raise _missing(self.info, Capability.HIDDEN_STATES)

    def limit_logits(self, vocab_rows: int) -> bool:
        """Until told otherwise passes leave out the logits of all tokens but the first so many; WHOLE_VOCABULARY: they
        give all. False: they always do. For draft models: what is left out is not drafted."""
        return False

    def shared_keys(self, seq_cache: SequenceCache) -> Mapping[str, LayerKeys]:
        """What is stored of a sequence by the last layer of each kind of attention (Capability.SHARED_KEYS)."""
        raise _missing(self.info, Capability.SHARED_KEYS)

    def early_exit(self, layer: int, adapter: Adapter | None = None) -> Runner:
        """The same model stopped after `layer` layers, on the same sequence caches (Capability.EARLY_EXIT).

        adapter: what a state goes through between the final norm and the head.
        """
        raise _missing(self.info, Capability.EARLY_EXIT)


class Runner(ModelStates, Protocol):
    """One model, many sequences. Owns the KV tensors; which blocks of them a sequence has is decided by its engine.

    blocks  the pool of the engine; the holder of blocks is a SequenceCache
    """

    info: ModelInfo
    capabilities: frozenset[Capability]
    blocks: BlockPool
    plain_only: str | None = None  # why draft tokens cannot be verified with this model; None: they can
    decode_steps: int = 1  # plain steps the runner takes in a row without returning to the host; 1: it does not

    # --- sequence caches ----------------------------------------------------------------------------------------------

    def new_cache(self) -> SequenceCache:
        """A new, empty sequence cache."""
        raise NotImplementedError

    def read_adapters(self, folders: Mapping[str, str]) -> None:
        """Read LoRA adapters by name; the `lora` of a sequence cache chooses one. Raises ModelError."""
        raise CapabilityError(f"LoRA adapters need a model that the native runner runs; {self.info.name} is not one")

    def commit(self, seq_cache: SequenceCache, nodes: list[int]) -> None:
        """Of the last row read, keep these nodes (one path from its top) and no others."""
        raise NotImplementedError

    def truncate(self, seq_cache: SequenceCache, length: int) -> None:
        """Forget all past this length."""
        raise NotImplementedError

    def free(self, seq_cache: SequenceCache) -> None:
        """Give the memory back. Freeing twice is harmless."""
        raise NotImplementedError

    def fork(self, seq_cache: SequenceCache, length: int) -> SequenceCache:
        """A new cache that holds the first `length` tokens of this one; memory is shared where the runner can."""
        raise NotImplementedError

    def free_tokens(self) -> int:
        """Tokens that can still be stored, over all sequences. A step may write k + 1 a sequence."""
        raise NotImplementedError

    # --- passes -------------------------------------------------------------------------------------------------------

    def forward(self, rows: list[Row], *, last_only: bool = False) -> ModelOutput:
        """Read every row after what its cache holds, in one pass.

        Each cache then holds its row's nodes too, all of them, until `commit` keeps some of them. At most one row
        a cache. A row that is a tree needs Capability.TREE. Raises OutOfMemory, with the caches as they were before.
        """
        raise NotImplementedError

    def draft(self, inputs: list[DraftInput], num_tokens: int) -> DraftOutput | None:
        """Draft `num_tokens` tokens for every sequence; each cache then also holds all of them but the last.

        None: this runner drafts step by step, through `forward`.
        """
        return None

    def decode(self, rows: list[Row], num_steps: int) -> Tensor | None:
        """Read each row, one token, then its best next token, and so on: the tokens generated [rows, steps].

        They are those of as many `forward` passes, bit for bit; each cache then holds all of them but the last.
        None: not possible for these rows now; use `forward`.
        """
        return None

    def draft_loop(self, source: LoopSource, inputs: list[LoopInput], num_steps: int) -> LoopedSteps | None:
        """Verify draft tokens by the argmax, step after step, without waiting for the host: so many, or as many as the
        sequences have room for.

        Each step comes while the next one runs, with the cache of every sequence as long as it has left it. The tokens
        are those of as many `forward` passes, bit for bit. None: not possible for these.
        """
        return None

    def loop_source(self, limits: Callable[[], ChainLimits] | None = None) -> LoopSource | None:
        """What drafts with this model in the loop of another one; None: it cannot.

        limits: its chains may end before they have as many draft tokens as were asked for. Asked again now and then
        """
        return None

    def plain_loop(self, inputs: list[LoopInput], num_steps: int) -> PlainGroups | None:
        """As `draft_loop` without draft tokens, a few steps at a time. Their states are those of `forward`."""
        return None

    def preparations(self, plan: WarmupPlan) -> list[Preparation]:
        """What the first sequences would otherwise wait for, piece by piece. None by default."""
        return []

    def rollback_draft(self, seq_cache: SequenceCache, length: int) -> None:
        """Like truncate; but verification may use what an early exit has computed past `length`."""
        self.truncate(seq_cache, length)


def _missing(info: ModelInfo, capability: Capability) -> CapabilityError:
    return CapabilityError(f"{info.name} cannot {capability.value}")


class Drafter(Protocol):
    """Proposes what the target will generate. State is kept per sequence, and none of it shows in another sequence."""

    needs: frozenset[Capability] = frozenset()  # of the target; checked once, when the engine is built
    draft_runner: Runner | None = None  # the model it drafts with, where it has one: its passes are measured
    looks_up: bool = False  # whether `propose` only looks something up: it takes next to no time and changes nothing

    def preparations(self, plan: WarmupPlan) -> list[Preparation]:
        """As of a runner; what drafts a few tokens more or less is also met when the loop is rehearsed."""
        return []

    def loops_trees(self, plan: WarmupPlan) -> bool:
        """Whether its draft tokens may be trees in several steps in a row, which need graphs of their own."""
        return False

    def rehearsed(self) -> list[Drafter]:
        """The drafters that the loop is rehearsed with, itself first: one that chooses adds those it may not choose
        on made-up sequences."""
        return [self]

    def use_value(self, value: DraftValue, source: str = "") -> None:
        """What drafts are worth, for a drafter that chooses among several or stops by it. source: its own name there.

        Called once, before the first sequence, where the draft-length policy decides how much of a draft is sent.
        """
        return None

    def begin(self, seq: Sequence, prompt: RowOutput | None) -> None:
        """A sequence starts. `prompt` is the target's output for the tokens it has just read, all but the last one."""
        return None

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        """At most num_draft_tokens[i] draft tokens for seqs[i]. May return fewer, or none."""
        raise NotImplementedError

    def look_up(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree] | None:
        """The draft tokens that are there without making any: as long as there are none, plain steps follow each other.
        None: it makes them."""
        return self.propose(seqs, num_draft_tokens) if self.looks_up else None

    def draft_loop(
        self, target: Runner, seqs: list[Sequence], num_draft_tokens: list[int], num_steps: int
    ) -> LoopedSteps | None:
        """Several steps of greedy sequences in a row, one result a sequence and step; `observe` hears of none of them.

        None: it drafts step by step, through `propose`.
        """
        return None

    def observe(self, seqs: list[Sequence], results: list[StepResult]) -> None:
        """What became of the draft tokens. The sequences have already grown."""
        return None

    def end(self, seq: Sequence) -> None:
        """The sequence is over; forget it. Ending a sequence that never began is harmless.

        If `seq.keep_cache`, another sequence may go on from the target's cache of it: `begin` then brings only what is
        new there, and what a drafter has kept of the prefix saves it from drafting without.
        """
        return None

    def head_update(self, folder: str) -> HeadUpdate | None:
        """Read new weights of the trained head, and return what puts them in place between two steps.

        Any thread may read. Shapes and addresses stay, so captured graphs stay valid. None: there is no head. Raises
        ModelNotFound or WeightsError; the head is then unchanged.
        """
        return None

    def with_runner(self, wrap: Callable[[Runner], Runner]) -> Drafter:
        """The same drafter with its draft model's runner wrapped: audit counts and replays its passes."""
        return self


class Tokenizer(Protocol):
    """Token ids <-> characters, for one model.

    `hf_tokenizer` is the tokenizer of transformers that it wraps, or a hub.resolved_tokenizer that answers for it.
    """

    hf_tokenizer: Any

    def encode(self, prompt: Any) -> list[int]:
        """Token ids of a string, or of chat messages through the model's template. Raises PromptError."""

    def decode(self, ids: list[int]) -> str:
        """Characters without the model's special tokens."""


class ExternalEngine:
    """What an engine cannot do that runs in another process or owns its loop: its hidden states are out of reach."""

    async def prepare(self, request: Request) -> None:
        """Nothing: the other side compiles grammars."""

    async def embed(self, token_ids: list[int], pooling: str) -> list[float]:
        raise CapabilityError("this engine gives no embeddings; serve the model with the local engine for them")

    async def update_head(self, folder: str) -> None:
        raise CapabilityError("this engine takes no new head while it runs; serve the model with the local engine")


@runtime_checkable
class Engine(Protocol):
    """Requests in, outputs out. The server, the decoder, bench and every command speak only to this.

    methods  names a request may give, the engine's default first
    """

    info: ModelInfo
    methods: tuple[str, ...]

    @property
    def tokenizer(self) -> Tokenizer: ...

    def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        """Generate one sequence. Closing the iterator aborts the request within one step.

        Raises OptionError or PromptError at once; StepFailed, OutOfMemory or EngineFailed on the way.
        """

    async def prepare(self, request: Request) -> None:
        """Do beside the event loop what `generate` would hold it up with, such as compiling a grammar.

        Optional before `generate`. Raises OptionError.
        """

    async def embed(self, token_ids: list[int], pooling: str) -> list[float]:
        """The last hidden states of a prompt as one vector of length 1. pooling: "mean", "last" or "cls".

        Raises CapabilityError where the engine has no hidden states; OptionError, PromptError or OutOfMemory.
        """
        return await ExternalEngine().embed(token_ids, pooling)

    async def update_head(self, folder: str) -> None:
        """Give the drafter's trained head the weights in a directory, between two steps. Output does not change.

        Raises CapabilityError where there is no head or the engine cannot; ModelNotFound or WeightsError.
        """
        await ExternalEngine().update_head(folder)

    def stats(self) -> EngineStats:
        """What the engine does now and has done since it started. Safe from any thread."""

    def check_health(self) -> None:
        """Raise EngineFailed where the worker has died: no request can succeed any more. Cheap; from any thread."""

    async def close(self) -> None:
        """Stop; sequences in progress end with finish_reason "abort"."""
