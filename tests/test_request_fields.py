"""Settings of a request that shape its output, through SpeculativeDecoder: with drafts as without, and exactly."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paceline import SpeculativeDecoder
from paceline.core.types import StructuredOutput
from tests.support import chi2
from tests.support.tiny import byte_tokenizer, tiny_llama

PROMPT = "abcdabcdabcd"
EOS = 257
LETTERS = byte_tokenizer()("abcd").input_ids
DRAFTING: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_draft_tokens": 3, "draft_options": {"shortest": 1}},
    "ngram-tree": {"method": "ngram", "num_draft_tokens": 6, "draft_options": {"branches": 3, "shortest": 1}},
    "draft-model": {"draft_model": tiny_llama(seed=9), "num_draft_tokens": 3},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "bad_words": {"bad_words": ("II", "Go", "k5d")},
    "allowed_token_ids": {"allowed_token_ids": tuple(LETTERS)},
    "allowed_and_bad": {"allowed_token_ids": tuple(LETTERS), "bad_words": ("ab", "dd", "c")},
    "min_new_tokens": {"min_new_tokens": 9, "allowed_token_ids": (*LETTERS, EOS), "logit_bias": {EOS: 50.0}},
    "min_new_tokens_of_a_grammar": {"min_new_tokens": 4, "structured_output": StructuredOutput("regex", "[a-d]*")},
    "stop_token_ids": {"stop_token_ids": tuple(LETTERS[:2]), "allowed_token_ids": tuple(LETTERS)},
    "choice": {"structured_output": StructuredOutput("choice", '["abcd", "dabc", "dcba"]')},
    "gbnf": {"structured_output": StructuredOutput("grammar", 'root ::= "<" ("ab" | "cd")+ ">"')},
}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


@pytest.fixture(scope="module")
def plain(model: Any) -> Iterator[SpeculativeDecoder]:
    with SpeculativeDecoder(model, tokenizer=byte_tokenizer(), method="none") as decoder:
        yield decoder


@pytest.fixture(scope="module", params=DRAFTING)
def drafting(request: pytest.FixtureRequest, model: Any) -> Iterator[SpeculativeDecoder]:
    with SpeculativeDecoder(model, tokenizer=byte_tokenizer(), **DRAFTING[request.param]) as decoder:
        yield decoder


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_a_greedy_output_is_the_same_with_and_without_drafts(
    name: str, plain: SpeculativeDecoder, drafting: SpeculativeDecoder
) -> None:
    expected = plain.generate(PROMPT, max_new_tokens=24, **SETTINGS[name])
    result = drafting.generate(PROMPT, max_new_tokens=24, **SETTINGS[name])
    assert result.token_ids == expected.token_ids and result.text == expected.text
    assert result.finish_reason == expected.finish_reason
    assert result.token_ids != plain.generate(PROMPT, max_new_tokens=24).token_ids, "the setting changes the output"


@pytest.mark.slow
def test_forbidden_words_do_not_appear_and_allowed_tokens_are_all(drafting: SpeculativeDecoder) -> None:
    settings = {"max_new_tokens": 40, "temperature": 1.5, **SETTINGS["allowed_and_bad"]}
    for seed in range(5):
        text = drafting.generate(PROMPT, seed=seed, **settings).text
        assert set(text) <= set("abd") and "ab" not in text and "dd" not in text


def test_no_end_token_comes_before_the_least_length(drafting: SpeculativeDecoder) -> None:
    result = drafting.generate(PROMPT, max_new_tokens=24, **SETTINGS["min_new_tokens"])
    assert result.token_ids.index(EOS) == 9 and result.finish_reason == "stop"


def test_a_stop_token_ends_the_text_and_is_kept_where_asked(drafting: SpeculativeDecoder) -> None:
    settings = {"max_new_tokens": 24, "temperature": 1.0, "seed": 2, **SETTINGS["stop_token_ids"]}
    left_out, kept = (drafting.generate(PROMPT, include_stop=value, **settings) for value in (False, True))
    last = byte_tokenizer().decode(kept.token_ids[-1:])
    assert left_out.token_ids == kept.token_ids and kept.text == left_out.text + last
    assert not set(left_out.text) & set("ab") and left_out.finish_reason == "stop"
    outputs = list(drafting.stream(PROMPT, **settings))
    assert outputs[-1].stop_reason == kept.token_ids[-1]


@pytest.mark.slow
def test_a_stop_string_is_the_reason_and_is_kept_where_asked(drafting: SpeculativeDecoder) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 40, "temperature": 1.0, "seed": 4, "stop": ["ab", "ca"]}
    settings["allowed_token_ids"] = tuple(LETTERS)
    outputs = list(drafting.stream(PROMPT, include_stop=True, **settings))
    text, reason = "".join(output.text for output in outputs), outputs[-1].stop_reason
    assert isinstance(reason, str) and text.endswith(reason)
    assert drafting.generate(PROMPT, **settings).text == text[: -len(reason)]


def test_special_tokens_are_shown_where_asked(drafting: SpeculativeDecoder) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 4, "allowed_token_ids": (256, EOS), "min_new_tokens": 2}
    assert drafting.generate(PROMPT, **settings).text == ""
    shown = drafting.generate(PROMPT, skip_special_tokens=False, **settings)
    assert shown.text == "<s>" * sum(token == 256 for token in shown.token_ids), "an end token is no part of the text"


# --- sampled ----------------------------------------------------------------------------------------------------------

FALSE_ALARM = 1e-6  # the probability that correct code fails one test
NUM_SEQUENCES, LENGTH = 500, 3
ALLOWED = (*LETTERS, EOS)
BANNED = ("ab", "da")


def law(model: Any) -> dict[tuple[int, ...], float]:
    """The probability of every output: three tokens, the end not before the third, no forbidden word."""
    prompt: list[int] = byte_tokenizer()(PROMPT).input_ids
    words = {tuple(byte_tokenizer()(word).input_ids) for word in BANNED}
    outputs = {(): 1.0}
    for place in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for output, probability in outputs.items():
            row = model(torch.tensor([[*prompt, *output]])).logits[0, -1].float()
            tokens = [token for token in ALLOWED if (token != EOS or place == LENGTH - 1)]
            tokens = [token for token in tokens if (*output[-1:], token) not in words]
            for token, share in zip(tokens, torch.softmax(row[tokens], dim=-1).tolist()):
                longer[(*output, token)] = probability * share
        outputs = longer
    return outputs


def chi2_outcome(counts: Counter[tuple[int, ...]], probabilities: dict[tuple[int, ...], float]) -> tuple[float, float]:
    """The statistic and its limit. Outputs expected less than five times are pooled."""
    assert set(counts) <= set(probabilities), "an output that cannot be"
    total = counts.total()
    common = [output for output, share in probabilities.items() if share * total >= 5]
    pairs = [(counts[output], probabilities[output] * total) for output in common]
    rest = total - sum(expected for _, expected in pairs)
    pairs += [(total - sum(seen for seen, _ in pairs), rest)] if rest >= 5 else []
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in pairs)
    return statistic, float(chi2.isf(FALSE_ALARM, len(pairs) - 1))


@pytest.mark.slow
def test_sampled_outputs_have_the_law_of_the_masked_target(model: Any, drafting: SpeculativeDecoder) -> None:
    """Correct code fails this with probability 1e-6."""
    settings = {"allowed_token_ids": ALLOWED, "bad_words": BANNED, "min_new_tokens": LENGTH - 1}
    prompts = [PROMPT] * NUM_SEQUENCES
    results = drafting.generate(prompts, temperature=1.0, max_new_tokens=LENGTH, **settings)
    with torch.inference_mode():
        statistic, limit = chi2_outcome(Counter(tuple(result.token_ids) for result in results), law(model))
    print(f"chi² {statistic:.1f}, limit {limit:.1f}; correct code fails this with probability {FALSE_ALARM:g}")
    assert statistic < limit
    assert sum(result.stats.drafted for result in results) > NUM_SEQUENCES, "nothing was drafted: this shows little"


@pytest.mark.slow
def test_the_law_tells_a_mask_that_ignores_the_path(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule that gives every node the mask of the sequence itself must not pass."""
    from paceline.core.constraints import BannedWords

    allowed = BannedWords.allowed
    monkeypatch.setattr(BannedWords, "allowed", lambda self, path: allowed(self, []))
    options = DRAFTING["ngram"]
    settings = {"allowed_token_ids": ALLOWED, "bad_words": BANNED, "min_new_tokens": LENGTH - 1}
    with SpeculativeDecoder(model, tokenizer=byte_tokenizer(), **options) as decoder:
        results = decoder.generate([PROMPT] * 300, temperature=1.0, seed=0, max_new_tokens=LENGTH, **settings)
    words = [byte_tokenizer().decode(pair) for result in results for pair in itertools.pairwise(result.token_ids)]
    assert set(words) & set(BANNED)
