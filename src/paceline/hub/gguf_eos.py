"""Tokens that end a sequence of a GGUF file: those that its keys name, and those that llama.cpp knows by their text.

Converters write one end token and rarely the others, so a chat model's turn often ends with a token that no key names.
"""

from __future__ import annotations

from paceline.hub.gguf_fields import GgufFields

EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")  # llama.cpp ends a sequence at each of them
# Of llama.cpp's list all but </s>, which Gemma has as a mark in its text; elsewhere a key names it.
END_TEXTS = {
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>",
    "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<end_of_utterance>", "<EOT>", "_<EOT>", "▁<EOT>", "[EOT]",
    "[EOS]", "<eos>", "<turn|>", "<|tool_response>",
}  # fmt: skip
# Where a vocabulary has all of these, <|end|> closes one of several messages of a turn.
SEVERAL_MESSAGES = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})
MARKS = (3, 4)  # token types of llama.cpp: control and user-defined


def eos_token_ids(fields: GgufFields) -> int | list[int] | None:
    """As config.json has them: one, several or none."""
    named = (fields.get(f"tokenizer.ggml.{key}") for key in EOS_KEYS)
    ids = list(dict.fromkeys([*(int(token) for token in named if token is not None), *_by_text(fields)]))
    return ids if len(ids) > 1 else next(iter(ids), None)


def _by_text(fields: GgufFields) -> list[int]:
    tokens, types = (fields.get(f"tokenizer.ggml.{key}", ()) for key in ("tokens", "token_type"))
    ids = {text: index for index, (text, kind) in enumerate(zip(tokens, types)) if kind in MARKS and text in END_TEXTS}
    if any(ids.keys() >= texts for texts in SEVERAL_MESSAGES):
        ids.pop("<|end|>", None)
    return list(ids.values())
