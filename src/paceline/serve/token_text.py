"""Single tokens as the API shows them: their text, the bytes they contribute, and text as tokens.

`Tokenizer` of core.protocols encodes prompts and decodes whole outputs. Log-probabilities and predictions need more:
the bytes of a token that is part of a character, and tokens without a begin-of-sequence token. `token_text` gives what
a tokenizer can provide; any tokenizer has the defaults of `TokenText`.
"""

from __future__ import annotations

from functools import cached_property, singledispatch

from paceline.core.protocols import Tokenizer as AnyTokenizer
from paceline.hub.tokenizer import StreamDetokenizer, Tokenizer
from paceline.hub.vocabulary import spellings


class TokenText:
    """Tokens and text by `encode` and `decode` alone."""

    def __init__(self, tokenizer: AnyTokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Tokens of text in the middle of a sequence."""
        return self._tokenizer.encode(text)

    def decode(self, tokens: list[int]) -> str:
        """Text with special tokens where the tokenizer can show them."""
        return self._tokenizer.decode(tokens)

    def token_bytes(self, token: int) -> list[int] | None:
        """The bytes a token adds to the output; None for a special token, which adds nothing."""
        return list(self.decode([token]).encode("utf-8", "replace")) or None

    @property
    def chat_template(self) -> str:
        """The text of the chat template; empty: it is not known."""
        return ""

    @property
    def added_tokens(self) -> dict[str, int]:
        """Texts that are tokens of their own, such as <tool_call>, whatever stands around them."""
        return {}

    @property
    def special_tokens(self) -> frozenset[str]:
        """Those of them that the text of an output leaves out."""
        return frozenset()

    def stream(self, *, skip_special_tokens: bool = True) -> StreamDetokenizer:
        """Makes text of tokens that come one by one."""
        return StreamDetokenizer(self._tokenizer.decode)

    def is_special(self, token: int) -> bool:
        """Whether a token stands for no text of its own."""
        return self.token_bytes(token) is None

    def spelling(self, token: int) -> str:
        """One token as text. Part of a character is spelled bytes:\\xe2, as OpenAI does."""
        data = bytes(self.token_bytes(token) or ())
        try:
            return data.decode() or self.decode([token])
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class VocabularyTokenText(TokenText):
    """Tokens and text by the vocabulary of a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self._hf_tokenizer, self._streams = tokenizer.hf_tokenizer, tokenizer.stream
        self._encode = tokenizer.encode_continuation
        self._chat_template = tokenizer.chat_template
        self._special = frozenset(tokenizer.hf_tokenizer.all_special_ids)

    def encode(self, text: str) -> list[int]:
        return self._encode(text)

    def decode(self, tokens: list[int]) -> str:
        return str(self._hf_tokenizer.decode(tokens))

    def token_bytes(self, token: int) -> list[int] | None:
        if token in self._special:
            return None
        data = self._bytes_by_token.get(token)
        return list(self.decode([token]).encode("utf-8", "replace") if data is None else data)

    def stream(self, *, skip_special_tokens: bool = True) -> StreamDetokenizer:
        return self._streams(skip_special_tokens=skip_special_tokens)

    def is_special(self, token: int) -> bool:
        return token in self._special

    @property
    def chat_template(self) -> str:
        return self._chat_template

    @cached_property
    def added_tokens(self) -> dict[str, int]:  # type: ignore[override]
        return {str(text): int(token) for text, token in self._hf_tokenizer.get_added_vocab().items()}

    @cached_property
    def special_tokens(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset(text for text, token in self.added_tokens.items() if token in self._special)

    @cached_property
    def _bytes_by_token(self) -> dict[int, bytes]:
        return {token: spelling for spelling, token in spellings(self._hf_tokenizer).items()}


@singledispatch
def token_text(tokenizer: AnyTokenizer) -> TokenText:
    """The token text of an engine's tokenizer."""
    return TokenText(tokenizer)


@token_text.register
def _(tokenizer: Tokenizer) -> TokenText:
    return VocabularyTokenText(tokenizer)
