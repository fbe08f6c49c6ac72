"""Which methods can be tried, and what an engine of a setting is configured with."""

from __future__ import annotations

import pytest

from paceline.bench.candidates import DecodeSetting
from paceline.core.types import Capability
from paceline.drafting.ngram import Ngram
from paceline.errors import OptionError
from tests.support.bench_toys import toy_candidates


class NeedsBatchInvariance(Ngram):
    needs = frozenset({Capability.BATCH_INVARIANT})


def test_a_method_that_the_target_cannot_serve_is_listed_with_the_reason() -> None:
    candidates = toy_candidates(picky=NeedsBatchInvariance())
    assert candidates.drafting_methods == ["ngram", "draft_model"]
    assert "table cannot" in candidates.unavailable["picky"]
    with pytest.raises(OptionError, match="picky cannot be used here"):
        candidates.engine(DecodeSetting("picky", 2))
    with pytest.raises(OptionError, match="there is no method 'magic' here"):
        candidates.candidate("magic")


def test_an_engine_has_the_setting_and_no_prefix_cache() -> None:
    engine = toy_candidates().engine(DecodeSetting("draft_model", 4, 0.7, "block"), max_num_seqs=3)
    assert engine.config.speculative.num_draft_tokens == 4
    assert engine.config.speculative.acceptance == "block"
    assert engine.config.max_num_seqs == 3
    assert engine.config.cache.prefix_cache_tokens == 0


def test_engines_of_one_method_share_its_drafter() -> None:
    candidates = toy_candidates()
    first, second = (candidates.engine(DecodeSetting("draft_model", k)) for k in (2, 4))
    assert first.parts.drafter is second.parts.drafter
    assert candidates.draft_runner is first.parts.drafter.draft_runner


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(OptionError, match="acceptance"):
        toy_candidates().engine(DecodeSetting("draft_model", 2, 1.0, "sloppy"))
