"""The default model's own GGUF file (Q4_1), run as it is: its size in memory, and the text of its unpacked weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import SpeculativeDecoder
from paceline.build import open_runner, open_tokenizer
from paceline.config import ModelConfig
from paceline.core.types import Row
from paceline.hub.gguf_model import gguf_path
from paceline.layers import cpu_kernels

pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.skipif(cpu_kernels.library() is None, reason="no compiled kernels on this machine"),
]
PROMPT, NUM_TOKENS = "def fibonacci(n):\n", 32
SAFETY = 4.0  # standard deviations of a gap between two logits, by the rounding of inputs to 8 bits
MAX_DIVERGENCE = 0.02  # nats a token; 0.003 measured


@pytest.fixture(scope="module")
def path() -> Path:
    return gguf_path("default")


def logits_after(runner: Any, ids: list[int]) -> Tensor:
    """[tokens, vocab]"""
    seq_cache = runner.new_cache()
    logits: Tensor = runner.forward([Row.chain(seq_cache, ids)]).logits.clone()
    runner.free(seq_cache)
    return logits


def test_every_difference_from_the_unpacked_weights_is_a_near_tie(path: Path) -> None:
    """Both models read one text; where they prefer different tokens, the gap is no larger than their differences."""
    packed, exact = (open_runner(ModelConfig(str(path), dtype=dtype), "cpu", 256) for dtype in ("auto", "float32"))
    assert (packed.info.dtype, exact.info.dtype) == ("gguf", "float32")
    with SpeculativeDecoder(str(path), device="cpu", method="none") as decoder:
        text = decoder.generate(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True).token_ids
    prompt = open_tokenizer(ModelConfig(str(path))).encode(PROMPT)
    ours, reference = (logits_after(runner, [*prompt, *text])[len(prompt) - 1 : -1] for runner in (packed, exact))
    assert ours.argmax(dim=-1).tolist() == text, "read at once, it is what was generated token by token"
    best = reference.topk(2).indices
    noise = (ours.gather(1, best) - reference.gather(1, best)).diff(dim=1).std()
    gaps = reference.amax(dim=1) - reference.gather(1, torch.tensor(text)[:, None])[:, 0]
    assert (gaps <= SAFETY * noise).all(), f"gaps of up to {gaps.max():.3f}, rounding of {noise:.3f}"
    log_probs = reference.log_softmax(dim=-1)
    divergence = (log_probs.exp() * (log_probs - ours.log_softmax(dim=-1))).sum(dim=-1).mean()
    assert divergence < MAX_DIVERGENCE


def test_weights_take_no_more_than_a_tenth_more_than_the_file(path: Path) -> None:
    runner: Any = open_runner(ModelConfig(str(path)), "cpu", 256)
    pieces = {id(piece.data): piece for linear in runner.model.linears() for piece in linear.blocks}
    pieces[id(runner.model.embedding.blocks.data)] = runner.model.embedding.blocks
    assert sum(piece.data.nbytes for piece in pieces.values()) < 1.1 * path.stat().st_size
