"""Files of the Hugging Face Hub, into the cache of huggingface_hub (HF_HOME), where its other users find them too.

A download that was cut goes on where it stopped, also in a later process: huggingface_hub itself starts every file
again. A file is in the cache under its name only when its size and its hash are right. Of two processes at once the
first downloads a file and the other waits for it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from paceline.errors import FetchError, ModelNotFound
from paceline.hub.progress import Advance, size_text, transfer

WORKERS, ATTEMPTS = 4, 5
CHUNK_BYTES = 1 << 18
SECONDS_BETWEEN_ATTEMPTS = 1.0
LIST_TIMEOUT = 20.0
HTTP_LIMIT = 50 * 10**9  # larger files come only through huggingface_hub's own protocol
REFUSALS = (401, 403)
TOO_MANY_REQUESTS, SERVER_ERRORS = 429, 500
SHA256_DIGITS = 64  # of files in large-file storage; of others the Hub knows git's own hash


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository. digest: its SHA-256, or git's hash of it."""

    name: str
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a repository at one commit."""

    commit: str
    files: tuple[RemoteFile, ...]


class Unreachable(Exception):
    """The Hub does not answer, or must not be asked."""


def listing(repository: str) -> Listing:
    """What the Hub has under this name. Raises ModelNotFound, FetchError (a login is needed) or Unreachable."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

    try:
        info = HfApi().model_info(repository, files_metadata=True, timeout=LIST_TIMEOUT)
    except GatedRepoError as error:
        raise FetchError(_gated(repository)) from error
    except RepositoryNotFoundError as error:
        message = f"the Hugging Face Hub has no model {repository}, or it needs a login (hf auth login, or HF_TOKEN)"
        raise ModelNotFound(message) from error
    except HfHubHTTPError as error:
        if error.response is not None and error.response.status_code in REFUSALS:
            raise FetchError(f"the Hugging Face Hub refuses the token that it was sent for {repository}") from error
        raise Unreachable(str(error)) from error
    except (OfflineModeIsEnabled, _transport_error(), OSError) as error:
        raise Unreachable(str(error)) from error
    return Listing(str(info.sha), tuple(_remote_file(sibling) for sibling in info.siblings or ()))


def _gated(repository: str) -> str:
    return (
        f"{repository} is given only to those who accept its conditions: do that on its page, then log in "
        "(hf auth login, or HF_TOKEN)"
    )


def _transport_error() -> type[Exception]:
    """What the Hub's client raises when a connection breaks: of httpx or of its successor, by release."""
    from huggingface_hub import get_session

    module = import_module(type(get_session()).__module__.partition(".")[0])
    error: type[Exception] = module.TransportError
    return error


def _remote_file(sibling: Any) -> RemoteFile:
    digest = sibling.blob_id if sibling.lfs is None else sibling.lfs.sha256
    return RemoteFile(sibling.rfilename, int(sibling.size or 0), str(digest or ""))


def repository_folder(repository: str) -> Path:
    """The folder of a repository in the cache of huggingface_hub."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"


def cached_snapshot(repository: str) -> Path | None:
    """The folder of the files that were downloaded last; None: there are none."""
    folder = repository_folder(repository)
    reference = folder / "refs" / "main"
    commit = reference.read_text().strip() if reference.is_file() else ""
    snapshot = folder / "snapshots" / commit
    return snapshot if commit and snapshot.is_dir() else None


def fetch_files(repository: str, listed: Listing, names: list[str]) -> Path:
    """Download what is missing of these files. Returns the folder of the snapshot. Raises FetchError."""
    snapshot = repository_folder(repository) / "snapshots" / listed.commit
    remote = {file.name: file for file in listed.files}
    absent = [name for name in names if name not in remote]
    if absent:
        raise FetchError(f"{repository} is not complete on the Hugging Face Hub: it lacks {', '.join(absent)}")
    files = [remote[name] for name in names if not (snapshot / name).exists()]
    if files:
        _Download(repository).run(files)
    return snapshot


class _Download:
    """Files of one repository, some at a time. An error or Ctrl-C stops them all; what has arrived is kept."""

    def __init__(self, repository: str) -> None:
        self._repository, self._folder = repository, repository_folder(repository)
        self._broken, self._stopped = _transport_error(), threading.Event()

    def run(self, files: list[RemoteFile]) -> None:
        missing = [file for file in files if self._is_resumable(file) and not self._blob(file).exists()]
        total, done = sum(file.size for file in missing), sum(self._arrived(file) for file in missing)
        self._check_space(total - done)
        if not missing:
            self._all(files, self._link)
            return
        with transfer(f"downloading {self._repository}", total, done) as advance:
            self._all(files, lambda file: self._obtain(file, advance))

    def _is_resumable(self, file: RemoteFile) -> bool:
        """Others are left to huggingface_hub."""
        return bool(file.digest) and file.size <= HTTP_LIMIT

    def _check_space(self, needed: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._folder).free
        if needed > free:
            raise FetchError(
                f"{self._repository} needs {size_text(needed)} more and {self._folder.parent} has {size_text(free)} "
                "free. Let HF_HOME name another folder, or make room"
            )

    def _all(self, files: list[RemoteFile], work: Callable[[RemoteFile], None]) -> None:
        with ThreadPoolExecutor(WORKERS, "paceline-download") as pool:
            futures = [pool.submit(work, file) for file in files]
            try:
                finished = wait(futures, return_when=FIRST_EXCEPTION).done
            finally:  # also on Ctrl-C: the threads look at it between two pieces
                self._stopped.set()
                pool.shutdown(cancel_futures=True)
            for future in finished:
                future.result()

    def _obtain(self, file: RemoteFile, advance: Advance) -> None:
        if self._is_resumable(file):
            with self._locked(file):
                if not self._blob(file).exists():
                    self._receive(file, advance)
                    _check_digest(file, self._partial(file))
                    self._partial(file).rename(self._blob(file))
        self._check_going_on(file)
        self._link(file)

    @contextmanager
    def _locked(self, file: RemoteFile) -> Iterator[None]:
        """The lock that huggingface_hub takes for the same file."""
        from filelock import FileLock, Timeout  # a start that downloads nothing does not wait for this import

        path = self._folder.parent / ".locks" / self._folder.name / f"{file.digest}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._blob(file).parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
        while not lock.is_locked:
            self._check_going_on(file)
            with suppress(Timeout):
                lock.acquire(timeout=SECONDS_BETWEEN_ATTEMPTS)
        try:
            yield
        finally:
            lock.release()

    def _check_going_on(self, file: RemoteFile) -> None:
        if self._stopped.is_set():
            raise FetchError(self._interrupted(file, None))

    def _receive(self, file: RemoteFile, advance: Advance) -> None:
        """Append what is missing. What breaks off is tried again, five times while it brings nothing."""
        left = ATTEMPTS
        while (before := self._arrived(file)) < file.size:
            error = self._append_or_error(file, before, advance)
            self._check_going_on(file)
            left = ATTEMPTS if self._arrived(file) > before else left - 1
            if left == 0:
                raise FetchError(self._interrupted(file, error)) from error
            if error is not None:
                time.sleep(SECONDS_BETWEEN_ATTEMPTS)
        self._partial(file).touch()  # a file of no bytes

    def _append_or_error(self, file: RemoteFile, start: int, advance: Advance) -> Exception | None:
        from huggingface_hub.errors import HfHubHTTPError

        try:
            self._append(file, start, advance)
        except self._broken as error:
            return error
        except HfHubHTTPError as error:
            if not _may_pass(error):
                raise
            return error
        return None

    def _interrupted(self, file: RemoteFile, error: Exception | None) -> str:
        reason = "" if error is None else f" ({type(error).__name__})"
        return (
            f"the download of {self._repository} stopped at {file.name}{reason}; the same command goes on from there"
        )

    def _append(self, file: RemoteFile, start: int, advance: Advance) -> None:
        from huggingface_hub import get_session, hf_hub_url, hf_raise_for_status
        from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT
        from huggingface_hub.utils import build_hf_headers

        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        headers |= {"Range": f"bytes={start}-"} if start else {}
        url = hf_hub_url(self._repository, file.name)
        options: dict[str, Any] = {"headers": headers, "timeout": HF_HUB_DOWNLOAD_TIMEOUT, "follow_redirects": True}
        with get_session().stream("GET", url, **options) as response:
            hf_raise_for_status(response)
            resumed = response.status_code == 206
            if not resumed:
                advance(-start)
            with self._partial(file).open("ab" if resumed else "wb") as sink:
                for chunk in response.iter_bytes(CHUNK_BYTES):
                    sink.write(chunk)
                    advance(len(chunk))
                    if self._stopped.is_set():
                        return

    def _link(self, file: RemoteFile) -> None:
        """Let huggingface_hub name the file in its snapshot: that takes no download, for the content is there."""
        from huggingface_hub import hf_hub_download

        hf_hub_download(self._repository, file.name)

    def _arrived(self, file: RemoteFile) -> int:
        partial = self._partial(file)
        size = partial.stat().st_size if partial.is_file() else 0
        if size > file.size:  # not of this file
            partial.unlink()
            return 0
        return size

    def _blob(self, file: RemoteFile) -> Path:
        return self._folder / "blobs" / file.digest

    def _partial(self, file: RemoteFile) -> Path:
        return self._folder / "blobs" / f"{file.digest}.incomplete"


def _may_pass(error: Any) -> bool:
    """Whether a refusal is of this moment: too many requests, or a server that fails."""
    status = 0 if error.response is None else error.response.status_code
    return status == TOO_MANY_REQUESTS or status >= SERVER_ERRORS


def _check_digest(file: RemoteFile, path: Path) -> None:
    """Raise FetchError, and keep nothing, where what has arrived is not what the Hub has."""
    if _digest(path, file) != file.digest:
        os.unlink(path)
        raise FetchError(f"{file.name} was damaged on the way: its hash is wrong. It is not kept; fetch it again")


def _digest(path: Path, file: RemoteFile) -> str:
    with path.open("rb") as source:
        if len(file.digest) == SHA256_DIGITS:
            return hashlib.file_digest(source, "sha256").hexdigest()
        git = hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)
        while chunk := source.read(CHUNK_BYTES):
            git.update(chunk)
        return git.hexdigest()
