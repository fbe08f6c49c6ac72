"""One round: guess, check, keep.

THE INVARIANT: between rounds a slot holds every token of its text but the last. The last one is read together with
the guesses that follow it, so plain decoding, prefill and verification are all the same pass.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from paceline.core.budget import Budget
from paceline.core.costs import Timing
from paceline.core.protocols import (
    TILE,
    Ability,
    Drafter,
    Output,
    Round,
    Row,
    Runner,
    StrideRunner,
    Verdict,
    as_outputs,
)
from paceline.core.sequence import Sequence
from paceline.core.tree import DraftTree, empty
from paceline.decode.judge import Judge, logprobs_of
from paceline.drafting.nothing import Nothing
from paceline.errors import AbilityError

STRIDE = 4  # plain rounds taken at once: the host's work a round is shared by four, and no piece of text waits long
NOT_KEPT = Output(torch.empty(0, 0))  # of a stride only the tokens come back


@dataclass(frozen=True, slots=True)
class Machinery:
    """What a round is made with. Put together once, at assembly."""

    target: Runner
    drafter: Drafter
    budget: Budget
    judge: Judge


def check_abilities(target: Runner, drafter: Drafter) -> None:
    """Ask once whether the target can do what the drafter needs."""
    for ability in drafter.needs - target.abilities:
        name = type(drafter).__name__
        raise AbilityError(f"{name} needs a model that can {ability.value}; {target.card.name} cannot")


def prefill(texts: list[Sequence], with_: Machinery, chunk: int = 2048) -> None:
    """Read every prompt but its last token, several texts in one pass.

    A text whose slot already holds a beginning goes on from there; the drafter is told only of what was read now.
    """
    read: dict[int, list[Output]] = {text.number: [] for text in texts}
    for text in texts:
        if text.slot is None:
            text.slot = with_.target.open()
    while pending := [text for text in texts if unread(text)]:
        for text, output in zip(pending, read_some(pending, with_, chunk)):
            read[text.number].append(output)
    for text in texts:
        begin(text, read[text.number], with_)


def begin(text: Sequence, parts: list[Output], with_: Machinery) -> None:
    """The prompt of a text has been read, in these parts: from here on it may be guessed for, and is judged."""
    text.acceptance = text.acceptance or with_.judge.rule  # a drafter may want to know how its guesses are judged
    with_.drafter.begin(text, joined(parts))


def unread(text: Sequence) -> int:
    """Tokens of a text that its slot must still take before a round: all but the last."""
    assert text.slot is not None
    return len(text.ids) - 1 - text.slot.length


def read_some(pending: list[Sequence], with_: Machinery, chunk: int) -> list[Output]:
    """One pass over the next tokens of texts that have some unread, about `chunk` of them shared out evenly.

    Where `chunk` is not a tile for each, the first texts are read and the others wait; what is returned is of those.
    """
    first = pending[: max(1, chunk // TILE)]
    rows = [_prompt_row(text, max(1, chunk // len(first))) for text in first]
    outputs = as_outputs(with_.target.forward(rows, last_only=True))
    for row in rows:
        with_.target.keep(row.slot, list(range(len(row.parents))))
    return list(outputs)


def joined(parts: list[Output]) -> Output | None:
    """The outputs of a prompt read in chunks, as if it had been read at once."""
    if len(parts) < 2:
        return parts[0] if parts else None
    hidden = [part.hidden for part in parts if part.hidden is not None]
    features = [part.features for part in parts if part.features is not None]
    return Output(
        parts[-1].logits, torch.cat(hidden) if hidden else None, torch.cat(features) if features else None
    )


def _prompt_row(text: Sequence, chunk: int) -> Row:
    assert text.slot is not None
    start, last = text.slot.length, len(text.ids) - 1
    end = min(start + chunk, last)
    if end < last and end - end % TILE > start:
        end -= end % TILE
    return Row.chain(text.slot, text.ids[start:end])


def step(texts: list[Sequence], with_: Machinery, budgets: list[int] | None = None) -> list[Round]:
    """Run one round for all texts. Each grows by at least one token, unless it was already finished.

    budgets: guesses a text, where the caller has already asked the budget and made room for them.
    """
    started = time.perf_counter()
    budgets = with_.budget.plan(texts) if budgets is None else budgets
    trees = with_.drafter.propose(texts, budgets)
    drafted = time.perf_counter()
    rows = [_row(text, tree) for text, tree in zip(texts, trees)]
    outputs = as_outputs(with_.target.forward(rows))
    verdicts = with_.judge.verdicts(texts, trees, outputs)
    checked = time.perf_counter()
    rounds: list[Round] = []
    for index, (text, tree, verdict) in enumerate(zip(texts, trees, verdicts)):
        output = outputs[index]
        with_.target.keep(rows[index].slot, [0] + [node + 1 for node in verdict.path])
        if text.logprobs is not None:
            text.token_logprobs += logprobs_of(text, tree, output, verdict, text.logprobs)
        rounds.append(_settle(text, Round(tree, verdict, output), with_.target))
    with_.drafter.observe(texts, rounds)
    timing = Timing(
        drafted - started,
        checked - drafted,
        sum(outputs.sizes),
        max((tree.guesses for tree in trees), default=0),
        len(texts),
        sum(tree.guesses > 0 for tree in trees),
    )
    with_.budget.observe(texts, rounds, timing)
    return rounds


def stride(texts: list[Sequence], with_: Machinery) -> list[Round]:
    """Several plain rounds taken as one, where nothing is guessed and the best token is all that is asked for.

    The target writes on without waiting for the host; what it writes past a text's end is dropped. Any other round is
    one `step`.
    """
    started = time.perf_counter()
    written = _written_ahead(texts, with_)
    if written is None:
        return step(texts, with_)
    tokens = written.tolist()
    passes = written.shape[1]
    timing = Timing(0.0, (time.perf_counter() - started) / passes, len(texts), 0, len(texts))
    rounds = [_settle_all(text, ids, with_.target) for text, ids in zip(texts, tokens)]
    for _ in range(passes):
        with_.budget.observe(texts, rounds, timing)
    return rounds


def _written_ahead(texts: list[Sequence], with_: Machinery) -> Tensor | None:
    target, steps = with_.target, min(STRIDE, max(text.room for text in texts))
    if Ability.STRIDE not in target.abilities or not isinstance(with_.drafter, Nothing) or steps < 2:
        return None
    if not all(map(_bare, texts)):
        return None
    return cast(StrideRunner, target).stride([_row(text, empty()) for text in texts], steps)


def _bare(text: Sequence) -> bool:
    """Whether the best token, as it comes out of the pass, is all that decides."""
    return text.sampling.plain_greedy and text.constraint is None and text.logprobs is None


def _settle_all(text: Sequence, tokens: list[int], target: Runner) -> Round:
    """One plain round a token, up to the text's end, told as one."""
    emitted = text.extend(tokens, 0)
    text.tally.add_plain(len(emitted))
    assert text.slot is not None
    if len(emitted) < len(tokens):
        target.trim(text.slot, len(text.ids) - 1)
    return Round(empty(), Verdict([], emitted[-1]), NOT_KEPT, emitted)


def _row(text: Sequence, tree: DraftTree) -> Row:
    """The last token of the text, not yet read, and the guesses after it."""
    assert text.slot is not None, "prefill opens the slot"
    assert text.slot.length == len(text.ids) - 1, "a slot holds every token of its text but the last"
    return Row(text.slot, tree.tokens, [-1] + [parent + 1 for parent in tree.parents], lead=text.ids[-1])


def _settle(text: Sequence, done: Round, target: Runner) -> Round:
    """Let the text grow, count, and hold the invariant where the end cut inside the run."""
    path = done.verdict.path
    guesses = done.tree.tokens.tolist() if path else []
    run = [guesses[node] for node in path] + [done.verdict.token]
    emitted = text.extend(run, len(path))
    accepted = min(len(path), len(emitted))
    cut = len(emitted) < len(run)
    text.tally.add_round(done.tree, accepted, len(emitted), cut)
    if cut:
        assert text.slot is not None
        target.trim(text.slot, len(text.ids) - 1)
        del text.token_logprobs[text.new_tokens :]
    return Round(done.tree, done.verdict, done.output, emitted, accepted)
