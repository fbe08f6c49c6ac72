"""What the API shows of a tokenizer: the spellings of its tokens, its special tokens, its chat template."""

from __future__ import annotations

from functools import cached_property, singledispatch
from typing import Any

from paceline.core.protocols import Tokenizer as AnyTokenizer
from paceline.hub.resolved_tokenizer import transformers_tokenizer
from paceline.hub.tokenizer import Tokenizer

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
NUMBERS_AND_FLAGS = ("add_bos_token", "add_eos_token", "padding_side", "truncation_side", "model_max_length")


class Vocabulary:
    """Any tokenizer: it encodes and decodes, and has no vocabulary to look into."""

    def __init__(self, tokenizer: AnyTokenizer) -> None:
        self._tokenizer = tokenizer

    @property
    def ids(self) -> dict[str, int]:
        """Token ids by their spellings."""
        return {}

    @property
    def chat_template(self) -> str:
        return ""

    @property
    def special_tokens(self) -> dict[str, str]:
        """Spellings by transformers' names for them."""
        return {}

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids. special: with those that start or end a prompt."""
        return self._tokenizer.encode(text) if text else []

    def spelling(self, token: int) -> str:
        """A token as the vocabulary writes it."""
        return self._tokenizer.decode([token])

    def description(self) -> dict[str, Any]:
        """What /tokenizer_info shows."""
        return {"tokenizer_class": type(self._tokenizer).__name__, **self.special_tokens}


class HuggingFaceVocabulary(Vocabulary):
    """A tokenizer of transformers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self._hf_tokenizer = tokenizer.hf_tokenizer

    @cached_property
    def ids(self) -> dict[str, int]:
        return dict(self._hf_tokenizer.get_vocab())

    @property
    def chat_template(self) -> str:
        template = self._hf_tokenizer.chat_template
        return template if isinstance(template, str) else ""

    @property
    def special_tokens(self) -> dict[str, str]:
        special = self._hf_tokenizer.special_tokens_map
        return {name: str(special[name]) for name in SPECIAL_TOKENS if special.get(name)}

    def encode(self, text: str, *, special: bool) -> list[int]:
        return [int(token) for token in self._hf_tokenizer(text, add_special_tokens=special).input_ids]

    def spelling(self, token: int) -> str:
        return str(self._hf_tokenizer.convert_ids_to_tokens(token) or "")

    def description(self) -> dict[str, Any]:
        loaded = transformers_tokenizer(self._hf_tokenizer)
        settings = loaded.init_kwargs
        shown = {name: settings[name] for name in NUMBERS_AND_FLAGS if isinstance(settings.get(name), str | int)}
        details = {"chat_template": self.chat_template or None, "vocab_size": len(self.ids), **shown}
        return {"tokenizer_class": type(loaded).__name__, **self.special_tokens, **details}


@singledispatch
def vocabulary(tokenizer: AnyTokenizer) -> Vocabulary:
    """The vocabulary of an engine's tokenizer."""
    return Vocabulary(tokenizer)


@vocabulary.register
def _(tokenizer: Tokenizer) -> Vocabulary:
    return HuggingFaceVocabulary(tokenizer)
