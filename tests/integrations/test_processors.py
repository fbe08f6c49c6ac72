"""hf_generate with whatever `generate` takes: processors, criteria, streamers, scores, assistants. Same call, same
result, compared with transformers' own plain decoding."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import paceline
from paceline.engines.local import verifier
from paceline.errors import OptionError
from tests.support import chi2
from tests.support.families import Variant, tiny_family
from tests.support.tiny import byte_tokenizer, tiny_llama

PAD = 258


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


@pytest.fixture(scope="module")
def prompts() -> Tensor:
    ids = torch.randint(0, 250, (3, 9), generator=torch.Generator().manual_seed(0))
    ids[1, :4] = ids[2, :1] = PAD  # padding in front
    return ids


def settings_of(ids: Tensor, **settings: Any) -> dict[str, Any]:
    return {"attention_mask": (ids != PAD).long(), "max_new_tokens": 24, "do_sample": False, **settings}


def plain(model: Any, ids: Tensor, **settings: Any) -> Any:
    return model.generate(ids, **settings_of(ids, **settings))


def ours(model: Any, ids: Tensor, **settings: Any) -> Any:
    return model.generate(ids, custom_generate=paceline.hf_generate, **settings_of(ids, **settings))


# --- processors and criteria ------------------------------------------------------------------------------------------


class FavoursTheRepeated:
    """A processor of one's own: adds to the tokens at every third position of what is there."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        changed = scores.clone()
        for row, ids in enumerate(input_ids):
            changed[row, ids[::3]] += 1.5
            changed[row, ids[-1]] -= 4.0
        return changed


class StopsAfterEven:
    """A criterion of one's own: two even tokens in a row."""

    def __call__(self, input_ids: Tensor, scores: Any) -> Tensor:
        return (input_ids[:, -1] % 2 == 0) & (input_ids[:, -2] % 2 == 0)


def odd_rows_get_odd_tokens(row: int, ids: Tensor) -> list[int]:
    return [token for token in range(100, 200) if (token + len(ids)) % 2 == row % 2]


GREEDY: dict[str, dict[str, Any]] = {
    "min_new_tokens": {"min_new_tokens": 12, "eos_token_id": [187, 33, 49]},
    "min_length": {"min_length": 18, "eos_token_id": [187, 33, 49]},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[187], [188, 49], [94]]},
    "suppress_tokens": {"suppress_tokens": list(range(0, 250, 3))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(0, 200))},
    "sequence_bias": {"sequence_bias": [[[187], -2.5], [[188, 49], -3.0], [[47], 3.0]]},
    "forced_eos_token_id": {"forced_eos_token_id": 99},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (4, 1.3), "eos_token_id": 187},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": odd_rows_get_odd_tokens},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.6},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "repetition_penalty": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 3},
    "own processor": {"logits_processor": [FavoursTheRepeated()]},
    "own criterion": {"stopping_criteria": [StopsAfterEven()]},
    "renormalize_logits": {"renormalize_logits": True},
    "long max_time": {"max_time": 600.0},
    "all at once": {
        "logits_processor": [FavoursTheRepeated()],
        "stopping_criteria": [StopsAfterEven()],
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 5,
        "repetition_penalty": 1.2,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GREEDY)
@pytest.mark.parametrize("drafter", ["ngram", "draft"])
def test_a_setting_of_generate_gives_what_generate_gives(model: Any, prompts: Tensor, name: str, drafter: str) -> None:
    own = {"num_draft_tokens": 5} if drafter == "ngram" else {"draft_model": tiny_llama(), "num_draft_tokens": 3}
    theirs = plain(model, prompts, **GREEDY[name])
    assert torch.equal(ours(model, prompts, **own, **GREEDY[name]), theirs)
    if name != "long max_time":
        assert not torch.equal(theirs, plain(model, prompts)) or "renormalize" in name, "the setting changes nothing"


@pytest.mark.slow
def test_what_depends_on_the_prompt_takes_that_of_its_own_row(model: Any, prompts: Tensor) -> None:
    """Two sequences of each prompt, and each is kept from its own prompt's tokens."""
    asked = {"encoder_no_repeat_ngram_size": 1, "do_sample": True, "top_k": 1, "num_return_sequences": 2}
    assert torch.equal(ours(model, prompts, **asked), plain(model, prompts, **asked))


def test_processors_that_count_their_calls_are_refused_by_name(model: Any, prompts: Tensor) -> None:
    from transformers import SynthIDTextWatermarkingConfig

    watermark = SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3)
    for setting in ({"guidance_scale": 1.5}, {"watermarking_config": watermark, "do_sample": True}):
        with pytest.raises(OptionError, match=next(iter(setting))):
            ours(model, prompts[:1], **setting)


def test_max_time_ends_a_sequence(model: Any, prompts: Tensor) -> None:
    tokens = ours(model, prompts[:1], max_new_tokens=2000, max_time=0.0, num_draft_tokens=4)
    assert tokens.shape[1] == 10, "as in transformers, the clock is read after every token"


@pytest.mark.slow
def test_a_stop_string_criterion_stops(model: Any, prompts: Tensor) -> None:
    from transformers import StopStringCriteria

    tokenizer = byte_tokenizer()
    text = tokenizer.decode(plain(model, prompts[:1])[0, 9:])
    criterion = StopStringCriteria(tokenizer, [text[5:7]])
    theirs = plain(model, prompts[:1], stopping_criteria=[criterion])
    assert torch.equal(ours(model, prompts[:1], stopping_criteria=[criterion], num_draft_tokens=6), theirs)
    assert theirs.shape[1] < 9 + 24


# --- sampled ----------------------------------------------------------------------------------------------------------

ALLOWED = (65, 77, 120, 160, 200, 31)
FALSE_ALARM = 1e-5
SAMPLES = 700


def only_some() -> dict[str, Any]:
    return {"suppress_tokens": [token for token in range(259) if token not in ALLOWED]}


def exact_pairs(model: Any, ids: Tensor, processors: Any) -> dict[tuple[int, int], float]:
    """The probability of every pair of first tokens, by transformers' processors over plain passes."""

    def next_probs(tokens: Tensor) -> Tensor:
        with torch.no_grad():
            logits = model(tokens).logits[:, -1].float()
        return torch.softmax(processors(tokens, logits), dim=-1)[0]

    first, pairs = next_probs(ids), {}
    for token in ALLOWED:
        second = next_probs(torch.cat([ids, torch.tensor([[token]])], dim=1))
        pairs |= {(token, other): float(first[token] * second[other]) for other in ALLOWED}
    return pairs


def chi_square(model: Any, ids: Tensor, settings: dict[str, Any]) -> tuple[float, float]:
    """The statistic over pairs of tokens of many sampled sequences, and its limit for a false alarm in 100,000."""
    seen: list[Any] = []

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["logits_processor"])
        return args[1]

    sampled = {"do_sample": True, "max_new_tokens": 3, "num_return_sequences": SAMPLES, **only_some(), **settings}
    model.generate(ids, custom_generate=spy, **sampled)
    pairs = exact_pairs(model, ids, seen[0])
    own = {"draft_model": tiny_llama(seed=3), "num_draft_tokens": 2}
    torch.manual_seed(5)
    rows = model.generate(ids, custom_generate=paceline.hf_generate, **own, **sampled)[:, ids.shape[1] :]
    counts = dict.fromkeys(pairs, 0)
    for row in rows.tolist():
        counts[tuple(row[:2])] = counts.get(tuple(row[:2]), 0) + 1
    if counts.keys() - pairs.keys():
        return float("inf"), 0.0  # a token that the processors exclude
    cells = [pair for pair, probability in pairs.items() if probability * SAMPLES >= 5]
    rest = sum(counts[pair] for pair in pairs if pair not in cells), sum(pairs[p] for p in pairs if p not in cells)
    statistic = sum((counts[pair] - SAMPLES * pairs[pair]) ** 2 / (SAMPLES * pairs[pair]) for pair in cells)
    statistic += (rest[0] - SAMPLES * rest[1]) ** 2 / (SAMPLES * rest[1]) if rest[1] * SAMPLES >= 1 else rest[0]
    return statistic, float(chi2.isf(FALSE_ALARM, len(cells)))


SAMPLED: dict[str, dict[str, Any]] = {
    "typical_p": {"typical_p": 0.7, "temperature": 1.6, "top_k": 0},
    "own processor and epsilon": {"logits_processor": [FavoursTheRepeated()], "epsilon_cutoff": 0.05, "top_k": 0},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_tokens_have_the_processed_distribution(model: Any, prompts: Tensor, name: str) -> None:
    statistic, limit = chi_square(model, prompts[:1], SAMPLED[name])
    assert statistic < limit, f"chi² {statistic:.1f} over {limit:.1f}; false alarms: 1 in 100,000"


@pytest.mark.slow
def test_a_wrong_rule_is_found(model: Any, prompts: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processing the row after the sequence alone, and not those after draft tokens, shows."""
    right = verifier.processed_rows

    def wrong(processor: Any, paths: list[list[int]], logits: Tensor, *, greedy: bool) -> Tensor:
        rows = right(processor, paths, logits, greedy=greedy)
        return torch.cat([rows[:1], torch.softmax(logits[1:].float(), dim=-1)])

    monkeypatch.setattr(verifier, "processed_rows", wrong)
    statistic, limit = chi_square(model, prompts[:1], SAMPLED["own processor and epsilon"])
    assert statistic > limit


# --- scores, streamers, assistants ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"eos_token_id": 7}, {"no_repeat_ngram_size": 2, "repetition_penalty": 1.2}], ids=["raw", "changed"]
)
def test_scores_and_logits_are_those_of_the_accepted_tokens(
    model: Any, prompts: Tensor, changes: dict[str, Any]
) -> None:
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, **changes}
    theirs, mine = plain(model, prompts, **asked), ours(model, prompts, num_draft_tokens=4, **asked)
    assert torch.equal(theirs.sequences, mine.sequences)
    assert len(theirs.scores) == len(mine.scores) == len(mine.logits) == 24
    for name in ("scores", "logits"):
        for expected, value in zip(getattr(theirs, name), getattr(mine, name)):
            torch.testing.assert_close(value, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.slow
def test_a_text_streamer_prints_the_whole_text(model: Any, prompts: Tensor, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import TextStreamer

    tokenizer = byte_tokenizer()
    plain(model, prompts[:1], streamer=TextStreamer(tokenizer))
    theirs = capsys.readouterr().out
    ours(model, prompts[:1], streamer=TextStreamer(tokenizer), num_draft_tokens=5)
    assert capsys.readouterr().out == theirs and theirs


@pytest.mark.slow
def test_the_reader_of_an_iterator_streamer_never_waits_for_ever(model: Any, prompts: Tensor) -> None:
    from transformers import TextIteratorStreamer

    tokenizer = byte_tokenizer()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=120)
    thread = threading.Thread(target=ours, args=(model, prompts[:1]), kwargs={"streamer": streamer})
    thread.start()
    text = "".join(streamer)
    thread.join(120)
    assert text == tokenizer.decode(plain(model, prompts[:1])[0, 9:])


def steps_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Draft tokens and accepted ones of every sequence that is generated from now on."""
    from paceline.engines.local.engine import LocalEngine

    counts, run = [], LocalEngine.run

    def counted(self: LocalEngine, *args: Any) -> Any:
        seqs = run(self, *args)
        counts.extend((seq.stats.drafted, seq.stats.accepted) for seq in seqs)
        return seqs

    monkeypatch.setattr(LocalEngine, "run", counted)
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("name", ["assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens"])
def test_assistants_of_the_call_draft(model: Any, prompts: Tensor, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, ids = steps_of(monkeypatch), prompts[:1].repeat(1, 3)
    value = {"assistant_model": tiny_llama(), "assistant_early_exit": 1, "prompt_lookup_num_tokens": 3}[name]
    assert torch.equal(ours(model, ids, **{name: value}), plain(model, ids))
    drafted, accepted = counts[0]
    assert drafted > 0 and (name != "assistant_model" or drafted == accepted), "the model is its own best draft"


def test_a_draft_of_another_vocabulary_is_refused_in_words(model: Any, prompts: Tensor) -> None:
    with pytest.raises(OptionError, match="vocabularies can be compared"):
        ours(model, prompts, draft_model=tiny_llama(vocab_size=300))


@pytest.mark.slow
def test_what_speculation_cannot_do_is_refused_by_name(model: Any, prompts: Tensor) -> None:
    from transformers import BartConfig, BartForConditionalGeneration

    with pytest.raises(OptionError, match="num_beams"):
        ours(model, prompts, num_beams=2)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 260, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16}
    bart = BartForConditionalGeneration(BartConfig(**sizes, **heads, forced_eos_token_id=None)).eval()
    with pytest.raises(OptionError, match="without an encoder"):
        ours(bart, prompts[:1])


# --- families ---------------------------------------------------------------------------------------------------------

FAMILIES = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi",
    "phi3",
    "gpt2",
    "gpt_neo",
    "gpt_neox",
    "gptj",
    "opt",
    "falcon",
    "stablelm",
    "olmo",
    "olmo2",
    "granite",
    "cohere",
    "starcoder2",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "gpt_oss",
    "glm",
    "glm4",
    "smollm3",
    "helium",
    "nemotron",
    "codegen",
    "persimmon",
    "bloom",
    "mpt",
    "lfm2",
    "qwen3_next",
]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_gives_its_own_tokens_with_processors_and_drafts(family: str) -> None:
    """What transformers' own tests ask of assisted generation: greedy, in a batch, with processors and a criterion."""
    model = tiny_family(Variant(family)).eval()
    ids = torch.randint(3, 250, (2, 8), generator=torch.Generator().manual_seed(1))
    ids = torch.cat([ids, ids[:, 2:6]], dim=1)  # something to look up
    asked = {
        "max_new_tokens": 16,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 4,
        "logits_processor": [FavoursTheRepeated()],
    }
    theirs = plain(model, ids, **asked)
    assert torch.equal(ours(model, ids, num_draft_tokens=3, **asked), theirs)
