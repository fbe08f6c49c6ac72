"""paceline.toml: what `paceline tune` found out on this machine, for everything that decodes.

A profile belongs to one target. It names the method and the k that paid there, and holds what passes cost, so that
`-k auto` starts from facts instead of a measurement of its own. Looked for at PACELINE_PROFILE, or else in the current
directory. Whoever names a method or a draft is not overruled.
"""

from __future__ import annotations

import json
import os
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.config import AUTO, METHODS, DecoderOptions, checked_num_draft_tokens
from paceline.errors import OptionError

FILE_NAME = "paceline.toml"
VARIABLE = "PACELINE_PROFILE"
HEAD = "# Written by `paceline tune`. Delete it to go back to the defaults; edit it to overrule the advice.\n"


@dataclass(frozen=True, slots=True)
class Profile:
    """The advice, and the measurements it rests on.

    device             where it was measured: cpu, cuda:0, …
    dtype, draft_dtype as they were asked for; None: the default
    pass_seconds       of the target, by the tokens in a pass
    draft_seconds      of a round's guessing, by the number of guesses
    """

    target: str
    device: str
    method: str = "none"
    num_draft_tokens: int | str = AUTO
    draft: str | None = None
    dtype: str | None = None
    draft_dtype: str | None = None
    advice: str = ""
    predicted: float | None = None
    measured: float | None = None
    shortest_answer: int = 0
    pass_seconds: dict[int, float] = field(default_factory=dict)
    draft_seconds: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise OptionError(f"a profile's method must be one of {', '.join(METHODS)}, not {self.method!r}")
        object.__setattr__(self, "num_draft_tokens", checked_num_draft_tokens(self.num_draft_tokens))


def profile_for(target: Any, path: Path | None = None) -> Profile | None:
    """The profile that is in force for a target, or None. Raises OptionError where the file cannot be understood."""
    chosen = path or _place()
    if chosen is None or not chosen.is_file():
        return None
    found = read_profile(chosen)
    return found if isinstance(target, str | Path) and str(target) == found.target else None


def adopted(options: DecoderOptions, *, chosen: bool) -> DecoderOptions:
    """Options with what the profile in force adds to them.

    chosen: the user named a method or a draft. Then the profile lends its costs, if it is about the same method, and
    nothing else. A profile of another device or dtype than the one asked for is not in force.
    """
    profile = profile_for(options.target)
    if profile is None or not _same_machine(profile, options):
        return options
    if chosen:
        same = profile.method == options.method and profile.draft == options.draft
        return replace(options, profile=profile) if same else options
    return replace(
        options,
        method=profile.method,
        draft=profile.draft,
        num_draft_tokens=profile.num_draft_tokens if options.num_draft_tokens == AUTO else options.num_draft_tokens,
        dtype=options.dtype or profile.dtype,
        draft_dtype=options.draft_dtype or profile.draft_dtype,
        profile=profile,
    )


def _same_machine(profile: Profile, options: DecoderOptions) -> bool:
    device = options.device is None or options.device == AUTO or profile.device.startswith(options.device)
    return device and (options.dtype is None or options.dtype == profile.dtype)


def _place() -> Path | None:
    named = os.environ.get(VARIABLE)
    return Path(named).expanduser() if named else Path(FILE_NAME)


def read_profile(path: Path) -> Profile:
    """Read a file that `write_profile` wrote, or that was edited since."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        decoder, measured = document["decoder"], document.get("measured", {})
        return Profile(
            target=str(decoder["target"]),
            device=str(measured.get("device", "")),
            method=str(decoder.get("method", "none")),
            num_draft_tokens=decoder.get("num_draft_tokens", AUTO),
            draft=decoder.get("draft"),
            dtype=decoder.get("dtype"),
            draft_dtype=decoder.get("draft_dtype"),
            advice=str(measured.get("advice", "")),
            predicted=measured.get("predicted"),
            measured=measured.get("speedup"),
            shortest_answer=int(measured.get("shortest_answer", 0)),
            pass_seconds=_curve(document.get("pass_seconds", {})),
            draft_seconds=_curve(document.get("draft_seconds", {})),
        )
    except OptionError as error:
        raise OptionError(f"{path}: {error}") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise OptionError(f"{path} is not a profile of paceline tune ({error}); delete it or run tune again") from error


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile; a reader sees the old file or the new one, never half of it."""
    sections: dict[str, dict[str, Any]] = {
        "decoder": {
            "target": profile.target,
            "draft": profile.draft,
            "method": profile.method,
            "num_draft_tokens": profile.num_draft_tokens,
            "dtype": profile.dtype,
            "draft_dtype": profile.draft_dtype,
        },
        "measured": {
            "device": profile.device,
            "advice": profile.advice,
            "predicted": profile.predicted,
            "speedup": profile.measured,
            "shortest_answer": profile.shortest_answer,
        },
        "pass_seconds": {str(size): seconds for size, seconds in profile.pass_seconds.items()},
        "draft_seconds": {str(size): seconds for size, seconds in profile.draft_seconds.items()},
    }
    text = HEAD + "".join(f"\n[{name}]\n{_lines(values)}" for name, values in sections.items())
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def _lines(values: dict[str, Any]) -> str:
    """TOML of plain values; JSON's strings and numbers are TOML's too. What is None is left out."""
    known = {key: value for key, value in values.items() if value is not None}
    return "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in known.items())


def _curve(table: dict[str, Any]) -> dict[int, float]:
    found = {int(size): float(seconds) for size, seconds in table.items()}
    if any(size < 0 or not 0 <= seconds < float("inf") for size, seconds in found.items()):
        raise OptionError("costs must be seconds of 0 or more")
    return found
