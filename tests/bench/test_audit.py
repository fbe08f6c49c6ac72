"""The audit finds what it is there to find, names it, and does not cry wolf."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paceline.bench.audit import Audit, AuditPlan, Check, Outcome, audit, judged
from paceline.bench.candidates import Setting, Subject
from paceline.bench.measure import Length
from paceline.bench.memoized_runner import MemoizedRunner
from paceline.bench.near_ties import Kind, compare, rounding
from paceline.bench.sampling_test import Effort, SamplingAudit, sampling_for
from paceline.core.sampling import SamplingParams
from paceline.core.types import ModelOutput, Row
from paceline.drafting.draft_model import DraftModel
from paceline.drafting.layerskip import LayerSkip
from paceline.drafting.no_draft import NoDraft
from paceline.engines.local.verifier import Verifier
from paceline.runners.native import NativeRunner
from paceline.runners.table import TableRunner
from tests.runners.native.models import tiny
from tests.support.bench_toys import CONTEXT, Anticipating, PlantedJudge, WrongQ, toy_subject


def plan(**changes: object) -> AuditPlan:
    """600 draws see a distance of 0.2 with 95% certainty; the planted bugs are twice as far off."""
    first = AuditPlan(
        [CONTEXT], [CONTEXT], ["draft"], ("token",), (1.0,), length=Length(12), draws=600, seconds=60.0, seed=1
    )
    return replace(first, **changes)  # type: ignore[arg-type]


def found(subject: Subject, chosen: AuditPlan) -> dict[str, Check]:
    return {check.name: check for check in audit(subject, chosen)}


def test_every_lossless_rule_and_method_passes_on_the_table() -> None:
    """False alarm probability 0.001 in all, as the audit states."""
    checks = found(toy_subject(), plan(methods=["draft", "ngram"], rules=("token", "block", "coupled"), draws=300))
    assert {check.outcome for check in checks.values()} == {Outcome.PASSED}
    assert len(checks) == 2 + 6
    assert Audit(list(checks.values()), 0.001).lossless


def test_a_lossy_rule_is_caught_and_named() -> None:
    checks = found(toy_subject(), plan(rules=("token", "lossy-typical"), draws=300))
    result = Audit(list(checks.values()), 0.001)
    assert [check.name for check in result.failed] == ["sampled draft k=2 T=1 lossy-typical"]
    assert "the target says" in result.failed[0].detail
    assert not result.lossless


@pytest.mark.parametrize("bug", [WrongQ, Anticipating])
def test_a_drafter_that_lies_is_caught(bug: type) -> None:
    subject = toy_subject()
    spoilt = replace(subject, drafters={**subject.drafters, "planted": bug(subject.drafters["draft"])})
    checks = found(spoilt, plan(methods=["planted"], draws=1500))
    assert checks["sampled planted k=2 T=1"].outcome is Outcome.FAILED


def test_a_missing_residual_is_caught() -> None:
    subject = replace(toy_subject(), make_judge=PlantedJudge)
    checks = found(subject, plan(draws=1000))
    assert checks["sampled draft k=2 T=1"].outcome is Outcome.FAILED
    assert checks["greedy draft = plain"].outcome is Outcome.PASSED  # greedy texts alone would not have shown it


def test_a_drafter_that_never_guesses_is_not_called_proven() -> None:
    subject = toy_subject()
    checks = found(
        replace(subject, drafters={**subject.drafters, "mute": subject.drafters["none"]}), plan(methods=["mute"])
    )
    assert checks["sampled mute k=2 T=1"].outcome is Outcome.UNTESTED


def test_the_false_alarm_rate_is_the_one_stated() -> None:
    """200 audits at alpha = 0.05 of a subject that is exact: 10 alarms expected, standard deviation 3.1. Fewer than 1
    or more than 21 happen by chance with probability below 0.001."""
    alarms = 0
    laboratory = SamplingAudit(toy_subject())
    for seed in range(200):
        setting = Setting("draft", 2, 1.0, ("token", "block")[seed % 2])
        evidence = laboratory.fit(setting, CONTEXT, Effort(draws=64), seed=1000 * seed)
        alarms += judged("once", evidence, threshold=0.05, seconds=0.0).outcome is Outcome.FAILED
    print(f"{alarms} alarms in 200 audits at alpha = 0.05")
    assert 1 <= alarms <= 21


def test_texts_are_drawn_as_the_exact_distribution_says() -> None:
    laboratory = SamplingAudit(toy_subject())
    exact = laboratory.exact(laboratory.desk("draft", CONTEXT), SamplingParams(temperature=1.0), 2)
    table = TableRunner(vocab_size=5, seed=3).exact(CONTEXT, 2, SamplingParams(temperature=1.0))
    assert exact == pytest.approx({path: uniforms for path, uniforms in table.items() if uniforms > 0}, abs=1e-6)


def test_a_large_vocabulary_is_narrowed_and_a_small_one_is_not() -> None:
    assert sampling_for(toy_subject(), 0.7).top_k == 0
    wide = replace(toy_subject(), target=TableRunner(vocab_size=40, order=1))
    assert sampling_for(wide, 0.7).top_k == 4


def test_the_remembering_runner_says_what_the_real_one_says() -> None:
    real, remembering = TableRunner(seed=5), MemoizedRunner(TableRunner(seed=5))
    seq_caches = real.open(), remembering.open()
    for tokens, parents, kept in (
        ([1, 2, 3], [-1, 0, 1], [0, 1, 2]),
        ([4, 0, 2], [-1, 0, 0], [0, 2]),
        ([1], [-1], [0]),
    ):
        output = []
        for runner, seq_cache in zip((real, remembering), seq_caches):
            out = runner.forward([Row(seq_cache, torch.tensor(tokens), parents)])
            runner.commit(seq_cache, kept)
            output.append(out.logits)
        assert output[0].equal(output[1])
        assert seq_caches[0].length == seq_caches[1].length
    real.trim(seq_caches[0], 3)
    remembering.trim(seq_caches[1], 3)
    assert seq_caches[1].tokens == [1, 2, 3]
    twin = remembering.fork(seq_caches[1], 2)
    assert (twin.tokens, twin.length) == ([1, 2], 2)
    passes = remembering.passes
    remembering.forward([Row.chain(twin, [3])])
    assert remembering.passes == passes  # that text was known


def test_remembered_states_are_the_real_ones() -> None:
    runner = NativeRunner.of_model(tiny("llama"), "tiny", kv_cache_tokens=1024)
    runner.expose(hidden=True, features=(1,))
    remembering = MemoizedRunner(runner, states=True)
    prompts, tree = [[3, 1, 4, 1, 5], [9, 2, 6]], ([5, 6, 7], [-1, 0, 0])
    for _ in range(2):  # the second time from memory
        output = []
        for one in (runner, remembering):
            seq_caches = [one.open() for _ in prompts]
            read = one.forward([Row.chain(seq_cache, ids) for seq_cache, ids in zip(seq_caches, prompts)], last_only=True)
            for seq_cache, ids in zip(seq_caches, prompts):
                one.keep(seq_cache, list(range(len(ids))))
            output.append((read, one.forward([Row(seq_cache, torch.tensor(tree[0]), tree[1]) for seq_cache in seq_caches])))
        for real, remembered in zip(*output):
            assert (real.sizes, real.read or real.sizes) == (remembered.sizes, remembered.read)
            for part in ("logits", "hidden", "features"):
                torch.testing.assert_close(getattr(remembered, part), getattr(real, part), rtol=1e-4, atol=1e-5)
    assert remembering.passes == 2 * len(prompts)


def test_a_drafter_that_looks_into_the_target_gets_as_many_draws_as_any() -> None:
    """The chance of a false alarm is the audit's alpha, 0.001."""
    runner = NativeRunner.of_model(tiny("llama"), "tiny", kv_cache_tokens=1024)
    subject = Subject(runner, None, {"none": NoDraft(), "layerskip": LayerSkip(runner, 1)})
    checks = list(audit(subject, plan(contexts=[[5, 90, 17, 5]], prompts=[], draws=400, methods=["layerskip"])))
    assert {(check.outcome, check.draws) for check in checks} == {(Outcome.PASSED, 400)}


def test_a_confined_runner_is_the_model_without_its_other_tokens() -> None:
    """Numbers are the part's own; texts read and logits said are the inner model's at those tokens."""
    inner, part = TableRunner(vocab_size=9, seed=2), [7, 3, 0, 4]
    confined = MemoizedRunner(inner, part)
    seq_cache, real = confined.open(), inner.new_cache()
    output = confined.forward([Row.chain(seq_cache, [1, 0, 3])]).logits
    assert output.equal(inner.forward([Row.chain(real, [3, 7, 4])]).logits[:, part])
    assert (confined.info.vocab_size, confined.info.eos_token_ids) == (4, frozenset())


def test_a_large_vocabulary_is_confined_for_drafters_that_need_only_what_the_target_says() -> None:
    target, twin = TableRunner(vocab_size=300, order=1, seed=3), TableRunner(vocab_size=300, order=1, seed=3, blur=0.4)
    subject = replace(toy_subject(draft=DraftModel(twin, 300)), target=target)
    context = [5, 290, 17, 5, 290]
    laboratory = SamplingAudit(subject)
    desk = laboratory.desk("draft", context)
    assert 4 <= desk.target.info.vocab_size < 300
    assert desk.real(tuple(desk.context)) == context
    checks = {check.name: check for check in audit(subject, plan(contexts=[context], prompts=[], draws=200))}
    assert checks["sampled draft k=2 T=1"].outcome is Outcome.PASSED


def test_greedy_differences_are_told_apart() -> None:
    target = TableRunner(vocab_size=5, seed=3)
    plain = [0, 3, 1]
    assert compare(target, CONTEXT, plain, plain).kind is Kind.SAME
    cut = compare(target, CONTEXT, plain, plain[:2])
    assert (cut.kind, cut.place) == (Kind.BUG, 2)
    other = compare(target, CONTEXT, [0], [1])
    assert other.kind is Kind.BUG
    assert "logit gap" in str(other)
    assert rounding(target, CONTEXT) == 0.0


def test_two_tokens_within_the_rounding_are_a_near_tie() -> None:
    target = TableRunner(vocab_size=5, seed=3)
    target.table[:, 1] = target.table[:, 0] + 1e-6
    found = compare(target, CONTEXT, [0], [1])
    assert found.kind is Kind.NEAR_TIE


class ReadsPromptsOtherwise(TableRunner):
    """Bit-equal at every width, but a prompt goes through kernels that round in another way."""

    def forward(self, rows: list[Row], *, last_only: bool = False) -> ModelOutput:
        output = super().forward(rows, last_only=last_only)
        return replace(output, logits=output.logits + 0.02 * torch.eye(5)[0]) if last_only else output


@pytest.mark.parametrize("gap, kind", [(0.05, Kind.NEAR_TIE), (0.2, Kind.BUG)])
def test_rounding_counts_the_way_prompts_are_read(gap: float, kind: Kind) -> None:
    """Else a bfloat16 model on a GPU, equal to itself bit for bit, would be asked to equal transformers to 1e-4."""
    target = ReadsPromptsOtherwise(vocab_size=5, seed=3)
    target.table[:, 1] = target.table[:, 0] - gap
    assert rounding(target, CONTEXT) == pytest.approx(0.02, rel=1e-3)
    assert compare(target, CONTEXT, [0], [1]).kind is kind


def test_an_unknown_rule_is_refused() -> None:
    from paceline.errors import OptionError

    with pytest.raises(OptionError, match="acceptance"):
        toy_subject().parts(Setting("draft", 2, 1.0, "sloppy"))
    assert Verifier("token").rule == "token"
