"""Sampled texts of a recurrent and of a windowed model have the target's law, under every acceptance rule.

A token's place in the target's distribution, likeliest first and spread evenly over its own probability, is uniform if
and only if the token was drawn from it. Correct code fails one of these tests with probability 1e-5.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import SpeculativeDecoder
from paceline.core.verify import RULES
from paceline.runners.huggingface_state import ModelState
from paceline.runners.native.recurrent_states import RecurrentStates
from paceline.runners.native.sequence_state import SequenceState, StateSpan
from tests.support import chi2
from tests.support.families import Variant, tiny_family
from tests.support.tiny import byte_tokenizer

FALSE_ALARM, BINS = 1e-5, 20
PROMPTS = [[(5 * place + 3 * length) % 200 for place in range(length)] for length in (4, 9, 20, 33)]
NEW_TOKENS = 120
LOSSLESS = [name for name, rule in RULES.items() if rule.lossless]


NATIVE = ("qwen3_5_text",)  # kinds that run natively here; all others through transformers


def near(model: Any) -> Any:
    """A draft model: the target with a little noise."""
    draft = copy.deepcopy(model)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(5)
        for weight in draft.parameters():
            weight.add_(torch.randn_like(weight) * 0.03)
    return draft


def lasting(model: Any) -> None:
    """States that fade slowly: what is wrong with them shows for long."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.fill_(-4.0)


def places(model: Any, prompt: list[int], tokens: list[int]) -> Tensor:
    """Where each token lies in the target's distribution, from 0 for the likeliest to 1."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0]
    probs = logits[len(prompt) - 1 : -1].double().softmax(dim=-1)
    own = probs.gather(1, torch.tensor(tokens)[:, None])
    before = (probs * (probs > own)).sum(dim=-1)
    spread = torch.rand(len(tokens), generator=torch.Generator().manual_seed(len(prompt)), dtype=torch.float64)
    return before + spread * own[:, 0]


def statistic(kind: str, rule: str) -> float:
    model = tiny_family(Variant(kind))
    if kind in NATIVE:
        lasting(model)
    options: dict[str, Any] = {"draft_model": near(model), "num_draft_tokens": 3, "tokenizer": byte_tokenizer()}
    if kind in NATIVE:
        options["runner"] = "native"
    with SpeculativeDecoder(model, acceptance=rule, **options) as decoder:
        results = decoder.generate(PROMPTS, max_new_tokens=NEW_TOKENS, ignore_eos=True, temperature=1.0, seed=3)
    return uniformity(model, results)


def uniformity(model: Any, results: list[Any]) -> float:
    """chi² of the places of all tokens against the even spread over BINS bins."""
    accepted = sum(result.stats.accepted for result in results)
    assert accepted > 0, "nothing was accepted: this would show nothing"
    found = torch.cat([places(model, prompt, result.token_ids) for prompt, result in zip(PROMPTS, results)])
    counts = torch.histc(found, BINS, 0.0, 1.0)
    expected = counts.sum() / BINS
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.slow
@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("kind", ["qwen3_next", "gemma3_text", *NATIVE])
def test_sampled_texts_have_the_law_of_the_target(kind: str, rule: str) -> None:
    value = statistic(kind, rule)
    assert value < chi2.isf(FALSE_ALARM, BINS - 1), f"chi² {value:.1f}: p = {chi2.sf(value, BINS - 1):.2g}"


@pytest.mark.slow
def test_a_state_that_is_not_rolled_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant forgets the rejected tokens and keeps what they did to the state."""

    def forget_only(state: ModelState, length: int) -> None:
        state.length = min(state.length, length)

    monkeypatch.setattr(ModelState, "rewind", forget_only)
    monkeypatch.setattr("paceline.build._hugging_face", _without_probe)
    assert statistic("qwen3_next", "token") > chi2.isf(FALSE_ALARM, BINS - 1)


@pytest.mark.slow
def test_a_native_state_that_keeps_rejected_tokens_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant folds every draft token into the state, and takes none back."""

    def forget_only(states: RecurrentStates, state: SequenceState, length: int) -> None:
        state.now.length = state.now.end = length

    monkeypatch.setattr(StateSpan, "folded", property(lambda span: span.end))
    monkeypatch.setattr(RecurrentStates, "_rewind", forget_only)
    assert statistic("qwen3_5_text", "token") > chi2.isf(FALSE_ALARM, BINS - 1)


def _without_probe(model: Any, name: str, kv_cache_tokens: int | None) -> Any:
    """The probe would refuse the mutant."""
    from paceline.runners.huggingface_state_runner import HuggingFaceStateRunner

    return HuggingFaceStateRunner(model, name)
