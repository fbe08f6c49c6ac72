"""A draft of another vocabulary: through characters, and through the tokens both have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paceline.core.sampling import SamplingParams
from paceline.core.types import Row
from paceline.drafting.cross_vocab import CrossVocab, TokenizerBridge
from paceline.drafting.registry import build_drafter
from paceline.errors import OptionError, PairError
from paceline.hub.vocabulary import SAME, SHARED, TEXT, pairing, shared_tokens, spellings
from paceline.runners.huggingface import HuggingFaceRunner
from paceline.runners.table import TableRunner
from tests.support.build import sequence
from tests.support.drafter_exactness import (
    assert_unchanged,
    check_greedy,
    check_sampled,
    context_for,
    engine_of,
    generated,
)
from tests.support.tiny import byte_tokenizer, tiny_llama, write_tiny_model

PROMPT = "to be or not to be, to be or not, to be or"


def letters(vocabulary: dict[str, int], merges: list[tuple[str, str]], **special: str) -> Any:
    """A byte-level tokenizer over a few letters."""
    model = Tokenizer(models.BPE(vocabulary, merges))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=model, **special)


def ours() -> Any:
    return letters({"a": 0, "b": 1, "c": 2, "ab": 3}, [("a", "b")])


def theirs() -> Any:
    return letters({"c": 0, "b": 1, "bc": 2, "a": 3}, [("b", "c")])


def cross_vocab(way: str = "auto") -> CrossVocab:
    return CrossVocab(TableRunner(4, order=2, seed=9), ours(), theirs(), 4, way)


# --- vocabularies -----------------------------------------------------------------------------------------------------


def test_shared_tokens_are_those_of_equal_bytes() -> None:
    found = shared_tokens(ours(), theirs())
    assert (found.target_ids, found.draft_ids) == ([0, 1, 2], [3, 1, 0])


def test_one_space_is_the_same_in_every_spelling() -> None:
    by_letters = letters({"Ġthe": 0, "Ċ": 1, "Ã©": 2, "Ġ": 3, "Ġa": 4}, [])
    metaspace = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE({"▁the": 0, "<0x0A>": 1, "é": 2, "▁": 3, "x": 4}, []))
    )
    assert spellings(by_letters) == {b" the": 0, b"\n": 1, "é".encode(): 2, b" ": 3, b" a": 4}
    assert spellings(metaspace) == {b" the": 0, b"\n": 1, "é".encode(): 2, b" ": 3, b"x": 4}
    assert len(shared_tokens(by_letters, metaspace).target_ids) == 4


def test_end_tokens_match_each_other_and_other_special_tokens_match_nothing() -> None:
    one = letters({"a": 0, "<end>": 1, "<x>": 2}, [], eos_token="<end>", bos_token="<x>")
    other = letters({"<stop>": 0, "a": 1, "<x>": 2}, [], eos_token="<stop>", bos_token="<x>")
    found = shared_tokens(one, other)
    assert (found.target_ids, found.draft_ids) == ([0, 1], [1, 0])


def test_a_pair_has_a_way_and_a_cost() -> None:
    same = pairing(ours(), ours())
    assert (same.greedy, same.sampled, same.share) == (SAME, SAME, 1.0)
    mixed = pairing(ours(), theirs())
    assert (mixed.greedy, mixed.sampled, mixed.share) == (TEXT, SHARED, 0.75)
    assert "3 of 4 tokens in common (75%)" in mixed.cost
    unrelated = pairing(letters({chr(97 + i): i for i in range(20)}, []), letters({"a": 0, "Z": 1}, []))
    assert unrelated.sampled == TEXT and "too few" in unrelated.cost


# --- characters -------------------------------------------------------------------------------------------------------


def test_text_is_tokenised_from_where_the_sequence_ends() -> None:
    bridge = TokenizerBridge(ours())
    assert bridge.after("c", "abc") == [3, 2]
    assert bridge.after("a", "bc") == [1, 2], "'ab' would cross the boundary after the last token"


def test_draft_tokens_by_text_are_the_characters_of_the_draft_model() -> None:
    drafter, seq = cross_vocab(TEXT), sequence([2, 0, 1], 50)
    draft_tokens = drafter.propose([seq], [3])[0]
    runner, expected = drafter.runner, theirs()
    seq_cache, output = runner.new_cache(), [0, 3, 1]
    assert expected.decode(output) == ours().decode([2, 0, 1])
    for _ in range(3):
        output.append(
            int(runner.forward([Row.chain(seq_cache, output[seq_cache.length :])], last_only=True).logits.argmax())
        )
    written = expected.decode(output)[3:]
    assert ours().decode(draft_tokens.tokens.tolist()) == written[: len(ours().decode(draft_tokens.tokens.tolist()))]
    assert len(draft_tokens) <= 3 and draft_tokens.probs is None


def test_the_draft_cache_follows_the_sequence_through_rejections() -> None:
    drafter, seq = cross_vocab(SHARED), sequence([2, 0, 1], 50, SamplingParams(1.0, seed=1))
    for tokens in ([0], [3, 3], [1, 2, 0], [2]):
        drafter.propose([seq], [3])
        seq_cache = drafter._states[seq.seq_id].seq_cache
        assert seq_cache.length == len(drafter._states[seq.seq_id].cached)
        seq.ids += tokens
    fresh, twin = cross_vocab(SHARED), sequence(seq.ids, 50, SamplingParams(1.0, seed=1))
    twin.rng.generator.set_state(seq.rng.generator.get_state())
    assert fresh.propose([twin], [3])[0].tokens.tolist() == drafter.propose([seq], [3])[0].tokens.tolist()


def test_nothing_is_drafted_inside_a_character() -> None:
    tokenizer, runner = byte_tokenizer(), TableRunner(259, order=1, seed=0)
    drafter = CrossVocab(runner, tokenizer, byte_tokenizer(40), 259)
    half = tokenizer("né").input_ids[:-1]
    assert len(drafter.propose([sequence(half, 50)], [3])[0]) == 0


def test_shared_draft_tokens_carry_the_distribution_they_were_drawn_from() -> None:
    drafter, seq = cross_vocab(), sequence([2, 0, 1], 50, SamplingParams(1.0, seed=4))
    draft_tokens = drafter.propose([seq], [3])[0]
    assert draft_tokens.probs is not None and draft_tokens.probs.shape == (3, 4)
    assert torch.allclose(draft_tokens.probs.sum(-1), torch.ones(3))
    assert bool((draft_tokens.probs[:, 3] == 0).all()), "the draft model has no token 'ab'"


@pytest.mark.parametrize("way", [TEXT, SHARED])
def test_a_token_that_only_the_tokenizer_of_the_draft_model_knows_is_never_asked_of_the_model(way: str) -> None:
    """Tokens are added to tokenizers without a row in the model; both know "d" here, and the draft model does not."""
    target = letters({"a": 0, "b": 1, "c": 2, "d": 3}, [])
    draft = letters({"c": 0, "b": 1, "a": 2, "d": 3}, [])
    drafter = CrossVocab(TableRunner(3, order=2, seed=9), target, draft, 4, way)
    known, unknown = sequence([0, 1, 2], 50), sequence([0, 3, 2], 50)
    [tree, none] = drafter.propose([known, unknown], [3, 3])
    assert len(tree) == 3 and 3 not in tree.tokens.tolist() and not len(none)


def test_impossible_options_are_refused() -> None:
    with pytest.raises(OptionError, match="way of"):
        cross_vocab("telepathy")
    with pytest.raises(PairError, match=r"tokenizer\.json"):
        CrossVocab(TableRunner(4), object(), theirs(), 4)


# --- exactness --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [TEXT, SHARED])
def test_greedy_outputs_are_unchanged(way: str) -> None:
    check_greedy(cross_vocab(way))


@pytest.mark.slow
def test_sampled_outputs_have_the_right_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways in one batch: the sequences with 3 draft tokens use one, those with 2 the other."""
    drafter = cross_vocab()
    monkeypatch.setattr(drafter, "way_of", lambda seq: SHARED if seq.params.num_draft_tokens == 3 else TEXT)
    check_sampled(drafter, length=120, copies=84)


# --- real models ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def renumbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model under other numbers: 40 tokens have changed places, and their rows with them."""
    folder = write_tiny_model(tmp_path_factory.mktemp("renumbered") / "model", swapped=40)
    model = tiny_llama()
    order = torch.cat([torch.arange(39, -1, -1), torch.arange(40, model.config.vocab_size)])
    with torch.no_grad():
        for weight in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
            weight.copy_(weight[order].clone())
    model.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_the_same_model_under_other_numbers_is_always_right(tiny_model: Any, renumbered: Path) -> None:
    """Only translation could lose a token: between these two models it loses none."""
    alphabet = enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    no_half_characters = {token: -100.0 for token, letter in alphabet if ord(letter) > 126}
    target = HuggingFaceRunner(tiny_model, "tiny")
    drafter = build_drafter("cross_vocab", context_for(target, str(renumbered)))
    seq = sequence(prompt_ids(), 40, SamplingParams(0.8, seed=3, logit_bias=no_half_characters))
    generated([seq], engine_of(target, drafter))
    assert seq.stats.acceptance_rate > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("way", [TEXT, SHARED])
def test_greedy_output_of_a_real_pair_is_unchanged(way: str, tiny_model: Any, renumbered: Path) -> None:
    target = HuggingFaceRunner(tiny_model, "tiny")
    drafter = build_drafter("cross_vocab", context_for(target, str(renumbered), way=way))
    assert drafter.draft_runner is not None
    assert_unchanged(target, drafter, [prompt_ids()], 40, 3)


def prompt_ids() -> list[int]:
    return [int(token) for token in byte_tokenizer()(PROMPT).input_ids]


def test_a_failed_pass_leaves_the_cache_consistent(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, seq = cross_vocab(TEXT), sequence([2, 0, 1], 50)
    expected = drafter.propose([seq], [3])[0].tokens.tolist()
    other = sequence([0, 0, 1], 50)
    other.seq_id = seq.seq_id  # the same cache, read with other tokens until the pass fails
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of luck"):
        patch.setattr(drafter, "_choose", _fail)
        drafter.propose([other], [3])
    assert drafter.propose([seq], [3])[0].tokens.tolist() == expected


def _fail(*_: object) -> None:
    raise RuntimeError("out of luck")
