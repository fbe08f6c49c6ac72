"""SpeculativeDecoder on a tiny model: one text, many, streamed, ids in and out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import SpeculativeDecoder
from paceline.errors import OptionError, PacelineError, PairError, PromptError
from tests.support.tiny import byte_tokenizer, tiny_llama, write_tiny_model

PROMPTS = ["abcabcabc", "to be or not to be", "x", "12 12 12 12"]
GUESSING: list[dict[str, Any]] = [
    {},
    {"draft": "ngram", "num_draft_tokens": 4},
    {"method": "ngram", "num_draft_tokens": 6, "method_options": {"branches": 3, "shortest": 1}},
    {"draft": tiny_llama(seed=9), "num_draft_tokens": 3},
    {"draft": "ngram", "num_draft_tokens": "auto"},
]


@pytest.fixture(params=GUESSING, ids=["none", "ngram", "ngram-tree", "draft", "auto"])
def decoder(request: pytest.FixtureRequest, tiny_folder: Path) -> SpeculativeDecoder:
    return SpeculativeDecoder(str(tiny_folder), **request.param)


def expected(model: Any, decoder: SpeculativeDecoder, prompt: str, new_tokens: int = 30) -> list[int]:
    ids = torch.tensor([decoder.tokenizer.encode(prompt)])
    output: list[int] = model.generate(ids, max_new_tokens=new_tokens, do_sample=False)[0, ids.shape[1] :].tolist()
    return output


def test_greedy_is_the_models_own_text(decoder: SpeculativeDecoder, tiny_model: Any) -> None:
    for result, prompt in zip(decoder.generate(PROMPTS, max_new_tokens=30), PROMPTS):
        assert result.token_ids == expected(tiny_model, decoder, prompt)
        assert result.text == decoder.tokenizer.decode(result.token_ids)
        assert len(result.from_draft) == len(result.token_ids) and sum(result.from_draft) == result.stats.accepted


def test_streaming_says_the_same(decoder: SpeculativeDecoder) -> None:
    whole = decoder.generate(PROMPTS[0], max_new_tokens=20)
    outputs = list(decoder.stream(PROMPTS[0], max_new_tokens=20))
    assert "".join(output.text for output in outputs) == whole.text
    assert [token for output in outputs for token in output.token_ids] == whole.token_ids
    assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
    assert outputs[-1].finish_reason == whole.finish_reason
    assert outputs[-1].stats is not None and outputs[-1].stats.new_tokens == whole.stats.new_tokens


def test_leaving_a_stream_early_gives_its_slot_back(decoder: SpeculativeDecoder) -> None:
    stream = decoder.stream(PROMPTS[0], max_new_tokens=20)
    next(stream)
    stream.close()
    assert decoder.generate(PROMPTS[0], max_new_tokens=5).stats.new_tokens == 5


def test_ids_in_ids_out(decoder: SpeculativeDecoder, tiny_model: Any) -> None:
    ids = torch.randint(0, 250, (3, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    theirs = tiny_model.generate(ids, attention_mask=mask, max_new_tokens=25, do_sample=False)
    assert torch.equal(decoder.decode(ids, mask, max_new_tokens=25), theirs)
    assert torch.equal(decoder.decode(ids[0], max_new_tokens=25), theirs[0][: 8 + 25])


def test_a_seed_is_a_text(decoder: SpeculativeDecoder) -> None:
    how: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0, "top_p": 0.95}
    one, two = (decoder.generate(PROMPTS[1], seed=5, **how).token_ids for _ in range(2))
    assert one == two
    together = decoder.generate([PROMPTS[0], PROMPTS[1]], seed=4, **how)
    assert together[1].token_ids == one, "in a list, text i has seed + i"


def test_a_rule_asked_for_is_the_rule_with_a_seed_too(tiny_folder: Path) -> None:
    how: dict[str, Any] = {"max_new_tokens": 40, "temperature": 1.0, "seed": 3}
    seqs = {
        rule: SpeculativeDecoder(str(tiny_folder), draft="ngram", acceptance=rule).generate(PROMPTS[1], **how).text
        for rule in (None, "coupled", "token")
    }
    assert seqs[None] == seqs["coupled"] != seqs["token"]


def test_coupled_acceptance_hides_the_guessing(tiny_folder: Path) -> None:
    seqs = set()
    for way in GUESSING:
        decoder = SpeculativeDecoder(str(tiny_folder), acceptance="coupled", **way)
        seqs.add(decoder.generate(PROMPTS[1], max_new_tokens=20, temperature=1.0, seed=3).text)
    assert len(seqs) == 1


def test_penalties_follow_the_guesses(tiny_folder: Path, tiny_model: Any) -> None:
    decoder = SpeculativeDecoder(str(tiny_folder), draft=tiny_model, num_draft_tokens=4)
    plain = decoder.generate(PROMPTS[0], max_new_tokens=25, presence_penalty=2.0, num_draft_tokens=0)
    from_draft = decoder.generate(PROMPTS[0], max_new_tokens=25, presence_penalty=2.0)
    assert from_draft.token_ids == plain.token_ids and from_draft.stats.acceptance_rate == 1.0
    assert plain.token_ids != decoder.generate(PROMPTS[0], max_new_tokens=25).token_ids


def test_draft_is_target_accepts_everything(tiny_folder: Path, tiny_model: Any) -> None:
    decoder = SpeculativeDecoder(tiny_model, draft=tiny_model, num_draft_tokens=4, tokenizer=byte_tokenizer())
    stats = decoder.generate(PROMPTS[1], max_new_tokens=50, ignore_eos=True).stats
    assert (stats.tokens_per_step, stats.steps, stats.acceptance_rate) == (5.0, 10, 1.0)


def test_logprobs_are_the_models(tiny_folder: Path, tiny_model: Any) -> None:
    decoder = SpeculativeDecoder(str(tiny_folder), draft="ngram", num_draft_tokens=4)
    result = decoder.generate(PROMPTS[0], max_new_tokens=15, logprobs=2)
    assert result.logprobs is not None and len(result.logprobs) == len(result.token_ids)
    prompt = decoder.tokenizer.encode(PROMPTS[0])
    with torch.no_grad():
        output = tiny_model(torch.tensor([prompt + result.token_ids])).logits[0, len(prompt) - 1 : -1]
    rows = torch.log_softmax(output, -1)
    for row, token, found in zip(rows, result.token_ids, result.logprobs):
        assert found.token == token == found.top[0][0] and len(found.top) == 2
        assert found.logprob == pytest.approx(float(row[token]), abs=1e-3)


def test_a_conversation_reads_only_what_is_new(tiny_folder: Path) -> None:
    decoder, again = SpeculativeDecoder(str(tiny_folder), draft="ngram", num_draft_tokens=3), []
    fresh = SpeculativeDecoder(str(tiny_folder))
    messages: list[dict[str, Any]] = []
    for output in ("hello", "go on", "and then?"):
        messages.append({"role": "user", "content": output})
        outputs = list(decoder.stream(messages, keep_cache=True, max_new_tokens=12))
        again.append("".join(output.text for output in outputs))
        assert again[-1] == fresh.generate(messages, max_new_tokens=12).text
        messages.append({"role": "assistant", "content": again[-1]})


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"num_draft_tokens": 200}, OptionError),
        ({"colour": "red"}, OptionError),
        ({"method": "magic"}, OptionError),
        ({"max_num_seqs": 0}, OptionError),
        ({"acceptance": "sure"}, OptionError),
        ({"device": "cuda:99"}, OptionError),
        ({"batch_invariant": True, "device": "cpu"}, OptionError),
    ],
)
def test_impossible_options(tiny_folder: Path, options: dict[str, Any], error: type[PacelineError]) -> None:
    with pytest.raises(error):
        SpeculativeDecoder(str(tiny_folder), **options)


@pytest.mark.parametrize(
    ("prompt", "settings"),
    [
        ("", {}),
        ([], {}),
        ("x" * 600, {}),
        ([999], {}),
        ("x", {"max_new_tokens": -1}),
        ("x", {"tempreature": 1}),
        ("x", {"stop": [""]}),
        ("x", {"num_draft_tokens": 500}),
    ],
    ids=str,
)
def test_impossible_requests(tiny_folder: Path, prompt: Any, settings: dict[str, Any]) -> None:
    with pytest.raises((OptionError, PromptError)):
        SpeculativeDecoder(str(tiny_folder)).generate(prompt, **settings)


def test_a_text_never_outgrows_the_context(tiny_folder: Path) -> None:
    result = SpeculativeDecoder(str(tiny_folder), draft="ngram", num_draft_tokens=8).generate(
        "ab" * 250, max_new_tokens=100, ignore_eos=True
    )
    assert (len(result.token_ids), result.finish_reason) == (12, "length")


def test_a_draft_of_another_vocabulary(tiny_folder: Path, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other", swapped=4)
    with pytest.raises(PairError, match="4 of 259"):
        SpeculativeDecoder(str(tiny_folder), draft=str(other), num_draft_tokens=2)


def test_a_padded_vocabulary_is_the_same_vocabulary(tiny_folder: Path, tmp_path: Path, tiny_model: Any) -> None:
    """Sizes inside one family differ by padding; a larger head must not guess what the target does not have."""
    other = write_tiny_model(tmp_path / "padded", seed=1, vocab_size=320)
    decoder = SpeculativeDecoder(str(tiny_folder), draft=str(other), num_draft_tokens=3)
    assert decoder.generate(PROMPTS[0], max_new_tokens=30).token_ids == expected(tiny_model, decoder, PROMPTS[0])
    sampled = decoder.generate(PROMPTS[0], max_new_tokens=60, temperature=2.0, seed=1, ignore_eos=True)
    assert max(sampled.token_ids) < 259
