"""What engines other than the local one need in tests.

llama_cpp  a GGUF file (`ascii_gguf`, whose model in transformers is `gguf_llama`) and one thread (ONE_THREAD); skipped
           where xllamacpp is not installed. Its requests choose neither method nor draft length, and log-probabilities
           need method none (EngineSpec.drafts_with_logprobs).
http       a running server (`serving_model(ascii_llama(), byte_tokenizer(), …)` of tests/serve/running.py), its url as
           engine option, and the tokenizer of its model; without one there are no token ids.

Both are given a model that says ASCII only: llama.cpp does not report tokens that end inside a character, and only the
text of a whole character can be turned back into its tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.gguf import write_gguf
from tests.support.tiny import tiny_llama

NUM_ASCII = 94  # the first tokens of the tiny vocabulary: characters that are one byte
ONE_THREAD = {"threads": 1}  # threads that wait for each other on busy cores would make the suite slow


def ascii_llama(**changes: Any) -> Any:
    """A tiny model that says ASCII only."""
    model = tiny_llama(**changes)
    with torch.no_grad():
        model.lm_head.weight[NUM_ASCII:] = 0
    return model


def gguf_llama(**changes: Any) -> Any:
    """The same with the special tokens of tests/support/gguf.py."""
    return ascii_llama(bos_token_id=257, eos_token_id=258, pad_token_id=256, **changes)


def ascii_gguf(folder: Path, **changes: Any) -> Path:
    """That model as a GGUF file."""
    return write_gguf(folder / "tiny.gguf", gguf_llama(**changes))
