"""The two questions every drafter must answer: is a greedy output unchanged, and is a sampled one distributed as the
target says? Asked on the toy model, whose every distribution is known, in a batch of sequences that draft 3, 0 and 2
tokens.

Greedy outputs go through the real engine. Sampled ones go through `generate_steps`: without a runner, all trees of
a step verified at once, which makes twenty thousand samples a matter of seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from paceline.core.draft_length import FixedDraftLength, within_room
from paceline.core.draft_tree import DraftTree
from paceline.core.protocols import Drafter, Runner
from paceline.core.sampling import SamplingParams, distribution
from paceline.core.sequence import Sequence
from paceline.core.stats import SpecStats
from paceline.core.types import Row, RowOutput, StepResult, VerifyResult
from paceline.core.verify import verify_trees
from paceline.drafting.no_draft import NoDraft
from paceline.drafting.registry import DrafterContext
from paceline.engines.local.engine import LocalEngine
from paceline.hub.tokenizer import Tokenizer, load_tokenizer
from paceline.hub.vocabulary import compare
from paceline.kv.prefix_cache import PrefixCache
from paceline.runners.huggingface import HuggingFaceRunner
from paceline.runners.table import TableRunner, TableSequenceCache
from tests.support import chi2
from tests.support.build import sequence, toy_engine
from tests.support.tiny import byte_tokenizer

NUM_DRAFT_TOKENS = (3, 0, 2)
PROMPT = [0, 1, 2, 0, 1, 3, 0, 1]
FALSE_ALARM = 1e-6  # the probability that a correct drafter fails the test of its distribution
UNREACHABLE = -2  # the parent of nodes that are never accepted


def toy(order: int = 2) -> TableRunner:
    return TableRunner(vocab_size=4, order=order, seed=5)


def sequences(prompts: list[list[int]], length: int, *, rule: str = "token", **sampling: Any) -> list[Sequence]:
    return [sequence(list(prompt), length, SamplingParams(**sampling), rule=rule) for prompt in prompts]


def batch(
    sampling: SamplingParams,
    length: int,
    *,
    prediction: list[int] | None = None,
    methods: tuple[str | None, ...] = (None, None, None),
    copies: int = 1,
) -> list[Sequence]:
    """Sequences that draft 3, 0 and 2 tokens in turn. Those that draft none only fill the batch, so they are short."""
    seqs = []
    for number, (place, k) in enumerate([*enumerate(NUM_DRAFT_TOKENS)] * copies):
        own = SamplingParams(sampling.temperature, seed=None if sampling.seed is None else sampling.seed + number)
        new_tokens = length if k else length // 4
        params = {"num_draft_tokens": k, "prediction": prediction, "method": methods[place]}
        seqs.append(sequence(PROMPT[place:], new_tokens, own, **params))
    return seqs


def context_for(target: Runner, draft_model: Any = None, **options: Any) -> DrafterContext:
    """What a drafter is built from, over models and tokenizers of tests/support/tiny.py."""

    def open_runner(folder: Any) -> HuggingFaceRunner:
        from transformers import AutoModelForCausalLM

        return HuggingFaceRunner(AutoModelForCausalLM.from_pretrained(folder).eval(), "draft")

    def open_tokenizer(folder: Any) -> Tokenizer:
        return Tokenizer(load_tokenizer(Path(folder), "draft"))

    tokenizer = Tokenizer(byte_tokenizer())
    return DrafterContext(
        target=target,
        tokenizer=tokenizer,
        draft_model=draft_model,
        device="cpu",
        head_dtype=torch.float32,
        head_in_int8=False,
        options=options,
        prefix_cache=PrefixCache(),
        open_runner=open_runner,
        open_tokenizer=open_tokenizer,
        compare_tokenizers=lambda folder: compare(tokenizer.hf_tokenizer, open_tokenizer(folder).hf_tokenizer),
    )


# --- through the engine -----------------------------------------------------------------------------------------------


def engine_of(target: Runner, drafter: Drafter, num_draft_tokens: int = 3, **options: Any) -> LocalEngine:
    """An engine whose drafter is tested; nothing is reused between its sequences unless options say so."""
    return toy_engine(target, drafter, FixedDraftLength(num_draft_tokens), **{"prefix_cache_tokens": 0, **options})


def generated(seqs: list[Sequence], engine: LocalEngine) -> list[list[int]]:
    """The outputs of these sequences, generated together."""
    return [seq.generated for seq in engine.run(seqs)]


class Recorder(Drafter):
    """Passes everything on to a drafter, and keeps the trees and results of the last step."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.needs, self.draft_runner = drafter, drafter.needs, drafter.draft_runner
        self.trees: list[DraftTree] = []
        self.results: list[StepResult] = []

    def begin(self, seq: Sequence, prompt: RowOutput | None) -> None:
        self.drafter.begin(seq, prompt)

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        self.trees = self.drafter.propose(seqs, num_draft_tokens)
        assert all(tree.num_draft_tokens <= k for tree, k in zip(self.trees, num_draft_tokens, strict=True))
        return self.trees

    def observe(self, seqs: list[Sequence], results: list[StepResult]) -> None:
        self.results = results
        self.drafter.observe(seqs, results)

    def end(self, seq: Sequence) -> None:
        self.drafter.end(seq)


def steps(
    seqs: list[Sequence], target: Runner, drafter: Drafter, num_draft_tokens: int = 3
) -> Iterator[list[StepResult]]:
    """Generate these sequences together; yields the results of each step, in the order of those still running."""
    recorder = Recorder(drafter)
    engine = engine_of(target, recorder, num_draft_tokens)
    for seq in seqs:
        engine.add(seq)
    while engine.has_work:
        engine.step()
        yield recorder.results


def prefill(seqs: list[Sequence], target: Runner, drafter: Drafter) -> None:
    """Read every prompt but its last token, and start the drafter on it."""
    for seq in seqs:
        seq.start(target.new_cache())
        assert seq.seq_cache is not None
        output = target.forward([Row.chain(seq.seq_cache, seq.ids[:-1])], last_only=True)
        target.commit(seq.seq_cache, list(range(len(seq.ids) - 1)))
        drafter.begin(seq, output[0])


def greedy_run(target: Runner, drafter: Drafter, prompts: list[list[int]], length: int, k: int) -> list[Sequence]:
    seqs = sequences(prompts, length)
    generated(seqs, engine_of(target, drafter, k))
    return seqs


def assert_unchanged(target: Runner, drafter: Drafter, prompts: list[list[int]], length: int, k: int) -> SpecStats:
    """The outputs are what the target alone generates; returns what was counted."""
    plain = greedy_run(target, NoDraft(), prompts, length, 0)
    drafted = greedy_run(target, drafter, prompts, length, k)
    assert [seq.generated for seq in drafted] == [seq.generated for seq in plain]
    return total_of(drafted)


def total_of(seqs: list[Sequence]) -> SpecStats:
    total = SpecStats()
    for seq in seqs:
        total.add(seq.stats)
    return total


def greedy_batch(drafter: Drafter, **options: Any) -> list[Sequence]:
    """The batch generated greedily."""
    seqs = batch(SamplingParams(), 60, **options)
    generated(seqs, engine_of(toy(), drafter))
    return seqs


def check_greedy(drafter: Drafter, **options: Any) -> SpecStats:
    """Every output is the plain one; and some draft token was accepted, or this shows nothing."""
    plain, drafted = greedy_batch(NoDraft()), greedy_batch(drafter, **options)
    assert [seq.generated for seq in drafted] == [seq.generated for seq in plain]
    assert drafted[1].stats.drafted == 0, "num_draft_tokens 0 drafts nothing"
    total = total_of(drafted)
    assert total.accepted > 0
    return total


# --- steps without a runner -------------------------------------------------------------------------------------------


def output_of(logits: Tensor) -> RowOutput:
    """An output of the toy: its hidden state is its logits."""
    return RowOutput(logits, logits, torch.cat([logits] * 3, dim=-1))


def begin(seq: Sequence, drafter: Drafter, target: TableRunner) -> None:
    seq.seq_cache = TableSequenceCache()
    rows = [target._context(seq.ids[: end + 1]) for end in range(len(seq.ids) - 1)]
    drafter.begin(seq, output_of(target.table[rows]))


def drafted_trees(seqs: list[Sequence], drafter: Drafter) -> list[DraftTree]:
    """What the drafter proposes: no more than it may, and with the sequence caches as they were."""
    for seq in seqs:
        assert isinstance(seq.seq_cache, TableSequenceCache)
        seq.seq_cache.tokens, seq.seq_cache.length = seq.ids[:-1], len(seq.ids) - 1
    num_draft_tokens = [within_room(seq, 0) for seq in seqs]
    trees = drafter.propose(seqs, num_draft_tokens)
    for seq, tree, k in zip(seqs, trees, num_draft_tokens):
        assert seq.seq_cache is not None and seq.seq_cache.length == len(seq.ids) - 1, "a cache was not restored"
        assert tree.num_draft_tokens <= k
    return trees


class PaddedTrees:
    """The trees of a step as tensors of one size. Padding and probes are unreachable."""

    def __init__(self, seqs: list[Sequence], trees: list[DraftTree], vocab_size: int) -> None:
        size = max(1, *(len(tree) for tree in trees))
        lists = [tree.tokens.tolist() for tree in trees]
        self.tokens = torch.tensor([tokens + [0] * (size - len(tokens)) for tokens in lists])
        parents = torch.tensor([tree.parents + [UNREACHABLE] * (size - len(tree)) for tree in trees])
        self.q = one_hot(self.tokens, vocab_size).float()
        for row, tree in enumerate(trees):
            if tree.probs is not None:
                self.q[row, : len(tree)] = tree.probs
        last = torch.tensor([seq.ids[-2:] for seq in seqs])
        before = torch.cat([last[:, 1:], self.tokens], dim=1).gather(1, (parents + 1).clamp_min(0))
        # Of the toy that looks two tokens back: the row of the table after the sequence and after each node.
        pairs = torch.cat([last[:, None], torch.stack([before, self.tokens], dim=-1)], dim=1)
        self.contexts = pairs[..., 0] * (vocab_size + 1) + pairs[..., 1]
        drafted = torch.tensor([tree.num_draft_tokens for tree in trees])
        self.parents = parents.masked_fill(torch.arange(size) >= drafted[:, None], UNREACHABLE)


def generate_steps(seqs: list[Sequence], drafter: Drafter, target: TableRunner, rng: torch.Generator) -> None:
    """Generate these sequences, all trees of a step verified at once."""
    probs = distribution(target.table, SamplingParams(1.0))
    for seq in seqs:
        begin(seq, drafter, target)
    while seqs:
        trees = drafted_trees(seqs, drafter)
        padded = PaddedTrees(seqs, trees, target.info.vocab_size)
        uniforms = torch.rand(len(seqs), padded.tokens.shape[1] + 1, generator=rng, dtype=torch.float64)
        walks = verify_trees(padded.tokens, padded.parents, padded.q, probs[padded.contexts], uniforms)
        rows = zip(walks.nodes.tolist(), walks.counts.tolist(), walks.tokens.tolist())
        verified = [VerifyResult(nodes[:count], token) for nodes, count, token in rows]
        logits = target.table[padded.contexts]
        features = torch.cat([logits] * 3, dim=-1)
        outputs = map(RowOutput, logits.unbind(), logits.unbind(), features.unbind())
        drafter.observe(seqs, [settle(*each) for each in zip(seqs, trees, verified, outputs)])
        for seq in [seq for seq in seqs if seq.finished]:
            drafter.end(seq)
        seqs = [seq for seq in seqs if not seq.finished]


def settle(seq: Sequence, tree: DraftTree, verified: VerifyResult, output: RowOutput) -> StepResult:
    """Extend the sequence by what was verified. output: a row for the sequence and one for every node."""
    tokens = tree.tokens.tolist()
    emitted = seq.extend([tokens[node] for node in verified.accepted] + [verified.next_token], len(verified.accepted))
    accepted = min(len(verified.accepted), len(emitted))
    seq.stats.add_step(tree, accepted, len(emitted), len(emitted) <= len(verified.accepted))
    return StepResult(tree, verified, output, emitted, accepted)


def check_sampled(
    drafter: Drafter,
    target: TableRunner | None = None,
    *,
    samples: int = 20_000,
    length: int = 160,
    copies: int = 64,
    **options: Any,
) -> SpecStats:
    """The tokens after each context are distributed as the table says: chi² over all contexts, of at least `samples`
    tokens of drafting sequences. Fails a correct drafter with probability FALSE_ALARM."""
    target, rng = target or toy(), torch.Generator().manual_seed(11)
    counts, total, seed = Counter[tuple[int, int]](), SpecStats(), 0
    while total.new_tokens < samples:
        seqs = batch(SamplingParams(1.0, seed=seed), length, copies=copies, **options)
        seed += len(seqs)
        generate_steps(list(seqs), drafter, target, rng)
        for seq in (seq for seq in seqs if seq.params.num_draft_tokens):
            total.add(seq.stats)
            for at in range(seq.prompt_length, len(seq.ids)):
                counts[target._context(seq.ids[at - 2 : at]), seq.ids[at]] += 1
    assert total.accepted > 0.05 * total.new_tokens, "hardly any draft token was accepted: this shows little"
    statistic, freedom = chi_squared(distribution(target.table, SamplingParams(1.0)).tolist(), counts)
    limit = float(chi2.isf(FALSE_ALARM, freedom))
    print(f"chi² {statistic:.1f} of {freedom} degrees of freedom, limit {limit:.1f}, error probability {FALSE_ALARM}")
    assert statistic < limit, f"chi² {statistic:.1f} is over its limit {limit:.1f}"
    return total


def chi_squared(probs: list[list[float]], counts: Counter[tuple[int, int]]) -> tuple[float, int]:
    """chi² between counted and expected successors of every context, and its degrees of freedom."""
    statistic, freedom = 0.0, 0
    for context in {context for context, _ in counts}:
        observed = [counts[context, token] for token in range(len(probs[context]))]
        expected = [sum(observed) * p for p in probs[context]]
        if min(expected) >= 5:  # else it is too rare for the statistic to have its limit's distribution
            statistic += sum((count - mean) ** 2 / mean for count, mean in zip(observed, expected))
            freedom += len(observed) - 1
    assert freedom >= 18, "too few contexts were visited"
    return statistic, freedom
