"""Text that arrives in parts, read by generators that yield None where they must wait for more of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

Result = TypeVar("Result")
Piece = TypeVar("Piece")
Waiting = Generator[None, None, Result]  # yields None until the result is certain
BLANKS = " \t\r\n"
SCALAR_ENDS = ",}]" + BLANKS


class TextStream:
    """All text so far, and the position up to which it has been read."""

    def __init__(self) -> None:
        self._text = ""
        self._ended = False
        self.position = 0

    def add(self, text: str) -> None:
        self._text += text

    def end(self) -> None:
        """No more text comes."""
        self._ended = True

    @property
    def rest(self) -> str:
        """What has arrived and has not been read."""
        return self._text[self.position :]

    def since(self, position: int) -> str:
        """What has been read from this position on."""
        return self._text[position : self.position]

    # --- waiting reads ------------------------------------------------------------------------------------------------

    def next_character(self) -> Waiting[str]:
        """The next character, not yet read; empty at the end of the text."""
        while self.position >= len(self._text) and not self._ended:
            yield None
        return self._text[self.position : self.position + 1]

    def skip_blanks(self) -> Waiting[str]:
        """Read blanks; returns the character after them, not yet read."""
        while True:
            character = yield from self.next_character()
            if not character or character not in BLANKS:
                return character
            self.position += 1

    def take(self, options: Iterable[str]) -> Waiting[str]:
        """Read the option that comes next; empty: none does. An option must not begin another one."""
        possible = [option for option in options if option]
        while True:
            rest = self.rest
            match = next((option for option in possible if rest.startswith(option)), "")
            if match:
                self.position += len(match)
                return match
            if self._ended or not any(option.startswith(rest) for option in possible):
                return ""
            yield None

    def text_until(self, markers: tuple[str, ...]) -> Waiting[str | None]:
        """Read all before the first of the markers; None: there is none, and all text has been read."""
        start = self.position
        while True:
            found = _first(self._text, markers, start)
            if found >= 0:
                self.position = found
                return self.since(start)
            if self._ended:
                self.position = len(self._text)
                return None
            yield None

    def pieces_until(
        self, markers: tuple[str, ...], piece: Callable[[str], Piece]
    ) -> Generator[Piece | None, None, bool]:
        """Yield the text before the first of the markers as it arrives; returns whether a marker follows."""
        while True:
            found = _first(self._text, markers, self.position)
            safe = len(self._text) - (0 if self._ended else _overlap(self.rest, markers))
            limit = found if found >= 0 else safe
            if limit > self.position:
                start, self.position = self.position, limit
                yield piece(self._text[start:limit])
            if found >= 0 or self._ended:
                return found >= 0
            yield None

    def opens_object(self) -> Waiting[bool]:
        """Whether a JSON object begins here, as far as its first member shows it. Nothing is read."""
        start = self.position
        self.position += 1
        character = yield from self.skip_blanks()
        self.position = start
        return character in ('"', "}")

    # --- JSON ---------------------------------------------------------------------------------------------------------

    def json_value(self) -> Waiting[str | None]:
        """Read a JSON value as it is written; None: the text ends inside it, or there is none."""
        start = self.position
        is_complete = False
        for part in self.json_pieces(lambda text: text):
            if part is None:
                yield None
            else:
                is_complete = part == ""
        return self.since(start) if is_complete and self.position > start else None

    def json_pieces(self, piece: Callable[[str], Piece]) -> Generator[Piece | None, None, None]:
        """Yield a JSON value as it arrives, and an empty piece once it is complete."""
        scanner = JsonScanner()
        while True:
            size = scanner.feed(self.rest)
            if size:
                start, self.position = self.position, self.position + size
                yield piece(self._text[start : self.position])
            if scanner.is_complete or (self._ended and scanner.is_scalar):
                yield piece("")
                return
            if self._ended:
                return
            yield None


class JsonScanner:
    """Finds where a JSON value ends. It counts brackets and follows strings; whether it is valid is not its matter."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = self._has_begun = False
        self.is_complete = False

    @property
    def is_scalar(self) -> bool:
        """Whether it is a number or a name so far: only what follows shows its end."""
        return self._has_begun and not self._depth and not self._in_string

    def feed(self, text: str) -> int:
        """How many of these characters belong to the value."""
        for size, character in enumerate(text):
            if self.is_scalar and character in SCALAR_ENDS:
                self.is_complete = True
            if self.is_complete:
                return size
            self._read(character)
        return len(text)

    def _read(self, character: str) -> None:
        self._has_begun = True
        if self._in_string:
            self._read_in_string(character)
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.is_complete = self._depth <= 0

    def _read_in_string(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._in_string = False
            self.is_complete = self._depth == 0


def json_string(text: str | None) -> str | None:
    """The string that JSON text stands for; None where it is none."""
    try:
        value = json.loads(text or "", strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _first(text: str, markers: tuple[str, ...], start: int) -> int:
    positions = [position for position in (text.find(marker, start) for marker in markers) if position >= 0]
    return min(positions, default=-1)


def _overlap(text: str, markers: tuple[str, ...]) -> int:
    """Length of the longest end of the text that begins a marker."""
    longest = max((len(marker) for marker in markers), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-size:]) for marker in markers):
            return size
    return 0
