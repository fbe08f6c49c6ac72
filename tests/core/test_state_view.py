"""Drafters of one target read different layers: each gets its own states, in its own order, from every runner."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.core.protocols import Drafter, Runner
from paceline.core.state_view import StateView, all_layers
from paceline.core.types import Row, RowOutput
from paceline.drafting.dflash import DFlash
from paceline.drafting.eagle import Eagle
from paceline.heads.eagle3 import Eagle3Config, Eagle3Head, usual_feature_layers
from paceline.runners.huggingface import HuggingFaceRunner
from paceline.runners.native.runner import NativeRunner
from tests.support.dflash import tiny_head
from tests.support.drafter_exactness import sequences
from tests.support.tiny import tiny_llama

PROMPT = [5, 7, 9, 11, 200, 31]


@pytest.fixture(scope="module")
def model() -> Any:
    """Four layers: the three that EAGLE-3 usually reads are not three layers here."""
    return tiny_llama(3, num_hidden_layers=4)


def runner(kind: str, model: Any) -> Runner:
    return HuggingFaceRunner(model, "tiny") if kind == "transformers" else NativeRunner.of_model(model, "tiny")


def eagle_head() -> Eagle3Head:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        head = Eagle3Head(Eagle3Config(32, 48, 4, 2, 8, 259, 259, 32))
        for weight in head.parameters():
            torch.nn.init.normal_(weight, std=0.3)
    return head.eval().requires_grad_(False)


def drafts(target: Runner, drafter: Drafter) -> list[int]:
    [seq] = sequences([PROMPT], 20)
    output = target.forward([Row.chain(target.new_cache(), PROMPT[:-1])], last_only=True)[0]
    drafter.begin(seq, output)
    return drafter.propose([seq], [4])[0].tokens.tolist()


@pytest.mark.parametrize("kind", ["transformers", "native"])
def test_two_heads_draft_together_what_each_drafts_alone(kind: str, model: Any) -> None:
    """The usual layers of four, (2, 2, 1), are neither rising nor different; the other head reads 1 and 3."""
    assert usual_feature_layers(4) == (2, 2, 1)
    first, second, shared = (runner(kind, model) for _ in range(3))
    block_head = tiny_head(feature_layers=(1, 3))
    alone = [drafts(first, Eagle(eagle_head(), first)), drafts(second, DFlash(block_head, second))]
    both = [Eagle(eagle_head(), shared), DFlash(tiny_head(feature_layers=(1, 3)), shared)]
    assert [drafts(shared, drafter) for drafter in both] == alone
    assert all(map(len, alone))


def test_both_runners_give_a_head_the_same_states_of_a_shallow_target(model: Any) -> None:
    targets = [runner(kind, model) for kind in ("transformers", "native")]
    one, other = (drafts(target, Eagle(eagle_head(), target)) for target in targets)
    assert one == other


def test_a_view_takes_its_layers_in_its_own_order() -> None:
    exposed = all_layers((4,), (2, 0, 2))
    assert exposed == (0, 2, 4)
    features = torch.arange(6.0).view(1, 6)  # two values a layer
    output = RowOutput(torch.zeros(1, 3), torch.ones(1, 2), features)
    assert StateView((4, 0, 4), lambda: exposed).of(output).tolist() == [[4, 5, 0, 1, 4, 5]]  # type: ignore[union-attr]
    assert StateView(exposed, lambda: exposed).of(output) is features, "nothing is copied where all is read"
    assert StateView((), lambda: exposed).of(output) is output.hidden
