"""A draft model with another tokenizer (universal assisted generation).

The draft model reads the characters of the sequence: before every step they are tokenised by its own tokenizer, and its
cache keeps the prefix that did not change. Draft tokens come back in one of two ways:

text    the draft model continues the text; its characters are tokenised as the target does, from exactly where the last
        token of the sequence ends. These draft tokens are chosen, q is one-hot. Best for greedy sequences.
shared  the draft model predicts only tokens that the target has too. Its logits over those are its distribution over
        the target's vocabulary: draft tokens are drawn from it and q is real. Best for sampled sequences.

The target verifies both, so a bad translation costs acceptance and nothing else.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.core import draft_tree
from paceline.core.draft_tree import DraftTree
from paceline.core.protocols import Drafter, Runner
from paceline.core.sequence import Sequence
from paceline.core.types import ModelInfo, Row, SequenceCache
from paceline.drafting.draft_kv import DraftKV, step_tokens
from paceline.drafting.draft_sampling import SampledDraft, choose
from paceline.drafting.registry import DrafterContext, DrafterSpec, WeightsNeeded, options_of
from paceline.errors import OptionError, OutOfMemory, PairError
from paceline.hub.vocabulary import SAME, SHARED, TEXT, pairing, shared_tokens
from paceline.kv.prefix_cache import PrefixCache, common_prefix_length

OWNER = "cross_vocab"  # in the prefix cache
AUTO = "auto"
INCOMPLETE_CHARACTER = "\ufffd"  # a tokenizer's output for bytes whose character is not complete
CONTEXT_TOKENS = 16  # tokens before a boundary that suffice to tokenise the text after it


class TokenizerBridge:
    """One tokenizer: ids to characters and back.

    Calls the tokenizer's own engine, ten times faster than the layers around it: it runs several times per step.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._engine = tokenizer.backend_tokenizer
        self._bos: int | None = tokenizer.bos_token_id
        self.eos: int | None = tokenizer.eos_token_id

    def characters(self, ids: SequenceOf[int]) -> str:
        return str(self._engine.decode(list(ids), skip_special_tokens=False))

    def encode(self, text: str) -> list[int]:
        """The ids of a text from its start, with the special tokens this model puts in front."""
        return list(self._engine.encode(text).ids)

    def after(self, before: str, text: str) -> list[int]:
        """The ids of `text` when it follows `before`. No token crosses the boundary: the last token has ended there."""
        encoding = self._engine.encode(before + text, add_special_tokens=False)
        if all(end <= len(before) or start >= len(before) for start, end in encoding.offsets):
            return [id_ for id_, (start, _) in zip(encoding.ids, encoding.offsets) if start >= len(before)]
        return list(self._engine.encode(text, add_special_tokens=False).ids)

    def text_of(self, ids: list[int]) -> str:
        """The characters of a sequence, without the token this model starts every sequence with."""
        return self.characters(ids[1:] if ids and ids[0] == self._bos else ids)


@dataclass(slots=True, eq=False)
class DraftState:
    """One sequence in the draft model."""

    seq_cache: SequenceCache
    cached: list[int] = field(default_factory=list)  # what the sequence cache holds, in the draft's tokens


@dataclass(slots=True, eq=False)
class DraftInProgress:
    """The draft tokens of one step for one sequence."""

    seq: Sequence
    state: DraftState
    prompt: list[int]  # all of the sequence, in the draft's tokens
    way: str
    num_draft_tokens: int
    tokens: list[Tensor] = field(default_factory=list)  # each int64 [1]: the draft's tokens
    sampled: SampledDraft = field(default_factory=SampledDraft)  # the same in the target's vocabulary, if SHARED

    @property
    def step_tokens(self) -> int:
        """Tokens the draft model may store in this step."""
        return step_tokens(len(self.prompt) - self.state.seq_cache.length, self.num_draft_tokens)

    def row(self) -> Row:
        if self.tokens:
            return Row(self.state.seq_cache, self.tokens[-1], [-1])
        return Row.chain(self.state.seq_cache, self.prompt[self.state.seq_cache.length :])


class SharedVocabulary:
    """The tokens both models have, as tensors on the draft model's device."""

    def __init__(self, target: Any, draft: Any, vocab_size: int, runner_info: ModelInfo) -> None:
        """target, draft: tokenizers, which may know more tokens than the models. vocab_size: the target's."""
        shared, draft_size, device = shared_tokens(target, draft), runner_info.vocab_size, runner_info.device
        ids = zip(shared.target_ids, shared.draft_ids)
        pairs = [
            (target_id, draft_id) for target_id, draft_id in ids if target_id < vocab_size and draft_id < draft_size
        ]
        self._vocab_size = vocab_size
        self._target_ids = torch.tensor([target_id for target_id, _ in pairs], dtype=torch.int64, device=device)
        self._draft_ids = torch.tensor([draft_id for _, draft_id in pairs], dtype=torch.int64, device=device)
        self._to_draft = torch.zeros(vocab_size, dtype=torch.int64, device=device)
        self._to_draft[self._target_ids] = self._draft_ids

    def target_logits(self, logits: Tensor) -> Tensor:
        """Logits of the draft model as logits over the target's vocabulary. [rows, target vocabulary]"""
        wide = torch.full((logits.shape[0], self._vocab_size), -torch.inf, device=logits.device)
        wide[:, self._target_ids] = logits[:, self._draft_ids].float()
        return wide

    def to_draft_ids(self, tokens: Tensor) -> Tensor:
        return self._to_draft[tokens]


class CrossVocab(Drafter):
    """Drafts a chain with a model of another vocabulary.

    way  `text` or `shared` for every sequence, or `auto`: what suits the pair and the sequence's sampling
    """

    def __init__(
        self,
        runner: Runner,
        target: Any,
        draft: Any,
        vocab_size: int,
        way: str = AUTO,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        """target, draft: tokenizers. vocab_size: the target's."""
        if way not in (AUTO, TEXT, SHARED):
            raise OptionError(f"cross_vocab drafts by way of {TEXT}, {SHARED} or {AUTO}, not {way!r}")
        for name, tokenizer in (("target", target), ("draft model", draft)):
            if getattr(tokenizer, "backend_tokenizer", None) is None:
                raise PairError(f"the {name}'s tokenizer reports no offsets of tokens (it has no tokenizer.json)")
        self.runner = runner
        self.draft_runner = runner
        self.pairing = pairing(target, draft)
        self._way = way
        self._target, self._draft = TokenizerBridge(target), TokenizerBridge(draft)
        self._shared = SharedVocabulary(target, draft, vocab_size, runner.info)
        self._states: dict[int, DraftState] = {}
        self._kv = DraftKV(runner, OWNER, prefix_cache)

    def with_runner(self, wrap: Callable[[Runner], Runner]) -> CrossVocab:
        """The same drafter without its sequences, over a wrapped runner."""
        twin = copy.copy(self)
        twin.runner = twin.draft_runner = wrap(self.runner)
        twin._states, twin._kv = {}, DraftKV(twin.runner, OWNER)
        return twin

    # --- the protocol -------------------------------------------------------------------------------------------------

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        """The draft model reads a prompt on the first call with draft tokens."""
        drafts = [self._start(seq, k) for seq, k in zip(seqs, num_draft_tokens)]
        active = [draft for draft in drafts if draft is not None]
        self._kv.make_room(sum(draft.step_tokens for draft in active))
        try:
            self._draft_tokens(active)
        except OutOfMemory:  # nothing is drafted in this step; what was read of it is read again
            return [draft_tree.empty() for _ in seqs]
        return [draft_tree.empty() if draft is None else self._finish(draft) for draft in drafts]

    def _draft_tokens(self, drafts: list[DraftInProgress]) -> None:
        for depth in range(max((draft.num_draft_tokens for draft in drafts), default=0)):
            active = [draft for draft in drafts if depth < draft.num_draft_tokens]
            output = self.runner.forward([draft.row() for draft in active], last_only=True)
            self._choose(active, output.logits)

    def end(self, seq: Sequence) -> None:
        state = self._states.pop(seq.seq_id, None)
        if state is None:
            return
        if seq.keep_cache:
            self.runner.truncate(state.seq_cache, len(state.cached))
            self._kv.keep(state.cached, state.seq_cache)
        else:
            self.runner.free(state.seq_cache)

    # --- drafting -----------------------------------------------------------------------------------------------------

    def way_of(self, seq: Sequence) -> str:
        """How draft tokens get from the draft's vocabulary into the target's, for this sequence."""
        if self._way != AUTO:
            return self._way
        way = self.pairing.greedy if seq.sampling.greedy else self.pairing.sampled
        return SHARED if way == SAME else way

    def _start(self, seq: Sequence, num_draft_tokens: int) -> DraftInProgress | None:
        """Tokenise the sequence for the draft model. None: it cannot draft now."""
        if not num_draft_tokens:
            return None
        text = self._target.text_of(seq.ids)
        if text.endswith(INCOMPLETE_CHARACTER):
            return None  # until the target has completed the character
        prompt = self._draft.encode(text)
        info = self.runner.info
        if not prompt or len(prompt) + num_draft_tokens > info.max_seq_len or max(prompt) >= info.vocab_size:
            return None
        return DraftInProgress(seq, self._state(seq, prompt), prompt, self.way_of(seq), num_draft_tokens)

    def _state(self, seq: Sequence, prompt: list[int]) -> DraftState:
        """The draft's cache of a sequence, truncated to what it shares with the new tokens."""
        state = self._states.get(seq.seq_id)
        if state is None:
            seq_cache = self._kv.open(prompt)
            state = self._states[seq.seq_id] = DraftState(seq_cache, prompt[: seq_cache.length])
        length = min(common_prefix_length(state.cached, prompt), len(prompt) - 1)
        self.runner.truncate(state.seq_cache, length)
        state.cached = prompt[:length]  # all that is certain if this step fails
        return state

    def _choose(self, active: list[DraftInProgress], logits: Tensor) -> None:
        """The draft's next token for each: its argmax, or one chosen among the shared tokens."""
        best = logits.argmax(dim=-1, keepdim=True)
        for draft, token in zip(active, best):
            if draft.way == TEXT:
                draft.tokens.append(token)
        rows = [row for row, draft in enumerate(active) if draft.way == SHARED]
        if rows:
            self._choose_shared([active[row] for row in rows], self._shared.target_logits(logits[rows]))

    def _choose_shared(self, drafts: list[DraftInProgress], logits: Tensor) -> None:
        best = logits.argmax(dim=-1, keepdim=True)
        choose([draft.seq for draft in drafts], best, logits.__getitem__, [draft.sampled for draft in drafts])
        for draft in drafts:
            draft.tokens.append(self._shared.to_draft_ids(draft.sampled.tokens[-1]))

    def _finish(self, draft: DraftInProgress) -> DraftTree:
        tokens = torch.cat(draft.tokens).tolist()
        draft.state.cached = draft.prompt + tokens[:-1]  # the last one has not been read
        if draft.way == TEXT:
            return draft_tree.chain(self._retokenised(draft, tokens)[: draft.num_draft_tokens])
        return draft.sampled.chain(draft.seq)

    def _retokenised(self, draft: DraftInProgress, tokens: list[int]) -> list[int]:
        """The draft's tokens in the target's vocabulary; up to its end token, if it has one."""
        eos = self._draft.eos
        ended = eos is not None and eos in tokens
        new_tokens = tokens[: tokens.index(eos)] if eos is not None and ended else tokens
        context = draft.prompt[-CONTEXT_TOKENS:]
        text = self._draft.characters(context + new_tokens)[len(self._draft.characters(context)) :]
        text = text.rstrip(INCOMPLETE_CHARACTER)
        before = self._target.characters(draft.seq.ids[-CONTEXT_TOKENS:])
        ids = self._target.after(before, text) if text else []
        return ids + ([self._target.eos] if ended and self._target.eos is not None else [])


# --- building ---------------------------------------------------------------------------------------------------------


def build(context: DrafterContext) -> CrossVocab:
    runner = context.open_runner(context.draft_model)
    tokenizer = context.open_tokenizer(context.draft_model)
    return CrossVocab(
        runner,
        context.tokenizer.hf_tokenizer,
        tokenizer.hf_tokenizer,
        context.target.info.vocab_size,
        prefix_cache=context.prefix_cache,
        **context.options,
    )


SPEC = DrafterSpec(
    name="cross_vocab",
    summary="a draft model with another tokenizer (universal assisted generation)",
    weights=WeightsNeeded.MODEL,
    build=build,
    options=options_of(CrossVocab),
    reference="Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous "
    "Vocabularies, https://arxiv.org/abs/2502.05202",
)
