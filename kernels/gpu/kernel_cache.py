"""Triton's cache of compiled kernels, with a second folder that is only read, such as one inside an image."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import struct
import tempfile
from pathlib import Path
from typing import Final

from triton import knobs
from triton.runtime.cache import FileCacheManager, get_cache_manager

_logger = logging.getLogger(__name__)
_ELF: Final = struct.Struct("<4s28xQQ6x4H2x")  # header of 64-bit ELF files
_GROUP: Final = "__grp__"  # begins the name of the file that lists a kernel's files
_shipped: Path | None = None


def read_also(folder: Path) -> None:
    """Let Triton read kernels from a folder where its own cache has none; kernels compiled here go to its own cache.

    Args:
        folder: what `tessera warmup --arch` made, at any place.
    """
    global _shipped  # noqa: PLW0603 - Triton creates the managers
    _shipped = folder
    knobs.cache.manager_class = _CacheManager


def write_to(folder: Path) -> None:
    """Let Triton keep compiled kernels in a folder, without the code between source and binary; see `drop_sources`.

    Raises:
        OSError: the folder cannot be made, or no file can be written there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
    knobs.cache.dir = str(folder.absolute())
    knobs.compilation.store_binary_only = True


def drop_sources(folder: Path) -> None:
    """Delete the sources of compiled kernels from a folder: most of its size, and nothing reads them."""
    for path in _files(folder, "*.source"):
        path.unlink()


def num_kernels(folder: Path) -> int:
    """Return the number of compiled kernels in a folder."""
    return len(_files(folder, "*.cubin"))


def _files(folder: Path, pattern: str) -> list[Path]:
    """Return the files of kernels, without those that the operator keeps in the same folder."""
    keys = {path.parent for path in folder.glob(f"*/{_GROUP}*")}
    return [path for key in keys for path in key.glob(pattern)]


def is_cached(key: str) -> bool:
    """Whether the cache has a kernel; False if the cache is not one of files.

    Args:
        key: of the kernel, before it is hashed.
    """
    kept = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    if knobs.compilation.always_compile or not isinstance(kept, FileCacheManager):
        return False
    folders = [Path(kept.cache_dir)]
    if isinstance(kept, _CacheManager):
        folders.append(kept.shipped)
    names = (path.name.removeprefix(_GROUP) for it in folders for path in it.glob(f"{_GROUP}*"))
    return any(name in (kept.get_group(name) or {}) for name in names)


class _CacheManager(FileCacheManager):  # type: ignore[misc]  # Triton has no types
    """Reads the files of one key from Triton's folder, else from the shipped one.

    Attributes:
        shipped: the key's folder among the shipped ones; may be absent.
    """

    def __init__(self, key: str, *, override: bool = False, dump: bool = False) -> None:
        super().__init__(key, override=override, dump=dump)
        assert _shipped is not None
        self.shipped = _shipped / key

    def get_file(self, filename: str) -> str | None:
        """Return the path of a file, None if there is none."""
        own: str | None = super().get_file(filename)
        path = self.shipped / filename
        return str(path) if own is None and path.exists() and _is_whole(path) else own

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return the paths of a kernel's files by name, None if it is not cached, or shipped with a damaged file.

        A list of files has the absolute paths of the cache in which it was written.
        """
        own: dict[str, str] | None = super().get_group(filename)
        listed, metadata = self.shipped / f"{_GROUP}{filename}", self.shipped / filename
        if own is not None or not listed.exists():
            return own
        files = (metadata, metadata.with_suffix(".cubin"))
        if not all(map(_is_whole, (listed, *files))):
            return None
        return {path.name: str(path) for path in files}


@functools.cache
def _is_whole(path: Path) -> bool:
    """Whether a shipped file is there and complete; logs a warning if not."""
    try:
        if path.suffix == ".json":
            found = json.loads(path.read_text())
            whole = isinstance(found, dict) and bool(found)
        else:
            whole = _has_its_tables(path)
    except (OSError, ValueError, struct.error):
        whole = False
    if not whole:
        _logger.warning("--compiled-kernels: %s is missing or damaged, so it is made anew", path)
    return whole


def _has_its_tables(path: Path) -> bool:
    """Whether an ELF file has its tables of segments and sections, which are the last parts of cubins and libraries."""
    with path.open("rb") as file:
        header = _ELF.unpack(file.read(_ELF.size))
    magic, segments, sections, segment_bytes, num_segments, section_bytes, num_sections = header
    end = max(segments + segment_bytes * num_segments, sections + section_bytes * num_sections)
    return bool(magic == b"\x7fELF" and end <= path.stat().st_size)
