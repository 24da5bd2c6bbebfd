"""The folder of a service's sockets, and the removal of those that killed services have left behind."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Final

log = logging.getLogger("tessera")

_PREFIX: Final = "tessera-"
_LOCK: Final = "lock"


class SocketFolder:
    """Owns a new folder for sockets; mode 0700, so that no other user can connect.

    The folder has a file that this process holds locked as long as it lives. The system releases the lock when the
    process ends, however it ends, so a folder whose file can be locked belongs to nobody.

    Attributes:
        path: of the folder.

    Raises:
        OSError: the operating system refuses.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        try:
            # Locked before it has its name, so that no other service can take the folder for an abandoned one.
            self._lock, unnamed = tempfile.mkstemp(dir=self.path)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            Path(unnamed).rename(self.path / _LOCK)
        except OSError:
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def remove(self) -> None:
        """Remove the folder. Calling it again does nothing."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def remove_abandoned() -> None:
    """Remove this user's socket folders whose service has ended without doing so, by SIGKILL for example."""
    with contextlib.suppress(OSError):
        for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                if _is_abandoned(path):
                    log.info("removing %s, which a killed service has left behind", path)
                    shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(path: Path) -> bool:
    """Return whether a path is a socket folder of this user whose lock no process holds.

    Raises:
        OSError: it has no lock: it is not a socket folder, or is just being created.
    """
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return False
    lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
