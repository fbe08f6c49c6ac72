"""A draft model of another family, whose tokens are not the target's.

The text is told to the draft in characters: it is tokenised by the draft's own tokenizer before every round, and the
draft's cache keeps whatever that did not change. Guesses come back in one of two ways:

text    the draft writes on; the characters it wrote are tokenised as the target would, starting exactly where the
        text's last token ends. Such guesses are chosen, q is one-hot. Nothing is out of reach: best for greedy texts.
shared  the draft may only say tokens that the target has too. Its logits, cut down to those, are its distribution
        over the target's vocabulary: guesses are drawn from it and q is real. Best for sampled texts.

Either way the target's own rule decides, so a bad translation costs acceptance and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.core import tree
from paceline.core.protocols import TILE, Ability, Output, Round, Row, Runner, Slot, as_outputs
from paceline.core.sequence import Sequence
from paceline.core.tree import DraftTree
from paceline.drafting.choosing import Drawn, choose
from paceline.drafting.residents import Residents
from paceline.errors import OptionError, PairError
from paceline.kv.prefixes import shared_beginning
from paceline.models.vocabulary import SAME, SHARED, TEXT, pairing, shared_tokens

AUTO = "auto"
HALF_A_CHARACTER = "\ufffd"  # what a tokenizer writes for bytes whose character is not complete
BESIDE = 16  # tokens before a boundary that are enough to tokenise what comes after it


class Script:
    """One side's tokenizer: ids to characters and back. Speaks to the tokenizer's own engine, which is ten times
    quicker than the layers around it: this is asked several times a round."""

    def __init__(self, tokenizer: Any) -> None:
        self._engine = tokenizer.backend_tokenizer
        self._first: int | None = tokenizer.bos_token_id
        self.end: int | None = tokenizer.eos_token_id

    def characters(self, ids: Ordered[int]) -> str:
        return str(self._engine.decode(list(ids), skip_special_tokens=False))

    def whole(self, text: str) -> list[int]:
        """The ids of a text from its very beginning, with whatever this family puts in front."""
        return list(self._engine.encode(text).ids)

    def after(self, before: str, piece: str) -> list[int]:
        """The ids of `piece` when it follows `before`. A token that would cross the boundary is not made: the text's
        last token has ended there for good."""
        said = self._engine.encode(before + piece, add_special_tokens=False)
        if all(end <= len(before) or start >= len(before) for start, end in said.offsets):
            return [id_ for id_, (start, _) in zip(said.ids, said.offsets) if start >= len(before)]
        return list(self._engine.encode(piece, add_special_tokens=False).ids)

    def told(self, ids: list[int]) -> str:
        """A text in characters, without the token this family begins every text with."""
        return self.characters(ids[1:] if ids and ids[0] == self._first else ids)


@dataclass(slots=True, eq=False)
class _Talk:
    """One text as the draft sees it."""

    slot: Slot
    read: list[int] = field(default_factory=list)  # what the slot holds, in the draft's tokens


@dataclass(slots=True, eq=False)
class _Writing:
    """The guesses of one round for one text, in the making."""

    text: Sequence
    talk: _Talk
    prompt: list[int]  # all of the text, in the draft's tokens
    way: str
    budget: int
    tokens: list[Tensor] = field(default_factory=list)  # each int64 [1]: the draft's tokens
    drawn: Drawn = field(default_factory=Drawn)  # the same in the target's vocabulary, if SHARED

    @property
    def room(self) -> int:
        """Tokens the draft may write down in this round, rounded up to pages."""
        return len(self.prompt) - self.talk.slot.length + self.budget + TILE

    def row(self) -> Row:
        if self.tokens:
            return Row(self.talk.slot, self.tokens[-1], [-1])
        return Row.chain(self.talk.slot, self.prompt[self.talk.slot.length :])


class Foreign:
    """Drafts a chain with a model whose vocabulary is another.

    way  `text` or `shared` for every text, or `auto`: what suits the pair and the text's sampling
    """

    needs: frozenset[Ability] = frozenset()

    def __init__(self, runner: Runner, target: Any, draft: Any, vocab_size: int, way: str = AUTO) -> None:
        """target, draft: tokenizers. vocab_size: the target's."""
        if way not in (AUTO, TEXT, SHARED):
            raise OptionError(f"a foreign draft guesses by way of {TEXT}, {SHARED} or {AUTO}, not {way!r}")
        for name, tokenizer in (("target", target), ("draft", draft)):
            if getattr(tokenizer, "backend_tokenizer", None) is None:
                raise PairError(f"the {name}'s tokenizer cannot tell where its tokens lie (it has no tokenizer.json)")
        self.runner = runner
        self.pairing = pairing(target, draft)
        self._way = way
        self._ours, self._theirs = Script(target), Script(draft)
        self._vocab = vocab_size
        shared = shared_tokens(target, draft)
        pairs = [pair for pair in zip(shared.target_ids, shared.draft_ids) if pair[0] < vocab_size]
        device = runner.card.device
        self._shared_ours = torch.tensor([ours for ours, _ in pairs], dtype=torch.int64, device=device)
        self._shared_theirs = torch.tensor([theirs for _, theirs in pairs], dtype=torch.int64, device=device)
        self._as_theirs = torch.zeros(vocab_size, dtype=torch.int64, device=device)
        self._as_theirs[self._shared_ours] = self._shared_theirs
        self._talks: dict[int, _Talk] = {}
        self._residents = Residents(runner)

    def begin(self, text: Sequence, prompt: Output | None) -> None:
        """The draft reads the prompt when it is first asked."""

    def propose(self, texts: list[Sequence], budgets: list[int]) -> list[DraftTree]:
        writings = [self._start(text, budget) for text, budget in zip(texts, budgets)]
        self._residents.make_room(sum(writing.room for writing in writings if writing is not None))
        for depth in range(max(budgets, default=0)):
            active = [writing for writing in writings if writing is not None and depth < writing.budget]
            if active:
                said = as_outputs(self.runner.forward([writing.row() for writing in active], last_only=True))
                self._choose(active, said.logits)
        return [tree.empty() if writing is None else self._finish(writing) for writing in writings]

    def observe(self, texts: list[Sequence], rounds: list[Round]) -> None:
        """Nothing to learn: the next round tells the text anew, and the cache is cut where it differs."""

    def end(self, text: Sequence) -> None:
        talk = self._talks.pop(text.number, None)
        if talk is not None and text.stays:
            self._residents.keep(talk.read, talk.slot)
        elif talk is not None:
            self.runner.close(talk.slot)

    def way_of(self, text: Sequence) -> str:
        """How guesses for this text travel."""
        if self._way != AUTO:
            return self._way
        way = self.pairing.greedy if text.sampling.greedy else self.pairing.sampled
        return SHARED if way == SAME else way

    def _start(self, text: Sequence, budget: int) -> _Writing | None:
        """Tell the draft the text. None: nothing can be guessed now."""
        if not budget:
            return None
        told = self._ours.told(text.ids)
        if told.endswith(HALF_A_CHARACTER):
            return None  # no characters to go on from, until the target has finished this one
        prompt = self._theirs.whole(told)
        if not prompt or len(prompt) + budget > self.runner.card.longest_text:
            return None
        talk = self._talks.get(text.number)
        if talk is None:
            slot = self._residents.open(prompt)
            talk = self._talks[text.number] = _Talk(slot, prompt[: slot.length])
        self.runner.trim(talk.slot, min(shared_beginning(talk.read, prompt), len(prompt) - 1))
        return _Writing(text, talk, prompt, self.way_of(text), budget)

    def _choose(self, active: list[_Writing], logits: Tensor) -> None:
        """The draft's next token for each: its likeliest, or one chosen from what it shares with the target."""
        likeliest = logits.argmax(dim=-1, keepdim=True)
        for writing, token in zip(active, likeliest):
            if writing.way == TEXT:
                writing.tokens.append(token)
        sharing = [place for place, writing in enumerate(active) if writing.way == SHARED]
        if not sharing:
            return
        ours = torch.full((len(sharing), self._vocab), -torch.inf, device=logits.device)
        ours[:, self._shared_ours] = logits[sharing][:, self._shared_theirs].float()
        writings = [active[place] for place in sharing]
        drawn = [writing.drawn for writing in writings]
        choose([writing.text for writing in writings], ours.argmax(dim=-1, keepdim=True), ours.__getitem__, drawn)
        for writing in writings:
            writing.tokens.append(self._as_theirs[writing.drawn.tokens[-1]])

    def _finish(self, writing: _Writing) -> DraftTree:
        drawn = torch.cat(writing.tokens).tolist()
        writing.talk.read = writing.prompt + drawn[:-1]  # the last one was never read
        if writing.way == TEXT:
            return tree.chain(self._retold(writing, drawn)[: writing.budget])
        return writing.drawn.chain(writing.text)

    def _retold(self, writing: _Writing, drawn: list[int]) -> list[int]:
        """What the draft wrote, in the target's tokens; up to its end, if it ended."""
        ended = self._theirs.end is not None and self._theirs.end in drawn
        written = drawn[: drawn.index(self._theirs.end)] if ended else drawn  # type: ignore[arg-type]
        beside = writing.prompt[-BESIDE:]
        piece = self._theirs.characters(beside + written)[len(self._theirs.characters(beside)) :]
        piece = piece.rstrip(HALF_A_CHARACTER)
        ids = self._ours.after(self._ours.characters(writing.text.ids[-BESIDE:]), piece) if piece else []
        return ids + ([self._ours.end] if ended and self._ours.end is not None else [])
