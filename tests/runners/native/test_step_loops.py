"""Several steps in a row, with draft tokens and without: the same tokens, counts and caches as step by step.

Without a GPU what graphs would do is done by torch. On one they are CUDA graphs.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import pytest
import torch

pytest.importorskip("triton")

from paceline.core import looped_steps
from paceline.core.confidence import NUM_BINS, bin_of
from paceline.core.draft_length import AdaptiveDraftLength, FixedDraftLength
from paceline.core.looped_steps import MOST_LEAVES, ChainLimits, LeafLimits, LoopInput
from paceline.core.protocols import LoopSource
from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence
from paceline.core.stopping import StopRules
from paceline.core.types import Row, WarmupPlan
from paceline.drafting.auto import AutoDrafter
from paceline.drafting.draft_model import DraftModel
from paceline.drafting.router import DrafterRouter
from paceline.drafting.suffix import Suffix
from paceline.engines.local.engine import LocalEngine
from paceline.engines.local.scheduler import LOOP_STEPS
from paceline.runners.native import NativeRunner, step_loops
from paceline.runners.native.decode_graphs import ForwardGraph, PassOutput
from paceline.runners.native.pass_inputs import PassInputs, PassSize
from paceline.runners.native.plain_steps import PLAIN_GROUP
from paceline.runners.native.step_kernels import put_drafts, settle
from paceline.runners.native.step_loops import BINS, BLOCK, CONFIDENCE_UNIT, FIELDS, DraftedSteps, LeafWords
from tests.runners.native.fused import TorchGraphs
from tests.runners.native.models import ONE_KERNEL_SIZES, tiny
from tests.support.build import add, finish, sequence, toy_engine

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
PROMPTS = [[5, 9, 3, 7, 11, 2, 8], list(range(20, 70)), [44, 45]]
NEW_TOKENS = 40


def runner(noise: float = 0.0, kv_cache_tokens: int = 2048, *, one_kernel: bool = False) -> NativeRunner:
    """The tiny target, or with noise on its weights a draft model that is right now and then. one_kernel: of sizes that
    a GPU runs as one kernel, which alone states how likely its draft tokens are."""
    model = tiny("llama", torch.bfloat16, **ONE_KERNEL_SIZES) if one_kernel and CUDA else tiny("llama")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight += noise * torch.randn(weight.shape, generator=generator)
    built = NativeRunner.of_model(model.to(DEVICE), "llama", kv_cache_tokens=kv_cache_tokens)
    if not CUDA:
        built.decode_graphs = TorchGraphs(built)
    return built


@dataclass
class Loops:
    """An engine, and how many loops it has run."""

    engine: LocalEngine
    count: int = 0


def looping(k: int = 3, *, loops: bool = True, noise: float = 0.02, max_num_seqs: int = 3) -> Loops:
    """An engine with a draft model. loops: False takes every step alone."""
    target, draft = runner(), runner(noise)
    drafter = DraftModel(draft, target.info.vocab_size)
    made = Loops(toy_engine(target, drafter, FixedDraftLength(k), max_num_seqs=max_num_seqs, prefix_cache_tokens=1024))
    own = target.draft_loop

    def counted(source: LoopSource, inputs: list[LoopInput], num_steps: int) -> object:
        steps = own(source, inputs, num_steps) if loops else None
        made.count += steps is not None
        return steps

    target.draft_loop = counted  # type: ignore[method-assign,assignment]
    return made


def plain(prompts: list[list[int]], max_new_tokens: int = NEW_TOKENS, *, one_kernel: bool = False) -> list[list[int]]:
    """Token by token, one pass each."""
    target = runner(one_kernel=one_kernel)
    target.decode_steps = 1
    engine = toy_engine(target, draft_length=FixedDraftLength(0), max_num_seqs=3)
    return [seq.generated for seq in engine.run([sequence(prompt, max_new_tokens) for prompt in prompts])]


def counts_of(seq: Sequence) -> tuple[int, int, list[int]]:
    """Not the draft tokens: a loop has as many in its last step, past the end, as before."""
    return seq.stats.steps, seq.stats.accepted, seq.stats.accepted_at


@dataclass
class Settled:
    """Outputs of the kernel that ends a step."""

    rows: list[list[int]]
    next_tokens: list[int]
    lengths: list[int]
    grown: list[int]
    last_tokens: list[list[int]]


def settled(drafted: list[list[int]], best: list[list[int]], counts: list[int]) -> Settled:
    """The kernel over draft tokens of which as many are read as `counts` say, the last token included."""
    [(num_seqs, k), nodes] = (len(drafted), len(drafted[0])), len(best[0])
    tensors = [torch.tensor(values, device=DEVICE) for values in (drafted, best, counts)]
    tokens, argmaxes, held = tensors
    ids = torch.full((num_seqs, nodes), 50, device=DEVICE)
    lengths = torch.full((num_seqs,), 10, device=DEVICE)
    accepted, grown, shift = torch.zeros(3, num_seqs, dtype=torch.int64, device=DEVICE)
    last_tokens = torch.zeros(num_seqs, 2, dtype=torch.int64, device=DEVICE)
    rows = torch.zeros(num_seqs, FIELDS + 2 * k, dtype=torch.int64, device=DEVICE)
    settle[(num_seqs,)](
        *(tokens, tokens, tokens, held, held, argmaxes, ids, held, ids, lengths),
        *(accepted, grown, last_tokens, shift, rows, k, nodes, k),
        HAS_COUNT=False,
        HAS_LEAVES=False,
        MOST_LEAVES=0,
        HAS_CONFIDENCE=False,
        UNIT=1,
        FIELDS=FIELDS,
        BLOCK=8,
    )
    return Settled(rows.tolist(), ids[:, 0].tolist(), lengths.tolist(), grown.tolist(), last_tokens.tolist())


def test_accepted_are_draft_tokens_up_to_the_first_wrong_one_and_within_the_limit() -> None:
    drafted = [[1, 2, 3], [9, 2, 3], [1, 9, 3], [1, 2, 3]]
    found = settled(drafted, [[1, 2, 3, 4]] * 4, [4, 4, 4, 3])
    assert [row[0] for row in found.rows] == [3, 0, 1, 2]
    assert found.next_tokens == [row[1] for row in found.rows] == [4, 1, 2, 3]
    assert found.last_tokens == [[3, 4], [50, 1], [1, 2], [2, 3]]
    assert found.grown == [4, 1, 2, 3] and found.lengths == [14, 11, 12, 13]
    assert [row[FIELDS : FIELDS + 3] for row in found.rows] == drafted


@dataclass
class LeafStep:
    """A chain of draft tokens with a second choice for each, on its way through both kernels of a step.

    made   draft tokens that were made of the k there is room for; what lies behind them means nothing
    nodes  rows of the pass, the last token of the sequence included
    """

    made: int
    k: int
    nodes: int
    confidence: list[float]
    second_confidence: list[float]
    limits: ChainLimits

    @property
    def tokens(self) -> list[int]:
        return [5 + place for place in range(self.made)] + [1 << 40] * (self.k - self.made)

    @property
    def second(self) -> list[int]:
        return [105 + place for place in range(self.k)]

    def leaves(self) -> list[int]:
        """The reference: draft tokens, from 0 on, beside which a second choice is sent."""
        assert self.limits.leaves is not None
        survival, beside = 1.0, list[int]()
        for place in range(self.made):
            if survival * self.limits.leaves.rates[bin_of(self.second_confidence[place])] >= self.limits.leaves.least:
                beside.append(place)
            survival *= self.limits.rates[bin_of(self.confidence[place])]
        return beside[: min(MOST_LEAVES, self.nodes - self.made - 1)]


@dataclass
class LeafPass:
    """A step on the device: what the target reads, and what is left of it."""

    step: LeafStep

    def __post_init__(self) -> None:
        step, self.places = self.step, torch.arange(self.step.nodes, device=DEVICE)
        self.drafted, self.second = (torch.tensor([own], device=DEVICE) for own in (step.tokens, step.second))
        stated = torch.tensor([step.confidence, step.second_confidence], device=DEVICE)
        self.stated, self.second_stated = stated[:1], stated[1:]
        self.count, self.most = torch.tensor([float(step.made)], device=DEVICE), torch.tensor([step.k], device=DEVICE)
        self.ids, self.depths, self.masks = torch.full((3, 1, step.nodes), 50, device=DEVICE)
        self.counts = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        self.lengths = torch.full((1,), 10, device=DEVICE)
        self.accepted, self.grown, self.shift = torch.zeros(3, 1, dtype=torch.int64, device=DEVICE)
        self.last_tokens = torch.zeros(1, 2, dtype=torch.int64, device=DEVICE)
        self.row = torch.zeros(1, FIELDS + 2 * step.k + 3 * MOST_LEAVES, dtype=torch.int64, device=DEVICE)

    def put(self) -> None:
        words = LeafWords(torch.device(DEVICE))
        words.set(self.step.limits)
        put_drafts[(1,)](
            *(self.drafted, self.stated, self.second, self.second_stated, words.words, self.count, self.most),
            *(self.ids, self.counts, self.depths, self.masks, self.step.k, self.step.nodes, self.step.k),
            HAS_COUNT=True,
            HAS_LEAVES=True,
            MOST_LEAVES=MOST_LEAVES,
            BINS=BINS,
            BLOCK=BLOCK,
        )

    def settle(self, best: list[int]) -> None:
        argmaxes = torch.tensor(best, device=DEVICE)
        settle[(1,)](
            *(self.drafted, self.stated, self.second_stated, self.count, self.most, argmaxes, self.ids, self.counts),
            *(self.depths, self.lengths, self.accepted, self.grown, self.last_tokens, self.shift, self.row),
            *(self.step.k, self.step.nodes, self.step.k),
            HAS_COUNT=True,
            HAS_LEAVES=True,
            MOST_LEAVES=MOST_LEAVES,
            HAS_CONFIDENCE=True,
            UNIT=CONFIDENCE_UNIT,
            FIELDS=FIELDS,
            BLOCK=BLOCK,
        )


def leaf_steps(count: int) -> list[LeafStep]:
    dice, steps = random.Random(5), list[LeafStep]()
    for _ in range(count):
        k = dice.randint(1, 12)
        made = dice.randint(1, k)
        rates, leaf_rates = (tuple(sorted(dice.random() for _ in range(NUM_BINS))) for _ in range(2))
        limits = ChainLimits(0.1, rates, LeafLimits(dice.choice((0.0, 0.02, 0.1, 0.3)), leaf_rates))
        confidence, second = ([dice.random() ** power for _ in range(k)] for power in (0.3, 2))
        nodes = dice.randint(made + 1, made + 12)
        steps.append(LeafStep(made, k, max(nodes, k + 1), confidence, second, limits))
    return steps


def test_second_choices_that_promise_enough_come_behind_the_chain() -> None:
    """What a pass that was not taken has left is whatever its memory held; an embedding would fail on it."""
    numbers = set()
    for step in leaf_steps(60):
        made, beside, device = step.made, step.leaves(), LeafPass(step)
        device.put()
        held, chain = 1 + made + len(beside), [(2 << node) - 1 for node in range(made + 1)]
        assert device.counts.tolist() == [held]
        assert device.ids[0, :held].tolist() == [50, *step.tokens[:made], *(step.second[place] for place in beside)]
        assert device.depths[0, :held].tolist() == [*range(made + 1), *(place + 1 for place in beside)]
        own = [(2 << place) - 1 + (1 << made + 1 + index) for index, place in enumerate(beside)]
        assert device.masks[0, :held].tolist() == [*chain, *own]
        assert int(device.ids.max()) < 1 << 40
        assert device.depths[0, held:].tolist() == list(range(held, step.nodes)), "no leaf of an earlier step is left"
        numbers.add(len(beside))
    assert {0, 1, 2, 3, MOST_LEAVES} <= numbers


def test_a_leaf_is_accepted_where_the_draft_token_beside_it_is_not() -> None:
    """The target is right about some draft tokens, then chooses the second choice, or neither."""
    dice, outcomes = random.Random(7), set[tuple[bool, bool]]()
    for step in leaf_steps(60):
        made, beside, device = step.made, step.leaves(), LeafPass(step)
        device.put()
        right = dice.randint(0, made)
        takes_second = dice.random() < 0.7 and right < made
        best = [*step.tokens[:right], step.second[right] if takes_second else 77]
        best += [200 + node for node in range(len(best), step.nodes)]
        device.settle(best)
        is_leaf = takes_second and right in beside
        leaf = made + 1 + beside.index(right) if is_leaf else 0
        written = [*step.tokens[:right], step.second[right], best[leaf]] if is_leaf else best[: right + 1]
        assert device.accepted.tolist() == [right] and device.grown.tolist() == [len(written)]
        assert device.lengths.tolist() == [10 + len(written)] and int(device.ids[0, 0]) == written[-1]
        assert device.last_tokens.tolist() == [[50, *written][-2:]]
        assert device.shift.tolist() == [leaf - right - 1 if is_leaf else 0]
        looped = DraftedSteps.looped_step(steps_of(step), device.row[0].tolist())
        assert looped.verified.tokens == written[:-1] and looped.verified.next_token == written[-1]
        assert looped.draft_tokens == [*step.tokens[:made], *(step.second[place] for place in beside)]
        assert looped.parents == [*range(-1, made - 1), *(place - 1 for place in beside)]
        stated = step.confidence[:made] + [step.second_confidence[place] for place in beside]
        assert looped.confidence == pytest.approx(stated, abs=1e-5) and looped.num_leaves == len(beside)
        outcomes.add((takes_second, is_leaf))
    assert outcomes == {(False, False), (True, False), (True, True)}


def steps_of(step: LeafStep) -> DraftedSteps:
    """Steps of so many draft tokens, with leaves."""
    return cast(DraftedSteps, SimpleNamespace(k=step.k))


@pytest.mark.slow
@pytest.mark.parametrize("least", [0.0, 0.02, 9.0], ids=["long chains", "some", "single draft tokens"])
def test_a_chain_that_ends_early_and_its_leaves_write_what_plain_decoding_writes(least: float) -> None:
    target, draft = runner(one_kernel=True), runner(0.012, one_kernel=True)
    caches = [model.new_cache() for model in (target, draft)]
    ids, lengths, leaves = list(PROMPTS[0]), set(), Counter[str]()
    target.forward([Row.chain(caches[0], ids[:-1])], last_only=True)
    rates = tuple(0.3 + 0.05 * index for index in range(NUM_BINS))
    while len(ids) < len(PROMPTS[0]) + 120:
        source = draft.loop_source(lambda: ChainLimits(least, rates, LeafLimits(0.0, rates)))
        loop = LoopInput(caches[0], ids, lambda: False, 5, caches[1])
        steps = target.draft_loop(source, [loop], 6) if source is not None else None
        assert steps is not None
        for [step] in steps:
            made = len(step.draft_tokens) - step.num_leaves
            assert step.confidence is not None and len(step.confidence) == len(step.draft_tokens)
            lengths.add(made)
            leaves["sent"] += step.num_leaves
            leaves["accepted"] += max(step.verified.accepted, default=0) >= made
            leaves["not the last"] += any(parent < made - 2 for parent in (step.parents or [])[made:])
            ids += [*step.verified.tokens, step.verified.next_token]
            assert caches[0].length == len(ids) - 1
    expected = plain(PROMPTS[:1], 180, one_kernel=True)[0]
    assert ids[len(PROMPTS[0]) :] == expected[: len(ids) - len(PROMPTS[0])]
    assert max(lengths) == (1 if least == 9.0 else 5)
    if CUDA:
        return  # its passes have more rows, and another draft model is right elsewhere
    if least:
        assert leaves["sent"] > leaves["accepted"] > 0, "leaves were sent, and some were accepted"
    else:
        assert leaves["sent"] == 0, "as many draft tokens as the pass has room for"
    assert bool(leaves["not the last"]) == (least == 0.02)


@pytest.mark.parametrize("leaves", [True, False])
def test_a_step_with_a_leaf_is_read_by_a_pass_for_trees(leaves: bool) -> None:
    """Else the sums of the leaf would be rounded in another way than those of the same token in a chain."""
    target, draft = runner(), runner(0.012)
    caches = [model.new_cache() for model in (target, draft)]
    target.forward([Row.chain(caches[0], PROMPTS[0][:-1])], last_only=True)
    rates = (0.5,) * NUM_BINS
    limits = ChainLimits(0.02, rates, LeafLimits(0.05, rates))
    source = draft.loop_source((lambda: limits) if leaves else None)
    graphs = target.decode_graphs
    assert source is not None and (source.leaf_limits is not None) == leaves and graphs is not None
    asked: list[bool] = []
    own = graphs.prepared

    def prepared(rows: list[Row], size: PassSize) -> ForwardGraph:
        asked.append(size.trees)
        return own(rows, size)

    graphs.prepared = prepared  # type: ignore[method-assign,assignment]
    steps = target.draft_loop(source, [LoopInput(caches[0], list(PROMPTS[0]), lambda: False, 5, caches[1])], 4)
    assert steps is not None and len(list(steps)) == 4 and asked == [leaves]


@pytest.mark.slow
def test_a_batch_in_loops_writes_what_plain_decoding_writes_and_counts_as_step_by_step() -> None:
    looped, single = looping(), looping(loops=False)
    seqs, others = (made.engine.run([sequence(prompt, NEW_TOKENS) for prompt in PROMPTS]) for made in (looped, single))
    assert looped.count and single.count == 0
    assert [seq.generated for seq in seqs] == plain(PROMPTS)
    assert list(map(counts_of, seqs)) == list(map(counts_of, others))
    accepted = [seq.stats.accepted for seq in seqs]
    assert all(0 < count < seq.stats.drafted for seq, count in zip(seqs, accepted)), "some are right, some wrong"


@pytest.mark.slow
def test_a_draft_model_that_chooses_from_a_part_of_its_vocabulary_writes_what_plain_decoding_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, target, draft = 64, runner(), runner(0.012)
    monkeypatch.setattr(step_loops, "draft_vocabulary", lambda vocab_size, sequences: rows)
    caches = [model.new_cache() for model in (target, draft)]
    ids, drafted = list(PROMPTS[0]), list[int]()
    target.forward([Row.chain(caches[0], ids[:-1])], last_only=True)
    source = draft.loop_source()
    steps = target.draft_loop(source, [LoopInput(caches[0], ids, lambda: False, 5, caches[1])], 30) if source else None
    assert steps is not None
    for [step] in steps:
        drafted += step.draft_tokens
        ids += [*step.verified.tokens, step.verified.next_token]
    written = ids[len(PROMPTS[0]) :]
    assert written == plain(PROMPTS[:1], 180)[0][: len(written)] and max(written) >= rows
    assert CUDA or max(drafted) < rows, "graphs of other kernels read the whole LM head"


@pytest.mark.slow
def test_every_step_of_a_loop_is_handed_out_by_itself_and_the_caches_fit_the_sequence() -> None:
    made = looping()
    request = add(made.engine, sequence(PROMPTS[0], NEW_TOKENS))
    sizes: list[int] = []
    while made.engine.has_work:
        before = len(request.outputs)
        made.engine.step()
        sizes.append(len(request.outputs) - before)
        seq = request.state.seq
        if seq.seq_cache is not None and not seq.finished:
            assert seq.seq_cache.length == len(seq.ids) - 1
    assert max(sizes) > 2 and request.tokens == request.state.seq.generated == plain(PROMPTS[:1])[0]


@pytest.mark.slow
def test_a_loop_goes_on_as_long_as_the_policy_drafts_as_many_tokens() -> None:
    made = looping()
    [seq] = made.engine.run([sequence(PROMPTS[0], NEW_TOKENS)])
    assert made.count == 1 and seq.stats.steps > LOOP_STEPS and [seq.generated] == plain(PROMPTS[:1])

    made = looping()
    policy, asked = made.engine._draft_length, list[int]()

    def plan(seqs: list[Sequence]) -> list[int]:
        asked.append(seqs[0].stats.steps)
        return [min(3 + (len(asked) > 1), seq.remaining_tokens - 1) for seq in seqs]

    policy.plan = plan  # type: ignore[method-assign]
    [seq] = made.engine.run([sequence(PROMPTS[0], NEW_TOKENS)])
    assert asked[:3] == [0, LOOP_STEPS, LOOP_STEPS + 1], "another number ends it; a step that was begun still comes"
    assert made.count == 2 and [seq.generated] == plain(PROMPTS[:1])


@pytest.mark.slow
@pytest.mark.skipif(CUDA, reason="what a graph was captured for is not seen again")
@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize("tokens", [1, 13, 30])
def test_a_loop_ends_before_a_sequence_outgrows_what_was_reserved_for_it(
    noise: float, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft model is right all the time, or now and then; a few tokens are enough for a few steps only."""
    monkeypatch.setattr(looped_steps, "LOOP_TOKENS", tokens)
    target, draft = runner(), runner(noise)
    caches = [model.new_cache() for model in (target, draft)]
    ids, num_loops, ends = list(PROMPTS[0]), 0, list[int]()
    target.forward([Row.chain(caches[0], ids[:-1])], last_only=True)
    graphs = target.decode_graphs
    assert graphs is not None
    run, held = graphs._forward_work, lambda: len(target.blocks.table(caches[0])) * target.blocks.block_size

    def watched(inputs: PassInputs) -> PassOutput:
        ends.append(int(inputs.batch.lengths[0] + inputs.batch.counts[0]))
        assert ends[-1] <= held(), "it would write into blocks of others"
        return run(inputs)

    graphs._forward_work = watched  # type: ignore[method-assign]
    while len(ids) < len(PROMPTS[0]) + 150:
        source, loop = draft.loop_source(), LoopInput(caches[0], ids, lambda: False, 3, caches[1])
        steps = target.draft_loop(source, [loop], 64) if source is not None else None
        assert steps is not None
        num_loops += 1
        for [step] in steps:
            ids += [*step.verified.tokens, step.verified.next_token]
    assert ids[len(PROMPTS[0]) :] == plain(PROMPTS[:1], 300)[0][: len(ids) - len(PROMPTS[0])]
    assert num_loops >= 150 // max(tokens, 8) and max(ends) > 150


@pytest.mark.slow
def test_a_caller_ends_a_loop() -> None:
    made = looping()
    made.engine.end_loops_if(lambda: True)
    request = add(made.engine, sequence(PROMPTS[0], NEW_TOKENS))
    made.engine.step()
    assert request.state.seq.stats.steps == 2, "one that was read, and one that was under way"
    finish(made.engine)
    assert [request.tokens] == plain(PROMPTS[:1])


@pytest.mark.slow
def test_a_place_that_becomes_free_goes_to_a_request_that_waits() -> None:
    made = looping(max_num_seqs=2)
    prompts = [*PROMPTS, PROMPTS[0]]
    requests = [add(made.engine, sequence(prompt, tokens)) for prompt, tokens in zip(prompts, (8, 120, 20, 20))]
    while len(requests[0].tokens) < 8:
        made.engine.step()
    assert len(requests[1].tokens) < 60, "the other one has not gone on to its end"
    finish(made.engine)
    assert [request.tokens for request in requests[:2]] == [plain(PROMPTS[:1], 8)[0], plain(PROMPTS[1:2], 120)[0]]
    assert requests[2].tokens == plain(PROMPTS[2:], 20)[0]


@pytest.mark.slow
@pytest.mark.parametrize("place", [9, 10, 11, 12, 13])
def test_a_sequence_ends_inside_a_loop_and_the_others_go_on(place: int) -> None:
    texts = plain(PROMPTS)
    end = texts[0][place]
    made = looping()
    stopping = StopRules(NEW_TOKENS, frozenset({end}))
    seqs = [sequence(PROMPTS[0], 0, stopping=stopping), *(sequence(prompt, NEW_TOKENS) for prompt in PROMPTS[1:])]
    made.engine.run(seqs)
    assert seqs[0].generated == texts[0][: texts[0].index(end) + 1] and seqs[0].finish_reason == "stop"
    assert [seq.generated for seq in seqs[1:]] == texts[1:] and made.count


@pytest.mark.slow
def test_the_next_turn_goes_on_from_caches_that_a_loop_has_left() -> None:
    made = looping()
    [first] = made.engine.run([sequence(PROMPTS[1], 50)])
    turn = [*first.ids, 7, 8, 9]
    [second] = made.engine.run([sequence(turn, NEW_TOKENS)])
    assert second.num_cached_tokens > len(PROMPTS[1])
    assert [second.generated] == plain([turn])


@pytest.mark.slow
def test_each_sequence_keeps_to_its_own_number_of_draft_tokens() -> None:
    made = looping()
    seqs = [sequence(prompt, NEW_TOKENS, num_draft_tokens=k) for prompt, k in zip(PROMPTS, (1, 3, 6))]
    made.engine.run(seqs)
    assert made.count and [seq.generated for seq in seqs] == plain(PROMPTS)
    assert [max(len(seq.stats.offered_at), 0) for seq in seqs] == [1, 3, 6]


@pytest.mark.slow
def test_a_sampled_neighbour_keeps_the_batch_step_by_step() -> None:
    made = looping()
    sampled = sequence(PROMPTS[1], 80, SamplingParams(temperature=1.0, seed=1))
    greedy = sequence(PROMPTS[0], 16)
    made.engine.run([greedy, sampled])
    assert not made.count and [greedy.generated] == plain(PROMPTS[:1], 16)


def test_without_free_blocks_there_is_no_loop_and_nothing_changes() -> None:
    target, draft = runner(), runner(0.02)
    prompt = list(range(1, 64))
    caches = [model.new_cache() for model in (target, draft)]
    for model, cache in zip((target, draft), caches):
        model.forward([Row.chain(cache, prompt[:-1])], last_only=True)
    while target.blocks.free:
        target.blocks.grow(object(), 64)
    held = [len(model.blocks.table(cache)) for model, cache in zip((target, draft), caches)]
    loop = LoopInput(caches[0], prompt, lambda: False, 4, caches[1])
    source = draft.loop_source()
    assert source is not None and target.draft_loop(source, [loop], LOOP_STEPS) is None
    assert [cache.length for cache in caches] == [62, 62]
    assert [len(model.blocks.table(cache)) for model, cache in zip((target, draft), caches)] == held


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_auto_writes_what_plain_decoding_writes_in_loops_and_between_them(noise: float) -> None:
    """Which steps are taken in loops is a matter of time; the texts are not."""
    target, draft = runner(), runner(noise)
    drafter = AutoDrafter({"suffix": Suffix()}, {"draft_model": DraftModel(draft, target.info.vocab_size)})
    policy = AdaptiveDraftLength(max_draft_tokens=6)
    drafter.use_value(policy.draft_value())
    engine = toy_engine(target, drafter, policy, max_num_seqs=3)
    for _ in range(2):
        seqs = engine.run([sequence(prompt, NEW_TOKENS) for prompt in PROMPTS])
        assert [seq.generated for seq in seqs] == plain(PROMPTS)


@pytest.mark.slow
def test_requests_that_choose_the_draft_model_loop_too() -> None:
    target, draft = runner(), runner(0.02)
    router = DrafterRouter({"draft_model": DraftModel(draft, target.info.vocab_size)}, "draft_model")
    engine = toy_engine(target, router, FixedDraftLength(4), methods=("draft_model",))
    request = add(engine, sequence(PROMPTS[0], NEW_TOKENS, method="draft_model"))
    assert finish(engine) < request.state.seq.stats.steps, "fewer calls of the engine than steps"
    assert [request.tokens] == plain(PROMPTS[:1])


@pytest.mark.parametrize("kind", ["drafted", "plain"])
def test_a_loop_that_is_told_to_end_still_hands_out_what_was_begun(kind: str) -> None:
    target, draft = runner(), runner(0.02)
    caches = [model.new_cache() for model in (target, draft)]
    target.forward([Row.chain(caches[0], PROMPTS[0][:-1])], last_only=True)
    loop = LoopInput(caches[0], PROMPTS[0], lambda: False, 3 if kind == "drafted" else 0, caches[1])
    source = draft.loop_source()
    assert source is not None
    steps = target.draft_loop(source, [loop], 8) if kind == "drafted" else target.plain_loop([loop], 16)
    assert steps is not None
    next(steps)
    steps.send(True)
    with pytest.raises(StopIteration):
        next(steps)
    assert caches[0].length >= len(PROMPTS[0]) - 1 + 2


def plain_engine(max_num_seqs: int = 3) -> LocalEngine:
    target = runner()
    target.decode_steps = 8
    return toy_engine(target, draft_length=FixedDraftLength(0), max_num_seqs=max_num_seqs)


@pytest.mark.parametrize("new_tokens", [1, 2, 7, NEW_TOKENS])
def test_plain_steps_in_a_row_write_what_single_ones_write(new_tokens: int) -> None:
    engine = plain_engine()
    requests = [add(engine, sequence(prompt, new_tokens)) for prompt in PROMPTS]
    calls = finish(engine)
    assert [request.tokens for request in requests] == plain(PROMPTS, new_tokens)
    assert all(request.state.seq.stats.steps == new_tokens for request in requests)
    assert new_tokens < 8 or calls < new_tokens // 4
    largest = max(len(output.token_ids) for request in requests for output in request.outputs)
    assert largest <= PLAIN_GROUP, "a reader waits for a few tokens only"


@pytest.mark.slow
@pytest.mark.parametrize("place", [4, 5, 6])
def test_a_plain_sequence_ends_inside_a_loop_and_its_prefix_is_right(place: int) -> None:
    texts = plain(PROMPTS)
    end = texts[1][place]
    engine = plain_engine()
    stopping = StopRules(NEW_TOKENS, frozenset({end}))
    seqs = [sequence(PROMPTS[0], NEW_TOKENS), sequence(PROMPTS[1], 0, stopping=stopping)]
    engine.run(seqs)
    assert [seqs[0].generated, seqs[1].generated] == [texts[0], texts[1][: texts[1].index(end) + 1]]
    turn = [*seqs[1].ids, 3, 4]
    [second] = engine.run([sequence(turn, 20)])
    assert [second.generated] == plain([turn], 20)


def test_a_model_that_drafts_no_more_is_asked_again_after_a_few_plain_steps() -> None:
    """A policy decides step by step; only sequences that never draft take many plain steps at once."""
    made = looping(0)
    assert made.engine._draft_length.stays_plain([sequence(PROMPTS[0], 1)])
    made = looping(3)
    assert not made.engine._draft_length.stays_plain([sequence(PROMPTS[0], 1)])
    assert made.engine._draft_length.stays_plain([sequence(PROMPTS[0], 1, num_draft_tokens=0)])


@pytest.mark.slow
def test_a_loop_drafts_no_more_than_graphs_are_ready_for_unless_a_request_asks_for_it() -> None:
    made = looping(8)
    drafter = made.engine.parts.drafter
    drafter.preparations(WarmupPlan((1,), (1, 2, 3), 256))
    held, chosen = sequence(PROMPTS[0], NEW_TOKENS), sequence(PROMPTS[0], NEW_TOKENS, num_draft_tokens=5)
    for seq in (held, chosen):
        made.engine.run([seq])
    assert made.count and [len(seq.stats.offered_at) for seq in (held, chosen)] == [3, 5]


@pytest.mark.gpu
def test_on_the_card_a_loop_writes_what_plain_decoding_writes() -> None:
    made = looping()
    seqs = made.engine.run([sequence(prompt, 120) for prompt in PROMPTS])
    assert made.count and [seq.generated for seq in seqs] == plain(PROMPTS, 120)


@pytest.mark.slow
@pytest.mark.skipif(CUDA, reason="graphs that are there already need no memory")
def test_without_memory_for_a_capture_steps_are_taken_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    target = runner()
    assert target.decode_graphs is not None
    target.decode_steps = 8

    def full(*arguments: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(target.decode_graphs, "prepared", full)
    monkeypatch.setattr(target.decode_graphs, "fits_rows", lambda rows, last_only: None)  # passes without a graph
    [seq] = toy_engine(target, draft_length=FixedDraftLength(0)).run([sequence(PROMPTS[0], NEW_TOKENS)])
    assert [seq.generated] == plain(PROMPTS[:1])
