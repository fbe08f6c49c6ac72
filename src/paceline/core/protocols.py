"""The three protocols, and the records they exchange.

Runner   how one model runs: many texts, each remembered in a slot
Drafter  how guesses are made
Engine   requests in, pieces out

Records are frozen. Token ids are tensors on the runner's device, parents are host lists, so that a round can be put
together without waiting for the device.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, overload, runtime_checkable

import torch
from torch import Tensor

from paceline.core.tree import DraftTree

if TYPE_CHECKING:
    from paceline.core.distribution import SamplingParams
    from paceline.core.sequence import Sequence
    from paceline.core.tally import Tally


# Prompts are cut at multiples of this. Runners that round to few bits attend to a prompt in tiles of this size, so that
# a text does not depend on what else was read beside it.
TILE = 64


class Ability(Enum):
    """What a runner can do beyond reading a chain. Asked once, at assembly."""

    TREE = "read a tree of guesses in one pass"
    HIDDEN = "hand out hidden states"
    EXIT = "stop after an inner layer"
    LOOP = "draft several steps without returning to the host"
    STRIDE = "write several of its own tokens without returning to the host"


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the rest of the program may know of a model."""

    name: str
    vocab_size: int
    end_tokens: frozenset[int]
    longest_text: int
    layers: int
    width: int
    device: str
    dtype: str


class Slot:
    """What a runner remembers of one text. `length` tokens are in it; runners add what they need in a subclass."""

    __slots__ = ("length",)

    def __init__(self) -> None:
        self.length = 0


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """Tokens to read after what a slot holds. parents[i] == -1: node i follows the slot's last token.

    `lead` is a token the host knows and that stands before `tokens`, which may still be in the making on a device:
    joining them is left to the runner, so that putting a row together never touches the device.
    """

    slot: Slot
    tokens: Tensor
    parents: list[int]
    lead: int | None = None

    def ids(self) -> Tensor:
        """All token ids of the row, where `tokens` are."""
        if self.lead is None:
            return self.tokens
        first = torch.tensor([self.lead], dtype=torch.int64, device=self.tokens.device)
        return torch.cat([first, self.tokens])

    @classmethod
    def chain(cls, slot: Slot, tokens: Tensor | list[int]) -> Row:
        ids = tokens if isinstance(tokens, Tensor) else torch.tensor(tokens, dtype=torch.int64)
        return cls(slot, ids, list(range(-1, ids.shape[0] - 1)))

    @property
    def is_chain(self) -> bool:
        return all(parent == node - 1 for node, parent in enumerate(self.parents))


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """What a pass said about one row.

    logits    [nodes, vocab], or [1, vocab] of the last node with last_only
    hidden    [nodes, width] after the final norm; None unless asked for
    features  [nodes, layers · width] hidden states entering the layers asked for, joined low to high; None otherwise
    """

    logits: Tensor
    hidden: Tensor | None = None
    features: Tensor | None = None

    def copied(self) -> Output:
        """The same in memory of its own: what a captured pass says lies where its next one will write."""
        hidden, features = (None if part is None else part.clone() for part in (self.hidden, self.features))
        return Output(self.logits.clone(), hidden, features)


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """The outputs of one pass, row by row, without losing that they lie packed in one tensor.

    Work done for a whole batch (an argmax, a softmax) takes `logits` as it is: one launch instead of one a text.
    """

    logits: Tensor  # [all nodes, vocab]
    sizes: list[int]
    hidden: Tensor | None = None  # [all nodes, width]; with last_only still of every node
    features: Tensor | None = None
    read: list[int] | None = None  # nodes per row of hidden and features, where that differs from `sizes`
    best: Tensor | None = None  # int64 [all nodes]: the argmax of each row of logits, where the pass has found it

    @classmethod
    def of(cls, outputs: list[Output]) -> Outputs:
        """Pack outputs that were made one by one."""
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

    def __getitem__(self, index: int) -> Output:
        start, read = sum(self.sizes[:index]), self.read or self.sizes
        first = sum(read[:index])
        here = slice(first, first + read[index])
        return Output(
            self.logits[start : start + self.sizes[index]],
            None if self.hidden is None else self.hidden[here],
            None if self.features is None else self.features[here],
        )

    def __iter__(self) -> Iterator[Output]:
        return (self[index] for index in range(len(self.sizes)))


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which nodes stand, and the target's own token after them."""

    path: list[int]
    token: int


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """What one round did to one text; handed to the drafter and the budget, which learn from it.

    emitted may be shorter than path + own token: an end token or a limit can cut inside the run.
    """

    tree: DraftTree
    verdict: Verdict
    output: Output
    emitted: list[int] = field(default_factory=list)
    accepted: int = 0  # guesses among the emitted tokens


class Runner(Protocol):
    """One model, many texts; remembers what it has read of each."""

    card: ModelCard
    abilities: frozenset[Ability]

    def open(self) -> Slot:
        """A new, empty slot."""

    def forward(self, rows: list[Row], *, last_only: bool = False) -> Outputs:
        """Read every row after what its slot holds, in one pass.

        Each slot then holds its row's nodes too, all of them, until `keep` says which of them stay. At most one row
        a slot. A row that is a tree needs Ability.TREE. Raises OutOfMemory, with the slots as they were before.
        """

    def keep(self, slot: Slot, nodes: list[int]) -> None:
        """Of the last row read, remember these nodes (one path from its top) and no others."""

    def trim(self, slot: Slot, length: int) -> None:
        """Forget all past this length."""

    def close(self, slot: Slot) -> None:
        """Give the slot's memory back. Closing twice is harmless."""

    def fork(self, slot: Slot, length: int) -> Slot:
        """A new slot that holds the first `length` tokens of this one; memory is shared where the runner can."""

    def room(self) -> int:
        """Tokens that can still be stored, over all slots. A round may write k + 1 a text."""


Adapter = Callable[[Tensor], Tensor]


class OpenRunner(Runner, Protocol):
    """A runner one can look into (Ability.HIDDEN, Ability.EXIT): what drafters that live on the target need."""

    def expose(self, *, hidden: bool = False, features: tuple[int, ...] = ()) -> None:
        """From now on hand out last hidden states, and the states entering these layers. Called at assembly."""

    def head(self, hidden: Tensor) -> Tensor:
        """Hidden states after the final norm -> logits."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens -> input vectors."""

    def exit_at(self, layer: int, adapter: Adapter | None = None) -> Runner:
        """The same model left after `layer` layers (final norm and head on top), on the same cache and slots.

        adapter: what a state goes through between the final norm and the head.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Lead:
    """A text to be drafted for in a loop: all its ids, and how its guesses are chosen."""

    slot: Slot
    ids: list[int]
    temperature: float = 0.0  # 0: the argmax
    chances: list[float] | None = None  # a uniform number a step; needed where the temperature is above 0


@dataclass(frozen=True, slots=True, eq=False)
class Guesses:
    """What a loop drafted, on the device: tokens [texts, steps]; probs [texts, steps, vocab], or None if chosen."""

    tokens: Tensor
    probs: Tensor | None = None


class LoopRunner(Runner, Protocol):
    """A runner that drafts several steps without returning to the host (Ability.LOOP)."""

    def loop(self, leads: list[Lead], steps: int) -> Guesses | None:
        """Draft `steps` tokens for every text; each slot then holds its text and all guesses but the last.

        None: not possible for these texts (too many, too long, greedy and sampled mixed); use `forward`.
        """


class StrideRunner(Runner, Protocol):
    """A runner that writes several of its own tokens without returning to the host (Ability.STRIDE)."""

    def stride(self, rows: list[Row], steps: int) -> Tensor | None:
        """Read each row, one token, then its best next token, and so on: the tokens written [texts, steps].

        They are those of as many passes through `forward`, bit for bit; each slot then holds all of them but the last.
        None: not possible for these texts (too many, too long, no room); use `forward`.
        """


class Drafter(Protocol):
    """Guesses what the target will say. State is kept per text, and nothing of one text shows in another."""

    needs: frozenset[Ability]  # of the target; checked once, at assembly

    def begin(self, text: Sequence, prompt: Output | None) -> None:
        """A text starts. `prompt` is the target's output for the tokens it has just read, all but the last one."""

    def propose(self, texts: list[Sequence], budgets: list[int]) -> list[DraftTree]:
        """At most budgets[i] guesses for texts[i]. May return fewer, or none."""

    def observe(self, texts: list[Sequence], rounds: list[Round]) -> None:
        """What became of the guesses. The texts have already grown."""

    def end(self, text: Sequence) -> None:
        """The text is over; forget it. Ending a text that never began is harmless.

        If `text.stays`, another text may go on from the target's cache of it: `begin` then brings only what is new
        there, and what a drafter has kept of the beginning saves it from guessing without.
        """


@dataclass(frozen=True, slots=True)
class Request:
    """One text to be written."""

    prompt: list[int]
    sampling: SamplingParams
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    ignore_end: bool = False
    method: str | None = None  # which drafter; None: the engine's own choice
    draft_tokens: int | None = None  # None: the engine's budget
    prediction: list[int] | None = None  # a draft the client brings
    logprobs: int | None = None  # how many alternatives to report a token; None: no probabilities at all
    constraint: Any = None  # core.sequence.Constraint


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely the target held one emitted token, and its best alternatives."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """A bit of a text as it is written: tokens of one origin, and the characters they complete."""

    text: str
    token_ids: tuple[int, ...] = ()
    guessed: bool = False
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: str | None = None
    tally: Tally | None = None  # on the last piece
    drafted: int | None = None  # on the last piece of a round: guesses put to the target in it, where that is known


@runtime_checkable
class Engine(Protocol):
    """Requests in, pieces out. The server, the bench and the command line speak only to this."""

    card: ModelCard

    def generate(self, request: Request) -> AsyncIterator[Piece]:
        """Write one text. Closing the iterator aborts the request within one round."""

    def tally(self) -> Tally:
        """All that was done since the engine started."""

    async def close(self) -> None:
        """Stop; texts in progress end with finish_reason "abort"."""


@overload
def as_outputs(outputs: Outputs) -> Outputs: ...
@overload
def as_outputs(outputs: list[Output]) -> Outputs: ...
def as_outputs(outputs: Outputs | list[Output]) -> Outputs:
    """A runner written for one text at a time may return a plain list."""
    return outputs if isinstance(outputs, Outputs) else Outputs.of(outputs)
