"""hf_generate returns hidden states, attentions and the cache as `generate` does, and goes on from a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import paceline
from paceline.errors import OptionError
from tests.support.families import Variant, tiny_family
from tests.support.tiny import tiny_llama

PAD = 258
ALL = {
    "return_dict_in_generate": True,
    "output_hidden_states": True,
    "output_attentions": True,
    "output_scores": True,
    "output_logits": True,
}


@pytest.fixture(scope="module")
def model() -> Any:
    model = tiny_llama()
    model.set_attn_implementation("eager")  # others compute no attentions
    return model


@pytest.fixture(scope="module")
def prompts() -> Tensor:
    ids = torch.randint(0, 250, (3, 9), generator=torch.Generator().manual_seed(0))
    ids[1, :4] = ids[2, :1] = PAD  # padding in front
    return ids


def both(model: Any, ids: Tensor, **settings: Any) -> tuple[Any, Any]:
    """What transformers returns, and what hf_generate returns for the same call."""
    drafts = {name: settings.pop(name) for name in ("assistant_model", "prompt_lookup_num_tokens") if name in settings}
    mask = (ids != PAD).long()
    asked = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 6, "pad_token_id": PAD, **settings}
    return model.generate(ids, **asked), model.generate(ids, custom_generate=paceline.hf_generate, **asked, **drafts)


def assert_same_layers(ours: Any, theirs: Any, mask: Tensor) -> None:
    """Of one generated token: the same layers; what belongs to padding does not count."""
    assert len(ours) == len(theirs)
    for value, expected in zip(ours, theirs):
        assert (value is None) == (expected is None)
        if expected is not None:
            assert value.shape == expected.shape
            tokens = -2 if expected.dim() == 4 else 1
            visible = mask[:, : expected.shape[tokens]] if expected.shape[tokens] > 1 else mask[:, :1] * 0 + 1
            weight = visible[:, None, :, None] if expected.dim() == 4 else visible[:, :, None]
            torch.testing.assert_close(value * weight, expected * weight, atol=1e-3, rtol=1e-3)


def assert_same_outputs(ours: Any, theirs: Any, mask: Tensor) -> None:
    assert torch.equal(ours.sequences, theirs.sequences)
    for name in ("hidden_states", "attentions"):
        steps, expected = getattr(ours, name), getattr(theirs, name)
        assert (steps is None) == (expected is None)
        if expected is not None:
            assert len(steps) == len(expected)
            for step in zip(steps, expected):
                assert_same_layers(*step, mask)
    assert_same_cache(ours.past_key_values, theirs.past_key_values)


def assert_same_cache(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if theirs is not None:
        assert len(ours.layers) == len(theirs.layers)
        for layer, expected in zip(ours.layers, theirs.layers):
            for name in {"keys", "values"} & vars(expected).keys():
                torch.testing.assert_close(getattr(layer, name)[:1], getattr(expected, name)[:1], atol=1e-3, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no cache"])
def test_states_of_every_token_are_those_of_generate(model: Any, prompts: Tensor, use_cache: bool) -> None:
    end = int(model.generate(prompts[:1], max_new_tokens=3, do_sample=False)[0, -1])  # one row ends before the others
    mask = torch.cat([(prompts != PAD).long(), torch.ones(3, 6, dtype=torch.long)], dim=1)
    theirs, ours = both(model, prompts, use_cache=use_cache, eos_token_id=end, **ALL)
    assert_same_outputs(ours, theirs, mask)
    assert len(ours.hidden_states) == 6 and (ours.past_key_values is None) != use_cache


@pytest.mark.slow
def test_a_cache_of_ones_own_is_filled_and_gone_on_from(model: Any, prompts: Tensor) -> None:
    """A conversation of two turns: the first fills the cache, the second goes on from it."""
    from transformers import DynamicCache

    caches, tokens = [DynamicCache(config=model.config) for _ in range(2)], prompts[:1]
    for _ in range(2):
        outputs = [
            model.generate(tokens, past_key_values=cache, max_new_tokens=5, do_sample=False, **own)
            for cache, own in zip(caches, ({}, {"custom_generate": paceline.hf_generate}))
        ]
        assert torch.equal(outputs[0], outputs[1])
        assert_same_cache(caches[1], caches[0])
        assert caches[1].get_seq_length() == outputs[1].shape[1] - 1
        tokens = torch.cat([outputs[1], prompts[:1, 2:6]], dim=1)


@pytest.mark.slow
def test_going_on_from_a_cache_gives_states_of_the_new_tokens_alone(model: Any, prompts: Tensor) -> None:
    halves = [model.generate(prompts[:1], max_new_tokens=5, return_dict_in_generate=True) for _ in range(2)]
    tokens = torch.cat([halves[0].sequences, prompts[:1, 3:6]], dim=1)
    theirs, ours = (
        model.generate(tokens, past_key_values=half.past_key_values, max_new_tokens=4, **ALL, **own)
        for half, own in zip(halves, ({}, {"custom_generate": paceline.hf_generate}))
    )
    assert_same_outputs(ours, theirs, torch.ones_like(ours.sequences))
    assert ours.hidden_states[0][0].shape[1] == 4, "13 of 17 tokens were in the cache"


def test_a_cache_of_other_tokens_is_refused(model: Any, prompts: Tensor) -> None:
    """Decoding would read other tokens than the cache holds, and its text would be another."""
    half = model.generate(prompts[:1], max_new_tokens=5, return_dict_in_generate=True)
    own = {"past_key_values": half.past_key_values, "custom_generate": paceline.hf_generate}
    with pytest.raises(OptionError, match="was not made from the first tokens"):
        model.generate((half.sequences + 1) % 250, max_new_tokens=4, **own)
    with pytest.raises(OptionError, match="all tokens"):
        model.generate(half.sequences[:, -1:], attention_mask=torch.ones_like(half.sequences), max_new_tokens=4, **own)


@pytest.mark.slow
def test_the_number_of_draft_tokens_is_the_assistants(prompts: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.integrations import transformers as integration

    model, assistant, numbers = tiny_llama(), tiny_llama(seed=3), []
    create = integration.EngineConfig.create

    def recorded(*args: Any, **settings: Any) -> Any:
        numbers.append(settings["num_draft_tokens"])
        return create(*args, **settings)

    monkeypatch.setattr(integration.EngineConfig, "create", recorded)
    for number in (None, 2):
        assistant.generation_config.num_assistant_tokens = number
        theirs, ours = both(model, prompts[:1], assistant_model=assistant)
        assert torch.equal(ours, theirs)
    assert numbers == [integration.DEFAULT_DRAFT_TOKENS, 2]


# --- families ---------------------------------------------------------------------------------------------------------

FAMILIES = ["afmoe", "biogpt", "deepseek_v3", "exaone4", "gpt_bigcode", "olmoe"]
STATEFUL = ["bamba", "mamba"]  # transformers' assisted generation refuses them; n-gram drafts all the same


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES + STATEFUL)
def test_a_family_gives_the_outputs_that_transformers_asks_of_assisted_generation(family: str) -> None:
    """A right and a wrong assistant, prompt lookup, processors, all outputs, and on from the cache."""
    model = tiny_family(Variant(family))
    model.set_attn_implementation("eager")
    ids = torch.randint(3, 250, (1, 7), generator=torch.Generator().manual_seed(1))
    asked = {**ALL, "bad_words_ids": [[1, 0]], "repetition_penalty": 1.2, "eos_token_id": 7}
    asked["output_attentions"] = family != "mamba"
    if family in STATEFUL:
        ways: list[dict[str, Any]] = [{}]
    else:
        ways = [{"assistant_model": model}, {"assistant_model": tiny_family(Variant(family), seed=7)}]
        ways.append({"prompt_lookup_num_tokens": 2})
    for way in ways:
        theirs, ours = both(model, ids, **asked, **way)
        assert_same_outputs(ours, theirs, torch.ones_like(ours.sequences))
    if family != "mamba":  # its state cannot be gone on from
        own = {"past_key_values": ours.past_key_values, "custom_generate": paceline.hf_generate}
        further = model.generate(ours.sequences, max_new_tokens=3, do_sample=False, eos_token_id=7, **own)
        assert torch.equal(further, model.generate(ours.sequences, max_new_tokens=3, do_sample=False, eos_token_id=7))
