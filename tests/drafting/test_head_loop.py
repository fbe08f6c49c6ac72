"""Trained heads in a loop of steps: what plain decoding writes, and what steps one by one accept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from paceline.core.cost_model import StepTiming
from paceline.core.draft_length import FixedDraftLength
from paceline.core.sequence import Sequence
from paceline.core.stopping import StopRules
from paceline.core.types import StepResult, WarmupPlan
from paceline.device.graphs import EagerPool
from paceline.drafting.dflash import CONTEXT_SIZES, DFlash
from paceline.drafting.eagle import Eagle
from paceline.drafting.eagle_graph import EagleGraphs
from paceline.engines.local.engine import LocalEngine
from paceline.heads.eagle import EagleHead
from paceline.heads.eagle1 import Eagle1Config, Eagle1Head
from paceline.heads.eagle3 import Eagle3Config, Eagle3Head
from paceline.runners.native import NativeRunner
from tests.runners.native.fused import TorchGraphs
from tests.support.build import finish, sequence, toy_engine
from tests.support.dflash import tiny_head
from tests.support.tiny import tiny_llama

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the tiny model has no fused kernels"),
]
SMALL = {"vocab_size": 6, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}  # a random head is right at times
PROMPTS = [[5, 1, 2, 4, 3, 0], [2, 3], [place % 6 for place in range(70)]]
NEW_TOKENS = 40
EAGLES = ("eagle1", "eagle3")
VARIANTS = ("dflash", "dflash2", *EAGLES)


class Recording(FixedDraftLength):
    """Keeps the draft tokens of every step and how they hang together, by sequence."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.drafts: dict[int, list[list[tuple[int, int]]]] = {}

    def observe(self, seqs: list[Sequence], results: list[StepResult], timing: StepTiming) -> None:
        for seq, result in zip(seqs, results):
            nodes = list(zip(result.tree.tokens.tolist(), result.tree.parents))
            self.drafts.setdefault(seq.prompt_length, []).append(nodes)


def runner() -> NativeRunner:
    built = NativeRunner.of_model(tiny_llama(**SMALL), "tiny", kv_cache_tokens=2048)
    built.decode_graphs = TorchGraphs(built)
    return built


def dflash(variant: str, target: NativeRunner, nodes: int = 0, branches: int = 4, **more: Any) -> DFlash:
    head = tiny_head(variant, vocab_size=6, draft_vocab_size=6, mask_token_id=5, **more)
    drafter = DFlash(head, target, nodes=nodes, branches=branches)
    drafter.graphs = drafter._block_graphs(EagerPool())
    return drafter


def eagle(variant: str, target: NativeRunner) -> Eagle:
    size = target.info.hidden_size
    head: EagleHead
    with torch.random.fork_rng():
        torch.manual_seed(3)
        if variant == "eagle1":
            head = Eagle1Head(Eagle1Config(size, 48, 2, 1, 16, 6, 6, size))
        else:
            head = Eagle3Head(Eagle3Config(size, 48, 2, 1, 16, 6, 5, size, feature_layers=(0, 1)))
            head.choose_vocabulary(torch.tensor([0, 2, 3, 4, 5]))
    drafter = Eagle(head.eval().requires_grad_(False), target)
    drafter.graphs = EagleGraphs(drafter._head, drafter._buffers, 6, EagerPool())
    return drafter


def head_engine(variant: str, *, loops: bool = True, k: int = 4, **more: Any) -> LocalEngine:
    target = runner()
    drafter = eagle(variant, target) if variant in EAGLES else dflash(variant, target, **more)
    target.decode_graphs = TorchGraphs(target)
    if not loops:
        target.draft_loop = lambda *_: None  # type: ignore[method-assign]
    return toy_engine(target, drafter, Recording(k), max_num_seqs=3, prefix_cache_tokens=1024)


def drafts_of(engine: LocalEngine) -> dict[int, list[list[tuple[int, int]]]]:
    policy = engine.parts.draft_length
    assert isinstance(policy, Recording)
    return policy.drafts


def generated(engine: LocalEngine, prompts: list[list[int]], max_new_tokens: int = NEW_TOKENS, **params: Any) -> Any:
    return engine.run([sequence(prompt, max_new_tokens, **params) for prompt in prompts])


def plain(prompts: list[list[int]], max_new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    target = runner()
    target.decode_steps = 1
    engine = toy_engine(target, draft_length=FixedDraftLength(0), max_num_seqs=3)
    return [seq.generated for seq in generated(engine, prompts, max_new_tokens)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_in_a_loop_are_those_of_steps_one_by_one(variant: str) -> None:
    more: dict[str, int] = {"selector_top_k": 3} if variant == "dflash2" else {}
    more |= {} if variant in EAGLES else {"nodes": 4}  # steps one by one draft trees only where they are asked for
    engines = [head_engine(variant, loops=loops, **more) for loops in (True, False)]
    looped, single = (generated(engine, PROMPTS) for engine in engines)
    assert [seq.generated for seq in looped] == [seq.generated for seq in single] == plain(PROMPTS)
    for one, other in zip(looped, single):  # the last tokens may be draft tokens there and the target's own here
        assert 0 <= one.stats.accepted - other.stats.accepted <= 4 and 0 <= other.stats.steps - one.stats.steps <= 4
    assert sum(seq.stats.accepted for seq in looped) > 5
    ours, theirs = (drafts_of(engine) for engine in engines)
    for length, drafts in ours.items():  # near its end a step alone drafts no more than fits
        assert drafts[:-4] == theirs[length][: len(drafts) - 4] and len(drafts) > 20


class NowAndThen(FixedDraftLength):
    """Drafts at every third call, or at given lengths of a sequence; keeps what was drafted, by these lengths."""

    def __init__(self, k: int, lengths: dict[int, set[int]] | None = None) -> None:
        super().__init__(k)
        self._lengths, self._calls = lengths, 0
        self.drafts: dict[int, dict[int, list[int]]] = {}

    def plan(self, seqs: list[Sequence]) -> list[int]:
        self._calls += 1
        if self._lengths is None:
            return super().plan(seqs) if self._calls % 3 == 0 else [0] * len(seqs)
        here = [len(seq.ids) in self._lengths[seq.prompt_length] for seq in seqs]
        return [k if drafts else 0 for k, drafts in zip(super().plan(seqs), here)]

    def observe(self, seqs: list[Sequence], results: list[StepResult], timing: StepTiming) -> None:
        for seq, result in zip(seqs, results):
            if len(result.tree):
                before = len(seq.ids) - len(result.emitted)
                self.drafts.setdefault(seq.prompt_length, {})[before] = result.tree.tokens.tolist()


def engine_with(variant: str, policy: FixedDraftLength, *, loops: bool) -> LocalEngine:
    """An engine that takes only plain steps in a row, or none."""
    target = runner()
    drafter = eagle(variant, target) if variant in EAGLES else dflash(variant, target)
    target.decode_graphs, target.decode_steps = TorchGraphs(target), 6
    target.draft_loop = lambda *_: None  # type: ignore[method-assign]
    if not loops:
        target.plain_loop = lambda *_: None  # type: ignore[method-assign]
    return toy_engine(target, drafter, policy, max_num_seqs=3)


@pytest.mark.parametrize("variant", ["dflash", *EAGLES])
def test_after_plain_steps_in_a_row_a_head_drafts_what_it_drafts_after_single_ones(variant: str) -> None:
    first = NowAndThen(4)
    engine = engine_with(variant, first, loops=True)
    requests = [sequence(prompt, NEW_TOKENS) for prompt in PROMPTS]
    states = [engine.add(seq) for seq in requests]
    calls = finish(engine)
    assert [state.seq.generated for state in states] == plain(PROMPTS) and calls < NEW_TOKENS // 2
    second = NowAndThen(4, {length: set(drafts) for length, drafts in first.drafts.items()})
    assert [seq.generated for seq in generated(engine_with(variant, second, loops=False), PROMPTS)] == plain(PROMPTS)
    assert first.drafts == second.drafts and sum(map(len, first.drafts.values())) > 6


@pytest.mark.parametrize("variant", ["dflash", "dflash2"])
def test_blocks_are_trees_in_a_loop_and_branches_off_the_first_path_are_accepted(variant: str) -> None:
    engine = head_engine(variant)
    seqs = generated(engine, PROMPTS)
    assert [seq.generated for seq in seqs] == plain(PROMPTS)
    parents = [[parent for _, parent in nodes] for drafts in drafts_of(engine).values() for nodes in drafts]
    assert any(own != list(range(-1, len(own) - 1)) for own in parents), "some are no chains"
    chained = generated(head_engine(variant, branches=1), PROMPTS)
    accepted = [sum(seq.stats.accepted for seq in own) for own in (seqs, chained)]
    assert [seq.generated for seq in chained] == plain(PROMPTS) and accepted[0] > accepted[1] > 0


def test_a_tree_has_no_more_nodes_than_there_are_paths() -> None:
    engine = head_engine("dflash", k=30, nodes=30, branches=2, block_size=4)
    assert [seq.generated for seq in generated(engine, PROMPTS)] == plain(PROMPTS)
    sizes = {len(nodes) for drafts in drafts_of(engine).values() for nodes in drafts}
    assert max(sizes) == 2 + 4 + 8


@pytest.mark.parametrize("variant", ["dflash2", "eagle3"])
def test_a_loop_takes_several_steps_and_its_states_serve_the_next_turn(variant: str) -> None:
    more = {} if variant in EAGLES else {"nodes": 4}
    engine, single = (head_engine(variant, loops=loops, **more) for loops in (True, False))
    [first] = generated(engine, PROMPTS[2:])
    steps = first.stats.steps
    generated(single, PROMPTS[2:])
    turn = [*first.ids, 3, 4]
    engine.add(sequence(turn, NEW_TOKENS))
    assert finish(engine) < steps / 2, "a call of the engine is several steps"
    again, other = (generated(each, [turn])[0] for each in (engine, single))
    assert [again.generated] == [other.generated] == plain([turn])
    assert 0 <= again.stats.accepted - other.stats.accepted <= 1


@pytest.mark.parametrize("variant", ["dflash", "eagle3"])
@pytest.mark.parametrize("place", [6, 7, 8, 9])
def test_a_sequence_that_ends_inside_a_loop_leaves_the_others_alone(place: int, variant: str) -> None:
    texts = plain(PROMPTS)
    end = texts[0][place]
    engine = head_engine(variant)
    stopped = sequence(PROMPTS[0], 0, stopping=StopRules(NEW_TOKENS, frozenset({end})))
    others = [sequence(prompt, NEW_TOKENS) for prompt in PROMPTS[1:]]
    engine.run([stopped, *others])
    assert stopped.generated == texts[0][: texts[0].index(end) + 1]
    assert [seq.generated for seq in others] == texts[1:]


@pytest.mark.parametrize("variant", ["dflash", "dflash2"])
def test_what_is_read_at_once_is_made_ready(variant: str) -> None:
    drafter = dflash(variant, runner())
    pieces = drafter.preparations(WarmupPlan((1,), (3,), 256))
    assert len(pieces) > len(CONTEXT_SIZES), "blocks, and what prompts leave"
    for piece in pieces:
        piece()
    assert drafter.graphs is not None and len(drafter.graphs._graphs) == len(pieces) - len(CONTEXT_SIZES)
    drafter.graphs = None
    assert not drafter.preparations(WarmupPlan((1,), (3,), 256)), "nothing is loaded on first use"
