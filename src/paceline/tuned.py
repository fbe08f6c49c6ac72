"""paceline.toml: what `paceline tune` measured on this machine, for every command that generates.

A profile belongs to one model. It names the method and the number of draft tokens that paid there, and holds what
passes cost, so that `-k auto` starts from measurements. It is read from PACELINE_PROFILE, or else from the current
directory. A method or draft model that the user names overrules it.
"""

from __future__ import annotations

import json
import os
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config import AUTO, EngineConfig, checked_num_draft_tokens
from paceline.errors import OptionError

FILE_NAME = "paceline.toml"
VARIABLE = "PACELINE_PROFILE"
HEAD = "# Written by `paceline tune`. Delete it to go back to the defaults; edit it to overrule the advice.\n"


@dataclass(frozen=True, slots=True)
class TunedProfile:
    """The advice, and the measurements it rests on.

    device             where it was measured: cpu, cuda:0, …
    dtype, draft_dtype as the user gave them; None: the default
    pass_seconds       of the target, by the tokens in a pass
    draft_seconds      of drafting, by the number of draft tokens a step
    """

    target: str
    device: str
    method: str = "none"
    num_draft_tokens: int | str = AUTO
    draft_model: str | None = None
    dtype: str | None = None
    draft_dtype: str | None = None
    advice: str = ""
    predicted: float | None = None
    measured: float | None = None
    shortest_output: int = 0
    pass_seconds: dict[int, float] = field(default_factory=dict)
    draft_seconds: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_draft_tokens", checked_num_draft_tokens(self.num_draft_tokens))


def profile_for(target: Any, path: Path | None = None) -> TunedProfile | None:
    """The profile that is in force for a target, or None. Raises OptionError where the file cannot be understood."""
    file = path or _default_path()
    if not file.is_file():
        return None
    profile = read_profile(file)
    return profile if isinstance(target, str | Path) and str(target) == profile.target else None


def adopted(config: EngineConfig, *, chosen: bool) -> EngineConfig:
    """A configuration with what the profile in force adds to it.

    chosen: the user named a method or a draft model. Then the profile lends its costs, if it is about the same method,
    and nothing else. A profile of another device or dtype than the one asked for is not in force.
    """
    profile = profile_for(config.model.model)
    if profile is None or not _same_machine(profile, config):
        return config
    speculative = config.speculative
    if chosen:
        same = profile.method == speculative.method and profile.draft_model == speculative.draft_model
        return config.with_options(tuned=profile) if same else config
    return config.with_options(
        method=profile.method,
        draft_model=profile.draft_model,
        num_draft_tokens=(
            profile.num_draft_tokens if speculative.num_draft_tokens == AUTO else speculative.num_draft_tokens
        ),
        dtype=config.model.dtype or profile.dtype,
        draft_dtype=speculative.draft_dtype or profile.draft_dtype,
        tuned=profile,
    )


def _same_machine(profile: TunedProfile, config: EngineConfig) -> bool:
    model = config.model
    device = model.device is None or model.device == AUTO or profile.device.startswith(model.device)
    return device and (model.dtype is None or model.dtype == profile.dtype)


def _default_path() -> Path:
    path = os.environ.get(VARIABLE)
    return Path(path).expanduser() if path else Path(FILE_NAME)


def read_profile(path: Path) -> TunedProfile:
    """Read a file that `write_profile` wrote, or that was edited since."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        decoder, measured = document["decoder"], document.get("measured", {})
        return TunedProfile(
            target=str(decoder["target"]),
            device=str(measured.get("device", "")),
            method=str(decoder.get("method", "none")),
            num_draft_tokens=decoder.get("num_draft_tokens", AUTO),
            draft_model=decoder.get("draft_model"),
            dtype=decoder.get("dtype"),
            draft_dtype=decoder.get("draft_dtype"),
            advice=str(measured.get("advice", "")),
            predicted=measured.get("predicted"),
            measured=measured.get("speedup"),
            shortest_output=int(measured.get("shortest_output", 0)),
            pass_seconds=_curve(document.get("pass_seconds", {})),
            draft_seconds=_curve(document.get("draft_seconds", {})),
        )
    except OptionError as error:
        raise OptionError(f"{path}: {error}") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise OptionError(f"{path} is not a profile of paceline tune ({error}); delete it or run tune again") from error


def write_profile(profile: TunedProfile, path: Path) -> None:
    """Write a profile; a reader sees the old file or the new one, never half of it."""
    sections: dict[str, dict[str, Any]] = {
        "decoder": {
            "target": profile.target,
            "draft_model": profile.draft_model,
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
            "shortest_output": profile.shortest_output,
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
    present = {key: value for key, value in values.items() if value is not None}
    return "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in present.items())


def _curve(table: dict[str, Any]) -> dict[int, float]:
    curve = {int(width): float(seconds) for width, seconds in table.items()}
    if any(width < 0 or not 0 <= seconds < float("inf") for width, seconds in curve.items()):
        raise OptionError("costs must be seconds of 0 or more")
    return curve
