"""An EAGLE head draft tokens: one small layer that continues the target's own hidden states.

What is paired with what: the head's row at place t holds the target's state after token t and the embedding of token
t + 1, and says token t + 2. So before drafting, every place but the last of the sequence has a true state and a known next
token. The head reads those it has not read yet; from there it feeds on its own output, and what it wrote down
on the way is overwritten by the next true states.

chain   (nodes = 0)  one draft token after another; a sampled sequence draws from the real q over the target's vocabulary
tree    (nodes = n)  at each depth the likeliest `branches` nodes are expanded, and of all nodes seen the best are kept.
                     The draft tokens are chosen, so q is one-hot and sampling stays exact
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from paceline.core import draft_tree
from paceline.core.draft_tree import DraftTree
from paceline.core.protocols import Drafter, Runner
from paceline.core.sequence import Sequence
from paceline.core.types import Capability, RowOutput, StepResult
from paceline.drafting.draft_sampling import SampledDraft, can_draft_on_device, choose, cut, device_uniforms
from paceline.drafting.eagle_graph import EagleGraphs, Start, widened
from paceline.drafting.head_prefix_cache import HeadPrefix, HeadPrefixCache
from paceline.errors import OptionError, PairError
from paceline.heads.cache import KeyBuffers
from paceline.heads.eagle import EAGLE_1, EagleHead, usual_feature_layers

LONG = 16  # rows a sequence may catch up on together with others; a longer stretch is read on its own, unpadded


@dataclass(slots=True, eq=False)
class _Memory:
    """What the head holds of one sequence."""

    seq: Sequence
    row: int  # of the buffers
    start: int  # the place of the next entry is start + length: a sequence may go on from a cache the head never saw
    length: int = 0  # entries made of true states
    pending: list[Tensor] = field(default_factory=list)  # true states not read yet, [places, features]
    waiting: int = 0  # places in `pending`
    out: Tensor | None = None  # what the head said at the last place read, [hidden]

    def add(self, states: Tensor) -> None:
        self.pending.append(states)
        self.waiting += states.shape[0]

    def all_pending(self) -> Tensor:
        return self.pending[0] if len(self.pending) == 1 else torch.cat(self.pending)

    def has_read(self, count: int) -> None:
        """The first `count` of the pending states are now entries."""
        self.length += count
        self.waiting -= count
        self.pending = [self.all_pending()[count:]] if self.waiting else []

    def clear(self) -> None:
        self.pending.clear()
        self.waiting = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Level:
    """Nodes of one depth, for all sequences at once. Every tensor is [sequences, nodes]."""

    tokens: Tensor
    scores: Tensor  # log-probability of the whole path
    parents: Tensor  # index among all nodes, in the order of the levels


class Eagle(Drafter):
    """Drafts with an EAGLE-1/2 or EAGLE-3 head."""

    def __init__(
        self,
        head: EagleHead,
        target: Runner,
        *,
        nodes: int = 0,
        branches: int = 4,
        depth: int = 8,
        feature_layers: tuple[int, ...] = (),
    ) -> None:
        """nodes: of a tree, at most (the draft length may ask for fewer); 0 drafts chains. depth: of a tree, at most."""
        if nodes < 0 or branches < 1 or depth < 1:
            raise OptionError("eagle needs nodes of 0 or more, and branches and depth of 1 or more")
        config = head.config
        _check_pair(head, target)
        self.needs = frozenset({Capability.HIDDEN_STATES, Capability.TREE} if nodes else {Capability.HIDDEN_STATES})
        self.nodes, self.branches, self.depth = nodes, min(branches, config.draft_vocab_size), depth
        self._head, self._vocab = head, target.info.vocab_size
        self._last_only = config.kind == EAGLE_1
        layers = tuple(feature_layers) or config.feature_layers or usual_feature_layers(target.info.num_layers)
        target.expose(hidden=self._last_only, features=() if self._last_only else layers)
        head.borrow(target.embed, target.lm_head)
        self._target_ids = head.target_ids
        self._device = self._target_ids.device
        self._buffers = KeyBuffers(config.num_kv_heads, config.head_dim, head.fc.weight)
        self._memories: dict[int, _Memory] = {}
        self._beginnings = HeadPrefixCache()
        # Where launches are what costs, chains are captured whole. On a CPU only the work counts, and it is less there.
        self.loop = EagleGraphs(head, self._buffers, self._vocab) if self._device.type == "cuda" else None

    # --- what the target has computed ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def begin(self, seq: Sequence, prompt: RowOutput | None) -> None:
        states = None if prompt is None else self._states(prompt)
        read = 0 if states is None else states.shape[0]
        self.end(seq)
        memory = _Memory(seq, self._buffers.take(), len(seq.ids) - 1 - read)
        if memory.start:
            self._go_on(memory)
        if states is not None:
            memory.add(states)
        self._memories[seq.seq_id] = memory

    def _go_on(self, memory: _Memory) -> None:
        """The target had read the beginning before: take over what was written down for it then."""
        running = [self._beginning(other) for other in self._memories.values() if other.length]
        entries = self._beginnings.longest(memory.seq.ids, running)
        if entries is not None:
            self._buffers.write(memory.row, entries)
            memory.length = entries.keys.shape[1]
            memory.start -= memory.length

    def _beginning(self, memory: _Memory) -> HeadPrefix:
        return HeadPrefix(memory.seq.ids, memory.start, self._buffers.written(memory.row, memory.length))

    def observe(self, seqs: list[Sequence], results: list[StepResult]) -> None:
        for seq, result in zip(seqs, results):
            memory = self._memories.get(seq.seq_id)
            if memory is None:
                continue
            # The end may have cut inside the run: only places with a next token count.
            rows = [0, *(node + 1 for node in result.verified.accepted)][: len(result.emitted)]
            first = len(seq.ids) - 1 - len(rows)
            if first != memory.start + memory.length + memory.waiting:  # steps were not told of: begin anew here
                memory.start, memory.length, memory.out = first, 0, None
                memory.clear()
            states = self._states(result.output)
            memory.add(states[rows] if len(rows) > 1 else states[:1].clone())

    def end(self, seq: Sequence) -> None:
        memory = self._memories.pop(seq.seq_id, None)
        if memory is None:
            return
        if memory.length and seq.keep_cache:
            self._beginnings.add(self._beginning(memory).clone())
        self._buffers.give(memory.row)

    def _states(self, output: RowOutput) -> Tensor:
        found = output.hidden if self._last_only else output.features
        assert found is not None, "the target was asked at assembly to hand out its states"
        return found

    # --- guessing -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        chosen = [index for index, seq in enumerate(seqs) if num_draft_tokens[index] > 0 and self._knows(seq)]
        trees = [draft_tree.empty() for _ in seqs]
        if not chosen:
            return trees
        active, wanted = [seqs[index] for index in chosen], [num_draft_tokens[index] for index in chosen]
        made = self._trees(active, wanted) if self.nodes else self._chains(active, wanted)
        for index, guess in zip(chosen, made):
            trees[index] = guess
        return trees

    def _knows(self, seq: Sequence) -> bool:
        memory = self._memories.get(seq.seq_id)
        return memory is not None and (bool(memory.pending) or memory.out is not None)

    def _catch_up(self, seqs: list[Sequence]) -> None:
        """Read the true states that came in since the last time."""
        behind = [seq for seq in seqs if self._memories[seq.seq_id].pending]
        short = [seq for seq in behind if self._memories[seq.seq_id].waiting <= LONG]
        groups = [[seq] for seq in behind if self._memories[seq.seq_id].waiting > LONG]
        for group in [*groups, short] if short else groups:
            self._read(group)

    def _read(self, seqs: list[Sequence], *, but: int = 0) -> None:
        """Read the pending states of these sequences, all but the last `but`."""
        memories = [self._memories[seq.seq_id] for seq in seqs]
        counts = [memory.waiting - but for memory in memories]
        width = max(counts)
        fused = self._head.fuse(torch.cat([memory.all_pending()[:count] for memory, count in zip(memories, counts)]))
        ids = [_next_tokens(seq, memory, count) for seq, memory, count in zip(seqs, memories, counts)]
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in ids], device=self._device)
        out = self._chain_pass(memories, [0] * len(memories), tokens, _padded(fused, counts))
        for index, (memory, count) in enumerate(zip(memories, counts)):
            memory.out = out[index, count - 1]
            memory.has_read(count)

    def _chain_pass(self, memories: list[_Memory], ahead: list[int], tokens: Tensor, g: Tensor) -> Tensor:
        """Rows one after another, `ahead` places past the true ones. tokens [sequences, width], g [sequences, width, hidden]"""
        columns = [memory.length + more for memory, more in zip(memories, ahead)]
        places = [memory.start + column for memory, column in zip(memories, columns)]
        width = tokens.shape[1]
        steps = torch.arange(width, device=self._device)
        positions = torch.tensor(places, device=self._device)[:, None] + steps
        store = self._buffers.at([memory.row for memory in memories], columns, width)
        mask = self._staircase(columns, width)
        return self._head.block(self._head.embed(tokens), g, positions, mask, store)

    def _staircase(self, columns: list[int], width: int) -> Tensor | None:
        """bool [sequences, 1, width, seen]: every row sees its sequence up to itself. None: every row sees everything."""
        if width == 1 and len(set(columns)) == 1:
            return None
        last = torch.tensor(columns, device=self._device)[:, None] + torch.arange(width, device=self._device)
        return (torch.arange(max(columns) + width, device=self._device) <= last[..., None])[:, None]

    # --- chains -------------------------------------------------------------------------------------------------------

    def _chains(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        if self._can_loop(seqs):
            return self._in_one_loop(seqs, num_draft_tokens)
        self._catch_up(seqs)
        return self._step_by_step(seqs, num_draft_tokens)

    def _can_loop(self, seqs: list[Sequence]) -> bool:
        """Whether a captured chain can be had: all sequences are chosen for in one way, and bring states to begin with."""
        if self.loop is None or not all(map(can_draft_on_device, seqs)) or len({seq.sampling.greedy for seq in seqs}) > 1:
            return False
        return len(seqs) <= self.loop.MAX_SEQS and all(self._memories[seq.seq_id].pending for seq in seqs)

    def _in_one_loop(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        assert self.loop is not None
        for seq in seqs:
            if self._memories[seq.seq_id].waiting > self.loop.MOST_STATES:  # a prompt; its last state leads the chain
                self._read([seq], but=1)
        steps = max(num_draft_tokens)
        drafted = self.loop.guess([self._start(seq, steps) for seq in seqs], steps)
        for seq in seqs:
            memory = self._memories[seq.seq_id]
            memory.has_read(memory.waiting)
            memory.out = None
        return [cut(drafted, row, budget) for row, budget in enumerate(num_draft_tokens)]

    def _start(self, seq: Sequence, steps: int) -> Start:
        memory = self._memories[seq.seq_id]
        tokens = _next_tokens(seq, memory, memory.waiting)
        place = memory.start + memory.length
        sampling = seq.sampling
        temperature = 0.0 if sampling.greedy else sampling.temperature
        return Start(
            memory.row, memory.length, place, memory.all_pending(), tokens, temperature, device_uniforms(seq, steps)
        )

    def _step_by_step(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        drawn = [SampledDraft() for _ in seqs]
        active, out = list(range(len(seqs))), self._said(seqs)
        for depth in range(max(num_draft_tokens)):
            logits = self._head.logits(out)
            best = self._head.to_target_ids(logits.argmax(dim=-1, keepdim=True))
            wide = partial(self._wide, logits)
            choose([seqs[i] for i in active], best, wide, [drawn[i] for i in active])
            going = [place for place, i in enumerate(active) if depth + 1 < num_draft_tokens[i]]
            if not going:
                break
            if len(going) < len(active):
                out, active = out[going], [active[place] for place in going]
            memories = [self._memories[seqs[i].seq_id] for i in active]
            tokens = torch.cat([drawn[i].tokens[-1] for i in active]).to(self._device)[:, None]
            out = self._chain_pass(memories, [depth] * len(active), tokens, out[:, None])[:, 0]
        return [mine.chain(seq) for mine, seq in zip(drawn, seqs)]

    def _said(self, seqs: list[Sequence]) -> Tensor:
        """What the head said at the last true place of each sequence. [sequences, hidden]"""
        output = [self._memories[seq.seq_id].out for seq in seqs]
        return torch.stack([out for out in output if out is not None])

    def _wide(self, logits: Tensor, rows: list[int]) -> Tensor:
        return widened(logits[rows], self._target_ids, self._vocab)

    # --- trees --------------------------------------------------------------------------------------------------------

    def _trees(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        self._catch_up(seqs)
        limits = [min(budget, self.nodes) for budget in num_draft_tokens]
        levels = list(self._grow(seqs, limits))
        return _best_nodes(levels, limits)

    def _grow(self, seqs: list[Sequence], limits: list[int]) -> Iterator[_Level]:
        """Levels of nodes, each the children of the likeliest nodes of the one before."""
        count, deepest = self.branches, min(self.depth, max(limits))
        out = self._said(seqs)[:, None]
        tokens, scores = self._children(out)
        level = _Level(tokens[:, 0], scores[:, 0], torch.full_like(tokens[:, 0], draft_tree.ROOT))
        yield level
        seen, first = level.scores, 0
        front, out = _Front.of(level, first), out.expand(-1, count, -1)
        for depth in range(1, deepest):
            if self._no_room_for(front, seen, limits):
                return
            out = self._tree_pass(seqs, front, out, depth - 1)
            tokens, scores = self._children(out)
            scores = scores + front.scores[..., None]
            first += level.tokens.shape[1]
            level = _Level(tokens.flatten(1), scores.flatten(1), front.nodes.repeat_interleave(count, dim=1))
            yield level
            seen = torch.cat([seen, level.scores], dim=1)
            places = level.scores.topk(count, dim=1).indices
            out = out.gather(1, (places // count)[..., None].expand(-1, -1, out.shape[-1]))
            front = front.onward(level, places, first, count)

    def _children(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest next tokens after each row and their log-probabilities. Both [sequences, rows, branches]"""
        logits = self._head.logits(out).float()
        best = logits.topk(self.branches, dim=-1)
        scores = best.values - logits.logsumexp(dim=-1, keepdim=True)
        return self._head.to_target_ids(best.indices), scores

    def _tree_pass(self, seqs: list[Sequence], front: _Front, g: Tensor, depth: int) -> Tensor:
        memories = [self._memories[seq.seq_id] for seq in seqs]
        count, lengths = self.branches, [memory.length for memory in memories]
        columns = [length + depth * count for length in lengths]
        places = torch.tensor([memory.start + memory.length + depth for memory in memories], device=self._device)
        store = self._buffers.at([memory.row for memory in memories], columns, count)
        mask = front.mask(lengths, max(columns) + count)
        positions = places[:, None].expand(-1, count)
        return self._head.block(self._head.embed(front.tokens), g, positions, mask, store)

    def _no_room_for(self, front: _Front, seen: Tensor, limits: list[int]) -> bool:
        """Whether no child can get among the best: a path is never likelier than its beginning.

        Asking makes the host wait for the device, so on a GPU the tree is grown to its full depth instead.
        """
        if self._device.type != "cpu" or seen.shape[1] < max(limits):
            return False
        ordered = seen.sort(dim=1, descending=True).values
        edge = ordered[torch.arange(len(limits)), torch.tensor(limits) - 1]
        return bool((front.scores.amax(dim=1) <= edge).all())


@dataclass(frozen=True, slots=True, eq=False)
class _Front:
    """The nodes about to be expanded: [sequences, branches] each."""

    tokens: Tensor
    scores: Tensor
    nodes: Tensor  # index among all nodes
    lineage: Tensor  # bool [sequences, branches, expanded so far + branches]: itself and the expanded nodes before it

    @classmethod
    def of(cls, level: _Level, first: int) -> _Front:
        seqs, count = level.tokens.shape
        nodes = torch.arange(first, first + count, device=level.tokens.device).expand(seqs, -1)
        own = torch.eye(count, dtype=torch.bool, device=level.tokens.device)
        return cls(level.tokens, level.scores, nodes, own.expand(seqs, -1, -1))

    def onward(self, level: _Level, places: Tensor, first: int, count: int) -> _Front:
        """The front one level deeper: the nodes at `places` of that level, whose first node has index `first`."""
        parents = places // count
        inherited = self.lineage.gather(1, parents[..., None].expand(-1, -1, self.lineage.shape[-1]))
        own = torch.eye(count, dtype=torch.bool, device=places.device).expand(places.shape[0], -1, -1)
        lineage = torch.cat([inherited, own], dim=-1)
        return _Front(level.tokens.gather(1, places), level.scores.gather(1, places), places + first, lineage)

    def mask(self, lengths: list[int], seen: int) -> Tensor:
        """bool [sequences, 1, branches, seen]: the sequence's true places, the node's ancestors and itself."""
        true = torch.tensor(lengths, device=self.tokens.device)
        visible = torch.arange(seen, device=self.tokens.device) < true[:, None]
        count, expanded = self.lineage.shape[1:]
        places = true[:, None] + torch.arange(expanded, device=self.tokens.device)
        mask = visible[:, None].repeat(1, count, 1)
        return mask.scatter_(2, places[:, None].expand(-1, count, -1), self.lineage)[:, None]


def _best_nodes(levels: list[_Level], limits: list[int]) -> list[DraftTree]:
    """Of all nodes grown for each sequence, the likeliest. An ancestor is never less likely, so it is always among them."""
    scores = torch.cat([level.scores for level in levels], dim=1)
    tokens = torch.cat([level.tokens for level in levels], dim=1)
    parents = torch.cat([level.parents for level in levels], dim=1).tolist()
    # Stable: of equals the one of the earlier level comes first, and a parent may well equal its child.
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, : max(limits)].tolist()
    made: list[DraftTree] = []
    for index, limit in enumerate(limits):
        kept = sorted(order[index][:limit])
        place = {node: rank for rank, node in enumerate(kept)}
        place[draft_tree.ROOT] = draft_tree.ROOT
        made.append(DraftTree(tokens[index, kept], [place[parents[index][node]] for node in kept]))
    return made


def _next_tokens(seq: Sequence, memory: _Memory, count: int) -> list[int]:
    """The token after each of the next `count` places."""
    first = memory.start + memory.length + 1
    return seq.ids[first : first + count]


def _padded(rows: Tensor, counts: list[int]) -> Tensor:
    """[all rows, hidden] -> [sequences, longest, hidden]"""
    if len(set(counts)) == 1:
        return rows.view(len(counts), counts[0], -1)
    return torch.nn.utils.rnn.pad_sequence(list(torch.split(rows, counts)), batch_first=True)


def _check_pair(head: EagleHead, target: Runner) -> None:
    """Raise PairError where a head was made for another target."""
    config, info = head.config, target.info
    if config.target_hidden_size != info.hidden_size:
        raise PairError(f"this head reads states of {config.target_hidden_size} values; {info.name} has {info.hidden_size}")
    if not config.own_embeddings and config.hidden_size != info.hidden_size:
        raise PairError(
            f"this head is {config.hidden_size} wide and brings no embed_tokens.weight; those of {info.name} "
            f"are {info.hidden_size} wide"
        )
    largest = int(head.target_ids.max())
    if largest >= info.vocab_size:
        raise PairError(f"this head says token {largest}; {info.name} has {info.vocab_size} tokens")
