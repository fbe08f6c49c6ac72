"""A few made-up sequences before the first real one.

What no list of sizes can know (the chains of a head, the verifier, libraries that are loaded on first use) is met by
running the loop itself, with every number of draft tokens that may come. What those steps cost is what steps cost here,
so a draft-length policy starts from that.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from paceline.core.cost_model import StepTiming
from paceline.core.draft_length import DraftLengthPolicy, within_room
from paceline.core.draft_tree import DraftTree, empty, merge
from paceline.core.protocols import Drafter, Preparation
from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence, SequenceParams
from paceline.core.stopping import StopRules
from paceline.core.types import Capability, StepResult, WarmupPlan
from paceline.device.properties import supports_graphs
from paceline.engines.local.engine import EngineParts, LocalEngine
from paceline.engines.local.warmup import run_preparations
from paceline.errors import PacelineError
from paceline.kv.prefix_cache import TARGET, PrefixCache

PROMPTS = (100, 400, 900)  # tokens; what drafters keep of a sequence grows in powers of two
USUAL_KS = 8  # draft tokens: where the policy decides, more of them are only rehearsed after the shortest prompt
BATCH_KS = (1, 3)  # draft tokens of a batch, where the policy decides
WIDE_BATCH_KS = (3, 7, 15)  # the same where a pass is not one kernel: a graph also runs passes of a quarter of its size
FORKED_KS = (3, 8, 16)  # draft tokens of trees
STEPS = 6  # with each number of draft tokens, of which the first is not measured


def rehearse(engine: LocalEngine, plan: WarmupPlan | None) -> None:
    """Run the loop a few times where its first steps compile and capture; elsewhere that would only delay loading."""
    if plan is None or not supports_graphs(engine.info.device):
        return
    drafter, policy = engine.parts.drafter, engine.parts.draft_length
    rehearsals = [Rehearsal(engine, part) for part in drafter.rehearsed()]
    pieces = [piece for rehearsal in rehearsals for piece in rehearsal.preparations(plan)]
    if Capability.TREE in drafter.needs and plan.num_draft_tokens:
        pieces += Rehearsal(engine, ForkedDrafts()).forks(plan)
    run_preparations(pieces, "rehearsing", engine.info.device)
    if engine.config.tuned is None:
        policy.rehearsed(rehearsals[0].timings)
    if (value := policy.draft_value()) is not None:
        drafter.use_value(value)  # what was made up must not be held against those who drafted it


def _at_the_end(plan: WarmupPlan) -> range:
    """Of one number of draft tokens, the smaller ones that fit at the end of a sequence: draws are graphs of each."""
    [k, *others] = plan.num_draft_tokens or (0,)
    return range(1, 1 if others else min(k, USUAL_KS + 1))


class ForkedDrafts(Drafter):
    """Trees of two branches, which lookups find in no made-up sequence: tokens of no meaning, and beside them what the
    target has written after the same prompt before."""

    needs = frozenset({Capability.TREE})

    def __init__(self) -> None:
        self._written: list[int] = []

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        return [self._fork(seq.ids, k) if k > 1 else empty() for seq, k in zip(seqs, num_draft_tokens)]

    def _fork(self, ids: list[int], k: int) -> DraftTree:
        known = self._written[len(ids) : len(ids) + k // 2] if self._written[: len(ids)] == ids else []
        other = int(known[:1] == [0])
        return merge([[other] * (k - len(known)), known], k)

    def end(self, seq: Sequence) -> None:
        self._written = list(seq.ids)


class RehearsedSteps(DraftLengthPolicy):
    """Drafts as many tokens as it is told, and keeps what clean steps took."""

    def __init__(self) -> None:
        self.k, self.num_steps, self.measured = 0, 0, True
        self.timings: list[StepTiming] = []

    def begin(self, k: int, *, measured: bool = True) -> None:
        self.k, self.num_steps, self.measured = k, 0, measured

    def plan(self, seqs: list[Sequence]) -> list[int]:
        return [within_room(seq, self.k) for seq in seqs]

    def observe(self, seqs: list[Sequence], results: list[StepResult], timing: StepTiming) -> None:
        """In the first step of a sequence a drafter reads its prompt. What a drafter that is one of several takes in a
        loop is not what a pass costs the others."""
        self.num_steps += 1
        if timing.looped and any(result.tree.source for result in results):
            return
        if self.measured and timing.clean and self.num_steps > 1 and timing.num_draft_tokens == self.k:
            self.timings.append(timing)

    def forget(self, seq: Sequence) -> None:
        pass

    def rehearsed(self, timings: list[StepTiming]) -> None:
        pass


class Rehearsal:
    """Runs made-up sequences through an engine of its own over the same parts; nothing of them is kept or counted."""

    def __init__(self, engine: LocalEngine, drafter: Drafter | None = None) -> None:
        """drafter: instead of the engine's own."""
        self.steps = RehearsedSteps()
        own = PrefixCache(max_tokens={TARGET: 0})
        drafter = drafter or engine.parts.drafter
        parts: EngineParts = replace(engine.parts, drafter=drafter, draft_length=self.steps, prefix_cache=own)
        self._engine = LocalEngine(parts, engine.tokenizer, engine.config, engine.methods)
        self._max_seq_len = engine.info.max_seq_len

    @property
    def timings(self) -> list[StepTiming]:
        """Of clean steps, the first of each sequence left out."""
        return self.steps.timings

    def preparations(self, plan: WarmupPlan) -> list[Preparation]:
        """One piece for every number of draft tokens, plain steps included, and every length of prompt; a sampled one
        beside the greedy ones, since draws are graphs of their own. Costs are learnt from greedy steps after the
        shortest prompt, which all numbers of draft tokens meet."""
        longest = min(plan.max_context, self._max_seq_len)
        pieces: list[Preparation] = []
        for k in (0, *plan.num_draft_tokens):
            lengths = self._lengths(k, plan)
            fitting = [length for length in lengths if length + STEPS * (k + 1) < longest]
            pieces += [partial(self._run, k, length, STEPS) for length in fitting[:1]]
            pieces += [partial(self._run, k, length, 2, measured=False) for length in fitting[1:]]
            batches = [count for count in plan.num_seqs if count > 1 and fitting and k <= USUAL_KS]
            pieces += [partial(self._run, k, PROMPTS[0], 2, count) for count in batches]
            pieces += [partial(self._run, k, length, 2, temperature=1.0) for length in fitting[:1]]
        pieces += [partial(self._run, k, PROMPTS[0], 1, temperature=1.0) for k in _at_the_end(plan)]
        if len(plan.num_draft_tokens) > 1:
            pieces.append(partial(self._run, plan.num_draft_tokens[-1], PROMPTS[0], 2, whole=False))
        return pieces + self._largest_batch(plan, longest)

    def _lengths(self, k: int, plan: WarmupPlan) -> tuple[int, ...]:
        """Of the prompts that this number of draft tokens is rehearsed after. Where a pass of the draft model is one
        kernel, a graph of it serves every length, and the target's were captured by size: the most draft tokens meet
        all that a longer prompt loads."""
        if len(plan.num_draft_tokens) == 1:
            return PROMPTS
        draft = self._engine.parts.drafter.draft_runner
        serves_all = draft is not None and draft.info.rows_rounded_alike is not None
        usual = [number for number in (0, *plan.num_draft_tokens) if number <= USUAL_KS]
        ks = (0, max(usual)) if serves_all else usual
        return PROMPTS if k in ks else PROMPTS[:1]

    def forks(self, plan: WarmupPlan) -> list[Preparation]:
        """Each twice after every length of prompt: the second time the target's own tokens are a branch. Once drawn."""
        longest = min(plan.max_context, self._max_seq_len)
        ks = FORKED_KS if len(plan.num_draft_tokens) > 1 else plan.num_draft_tokens
        sizes = [(k, length) for k in ks for length in PROMPTS if length + 2 * (k + 1) < longest]
        run = partial(self._run, num_steps=2, measured=False)
        pieces: list[Preparation] = [partial(run, k, length) for k, length in sizes for _ in range(2)]
        return pieces + [partial(run, *size, temperature=1.0) for size in sizes[:1]]

    def _largest_batch(self, plan: WarmupPlan, longest: int) -> list[Preparation]:
        """The largest of the small batches, whose graphs also run the smaller ones: its prompts are read together, and
        what that loads is loaded now. Nothing that it takes is kept: the first such steps are slow."""
        rows, ks = self._engine.info.rows_rounded_alike, plan.num_draft_tokens
        sizes = [count for count in plan.quick_batches if rows is None or count <= rows]
        lengths = [length for length in PROMPTS if length + STEPS < longest]
        captures = self._engine.parts.target.decode_steps > 1  # a runner without graphs has nothing to make ready
        if not sizes or not lengths or not captures:
            return []
        usual = BATCH_KS if rows is not None else WIDE_BATCH_KS
        fitting = [k for k in (0, *(ks if len(ks) <= 1 else usual)) if rows is None or sizes[-1] * (k + 1) <= rows]
        length = lengths[-1] if rows is None else lengths[0]  # graphs of a long context also run shorter ones
        run = partial(self._run, length=length, num_steps=2, num_seqs=sizes[-1], measured=False)
        pieces: list[Preparation] = [partial(run, k) for k in fitting]
        return pieces + ([partial(run, fitting[-1], whole=False)] if len(ks) > 1 and fitting[-1] else [])

    def _run(
        self,
        k: int,
        length: int,
        num_steps: int,
        num_seqs: int = 1,
        temperature: float = 0.0,
        *,
        whole: bool = True,
        measured: bool = True,
    ) -> None:
        """A sequence that fails here says so when it is a user's. whole: no draft ends before it has k tokens."""
        self.steps.begin(k, measured=measured and temperature == 0 and whole)
        token = min(7, self._engine.info.vocab_size - 1)
        sampling, stopping = SamplingParams(temperature=temperature), StopRules(num_steps * (k + 1))
        params = SequenceParams(sampling, stopping, num_draft_tokens=(k or None) if whole else None)
        try:
            self._engine.run([Sequence([token] * length, params) for _ in range(num_seqs)])
        except PacelineError:
            self._engine.abort_all()
