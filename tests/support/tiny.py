"""A random Llama of a few thousand weights and a tokenizer that reads bytes, written as a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 259  # 256 bytes and three special tokens
LONGEST_TEXT = 512
CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def tiny_config(**changes: Any) -> Any:
    from transformers import LlamaConfig

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": LONGEST_TEXT,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 258,
        # Large weights make decided distributions: a random model of the usual scale is nearly uniform.
        "initializer_range": 0.3,
    }
    return LlamaConfig(**{**sizes, **changes})


def tiny_llama(seed: int = 0, **changes: Any) -> Any:
    """The same seed gives the same weights; the global generator is left as it was."""
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(tiny_config(**changes)).eval()


def byte_tokenizer(swapped: int = 0) -> Any:
    """One token a byte. `swapped`: this many of the first tokens change places, which makes another vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = letters[:swapped][::-1] + letters[swapped:]
    tokenizer = Tokenizer(models.BPE({response: seq_id for seq_id, response in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def write_tiny_model(folder: Path, seed: int = 0, swapped: int = 0, **changes: Any) -> Path:
    """Weights, config and tokenizer as AutoModelForCausalLM.from_pretrained reads them."""
    tiny_llama(seed, **changes).save_pretrained(folder)
    byte_tokenizer(swapped).save_pretrained(folder)
    return folder
