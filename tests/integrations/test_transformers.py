"""`model.generate(..., custom_generate=paceline.hf_generate)`: the same call, the same result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

import paceline
from paceline.errors import OptionError, PacelineError
from tests.support.tiny import tiny_llama


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


@pytest.fixture(scope="module")
def prompts() -> Tensor:
    ids = torch.randint(0, 250, (3, 9), generator=torch.Generator().manual_seed(0))
    ids[1, :4] = ids[2, :1] = 258  # padding in front
    return ids


def both(model: Any, ids: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    settings = {"attention_mask": (ids != 258).long(), "max_new_tokens": 40, "do_sample": False, **settings}
    own = {name: settings.pop(name) for name in ("method", "draft_model", "num_draft_tokens") if name in settings}
    return model.generate(ids, **settings), model.generate(ids, custom_generate=paceline.hf_generate, **own, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_draft_tokens": 0},
        {"method": "ngram", "num_draft_tokens": 7},
        {"repetition_penalty": 1.3},
        {"eos_token_id": [77, 120, 160]},
        {"max_new_tokens": 1},
    ],
    ids=str,
)
def test_greedy_is_the_same(model: Any, prompts: Tensor, settings: dict[str, Any]) -> None:
    theirs, ours = both(model, prompts, **settings)
    assert torch.equal(theirs, ours)


@pytest.mark.slow
def test_a_loaded_draft_model_drafts(model: Any, prompts: Tensor) -> None:
    theirs, ours = both(model, prompts, draft_model=tiny_llama(seed=3), num_draft_tokens=3)
    assert torch.equal(theirs, ours)


@pytest.mark.slow
def test_an_end_token_pads_as_transformers_does(model: Any, prompts: Tensor) -> None:
    theirs, _ = both(model, prompts)
    end = int(theirs[0, 9 + 5])
    theirs, ours = both(model, prompts, eos_token_id=end)
    assert torch.equal(theirs, ours) and (ours == 258).any()


@pytest.mark.slow
def test_torchs_seed_decides_a_sampled_sequence(model: Any, prompts: Tensor) -> None:
    def sampled(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return both(model, prompts, do_sample=True, top_k=20, temperature=0.9, num_return_sequences=2)[1]

    assert sampled(1).shape == (6, 49)
    assert torch.equal(sampled(1), sampled(1)) and not torch.equal(sampled(1), sampled(2))
    assert not torch.equal(sampled(1)[0], sampled(1)[1]), "two sequences of one prompt are drawn apart"


@pytest.mark.slow
def test_sampling_settings_are_those_of_the_call(model: Any, prompts: Tensor) -> None:
    """top_k = 1 leaves one token: sampling is greedy then, which shows that the setting arrived."""
    greedy, _ = both(model, prompts)
    torch.manual_seed(0)
    narrow = both(model, prompts, do_sample=True, top_k=1)[1]
    assert torch.equal(greedy, narrow)


@pytest.mark.slow
def test_a_dictionary_if_asked(model: Any, prompts: Tensor) -> None:
    theirs, ours = both(model, prompts, return_dict_in_generate=True)
    assert torch.equal(theirs.sequences, ours.sequences)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive search"),
        ({"num_draft_tokens": 999}, "0 to 128"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_honoured_is_refused(model: Any, prompts: Tensor, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(PacelineError, match=reason):
        model.generate(prompts, custom_generate=paceline.hf_generate, max_new_tokens=4, **settings)


def test_called_directly_it_names_custom_generate(model: Any, prompts: Tensor) -> None:
    with pytest.raises(OptionError, match="custom_generate"):
        paceline.hf_generate(model, prompts)


def generated(model: Any, ids: Tensor, **settings: Any) -> Tensor:
    tokens: Tensor = model.generate(
        ids, custom_generate=paceline.hf_generate, max_new_tokens=4, do_sample=False, **settings
    )
    return tokens


@pytest.mark.slow
def test_position_ids_that_follow_the_mask_are_the_usual_ones(model: Any, prompts: Tensor) -> None:
    mask = (prompts != 258).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    given = generated(model, prompts, attention_mask=mask, position_ids=positions)
    assert torch.equal(given, generated(model, prompts, attention_mask=mask))


@pytest.mark.parametrize("shift", [1, 7])
def test_position_ids_of_ones_own_are_refused(model: Any, prompts: Tensor, shift: int) -> None:
    with pytest.raises(OptionError, match="position_ids"):
        generated(model, prompts[:1], position_ids=torch.arange(9)[None] + shift)


def test_token_types_are_refused_by_name() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=32, n_layer=1, n_head=4, n_positions=64)).eval()
    ids = torch.tensor([[1, 2, 3]])
    with pytest.raises(OptionError, match="token_type_ids"):
        generated(gpt2, ids, token_type_ids=torch.ones_like(ids), pad_token_id=0)


def tiny_llava() -> Any:
    from transformers import LlavaConfig, LlavaForConditionalGeneration
    from transformers.models.clip import CLIPVisionConfig

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = CLIPVisionConfig(image_size=8, patch_size=4, projection_dim=16, **sizes)
    text = tiny_llama().config
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=250)
    with torch.random.fork_rng():
        return LlavaForConditionalGeneration(config).eval()


@pytest.mark.slow
def test_an_image_is_never_left_out_silently() -> None:
    """The text without the image is another text: either it is read, or the call is refused by its name."""
    ids = torch.tensor([[256, 250, 250, 250, 250, 7, 8]])
    with pytest.raises(OptionError, match="pixel_values"):
        generated(tiny_llava(), ids, pixel_values=torch.rand(1, 3, 8, 8))


@pytest.mark.slow
def test_a_model_that_can_read_images_generates_from_tokens_alone() -> None:
    model, ids = tiny_llava(), torch.tensor([[256, 5, 7, 8, 5, 7]])
    theirs = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(generated(model, ids), theirs)


class Interrupting(BaseStreamer):
    """Raises at its n-th call; the prompt is the first."""

    def __init__(self, last: int) -> None:
        self.calls_left = last

    def put(self, value: Tensor) -> None:
        self.calls_left -= 1
        if not self.calls_left:
            raise InterruptedError("the reader has gone")

    def end(self) -> None:
        raise AssertionError("a call that was interrupted has no end")


@pytest.mark.parametrize("last", [2, 5, 13])
def test_what_a_streamer_raises_ends_the_call(last: int, model: Any, prompts: Tensor) -> None:
    """At the first token, in the middle, and at the last of twelve."""
    streamer = Interrupting(last)
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    with pytest.raises(InterruptedError, match="the reader has gone"):
        model.generate(prompts[:1], custom_generate=paceline.hf_generate, streamer=streamer, **settings)
    assert streamer.calls_left == 0
