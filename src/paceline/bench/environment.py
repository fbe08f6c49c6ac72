"""What every result carries: the machine and the versions; and a results file that is never half written."""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
import uuid
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from paceline import __version__
from paceline.core.types import ModelInfo
from paceline.errors import OptionError

FORMAT = "paceline results"
PACKAGES = ("paceline", "torch", "transformers", "tokenizers", "numpy")


def hardware() -> dict[str, Any]:
    """The machine, as far as it determines a speed."""
    accelerators: list[str] = []
    if torch.cuda.is_available():
        accelerators = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "accelerators": accelerators,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory_gib() -> float:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return 0.0


def versions(more: tuple[str, ...] = ()) -> dict[str, str]:
    """Of Python and the packages that matter for speed and output. more: modules of an engine."""
    names = [*PACKAGES, *(_distribution(module) for module in more)]
    own = {"python": platform.python_version(), "paceline": __version__}  # an editable install may record an older one
    return {package: _version(package) for package in names} | own


def _distribution(module: str) -> str:
    """The name under which a module was installed."""
    return next(iter(metadata.packages_distributions().get(module, [module])))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def model_record(info: ModelInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "device": info.device,
        "dtype": info.dtype,
        "num_layers": info.num_layers,
        "hidden_size": info.hidden_size,
        "vocab_size": info.vocab_size,
    }


def new_run(command: list[str], target: ModelInfo, draft_model: ModelInfo | None) -> dict[str, Any]:
    """The first fields of a run; settings and workload are added after measuring."""
    return {
        "id": uuid.uuid4().hex[:12],
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": command,
        "target": model_record(target),
        "draft_model": None if draft_model is None else model_record(draft_model),
        "hardware": hardware(),
        "versions": versions(),
    }


def save_run(path: Path, run: dict[str, Any]) -> None:
    """Append a run, or replace the run of the same id. Readers see the old file or the new one, never half.

    Raises OptionError when the path is another kind of file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        runs = [other for other in load_runs(path) if other.get("id") != run["id"]] if path.exists() else []
        _replace(path, json.dumps({"format": FORMAT, "runs": [*runs, run]}, indent=1))


def check_results_file(path: Path) -> None:
    """Raise OptionError for a file that a run could not be added to, before anything is measured."""
    check_writable(path, "--out")
    if path.exists():
        load_runs(path)


def check_writable(path: Path, flag: str) -> None:
    """Raise OptionError for a file that cannot be written. Folders that are missing can be made."""
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise OptionError(f"{path} cannot be written; choose another file with {flag}")


def load_runs(path: Path) -> list[dict[str, Any]]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"{path} is damaged ({error}); move it away or choose another with --out") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise OptionError(f"{path} is not a results file of paceline bench; choose another with --out")
    runs = document.get("runs")
    if not isinstance(runs, list) or not all(isinstance(run, dict) for run in runs):
        raise OptionError(f"{path} is damaged (it has no list of runs); move it away or choose another with --out")
    return runs


def _replace(path: Path, text: str) -> None:
    """Write beside it and rename over it."""
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(partial, 0o644)
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
