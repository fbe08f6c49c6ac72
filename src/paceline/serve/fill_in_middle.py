"""Fill-in-the-middle prompts: what comes before and after a gap, in the special tokens that a model was trained on."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import PromptError
from paceline.serve.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class MiddleTokens:
    """The spellings of one family. separator: before each file, where the family has one."""

    prefix: str
    suffix: str
    middle: str
    separator: str = ""


FAMILIES = (
    MiddleTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>"),  # Qwen2.5-Coder, Granite 4
    MiddleTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>"),  # StarCoder, Granite, SmolLM
    MiddleTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    MiddleTokens("<|fim▁begin|>", "<|fim▁hole|>", "<|fim▁end|>"),  # DeepSeek-Coder, in its own order
    MiddleTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    MiddleTokens("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    MiddleTokens("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM, Seed
)


@dataclass(frozen=True, slots=True)
class OtherFile:
    """A file that the gap may refer to."""

    name: str
    text: str


class FillInMiddle:
    """Prompts for the gap between two texts."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary, self._ids = vocabulary, vocabulary.ids
        self._family = next((family for family in FAMILIES if self._knows(family)), None)

    def _knows(self, family: MiddleTokens) -> bool:
        return all(token in self._ids for token in (family.prefix, family.suffix, family.middle))

    @property
    def is_supported(self) -> bool:
        return self._family is not None

    def prompt(self, prefix: str, suffix: str, files: tuple[OtherFile, ...] = ()) -> list[int]:
        """Token ids. Raises PromptError for a model that was not trained for it."""
        family = self._family
        if family is None:
            raise PromptError(
                "this model has no fill-in-the-middle tokens, so it cannot write between a prompt and a suffix; "
                "leave the suffix out, or serve a code model such as Qwen2.5-Coder"
            )
        ids = [token for file in files for token in self._file(family, file)]
        if files and family.separator in self._ids:
            ids.append(self._ids[family.separator])
        ids += [self._ids[family.prefix], *self._text(prefix), self._ids[family.suffix], *self._text(suffix)]
        return [*ids, self._ids[family.middle]]

    def _file(self, family: MiddleTokens, file: OtherFile) -> list[int]:
        separator = self._ids.get(family.separator)
        return [*([] if separator is None else [separator]), *self._text(f"{file.name}\n{file.text}\n")]

    def _text(self, text: str) -> list[int]:
        return self._vocabulary.encode(text, special=False) if text else []
