"""A runner that asks another one about each text only once.

Thousands of draws from one context meet the same few texts again and again. What the model says about a text does not
change, so it is read once and remembered; drafting, judging and keeping count, which are what an audit puts to the
test, are done anew for every draw.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.core.draft_tree import path_to
from paceline.core.protocols import Runner
from paceline.core.types import Capability, ModelInfo, ModelOutput, Row, RowOutput, SequenceCache

Path = tuple[int, ...]
MOST_BASES = 24  # beginnings kept in the inner runner's memory


class RememberingSlot(SequenceCache):
    """Holds the tokens of its text."""

    __slots__ = ("fresh", "tokens")

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[int] = []
        self.fresh: Row | None = None

    def settle(self, kept: list[int]) -> None:
        if self.fresh is not None:
            ids = self.fresh.ids().tolist()
            self.tokens += [ids[node] for node in kept]
            self.fresh = None
        self.length = len(self.tokens)


@dataclass(slots=True, eq=False)
class Said:
    """What a model said after one text: logits [vocab] if it was asked for them, states if it hands them out."""

    logits: Tensor | None = None
    hidden: Tensor | None = None
    features: Tensor | None = None


class MemoizedRunner(Runner):
    """Answers from memory where it can. Reads chains and trees.

    tokens  a part of the vocabulary: the runner is then the inner model confined to these tokens, numbered in this
            order. A small vocabulary makes every draw cheap, and what is exact for any target is exact for this one
    states  remember hidden states too, for drafters that were made for the inner model and look into it
    """

    def __init__(self, inner: Runner, tokens: list[int] | None = None, *, states: bool = False) -> None:
        self.inner = inner
        self.info = inner.info if tokens is None else confined(inner.info, len(tokens))
        self._tokens = tokens
        self._columns = None if tokens is None else torch.tensor(tokens)
        self._states = states
        self.capabilities = inner.capabilities & ({Capability.TREE, Capability.HIDDEN_STATES} if states else {Capability.TREE})
        self._said: dict[Path, Said] = {}
        self._bases: dict[Path, SequenceCache] = {}
        self.passes = 0

    def new_cache(self) -> RememberingSlot:
        return RememberingSlot()

    def forward(self, rows: list[Row], *, last_only: bool = False) -> ModelOutput:
        found: list[RowOutput] = []
        for row in rows:
            seq_cache, ids = _own(row.seq_cache), row.ids().tolist()
            paths = [(*seq_cache.tokens, *(ids[step] for step in path_to(row.parents, node))) for node in range(len(ids))]
            self._learn(seq_cache.tokens, ids, row.parents, paths, last_only)
            found.append(self._answer(paths, last_only))
            seq_cache.fresh = row
            seq_cache.length = len(seq_cache.tokens) + len(ids)
        return ModelOutput.of(found)

    def _learn(self, before: list[int], ids: list[int], parents: list[int], paths: list[Path], last_only: bool) -> None:
        """Make sure that what will be asked about is known."""
        if not last_only:
            if any(path not in self._said or self._said[path].logits is None for path in paths):
                self._read(before, ids, parents, paths)
            return
        if self._states and any(path not in self._said for path in paths):
            self._read(before, ids, parents, paths, last_only=True)
        self.after(paths[-1])

    def _answer(self, paths: list[Path], last_only: bool) -> RowOutput:
        output = [self._said[path].logits for path in (paths[-1:] if last_only else paths)]
        logits = torch.stack([one for one in output if one is not None])
        if not self._states:
            return RowOutput(logits)
        return RowOutput(logits, self._joined(paths, "hidden"), self._joined(paths, "features"))

    def _joined(self, paths: list[Path], part: str) -> Tensor | None:
        kept = [getattr(self._said[path], part) for path in paths]
        return None if kept[0] is None else torch.stack(kept)

    def after(self, tokens: Path) -> Tensor:
        """Logits after a text [vocab]."""
        known = self._said.get(tokens)
        if known is None or known.logits is None:
            self._read(list(tokens[:-1]), [tokens[-1]], [-1], [tokens])
        logits = self._said[tokens].logits
        assert logits is not None
        return logits

    def _read(
        self, before: list[int], ids: list[int], parents: list[int], paths: list[Path], *, last_only: bool = False
    ) -> None:
        """Read a row once behind what stands before it, and remember what was said of every node."""
        self.passes += 1
        seq_cache = self._behind(self._real(before))
        try:
            row = Row(seq_cache, torch.tensor(self._real(ids), dtype=torch.int64), parents)
            output = self.inner.forward([row], last_only=last_only)[0]
            logits = output.logits.float().cpu()
            logits = logits if self._columns is None else logits[:, self._columns]
            # Copies: a captured pass writes its next results over these.
            hidden, features = (None if part is None else part.clone() for part in (output.hidden, output.features))
        finally:
            self.inner.free(seq_cache)
        for node, path in enumerate(paths):
            known = self._said.setdefault(path, Said())
            place = node - len(paths) + logits.shape[0]  # with last_only there are logits of the last node alone
            known.logits = logits[place] if place >= 0 else known.logits
            if self._states:
                known.hidden = None if hidden is None else hidden[node]
                known.features = None if features is None else features[node]

    def _real(self, ids: list[int]) -> list[int]:
        """The inner model's own numbers."""
        return ids if self._tokens is None else [self._tokens[token] for token in ids]

    def _behind(self, before: list[int]) -> SequenceCache:
        """A slot that holds these tokens; beginnings that come again are read once."""
        if not before:
            return self.inner.new_cache()
        key = tuple(before)
        if key not in self._bases:
            if len(self._bases) == MOST_BASES:
                for old in self._bases.values():
                    self.inner.free(old)
                self._bases.clear()
            base = self._bases[key] = self.inner.new_cache()
            self.inner.forward([Row.chain(base, before)], last_only=True)
            self.inner.commit(base, list(range(len(before))))
        return self.inner.fork(self._bases[key], len(before))

    def rollback_draft(self, seq_cache: SequenceCache, length: int) -> None:
        """Like trim: nothing is computed here that another pass could go on with."""
        self.truncate(seq_cache, length)

    def commit(self, seq_cache: SequenceCache, nodes: list[int]) -> None:
        _own(seq_cache).settle(nodes)

    def truncate(self, seq_cache: SequenceCache, length: int) -> None:
        own = _own(seq_cache)
        own.settle(list(range(len(own.fresh.parents))) if own.fresh is not None else [])
        del own.tokens[length:]
        own.length = len(own.tokens)

    def free(self, seq_cache: SequenceCache) -> None:
        _own(seq_cache).tokens.clear()

    def fork(self, seq_cache: SequenceCache, length: int) -> RememberingSlot:
        twin = RememberingSlot()
        twin.tokens = _own(seq_cache).tokens[:length]
        twin.length = len(twin.tokens)
        return twin

    def free_tokens(self) -> int:
        return 1 << 30


def confined(info: ModelInfo, size: int) -> ModelInfo:
    """The card of a model that knows only so many tokens; none of them ends a text."""
    return replace(info, vocab_size=size, eos_token_ids=frozenset())


def _own(seq_cache: SequenceCache) -> RememberingSlot:
    assert isinstance(seq_cache, RememberingSlot), "this slot belongs to another runner"
    return seq_cache
