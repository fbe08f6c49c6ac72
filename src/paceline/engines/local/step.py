"""One step: draft token, check, keep.

THE INVARIANT: between steps a sequence cache holds every token of its sequence but the last. The last one is read together with
the draft tokens that follow it, so plain decoding, prefill and verification are all the same pass.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.cost_model import StepTiming
from paceline.core.draft_length import DraftLengthPolicy
from paceline.core.draft_tree import DraftTree, empty
from paceline.core.protocols import Drafter, Runner
from paceline.core.sequence import Sequence
from paceline.core.types import Row, RowOutput, StepResult, VerifyResult
from paceline.drafting.no_draft import NoDraft
from paceline.engines.local.verifier import Verifier, logprobs_of
from paceline.errors import CapabilityError
from paceline.kv.block_manager import BLOCK_SIZE as TILE

STRIDE = 4  # plain steps taken at once: the host's work a step is shared by four, and no piece of sequence waits long
NOT_KEPT = RowOutput(torch.empty(0, 0))  # of a stride only the tokens come back


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What a step is made with. Put together once, at assembly."""

    target: Runner
    drafter: Drafter
    budget: DraftLengthPolicy
    verifier: Verifier


def check_capabilities(target: Runner, drafter: Drafter) -> None:
    """Ask once whether the target can do what the drafter needs."""
    for capability in drafter.needs - target.capabilities:
        name = type(drafter).__name__
        raise CapabilityError(f"{name} needs a model that can {capability.value}; {target.info.name} cannot")


def prefill(seqs: list[Sequence], parts: EngineParts, chunk: int = 2048) -> None:
    """Read every prompt but its last token, several sequences in one pass.

    A sequence whose sequence cache already holds a beginning goes on from there; the drafter is told only of what was read now.
    """
    read: dict[int, list[RowOutput]] = {seq.seq_id: [] for seq in seqs}
    for seq in seqs:
        if seq.seq_cache is None:
            seq.seq_cache = parts.target.new_cache()
    while pending := [seq for seq in seqs if num_unread(seq)]:
        for seq, output in zip(pending, read_some(pending, parts, chunk)):
            read[seq.seq_id].append(output)
    for seq in seqs:
        begin(seq, read[seq.seq_id], parts)


def begin(seq: Sequence, chunks: list[RowOutput], parts: EngineParts) -> None:
    """The prompt of a sequence has been read, in these chunks: from here on it may be guessed for, and is judged."""
    seq.acceptance = seq.acceptance or parts.verifier.rule  # a drafter may want to know how its draft tokens are judged
    parts.drafter.begin(seq, joined(chunks))


def num_unread(seq: Sequence) -> int:
    """Tokens of a sequence that its sequence cache must still take before a step: all but the last."""
    assert seq.seq_cache is not None
    return len(seq.ids) - 1 - seq.seq_cache.length


def read_some(pending: list[Sequence], parts: EngineParts, chunk: int) -> list[RowOutput]:
    """One pass over the next tokens of sequences that have some unread, about `chunk` of them shared out evenly.

    Where `chunk` is not a tile for each, the first sequences are read and the others wait; what is returned is of those.
    """
    first = pending[: max(1, chunk // TILE)]
    rows = [_prompt_row(seq, max(1, chunk // len(first))) for seq in first]
    outputs = parts.target.forward(rows, last_only=True)
    for row in rows:
        parts.target.commit(row.seq_cache, list(range(len(row.parents))))
    return list(outputs)


def joined(chunks: list[RowOutput]) -> RowOutput | None:
    """The outputs of a prompt read in chunks, as if it had been read at once."""
    if len(chunks) < 2:
        return chunks[0] if chunks else None
    hidden = [part.hidden for part in chunks if part.hidden is not None]
    features = [part.features for part in chunks if part.features is not None]
    return RowOutput(
        chunks[-1].logits, torch.cat(hidden) if hidden else None, torch.cat(features) if features else None
    )


def _prompt_row(seq: Sequence, chunk: int) -> Row:
    assert seq.seq_cache is not None
    start, last = seq.seq_cache.length, len(seq.ids) - 1
    end = min(start + chunk, last)
    if end < last and end - end % TILE > start:
        end -= end % TILE
    return Row.chain(seq.seq_cache, seq.ids[start:end])


def step(seqs: list[Sequence], parts: EngineParts, num_draft_tokens: list[int] | None = None) -> list[StepResult]:
    """Run one step for all sequences. Each grows by at least one token, unless it was already finished.

    draft length: draft tokens a sequence, where the caller has already asked the draft length and made room for them.
    """
    started = time.perf_counter()
    num_draft_tokens = parts.budget.plan(seqs) if num_draft_tokens is None else num_draft_tokens
    trees = parts.drafter.propose(seqs, num_draft_tokens)
    drafted = time.perf_counter()
    rows = [_row(seq, tree) for seq, tree in zip(seqs, trees)]
    outputs = parts.target.forward(rows)
    verified_rows = parts.verifier.verified_rows(seqs, trees, outputs)
    checked = time.perf_counter()
    results: list[StepResult] = []
    for index, (seq, tree, verified) in enumerate(zip(seqs, trees, verified_rows)):
        output = outputs[index]
        parts.target.commit(rows[index].seq_cache, [0] + [node + 1 for node in verified.accepted])
        if seq.logprobs is not None:
            seq.token_logprobs += logprobs_of(seq, tree, output, verified, seq.logprobs)
        results.append(_settle(seq, StepResult(tree, verified, output), parts.target))
    parts.drafter.observe(seqs, results)
    timing = StepTiming(
        drafted - started,
        checked - drafted,
        sum(outputs.sizes),
        max((tree.num_draft_tokens for tree in trees), default=0),
        len(seqs),
        sum(tree.num_draft_tokens > 0 for tree in trees),
    )
    parts.budget.observe(seqs, results, timing)
    return results


def stride(seqs: list[Sequence], parts: EngineParts) -> list[StepResult]:
    """Several plain steps taken as one, where nothing is guessed and the best token is all that is asked for.

    The target writes on without waiting for the host; what it writes past a sequence's end is dropped. Any other step is
    one `step`.
    """
    started = time.perf_counter()
    written = _written_ahead(seqs, parts)
    if written is None:
        return step(seqs, parts)
    tokens = written.tolist()
    passes = written.shape[1]
    timing = StepTiming(0.0, (time.perf_counter() - started) / passes, len(seqs), 0, len(seqs))
    results = [_settle_all(seq, ids, parts.target) for seq, ids in zip(seqs, tokens)]
    for _ in range(passes):
        parts.budget.observe(seqs, results, timing)
    return results


def _written_ahead(seqs: list[Sequence], parts: EngineParts) -> Tensor | None:
    target, steps = parts.target, min(STRIDE, max(seq.room for seq in seqs))
    if target.decode_steps < 2 or not isinstance(parts.drafter, NoDraft) or steps < 2:
        return None
    if not all(map(_bare, seqs)):
        return None
    return target.decode([_row(seq, empty()) for seq in seqs], steps)


def _bare(seq: Sequence) -> bool:
    """Whether the best token, as it comes out of the pass, is all that decides."""
    return seq.sampling.plain_greedy and seq.constraint is None and seq.logprobs is None


def _settle_all(seq: Sequence, tokens: list[int], target: Runner) -> StepResult:
    """One plain step a token, up to the sequence's end, told as one."""
    emitted = seq.extend(tokens, 0)
    seq.stats.add_plain(len(emitted))
    assert seq.seq_cache is not None
    if len(emitted) < len(tokens):
        target.truncate(seq.seq_cache, len(seq.ids) - 1)
    return StepResult(empty(), VerifyResult([], emitted[-1]), NOT_KEPT, emitted)


def _row(seq: Sequence, tree: DraftTree) -> Row:
    """The last token of the sequence, not yet read, and the draft tokens after it."""
    assert seq.seq_cache is not None, "prefill opens the slot"
    assert seq.seq_cache.length == len(seq.ids) - 1, "a slot holds every token of its text but the last"
    return Row(seq.seq_cache, tree.tokens, [-1] + [parent + 1 for parent in tree.parents], lead=seq.ids[-1])


def _settle(seq: Sequence, result: StepResult, target: Runner) -> StepResult:
    """Let the sequence grow, count, and hold the invariant where the end cut inside the run."""
    path = result.verified.accepted
    draft_tokens = result.tree.tokens.tolist() if path else []
    run = [draft_tokens[node] for node in path] + [result.verified.next_token]
    emitted = seq.extend(run, len(path))
    accepted = min(len(path), len(emitted))
    cut = len(emitted) < len(run)
    seq.stats.add_step(result.tree, accepted, len(emitted), cut)
    if cut:
        assert seq.seq_cache is not None
        target.truncate(seq.seq_cache, len(seq.ids) - 1)
        del seq.token_logprobs[seq.new_tokens :]
    return StepResult(result.tree, result.verified, result.output, emitted, accepted)
