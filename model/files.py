"""Opens the files of a checkpoint: regular files of a limited size that lie in the checkpoint's folder.

All that a checkpoint brings is read through this module, because a checkpoint comes from strangers: a link in it may
lead to a secret of this machine, which the service would show, and a pipe or a device would block for ever.

Links are followed where programs that store models make them:

- The folder itself may be reached through links.
- A link may lead to another file in the folder, as in a volume of Kubernetes.
- A snapshot in the cache of the Hugging Face Hub consists of links into the `blobs` of its repository, and `hf download
  --local-dir` of older versions made links into the `blobs` of any repository in the cache.
- The bundled model is part of the program; some installers make all files of a package links.

A hard link cannot be told from a file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from model.errors import ModelError

_BUNDLED: Final = Path(__file__).parent / "bundled"
_DESCRIPTORS: Final = next(
    (path for path in (Path("/proc/self/fd"), Path("/dev/fd")) if path.exists()), None
)
"""None on a Linux without `/proc`: there, what was opened is compared with what its path leads to."""
_KINDS: Final = (
    (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"),
)  # fmt: skip
_GET_PATH: Final = 50
"""`fcntl.F_GETPATH` of macOS, which other systems do not define."""


def read_file(folder: Path, name: str, max_bytes: int, error: type[ModelError]) -> bytes | None:
    """Return the content of a file of a checkpoint; None if there is no such file.

    Args:
        folder: the checkpoint.
        name: of the file, relative to the folder.
        max_bytes: limit of its size.
        error: type of the errors.

    Raises:
        ModelError: of the type `error`: it is larger, not a regular file, outside the folder, or cannot be read.
    """
    if not os.path.lexists(folder / name):
        return None
    with open_file(folder, name, error) as descriptor:
        return _read(descriptor, folder / name, max_bytes, error)


@contextlib.contextmanager
def open_file(folder: Path, name: str, error: type[ModelError]) -> Iterator[int]:
    """Open a file of a checkpoint for reading.

    What is checked is what was opened, so that a link that changes meanwhile leads nowhere else. Where the system
    permits it, nothing is opened for reading before it is known to be a regular file.

    Args:
        folder: the checkpoint.
        name: of the file, relative to the folder.
        error: type of the errors.

    Yields:
        The descriptor.

    Raises:
        ModelError: of the type `error`: there is no such file, it is not a regular file, or it is outside the folder.
    """
    file = folder / name
    with contextlib.ExitStack() as stack:
        try:
            base = _open(folder, getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY)
            stack.callback(os.close, base)
            found = _open(file, getattr(os, "O_PATH", os.O_RDONLY | os.O_NONBLOCK))
            stack.callback(os.close, found)
            mode = os.fstat(found).st_mode
            root, target = _path_of(base, folder), _path_of(found, file)
            # Where a link leads is said before what is there, so that it does not matter.
            if not _may_read(root, target):
                raise error(
                    f"{file} is a link to {target}, which is not in the model's folder; put a copy of it in the folder,"
                    " or serve the folder that has the file"
                )
            if not stat.S_ISREG(mode):
                kind = next((words for is_kind, words in _KINDS if is_kind(mode)), "no file")
                raise error(f"{file} is {kind}, not a regular file")
            if hasattr(os, "O_PATH"):
                checked, found = found, _open(path_of_descriptor(found, file), os.O_RDONLY)
                stack.callback(os.close, found)
                if not os.path.samestat(os.fstat(checked), os.fstat(found)):
                    raise error(f"{file} was replaced while it was opened")
        except (OSError, ValueError) as problem:  # ValueError: the name has a NUL character
            raise error(_why_not(file, problem)) from None
        yield found


def read_given(file: Path, max_bytes: int, error: type[ModelError]) -> bytes:
    """Return the content of a file that the operator names, wherever it is; otherwise like `read_file`."""
    try:
        descriptor = _open(file, os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError) as problem:
        raise error(_why_not(file, problem)) from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise error(f"{file} is not a regular file")
        return _read(descriptor, file, max_bytes, error)
    finally:
        os.close(descriptor)


def path_of_descriptor(descriptor: int, file: Path) -> str:
    """Return a path for libraries that open files by path; valid while the descriptor is open.

    Args:
        descriptor: of the file.
        file: the path by which it was opened.

    Raises:
        OSError: there is no such path any more.
    """
    return _real_path(descriptor, file) if _DESCRIPTORS is None else f"{_DESCRIPTORS}/{descriptor}"


def _open(path: Path | str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOCTTY)


def _read(descriptor: int, file: Path, max_bytes: int, error: type[ModelError]) -> bytes:
    size = os.fstat(descriptor).st_size
    if size > max_bytes:
        raise error(f"{file} has {size} bytes; at most {max_bytes} are read")
    try:
        with os.fdopen(os.dup(descriptor), "rb", buffering=0) as opened:
            content = bytearray()
            # It may grow meanwhile; files of the kernel have the size 0.
            while part := opened.read(min(1 << 20, max_bytes + 1 - len(content))):
                content += part
                if len(content) > max_bytes:
                    raise error(f"{file} has more than {max_bytes} bytes, the most that are read")
    except OSError as problem:
        raise error(_why_not(file, problem)) from None
    return bytes(content)


def _why_not(file: Path, problem: OSError | ValueError) -> str:
    if isinstance(problem, ValueError):
        return f"{str(file)!r} is not the name of a file"
    if problem.errno == errno.ENOENT and file.is_symlink():
        return f"{file} is a link to {file.readlink()}, which does not exist"
    return f"{file} cannot be read: {problem.strerror}"


def _path_of(descriptor: int, file: Path) -> str:
    """Return the path of what a descriptor stands for, without links."""
    if _DESCRIPTORS is None:
        return _real_path(descriptor, file)
    if _DESCRIPTORS.is_relative_to("/proc"):
        return str(Path(path_of_descriptor(descriptor, file)).readlink())
    import fcntl  # noqa: PLC0415 - only here

    return os.fsdecode(fcntl.fcntl(descriptor, _GET_PATH, bytes(1024)).rstrip(b"\0"))


def _real_path(descriptor: int, file: Path) -> str:
    """Return where a path leads, if that is what the descriptor stands for.

    Raises:
        OSError: it is not, or the path leads nowhere.
    """
    path = os.path.realpath(file)
    if not os.path.samestat(os.lstat(path), os.fstat(descriptor)):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    return path


def _may_read(root: str, target: str) -> bool:
    """Return whether a file may be read as part of the checkpoint in `root`; both are paths without links."""
    file, folder = Path(target), Path(root)
    if file.is_relative_to(folder):
        return True
    if folder.parent.name == "snapshots" and _is_in(file, folder.parent.parent / "blobs"):
        return True
    if folder == _BUNDLED.resolve():
        return True
    # Imported here because other folders do not need it.
    from huggingface_hub import constants  # noqa: PLC0415 - slow

    blobs = file.parent
    return (
        blobs.name == "blobs"
        and blobs.parent.name.startswith("models--")
        and blobs.parent.parent == Path(constants.HF_HUB_CACHE).resolve()
    )


def _is_in(file: Path, folder: Path) -> bool:
    return file.is_relative_to(folder.resolve())
