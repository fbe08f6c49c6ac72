"""Fill-in-the-middle prompts: what comes before and after a gap, in the special tokens that a model was trained on."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import PromptError
from paceline.serve.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class MiddleTokens:
    """The spellings of one family.

    separator   before each file, where the family has one
    repository  before the name of what the files belong to, likewise
    padding     which models write after the gap, likewise
    """

    prefix: str
    suffix: str
    middle: str
    separator: str = ""
    repository: str = ""
    padding: str = ""


FAMILIES = (
    # Qwen2.5-Coder, Granite 4
    MiddleTokens(
        "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|repo_name|>", "<|fim_pad|>"
    ),
    # StarCoder, Granite, SmolLM
    MiddleTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>", "<repo_name>", "<fim_pad>"),
    MiddleTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    MiddleTokens("<|fim▁begin|>", "<|fim▁hole|>", "<|fim▁end|>"),  # DeepSeek-Coder, in its own order
    MiddleTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    MiddleTokens("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    MiddleTokens("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM, Seed
)


# What llama.cpp calls a repository and a file whose names a client does not give.
REPOSITORY_NAME, FILE_NAME = "myproject", "filename"


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

    @property
    def end_ids(self) -> list[int]:
        """Tokens that end the gap beside the model's own end tokens: what follows belongs to another file."""
        family = self._family
        spellings = (family.separator, family.repository, family.padding) if family is not None else ()
        return [self._ids[spelling] for spelling in spellings if spelling in self._ids]

    def prompt(self, prefix: str, suffix: str, files: tuple[OtherFile, ...] = (), start: str = "") -> list[int]:
        """Token ids. start: how the gap begins. Raises PromptError for a model that was not trained for it."""
        family = self._family
        if family is None:
            raise PromptError(
                "this model has no fill-in-the-middle tokens, so it cannot write between a prompt and a suffix; "
                "leave the suffix out, or serve a code model such as Qwen2.5-Coder"
            )
        ids = self._files(family, files) if files else []
        ids += [self._ids[family.prefix], *self._text(prefix), self._ids[family.suffix], *self._text(suffix)]
        return [*ids, self._ids[family.middle], *self._text(start)]

    def _files(self, family: MiddleTokens, files: tuple[OtherFile, ...]) -> list[int]:
        """The repository with its files, as far as the family has tokens for it, up to the file with the gap."""
        ids = self._headed(family.repository, f"{REPOSITORY_NAME}\n") if family.repository in self._ids else []
        for file in files:
            ids += self._headed(family.separator, f"{file.name}\n{file.text}\n")
        return ids + (self._headed(family.separator, f"{FILE_NAME}\n") if family.separator in self._ids else [])

    def _headed(self, spelling: str, text: str) -> list[int]:
        """A text after a special token, where the model has that."""
        token = self._ids.get(spelling)
        return [*([] if token is None else [token]), *self._text(text)]

    def _text(self, text: str) -> list[int]:
        return self._vocabulary.encode(text, special=False) if text else []
