"""Hybrid models through the fused kernels: against the eager pass, and verification with the bits of plain decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from paceline import SpeculativeDecoder
from paceline.core.types import Row
from paceline.runners.native import NativeRunner
from tests.runners.native.fused import eager_graphs
from tests.support.families import Variant, tiny_family
from tests.support.tiny import byte_tokenizer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES: dict[str, Any] = {
    "head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_value_heads": 2
}  # fmt: skip
IDS = [(7 * n + n // 5) % 250 for n in range(60)]
PROMPT = 6


def fused(kind: str) -> NativeRunner:
    runner = NativeRunner.of_model(tiny_family(Variant(kind, changes=SIZES)).to(DEVICE), kind, kv_cache_tokens=1024)
    runner.decode_graphs = eager_graphs(runner)
    return runner


def plain(runner: NativeRunner, ids: list[int]) -> Tensor:
    cache, logits = runner.new_cache(), list[Tensor]()
    runner.forward([Row.chain(cache, ids[:PROMPT])], last_only=True)
    runner.commit(cache, list(range(PROMPT)))
    for token in ids[PROMPT:]:
        logits.append(runner.forward([Row.chain(cache, [token])]).logits[0].clone())
        runner.commit(cache, [0])
    return torch.stack(logits)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_next"])
def test_fused_passes_agree_with_eager_ones(kind: str) -> None:
    runner = fused(kind)
    ours = plain(runner, IDS[:12])
    runner.decode_graphs = None
    torch.testing.assert_close(ours, plain(runner, IDS[:12]), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_verification_has_the_bits_of_plain_decoding() -> None:
    runner = fused("qwen3_5_text")
    expected = plain(runner, IDS[:16])
    cache, place, other = runner.new_cache(), PROMPT, runner.new_cache()
    runner.forward([Row.chain(cache, IDS[:PROMPT])], last_only=True)
    runner.commit(cache, list(range(PROMPT)))
    for count, kept in [(1, 1), (4, 2), (3, 3), (3, 1), (2, 2)]:
        draft = IDS[place : place + kept] + [1] * (count - kept)
        logits = runner.forward([Row.chain(cache, draft), Row.chain(other, [3])])[0].logits
        assert torch.equal(logits[:kept], expected[place - PROMPT : place - PROMPT + kept])
        runner.commit(cache, list(range(kept)))
        place += kept


@pytest.mark.slow
def test_several_plain_steps_in_a_row_are_those_of_as_many_passes() -> None:
    runner = fused("qwen3_5_text")
    texts = []
    for at_once in (False, True):
        cache, ids = runner.new_cache(), IDS[: PROMPT + 1]
        runner.forward([Row.chain(cache, ids[:-1])], last_only=True)
        runner.commit(cache, list(range(PROMPT)))
        while len(ids) < PROMPT + 9:
            if at_once:
                written = runner.decode([Row.chain(cache, ids[-1:])], 4)
                assert written is not None
                ids = ids + written[0].tolist()
            else:
                ids = [*ids, int(runner.forward([Row.chain(cache, ids[-1:])]).logits[0].argmax())]
                runner.commit(cache, [0])
        texts.append(ids)
        runner.truncate(cache, PROMPT + 5)
        texts.append(runner.forward([Row.chain(cache, [5])]).logits[0].argmax().item())
    assert texts[:2] == texts[2:]


@pytest.mark.gpu
def test_graphs_of_a_hybrid_model_have_the_bits_of_plain_decoding_whatever_is_accepted() -> None:
    model = tiny_family(Variant("qwen3_5_text", changes=SIZES)).to("cuda", torch.bfloat16)
    runner = NativeRunner.of_model(model, "tiny", kv_cache_tokens=2048)
    assert runner.decode_graphs is not None
    expected = plain(runner, IDS)
    cache, place = runner.new_cache(), PROMPT
    runner.forward([Row.chain(cache, IDS[:PROMPT])], last_only=True)
    runner.commit(cache, list(range(PROMPT)))
    for count, kept in [(1, 1), (5, 2), (6, 6), (4, 1), (6, 3), (2, 2), (6, 5), (16, 9)]:
        logits = runner.forward([Row.chain(cache, IDS[place : place + kept] + [1] * (count - kept))]).logits
        assert torch.equal(logits[:kept], expected[place - PROMPT : place - PROMPT + kept])
        runner.commit(cache, list(range(kept)))
        place += kept


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_next"])
def test_speculation_through_the_decoder_writes_what_plain_decoding_writes(kind: str) -> None:
    """A draft that is often wrong, sequences of different lengths, several graphs."""
    target, draft = (tiny_family(Variant(kind, changes=SIZES), seed).to("cuda", torch.bfloat16) for seed in (0, 1))
    near = {name: 0.9 * target.state_dict()[name] + 0.1 * weight for name, weight in draft.state_dict().items()}
    draft.load_state_dict(near)
    prompts, texts = [IDS[:9], IDS[:30], IDS[5:17]], []
    for options in ({"method": "none"}, {"draft_model": draft, "num_draft_tokens": 4}):
        with SpeculativeDecoder(target, tokenizer=byte_tokenizer(), **options) as decoder:
            results = [decoder.generate(prompt, max_new_tokens=64, ignore_eos=True) for prompt in prompts]
        texts.append([result.token_ids for result in results])
    assert texts[0] == texts[1] and 1 < results[0].stats.tokens_per_step < 5
