"""Fetches one file of the Hugging Face Hub, and continues where an earlier attempt ended.

The hub library (2.4) deletes what it received of a file when it is interrupted, so that a shard of 5 GB begins again.
Here a file grows under a name that its content determines, and an attempt begins at its end. Imports no PyTorch.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from model.errors import ModelFolderError
from model.progress import bytes_text

if TYPE_CHECKING:
    from io import FileIO

_logger = logging.getLogger("tessera.download")

_ATTEMPTS: Final = 5
"""In sequence without a new byte, before a file is given up."""
_FIRST_WAIT_SECONDS: Final = 1.0
_TRANSPORT_ERRORS: Final = frozenset({"TransportError", "RequestException"})
"""Names of the base classes of connection errors in the HTTP libraries that the hub library has used."""
_TOO_MANY, _RANGE_REFUSED, _PARTIAL, _SERVER_ERRORS = 429, 416, 206, 500
_HASH_CHUNK: Final = 2**20
_range_of = re.compile(r"bytes (\d+)-").match
_is_sha256 = re.compile(r"[0-9a-f]{64}").fullmatch


class Stopped(Exception):  # noqa: N818 - no error: the caller asked for it
    """The transfer was told to end."""


@dataclass
class RemoteFile:
    """A file to fetch.

    Attributes:
        name: in the repository.
        url: of its content.
        etag: names the content; its SHA-256 for large files of the Hub.
        size: in bytes.
        blob: where it belongs in the cache.
        lock: file that the hub library locks as well while it fetches this content.
        done: bytes that are here; changes during the transfer.
    """

    name: str
    url: str
    etag: str
    size: int
    blob: Path
    lock: Path
    done: int = 0

    @property
    def partial(self) -> Path:
        """Where it grows."""
        return self.blob.with_name(f"{self.blob.name}.incomplete")

    def find(self) -> int:
        """Return how many bytes are here already, from earlier attempts."""
        self.done = 0
        for path in (self.blob, self.partial):
            with contextlib.suppress(OSError):
                self.done = path.stat().st_size
                break
        if self.done > self.size:
            self.partial.unlink(missing_ok=True)
            self.done = 0
        return self.done


def fetch(file: RemoteFile, stop: threading.Event) -> None:
    """Fetch a file; after a broken connection, continue where it ended.

    Args:
        file: which; its `done` grows.
        stop: ends the transfer when it is set. What is here stays, for the next attempt.

    Raises:
        ModelFolderError: the content is not what the Hub says.
        OSError: the file cannot be written.
        Exception: that of the HTTP library, if the Hub refuses or cannot be reached.
    """
    from huggingface_hub.utils import WeakFileLock  # noqa: PLC0415 - 0.2 s

    for folder in (file.lock.parent, file.blob.parent):
        folder.mkdir(parents=True, exist_ok=True)
    # Two processes may write at the same time where the lock has no effect, as on some network file systems: they
    # write the same bytes at the same places.
    with WeakFileLock(file.lock):
        if not file.blob.exists():
            resumed = file.find()
            _receive_all(file, stop)
            if resumed and not _is_whole(file):
                _logger.warning(
                    "%s: what an earlier download left was damaged; starting again", file.name
                )
                _discard(file)
                _receive_all(file, stop)
                resumed = 0
            if not resumed and not _is_whole(file):
                _discard(file)
                raise ModelFolderError(
                    f"{file.name}: what the Hub sent has another hash than it says"
                )
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                file.partial.replace(file.blob)
        file.done = file.size


def is_connection_error(error: BaseException) -> bool:
    """Whether an error says that a connection could not be made, or broke."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, ConnectionError | TimeoutError) or bool(names & _TRANSPORT_ERRORS)


def is_disk_full(error: BaseException) -> bool:
    """Whether an error says that there is no space left."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _receive_all(file: RemoteFile, stop: threading.Event) -> None:
    failures, wait = 0, _FIRST_WAIT_SECONDS
    while True:
        before = file.done
        try:
            _receive(file, stop)
        except Exception as error:
            if file.done > before:
                failures, wait = 0, _FIRST_WAIT_SECONDS
            failures += 1
            if not _may_pass(error) or failures == _ATTEMPTS:
                raise
            _logger.warning(
                "%s: %s after %s of %s; trying again in %.0f s, from there",
                file.name,
                reason(error),
                bytes_text(file.done),
                bytes_text(file.size),
                wait,
            )
            if stop.wait(wait):
                raise Stopped from None
            wait *= 2
        else:
            return


class _EndedEarlyError(ConnectionError):
    """The server ended the answer before the end of the file."""


def _receive(file: RemoteFile, stop: threading.Event) -> None:
    """Send one request and write its answer to the end of what is here."""
    if file.done == file.size and file.partial.exists():
        return
    from huggingface_hub import constants  # noqa: PLC0415 - 0.2 s
    from huggingface_hub.utils import (  # noqa: PLC0415 - as above
        build_hf_headers,
        get_session,
        hf_raise_for_status,
    )

    # Compressed content has other positions. The HTTP library keeps the token from other hosts when it is redirected.
    headers = build_hf_headers() | {"Accept-Encoding": "identity"}
    if file.done:
        headers["Range"] = f"bytes={file.done}-"
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with get_session().stream("GET", file.url, headers=headers, timeout=timeout) as response:
        if response.status_code == _RANGE_REFUSED:
            file.partial.unlink(missing_ok=True)
            file.done = 0
            raise _EndedEarlyError("the Hub refused to continue the file")
        hf_raise_for_status(response)
        begin = file.done if response.status_code == _PARTIAL else 0
        found = _range_of(response.headers.get("Content-Range", ""))
        if begin and found is not None and int(found[1]) != begin:
            raise ModelFolderError(
                f"{file.name}: the Hub sent another part of it than was asked for"
            )
        # Never shortened: what another process may have written behind the position is the same content.
        descriptor = os.open(file.partial, os.O_RDWR | os.O_CREAT, 0o644)
        with open(descriptor, "r+b", buffering=0) as out:  # noqa: PTH123 - of a descriptor
            out.seek(begin)
            file.done = begin
            for chunk in response.iter_bytes():
                _write(out, chunk)
                file.done += len(chunk)
                if stop.is_set():
                    raise Stopped
                if file.done > file.size:
                    break
    if file.done < file.size:
        raise _EndedEarlyError("the connection ended")
    if file.done > file.size:
        _discard(file)
        raise ModelFolderError(f"{file.name}: the Hub sent more than its {file.size} bytes")


def _write(file: FileIO, chunk: bytes) -> None:
    """Write all of a chunk without a buffer, so that a killed process loses nothing that was counted."""
    rest = memoryview(chunk)
    while rest:
        rest = rest[file.write(rest) :]


def _is_whole(file: RemoteFile) -> bool:
    """Compare a file with its hash, if the Hub says one.

    The machine may have crashed since a part was written, and a proxy or mirror may send something else.
    """
    if not _is_sha256(file.etag):
        return True
    sha256 = hashlib.sha256()
    with file.partial.open("rb") as content:
        while chunk := content.read(_HASH_CHUNK):
            sha256.update(chunk)
    return sha256.hexdigest() == file.etag


def _discard(file: RemoteFile) -> None:
    file.partial.unlink(missing_ok=True)
    file.done = 0


def _may_pass(error: Exception) -> bool:
    """Whether the same request may succeed later."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return bool(status == _TOO_MANY or status >= _SERVER_ERRORS)
    return is_connection_error(error)


def reason(error: BaseException) -> str:
    """Return the first line of an error, or its type."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip() if lines else type(error).__name__
