"""A name of the Hugging Face Hub -> its files in the Hub's cache; downloaded where the Hub can be reached."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import FetchError, ModelNotFound, PacelineError
from paceline.hub.cache import UNWRITABLE, cannot_write
from paceline.hub.download import Unreachable, cached_snapshot, fetch_files, listing
from paceline.hub.hub_name import HubName, chosen_files, is_gguf_choice
from paceline.hub.shards import missing_files


def obtain(name: HubName) -> Path:
    """The model's directory, or its GGUF file (of one in parts, the first). Raises ModelNotFound or FetchError."""
    from huggingface_hub import constants

    try:
        return _downloaded(name)
    except Unreachable:
        return cached(name)
    except PacelineError:
        raise
    except OSError as error:  # the Hub's own errors are among them
        if error.errno in UNWRITABLE:
            raise cannot_write(Path(constants.HF_HUB_CACHE), error, "HF_HOME") from error
        raise FetchError(f"{name} could not be downloaded ({type(error).__name__}); try again later") from error


def _downloaded(name: HubName) -> Path:
    listed = listing(name.repository)
    names = chosen_files(name, [file.name for file in listed.files])
    snapshot = fetch_files(name.repository, listed, names)
    return snapshot / names[0] if is_gguf_choice(names) else snapshot


def cached(name: HubName) -> Path:
    """What an earlier download left. Raises FetchError that names the missing files."""
    snapshot = cached_snapshot(name.repository)
    if snapshot is None:
        raise FetchError(_offline(name, [_expected(name)]))
    if name.gguf is None and (snapshot / "config.json").is_file():
        path, missing = snapshot, missing_files(snapshot)
    else:
        parts = _cached_gguf(name, snapshot)
        path, missing = snapshot / parts[0], [part for part in parts if not (snapshot / part).is_file()]
    if missing:
        raise FetchError(_offline(name, missing))
    return path


def _cached_gguf(name: HubName, snapshot: Path) -> list[str]:
    try:
        return chosen_files(name, _files(snapshot))
    except ModelNotFound as error:
        raise FetchError(_offline(name, [_expected(name)])) from error


def _files(snapshot: Path) -> list[str]:
    return [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()]


def _expected(name: HubName) -> str:
    if name.gguf is None:
        return "config.json, *.safetensors and the tokenizer's files"
    return name.gguf if name.gguf.endswith(".gguf") else f"*{name.gguf}*.gguf"


def _offline(name: HubName, missing: list[str]) -> str:
    from huggingface_hub import constants

    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hugging Face Hub cannot be reached"
    return (
        f"{name} is not whole on this machine and {why}. Missing: {', '.join(missing)}. Run `paceline fetch {name}` "
        f"where there is a connection, or hf download {name.repository} --local-dir DIR and name that directory"
    )
