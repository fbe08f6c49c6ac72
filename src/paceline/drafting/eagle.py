"""An EAGLE head drafts: one small layer that continues the target's own hidden states.

Pairing: the head's row at position t holds the target's state after token t and the embedding of token t + 1, and
predicts token t + 2. So before drafting, every position but the last of the sequence has a state of the target and a
known next token. The head reads those it has not read yet; from there it continues on its own output, and the KV of
these rows is overwritten by the next states of the target.

chain   (nodes = 0)  one draft token after another; a sampled sequence draws from the real q over the whole vocabulary
        a P-EAGLE head makes all of them in one pass (eagle_parallel.py)
tree    (nodes = n)  the likeliest nodes of every depth are expanded, the likeliest of all are kept (eagle_tree.py)
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from torch import Tensor

from paceline.core import draft_tree
from paceline.core.draft_tree import DraftTree
from paceline.core.draft_value import ChainStop, DraftValue
from paceline.core.looped_steps import LoopedSteps, LoopInput
from paceline.core.protocols import Drafter, HeadUpdate, Runner
from paceline.core.sequence import Sequence, loop_input
from paceline.core.types import Capability, RowOutput, StepResult
from paceline.device.argmax import argmax_rows
from paceline.device.properties import supports_graphs
from paceline.drafting.draft_sampling import (
    SampledDraft,
    can_draft_on_device,
    choose,
    first_tokens,
    loop_uniforms,
    predrawn,
    state_confidences,
)
from paceline.drafting.eagle_graph import ChainGraph, ChainInput, EagleGraphs, widened
from paceline.drafting.eagle_parallel import ParallelDrafting
from paceline.drafting.eagle_state import HeadState
from paceline.drafting.eagle_tree import TreeDrafting
from paceline.drafting.head_contexts import HeadContexts
from paceline.drafting.head_folder import checked_target, head_folder
from paceline.drafting.head_loop import HeadSource, most_nodes
from paceline.drafting.registry import DrafterContext, DrafterSpec, WeightsNeeded, options_of
from paceline.errors import OptionError, PairError, WeightsError
from paceline.heads.eagle import ChainHead, EagleHead
from paceline.heads.registry import load_head
from paceline.heads.rounded import round_linears, weight_copies
from paceline.kv.prefix_cache import PrefixCache

MAX_BATCHED_ROWS = 16  # states of one sequence that are read together with others; more are read alone, unpadded


class Eagle(Drafter):
    """Drafts with an EAGLE-1/2 or EAGLE-3 head."""

    owner = "eagle"  # in the prefix cache: heads of different kinds do not share entries

    def __init__(
        self,
        head: ChainHead,
        target: Runner,
        *,
        nodes: int = 0,
        branches: int = 4,
        depth: int = 8,
        feature_layers: tuple[int, ...] = (),
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        """nodes: of a tree, at most (num_draft_tokens may be fewer); 0 drafts chains. depth: of a tree, at most."""
        if nodes < 0 or branches < 1 or depth < 1:
            raise OptionError("eagle needs nodes of 0 or more, and branches and depth of 1 or more")
        if nodes and head.mask_token_id is not None:
            raise OptionError("a P-EAGLE head drafts chains in one pass; leave nodes at 0")
        _check_pair(head, target)
        self.needs = frozenset({Capability.HIDDEN_STATES, Capability.TREE} if nodes else {Capability.HIDDEN_STATES})
        self.nodes = nodes
        layers = head.feature_layers(target.info.num_layers, tuple(feature_layers))
        self._view = target.expose(hidden=not layers, features=layers)
        head.bind_target(target.embed, target.lm_head)
        self._head, self._vocab_size, self._target_ids = head, target.info.vocab_size, head.target_ids
        self._buffers = head.key_buffers()
        self._contexts = HeadContexts(self._buffers, prefix_cache, self.owner, ahead=head.tokens_ahead)
        self._tree_drafting = TreeDrafting(head, self._buffers, min(branches, head.config.draft_vocab_size), depth)
        mask_token_id = head.mask_token_id
        self._parallel = None if mask_token_id is None else ParallelDrafting(head, mask_token_id, self._chain_pass)
        # Where launches dominate the cost, a whole chain is one graph. On a CPU only the work counts; eager has less.
        captures = supports_graphs(self._device) and head.can_capture
        self.graphs = EagleGraphs(head, self._buffers, self._vocab_size) if captures else None
        self._stop: ChainStop | None = None

    @property
    def _device(self) -> torch.device:
        return self._target_ids.device

    def use_value(self, value: DraftValue, source: str = "") -> None:
        """Where the host waits for nothing, confidences are free: chains stop where they no longer pay."""
        self._stop = None if supports_graphs(self._device) else ChainStop(value, source)

    # --- states of the target -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def begin(self, seq: Sequence, prompt: RowOutput | None) -> None:
        self._contexts.begin(seq, None if prompt is None else self._view.of(prompt))

    @torch.inference_mode()
    def draft_loop(
        self, target: Runner, seqs: list[Sequence], num_draft_tokens: list[int], num_steps: int
    ) -> LoopedSteps | None:
        """Chains, where a chain is a graph; what a prompt has brought is read first."""
        graphs, longest = self.graphs, self._head.max_draft_tokens or sys.maxsize
        if graphs is None or self.nodes or self._parallel is not None or self._head.tokens_ahead != 1:
            return None
        inputs = [loop_input(seq, min(k, longest)) for seq, k in zip(seqs, num_draft_tokens)]
        if not all(map(self._can_draft, seqs)) or most_nodes(inputs) > graphs.MAX_STATES:
            return None
        states = [self._contexts.of(seq) for seq in seqs]
        if not self._fits_graph(graphs, states):
            return None
        self._read_prompts(graphs, states)

        def prepare(inputs: list[LoopInput], num_tokens: int) -> ChainGraph:
            nodes = most_nodes(inputs)
            starts = [_start(state, loop.num_draft_tokens, nodes - 1) for state, loop in zip(states, inputs)]
            return graphs.prepared(starts, nodes - 1, nodes, num_tokens)

        return target.draft_loop(HeadSource(self._view, states, prepare), inputs, num_steps)

    def observe(self, seqs: list[Sequence], results: list[StepResult]) -> None:
        for seq, result in zip(seqs, results):
            states = self._view.of(result.output)
            if states is not None:
                self._contexts.extend(seq, result, states, alone=len(seqs) == 1)

    def end(self, seq: Sequence) -> None:
        self._contexts.end(seq)

    def head_update(self, folder: str) -> HeadUpdate:
        # In host memory: a thread that allocates on the device would disturb a graph that is being captured.
        head, new = self._head, load_head(folder, EagleHead, dtype=self._head.like.dtype)
        check_update(head, new, folder)
        copies = weight_copies(new, head)

        def put_in_place() -> None:
            for copy in copies:
                copy()
            self._target_ids.copy_(head.target_ids)

        return put_in_place

    # --- drafting -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        active = [index for index, seq in enumerate(seqs) if num_draft_tokens[index] > 0 and self._can_draft(seq)]
        trees = [draft_tree.empty() for _ in seqs]
        if not active:
            return trees
        states = [self._contexts.of(seqs[index]) for index in active]
        longest = self._head.max_draft_tokens or sys.maxsize
        lengths = [min(num_draft_tokens[index], longest) for index in active]
        drafts = self._trees(states, lengths) if self.nodes else self._chains(states, lengths)
        for index, tree in zip(active, drafts):
            trees[index] = tree
        return trees

    def _can_draft(self, seq: Sequence) -> bool:
        if not self._contexts.has(seq):
            return False
        state = self._contexts.of(seq)  # entries taken from another sequence come without an output to go on from
        return bool(state.pending) or state.out is not None

    def _trees(self, states: list[HeadState], num_draft_tokens: list[int]) -> list[DraftTree]:
        self._catch_up(states)
        return self._tree_drafting.trees(states, _outputs(states), [min(k, self.nodes) for k in num_draft_tokens])

    def _chains(self, states: list[HeadState], num_draft_tokens: list[int]) -> list[DraftTree]:
        if self._parallel is not None:
            return self._in_one_pass(self._parallel, states, num_draft_tokens)
        if self.graphs is not None and self._fits_graph(self.graphs, states):
            return self._with_graph(self.graphs, states, num_draft_tokens)
        self._catch_up(states)
        return self._step_by_step(states, num_draft_tokens)

    def _catch_up(self, states: list[HeadState]) -> None:
        """Read the states of the target that came since the last call."""
        behind = [state for state in states if state.pending]
        short = [state for state in behind if state.num_pending <= MAX_BATCHED_ROWS]
        groups = [[state] for state in behind if state.num_pending > MAX_BATCHED_ROWS]
        for group in [*groups, short] if short else groups:
            self._read(group)

    def _read(self, states: list[HeadState], *, but: int = 0) -> None:
        """Read the pending states of these sequences, all but the last `but`."""
        counts = [state.num_pending - but for state in states]
        num_rows = max(counts)
        fused = self._head.fuse(torch.cat([state.all_pending()[:count] for state, count in zip(states, counts)]))
        ids = [state.next_tokens(count) for state, count in zip(states, counts)]
        tokens = torch.tensor([row + [0] * (num_rows - len(row)) for row in ids], device=self._device)
        out = self._chain_pass(states, 0, tokens, _padded(fused, counts))
        for index, (state, count) in enumerate(zip(states, counts)):
            state.out = out[index, count - 1]
            state.mark_read(count)

    def _chain_pass(self, states: list[HeadState], ahead: int, tokens: Tensor, g: Tensor) -> Tensor:
        """Rows one after another, `ahead` positions past the entries. tokens [sequences, rows], g [.., rows, hidden]"""
        columns = [state.length + ahead for state in states]
        first = torch.tensor([state.next_position + ahead for state in states], device=self._device)
        num_rows = tokens.shape[1]
        positions = first[:, None] + torch.arange(num_rows, device=self._device)
        store = self._buffers.at([state.row for state in states], columns, num_rows)
        mask = self._causal_mask(columns, num_rows)
        return self._head.block(self._head.embed(tokens), g, positions, mask, store)

    def _causal_mask(self, columns: list[int], num_rows: int) -> Tensor | None:
        """bool [sequences, 1, num_rows, columns]: a row sees its sequence up to itself. None: all rows see all."""
        if num_rows == 1 and len(set(columns)) == 1:
            return None
        last = torch.tensor(columns, device=self._device)[:, None] + torch.arange(num_rows, device=self._device)
        return (torch.arange(max(columns) + num_rows, device=self._device) <= last[..., None])[:, None]

    # --- chains -------------------------------------------------------------------------------------------------------

    def _fits_graph(self, graphs: EagleGraphs, states: list[HeadState]) -> bool:
        """Whether one graph drafts for all: tokens are chosen in one way, and all have states to start from."""
        seqs = [state.seq for state in states]
        if not all(map(can_draft_on_device, seqs)) or len({seq.sampling.greedy for seq in seqs}) > 1:
            return False
        return len(seqs) <= graphs.MAX_SEQS and all(state.pending for state in states)

    def _with_graph(self, graphs: EagleGraphs, states: list[HeadState], num_draft_tokens: list[int]) -> list[DraftTree]:
        self._read_prompts(graphs, states)
        steps = max(num_draft_tokens)
        drafted = graphs.draft([_start(state, k, steps) for state, k in zip(states, num_draft_tokens)], steps)
        for state in states:
            state.mark_read(state.num_pending)
            state.out = None
        return [first_tokens(drafted, row, k) for row, k in enumerate(num_draft_tokens)]

    def _read_prompts(self, graphs: EagleGraphs, states: list[HeadState]) -> None:
        """What a chain cannot hold; the last state of a prompt starts the chain."""
        for state in states:
            if state.num_pending > graphs.MAX_STATES:
                self._read([state], but=1)

    def _step_by_step(self, states: list[HeadState], num_draft_tokens: list[int]) -> list[DraftTree]:
        drafts = [SampledDraft() for _ in states]
        active, out = list(range(len(states))), _outputs(states)
        for depth in range(max(num_draft_tokens)):
            self._choose([states[i].seq for i in active], out, [drafts[i] for i in active])
            rows = [row for row, i in enumerate(active) if depth + 1 < num_draft_tokens[i] and not drafts[i].stopped]
            if not rows:
                break
            if len(rows) < len(active):
                out, active = out[rows], [active[row] for row in rows]
            tokens = torch.cat([drafts[i].tokens[-1] for i in active]).to(self._device)[:, None]
            out = self._chain_pass([states[i] for i in active], depth, tokens, out[:, None])[:, 0]
        return [draft.chain(state.seq) for draft, state in zip(drafts, states)]

    def _in_one_pass(
        self, parallel: ParallelDrafting, states: list[HeadState], num_draft_tokens: list[int]
    ) -> list[DraftTree]:
        for state in states:
            if state.num_pending > MAX_BATCHED_ROWS:  # a prompt is read alone, unpadded; its last state with the masks
                self._read([state], but=1)
        outputs, drafts = parallel.outputs(states, num_draft_tokens), [SampledDraft() for _ in states]
        for depth in range(max(num_draft_tokens)):
            active = [index for index, k in enumerate(num_draft_tokens) if depth < k]
            out = torch.stack([outputs[index][depth] for index in active])
            self._choose([states[index].seq for index in active], out, [drafts[index] for index in active])
        return [draft.chain(state.seq) for draft, state in zip(drafts, states)]

    def _choose(self, seqs: list[Sequence], out: Tensor, drafts: list[SampledDraft]) -> None:
        """The next draft token of each sequence, from the head's output at its last position. [sequences, hidden]"""
        logits = self._head.logits(out)
        if self._stop is not None:
            state_confidences(seqs, logits, drafts, self._stop)
        best = self._head.to_target_ids(argmax_rows(logits)[:, None])
        choose(seqs, best, partial(self._over_target_vocab, logits), drafts)

    def _over_target_vocab(self, logits: Tensor, rows: list[int]) -> Tensor:
        return widened(logits[rows], self._target_ids, self._vocab_size)


def _outputs(states: list[HeadState]) -> Tensor:
    """The head's output at the last position read of each sequence. [sequences, hidden_size]"""
    return torch.stack([state.out for state in states if state.out is not None])


def _start(state: HeadState, num_draft_tokens: int, num_steps: int) -> ChainInput:
    """Where a graph starts the chain of one sequence."""
    sampling = state.seq.sampling
    return ChainInput(
        state.row,
        state.length,
        state.next_position,
        state.all_pending(),
        state.next_tokens(state.num_pending),
        0.0 if sampling.greedy else sampling.temperature,
        loop_uniforms(predrawn(state.seq, num_draft_tokens), num_steps),
    )


def _padded(rows: Tensor, counts: list[int]) -> Tensor:
    """[all rows, hidden_size] -> [sequences, most rows, hidden_size]"""
    if len(set(counts)) == 1:
        return rows.view(len(counts), counts[0], -1)
    return torch.nn.utils.rnn.pad_sequence(list(torch.split(rows, counts)), batch_first=True)


def _check_pair(head: ChainHead, target: Runner) -> None:
    """Raise PairError where a head was trained for another target."""
    config, info = head.config, target.info
    if config.target_hidden_size != info.hidden_size:
        raise PairError(
            f"this head reads states of {config.target_hidden_size} values; {info.name} has {info.hidden_size}"
        )
    if not config.own_embeddings and config.hidden_size != info.hidden_size:
        raise PairError(
            f"this head has hidden size {config.hidden_size} and no embed_tokens.weight; the embeddings of {info.name} "
            f"have {info.hidden_size} values"
        )
    largest = int(head.target_ids.max())
    if largest >= info.vocab_size:
        raise PairError(f"this head predicts token {largest}; {info.name} has {info.vocab_size} tokens")


def check_update(head: ChainHead, new: ChainHead, folder: str) -> None:
    """Raise WeightsError where new weights are not those of the same head."""
    if new.config != head.config:
        raise WeightsError(f"the head in {folder} has another shape than the one that drafts; restart with it instead")


# --- building ---------------------------------------------------------------------------------------------------------


def build(context: DrafterContext) -> Eagle:
    target = checked_target(SPEC.name, context.target, Capability.HIDDEN_STATES)
    folder = head_folder(SPEC.name, context)
    head = load_head(folder, EagleHead, dtype=context.head_dtype, device=context.device)
    if context.head_in_int8:
        round_linears(head)
    return Eagle(head, target, prefix_cache=context.prefix_cache, **context.options)


SPEC = DrafterSpec(
    name="eagle",
    summary="an EAGLE-1/2, EAGLE-3 or P-EAGLE head continues the target's hidden states, as chains or trees",
    weights=WeightsNeeded.HEAD,
    build=build,
    options=options_of(Eagle),
    reference="EAGLE, https://arxiv.org/abs/2401.15077; EAGLE-2, https://arxiv.org/abs/2406.16858; "
    "EAGLE-3, https://arxiv.org/abs/2503.01840; P-EAGLE, https://arxiv.org/abs/2602.01469",
    head_kind="eagle3",
    other_kinds=("eagle1", "peagle"),
)
