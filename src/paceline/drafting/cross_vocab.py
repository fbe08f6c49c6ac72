"""A draft model of another family, whose tokens are not the target's.

The sequence is told to the draft in characters: it is tokenised by the draft's own tokenizer before every step, and the
draft's cache keeps whatever that did not change. DraftOutput come back in one of two ways:

sequence    the draft writes on; the characters it wrote are tokenised as the target would, starting exactly where the
        sequence's last token ends. Such draft tokens are chosen, q is one-hot. NoDraft is out of reach: best for greedy sequences.
shared  the draft may only say tokens that the target has too. Its logits, cut down to those, are its distribution
        over the target's vocabulary: draft tokens are drawn from it and q is real. Best for sampled sequences.

Either way the target's own rule decides, so a bad translation costs acceptance and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.core import draft_tree
from paceline.core.draft_tree import DraftTree
from paceline.core.protocols import Drafter, Runner
from paceline.core.sequence import Sequence
from paceline.core.types import Capability, Row, RowOutput, SequenceCache, StepResult
from paceline.drafting.draft_prefix_cache import DraftPrefixCache
from paceline.drafting.draft_sampling import SampledDraft, choose
from paceline.errors import OptionError, PairError
from paceline.hub.vocabulary import SAME, SHARED, TEXT, pairing, shared_tokens
from paceline.kv.block_manager import BLOCK_SIZE as TILE
from paceline.kv.prefix_cache import common_prefix_length

AUTO = "auto"
HALF_A_CHARACTER = "\ufffd"  # what a tokenizer writes for bytes whose character is not complete
BESIDE = 16  # tokens before a boundary that are enough to tokenise what comes after it


class TokenizerBridge:
    """One side's tokenizer: ids to characters and back. Speaks to the tokenizer's own engine, which is ten times
    quicker than the layers around it: this is asked several times a step."""

    def __init__(self, tokenizer: Any) -> None:
        self._engine = tokenizer.backend_tokenizer
        self._first: int | None = tokenizer.bos_token_id
        self.end: int | None = tokenizer.eos_token_id

    def characters(self, ids: Ordered[int]) -> str:
        return str(self._engine.decode(list(ids), skip_special_tokens=False))

    def whole(self, seq: str) -> list[int]:
        """The ids of a sequence from its very beginning, with whatever this family puts in front."""
        return list(self._engine.encode(seq).ids)

    def after(self, before: str, piece: str) -> list[int]:
        """The ids of `piece` when it follows `before`. A token that would cross the boundary is not made: the sequence's
        last token has ended there for good."""
        output = self._engine.encode(before + piece, add_special_tokens=False)
        if all(end <= len(before) or start >= len(before) for start, end in output.offsets):
            return [id_ for id_, (start, _) in zip(output.ids, output.offsets) if start >= len(before)]
        return list(self._engine.encode(piece, add_special_tokens=False).ids)

    def told(self, ids: list[int]) -> str:
        """A sequence in characters, without the token this family begins every sequence with."""
        return self.characters(ids[1:] if ids and ids[0] == self._first else ids)


@dataclass(slots=True, eq=False)
class _Talk:
    """One sequence as the draft sees it."""

    seq_cache: SequenceCache
    read: list[int] = field(default_factory=list)  # what the sequence cache holds, in the draft's tokens


@dataclass(slots=True, eq=False)
class _Writing:
    """The draft tokens of one step for one sequence, in the making."""

    seq: Sequence
    talk: _Talk
    prompt: list[int]  # all of the sequence, in the draft's tokens
    way: str
    budget: int
    tokens: list[Tensor] = field(default_factory=list)  # each int64 [1]: the draft's tokens
    drawn: SampledDraft = field(default_factory=SampledDraft)  # the same in the target's vocabulary, if SHARED

    @property
    def room(self) -> int:
        """Tokens the draft may write down in this step, rounded up to blocks."""
        return len(self.prompt) - self.talk.seq_cache.length + self.budget + TILE

    def row(self) -> Row:
        if self.tokens:
            return Row(self.talk.seq_cache, self.tokens[-1], [-1])
        return Row.chain(self.talk.seq_cache, self.prompt[self.talk.seq_cache.length :])


class CrossVocab(Drafter):
    """Drafts a chain with a model whose vocabulary is another.

    way  `seq` or `shared` for every sequence, or `auto`: what suits the pair and the sequence's sampling
    """

    needs: frozenset[Capability] = frozenset()

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
        self._ours, self._theirs = TokenizerBridge(target), TokenizerBridge(draft)
        self._vocab = vocab_size
        shared = shared_tokens(target, draft)
        pairs = [pair for pair in zip(shared.target_ids, shared.draft_ids) if pair[0] < vocab_size]
        device = runner.info.device
        self._shared_ours = torch.tensor([ours for ours, _ in pairs], dtype=torch.int64, device=device)
        self._shared_theirs = torch.tensor([theirs for _, theirs in pairs], dtype=torch.int64, device=device)
        self._as_theirs = torch.zeros(vocab_size, dtype=torch.int64, device=device)
        self._as_theirs[self._shared_ours] = self._shared_theirs
        self._talks: dict[int, _Talk] = {}
        self._residents = DraftPrefixCache(runner)

    def begin(self, seq: Sequence, prompt: RowOutput | None) -> None:
        """The draft reads the prompt when it is first asked."""

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        writings = [self._start(seq, budget) for seq, budget in zip(seqs, num_draft_tokens)]
        self._residents.make_room(sum(writing.room for writing in writings if writing is not None))
        for depth in range(max(num_draft_tokens, default=0)):
            active = [writing for writing in writings if writing is not None and depth < writing.budget]
            if active:
                output = self.runner.forward([writing.row() for writing in active], last_only=True)
                self._choose(active, output.logits)
        return [draft_tree.empty() if writing is None else self._finish(writing) for writing in writings]

    def observe(self, seqs: list[Sequence], results: list[StepResult]) -> None:
        """NoDraft to learn: the next step tells the sequence anew, and the cache is cut where it differs."""

    def end(self, seq: Sequence) -> None:
        talk = self._talks.pop(seq.seq_id, None)
        if talk is not None and seq.keep_cache:
            self._residents.keep(talk.read, talk.seq_cache)
        elif talk is not None:
            self.runner.free(talk.seq_cache)

    def way_of(self, seq: Sequence) -> str:
        """How draft tokens for this sequence travel."""
        if self._way != AUTO:
            return self._way
        way = self.pairing.greedy if seq.sampling.greedy else self.pairing.sampled
        return SHARED if way == SAME else way

    def _start(self, seq: Sequence, budget: int) -> _Writing | None:
        """Tell the draft the sequence. None: nothing can be guessed now."""
        if not budget:
            return None
        told = self._ours.told(seq.ids)
        if told.endswith(HALF_A_CHARACTER):
            return None  # no characters to go on from, until the target has finished this one
        prompt = self._theirs.whole(told)
        if not prompt or len(prompt) + budget > self.runner.info.max_seq_len:
            return None
        talk = self._talks.get(seq.seq_id)
        if talk is None:
            seq_cache = self._residents.open(prompt)
            talk = self._talks[seq.seq_id] = _Talk(seq_cache, prompt[: seq_cache.length])
        self.runner.truncate(talk.seq_cache, min(common_prefix_length(talk.read, prompt), len(prompt) - 1))
        return _Writing(seq, talk, prompt, self.way_of(seq), budget)

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
        choose([writing.seq for writing in writings], ours.argmax(dim=-1, keepdim=True), ours.__getitem__, drawn)
        for writing in writings:
            writing.tokens.append(self._as_theirs[writing.drawn.tokens[-1]])

    def _finish(self, writing: _Writing) -> DraftTree:
        drawn = torch.cat(writing.tokens).tolist()
        writing.talk.read = writing.prompt + drawn[:-1]  # the last one was never read
        if writing.way == TEXT:
            return draft_tree.chain(self._retold(writing, drawn)[: writing.budget])
        return writing.drawn.chain(writing.seq)

    def _retold(self, writing: _Writing, drawn: list[int]) -> list[int]:
        """What the draft wrote, in the target's tokens; up to its end, if it ended."""
        ended = self._theirs.end is not None and self._theirs.end in drawn
        written = drawn[: drawn.index(self._theirs.end)] if ended else drawn  # type: ignore[arg-type]
        beside = writing.prompt[-BESIDE:]
        output = self._theirs.characters(beside + written)[len(self._theirs.characters(beside)) :]
        output = output.rstrip(HALF_A_CHARACTER)
        ids = self._ours.after(self._ours.characters(writing.seq.ids[-BESIDE:]), output) if output else []
        return ids + ([self._ours.end] if ended and self._ours.end is not None else [])
