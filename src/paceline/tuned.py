"""paceline.toml: what `paceline tune` measured on this machine, for every command that generates.

A profile belongs to one model. It names the method and the number of draft tokens that paid there, and holds what
passes cost, so that `-k auto` starts from measurements. It is read from PACELINE_PROFILE, or else from the current
directory. A method or draft model that the user names overrules it.

Nothing that changes the output is adopted: a profile that was measured with another engine or dtype is not used until
the user asks for it. `adopted` says in one line what it did.
"""

from __future__ import annotations

import json
import os
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config import AUTO, EngineConfig, checked_num_draft_tokens, unknown_names
from paceline.errors import OptionError

FILE_NAME = "paceline.toml"
VARIABLE = "PACELINE_PROFILE"
LOCAL = "local"  # the engine of a profile that names none
DECODER_SETTINGS = frozenset({"target", "method", "num_draft_tokens", "draft_model", "dtype", "draft_dtype", "engine"})
HEAD = "# Written by `paceline tune`. Delete it to go back to the defaults; edit it to overrule the advice.\n"


@dataclass(frozen=True, slots=True)
class TunedProfile:
    """The advice, and the measurements it rests on.

    device             where it was measured: cpu, cuda:0, …
    engine             what ran the model
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
    engine: str = LOCAL
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


@dataclass(frozen=True, slots=True)
class Adoption:
    """A configuration with what the profile in force adds to it. note: the file, and what was adopted or was not."""

    config: EngineConfig
    note: str | None = None


def adopted(config: EngineConfig, *, chosen: bool) -> Adoption:
    """What the profile in force makes of a configuration.

    chosen: the user named a method or a draft model. Then the profile lends its costs, if it is about the same method,
    and nothing else. A profile of another device or dtype than the one asked for is not used.
    """
    profile = profile_for(config.model.model)
    if profile is None:
        return Adoption(config)
    if obstacle := _obstacle(profile, config):
        return Adoption(config, f"{_default_path()} is not used: {obstacle}")
    speculative = config.speculative
    if chosen:
        same = profile.method == speculative.method and profile.draft_model == speculative.draft_model
        return _adoption(config, {"tuned": profile}) if same else Adoption(config)
    options: dict[str, Any] = {"method": profile.method, "draft_model": profile.draft_model, "tuned": profile}
    if speculative.num_draft_tokens == AUTO:
        options["num_draft_tokens"] = profile.num_draft_tokens
    if speculative.draft_dtype is None:
        options["draft_dtype"] = profile.draft_dtype
    return _adoption(config, options)


def _adoption(config: EngineConfig, options: dict[str, Any]) -> Adoption:
    words = {name.replace("_", " "): value for name, value in options.items() if name != "tuned" and value is not None}
    settings = [f"{name} {value}" for name, value in words.items()]
    settings += ["measured costs"] if options["tuned"].pass_seconds else []
    return Adoption(config.with_options(**options), f"using {_default_path()}: {', '.join(settings)}")


def _obstacle(profile: TunedProfile, config: EngineConfig) -> str | None:
    """Why a profile does not hold for a configuration; None: it does."""
    model = config.model
    if profile.engine != config.engine:
        return f"it was measured with engine {profile.engine}, whose outputs may differ; add --engine {profile.engine}"
    if model.device not in (None, AUTO) and not profile.device.startswith(str(model.device)):
        return f"it was measured on {profile.device}"
    if model.dtype == profile.dtype:
        return None
    if model.dtype is None:
        return f"it was measured with dtype {profile.dtype}, which changes the output; add --dtype {profile.dtype}"
    return f"it was measured with {'the default dtype' if profile.dtype is None else f'dtype {profile.dtype}'}"


def _default_path() -> Path:
    path = os.environ.get(VARIABLE)
    return Path(path).expanduser() if path else Path(FILE_NAME)


def read_profile(path: Path) -> TunedProfile:
    """Read a file that `write_profile` wrote, or that was edited since."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        decoder, measured = document["decoder"], document.get("measured", {})
        if unknown := set(decoder) - DECODER_SETTINGS:
            raise unknown_names("setting", unknown, DECODER_SETTINGS)
        return TunedProfile(
            target=str(decoder["target"]),
            device=str(measured.get("device", "")),
            method=str(decoder.get("method", "none")),
            num_draft_tokens=decoder.get("num_draft_tokens", AUTO),
            draft_model=decoder.get("draft_model"),
            dtype=decoder.get("dtype"),
            draft_dtype=decoder.get("draft_dtype"),
            engine=str(decoder.get("engine", LOCAL)),
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
            "engine": None if profile.engine == LOCAL else profile.engine,
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
