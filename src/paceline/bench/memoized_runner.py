"""A runner that computes each prefix only once.

Thousands of draws from one context meet the same few prefixes again and again. The model's output after a prefix does
not change, so it is computed once and stored; drafting and verification, which an audit tests, run for every draw.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.core.draft_tree import path_to
from paceline.core.protocols import Adapter, Runner
from paceline.core.state_view import StateView
from paceline.core.types import Capability, ModelInfo, ModelOutput, Row, RowOutput, SequenceCache
from paceline.kv.block_manager import BlockManager

TokenPath = tuple[int, ...]
MAX_PREFIX_CACHES = 24  # sequence caches of prefixes kept in the inner runner
STATE_CAPABILITIES = frozenset({Capability.TREE, Capability.HIDDEN_STATES, Capability.EARLY_EXIT})


class MemoizedSequenceCache(SequenceCache):
    """Holds the tokens of its sequence."""

    __slots__ = ("last_row", "tokens")

    def __init__(self, tokens: list[int] | None = None) -> None:
        super().__init__()
        self.tokens: list[int] = tokens or []
        self.length = len(self.tokens)
        self.last_row: Row | None = None

    def settle(self, nodes: list[int]) -> None:
        """Keep these nodes of the last row."""
        if self.last_row is not None:
            ids = self.last_row.ids().tolist()
            self.tokens += [ids[node] for node in nodes]
            self.last_row = None
        self.length = len(self.tokens)


@dataclass(slots=True, eq=False)
class StoredOutput:
    """The model's output after one prefix: logits [vocab] once they were needed, hidden states if they are stored."""

    logits: Tensor | None = None
    hidden: Tensor | None = None
    features: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Request:
    """Tokens to read after a prefix, and the whole prefix that each of them ends."""

    prefix: list[int]
    ids: list[int]
    parents: list[int]
    paths: list[TokenPath]
    last_only: bool = False


class MemoizedRunner(Runner):
    """Serves chains and trees from stored outputs where it can.

    tokens  a part of the vocabulary: the runner is then the inner model restricted to these tokens, numbered in this
            order. A small vocabulary makes every draw cheap, and what is exact for any target is exact for this one
    states  store hidden states too, for drafters that read those of the inner model
    """

    def __init__(self, inner: Runner, tokens: list[int] | None = None, *, states: bool = False) -> None:
        self.inner = inner
        self.info = inner.info if tokens is None else restricted(inner.info, len(tokens))
        self.blocks = BlockManager()
        self.capabilities = inner.capabilities & (STATE_CAPABILITIES if states else {Capability.TREE})
        self.plain_only = inner.plain_only
        self.passes = 0  # of the inner runner
        self._tokens, self._states = tokens, states
        self._columns = None if tokens is None else torch.tensor(tokens)
        self._outputs: dict[TokenPath, StoredOutput] = {}
        self._prefix_caches: dict[TokenPath, SequenceCache] = {}

    # --- passes -------------------------------------------------------------------------------------------------------

    def forward(self, rows: list[Row], *, last_only: bool = False) -> ModelOutput:
        outputs: list[RowOutput] = []
        for row in rows:
            seq_cache, ids = _own(row.seq_cache), row.ids().tolist()
            prefix = seq_cache.tokens
            paths = [(*prefix, *(ids[step] for step in path_to(row.parents, node))) for node in range(len(ids))]
            outputs.append(self._output(_Request(prefix, ids, row.parents, paths, last_only)))
            seq_cache.last_row = row
            seq_cache.length = len(prefix) + len(ids)
        return ModelOutput.of(outputs)

    def after(self, tokens: TokenPath) -> Tensor:
        """Logits after a prefix [vocab]."""
        if not self._has_logits(tokens):
            self._compute(_Request(list(tokens[:-1]), [tokens[-1]], [-1], [tokens]))
        logits = self._outputs[tokens].logits
        assert logits is not None
        return logits

    def _output(self, request: _Request) -> RowOutput:
        paths = request.paths
        if not request.last_only:
            if not all(map(self._has_logits, paths)):
                self._compute(request)
        elif self._states and any(path not in self._outputs for path in paths):
            self._compute(request)
        logits = torch.stack([self.after(path) for path in (paths[-1:] if request.last_only else paths)])
        if not self._states:
            return RowOutput(logits)
        stored = [self._outputs[path] for path in paths]
        return RowOutput(
            logits, _stacked([output.hidden for output in stored]), _stacked([output.features for output in stored])
        )

    def _has_logits(self, path: TokenPath) -> bool:
        output = self._outputs.get(path)
        return output is not None and output.logits is not None

    def _compute(self, request: _Request) -> None:
        """One pass of the inner runner; its output is stored for every node."""
        self.passes += 1
        seq_cache = self._cache_of(self._inner_ids(request.prefix))
        try:
            ids = torch.tensor(self._inner_ids(request.ids), dtype=torch.int64)
            # A copy: the next replay of a CUDA graph overwrites the output of this one.
            output = self.inner.forward([Row(seq_cache, ids, request.parents)], last_only=request.last_only)[0].clone()
        finally:
            self.inner.free(seq_cache)
        self._store(request.paths, output)

    def _store(self, paths: list[TokenPath], output: RowOutput) -> None:
        logits = output.logits.float().cpu()
        logits = logits if self._columns is None else logits[:, self._columns]
        first = len(paths) - logits.shape[0]  # with last_only there are logits of the last node alone
        for node, path in enumerate(paths):
            stored = self._outputs.setdefault(path, StoredOutput())
            stored.logits = logits[node - first] if node >= first else stored.logits
            if self._states:
                stored.hidden = None if output.hidden is None else output.hidden[node]
                stored.features = None if output.features is None else output.features[node]

    def _inner_ids(self, ids: list[int]) -> list[int]:
        """Token ids of the inner model."""
        return ids if self._tokens is None else [self._tokens[token] for token in ids]

    def _cache_of(self, prefix: list[int]) -> SequenceCache:
        """A cache of the inner runner that holds these tokens; prefixes that come again are read once."""
        if not prefix:
            return self.inner.new_cache()
        key = tuple(prefix)
        if key not in self._prefix_caches:
            if len(self._prefix_caches) == MAX_PREFIX_CACHES:
                self._drop_prefix_caches()
            base = self._prefix_caches[key] = self.inner.new_cache()
            self.inner.forward([Row.chain(base, prefix)], last_only=True)
            self.inner.commit(base, list(range(len(prefix))))
        return self.inner.fork(self._prefix_caches[key], len(prefix))

    def _drop_prefix_caches(self) -> None:
        for seq_cache in self._prefix_caches.values():
            self.inner.free(seq_cache)
        self._prefix_caches.clear()

    # --- sequence caches ----------------------------------------------------------------------------------------------

    def new_cache(self) -> MemoizedSequenceCache:
        return MemoizedSequenceCache()

    def commit(self, seq_cache: SequenceCache, nodes: list[int]) -> None:
        _own(seq_cache).settle(nodes)

    def truncate(self, seq_cache: SequenceCache, length: int) -> None:
        own = _own(seq_cache)
        own.settle(list(range(len(own.last_row.parents))) if own.last_row is not None else [])
        del own.tokens[length:]
        own.length = len(own.tokens)

    def free(self, seq_cache: SequenceCache) -> None:
        _own(seq_cache).tokens.clear()

    def fork(self, seq_cache: SequenceCache, length: int) -> MemoizedSequenceCache:
        return MemoizedSequenceCache(_own(seq_cache).tokens[:length])

    def free_tokens(self) -> int:
        return 1 << 30

    # --- for drafters that read hidden states -------------------------------------------------------------------------

    def expose(self, *, hidden: bool = False, features: tuple[int, ...] = ()) -> StateView:
        return self.inner.expose(hidden=hidden, features=features)

    def lm_head(self, hidden: Tensor) -> Tensor:
        return self.inner.lm_head(hidden)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.inner.embed(tokens)

    def early_exit(self, layer: int, adapter: Adapter | None = None) -> MemoizedRunner:
        return MemoizedRunner(self.inner.early_exit(layer, adapter))


def restricted(info: ModelInfo, vocab_size: int) -> ModelInfo:
    """The same model with a part of its vocabulary; none of it is an end token."""
    return replace(info, vocab_size=vocab_size, eos_token_ids=frozenset())


def _stacked(tensors: list[Tensor | None]) -> Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.stack(present) if present else None


def _own(seq_cache: SequenceCache) -> MemoizedSequenceCache:
    assert isinstance(seq_cache, MemoizedSequenceCache), "this cache belongs to another runner"
    return seq_cache
