"""Compiles the kernels of a piece of work side by side, before it is done, or finds out that all of them are compiled.

Triton compiles a kernel where it is first launched, one after the other. Nearly all of that is spent outside Python, so
threads compile as many at once as there are processors. Knows no kernel: it has the work done with launches left out,
or up to the launch of a kernel that is not compiled.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_MOST_THREADS: Final = 32
_GROUP: Final = "__grp__"  # begins the name of the file that lists a kernel's files
_HASHED: Final = re.compile(r"\.(py|so),sha256=")


class NotCompiledError(Exception):
    """A kernel is launched that would have to be compiled first."""


@contextlib.contextmanager
def compile_nothing() -> Iterator[None]:
    """Launch what is launched inside as long as Triton's cache has it.

    For one thread at a time. Without Triton it does nothing.

    Raises:
        NotCompiledError: inside, in the place of a launch whose kernel would have to be compiled.
    """
    try:
        from triton.runtime._async_compile import active_mode  # noqa: PLC0415 - not everywhere
    except ImportError:
        yield
        return
    _name_compiler()
    before = active_mode.get()
    active_mode.set(_CacheAlone())
    try:
        yield
    finally:
        active_mode.set(before)


class _CacheAlone:
    """What Triton hands compilations to, in the place of its threads."""

    def submit(
        self, key: str, compile_kernel: Callable[[], object], finish: Callable[[object], None]
    ) -> object:
        """Read a kernel from the cache.

        Args:
            key: of the kernel in the cache, before it is hashed.
            compile_kernel: reads it, or compiles it where it is not there.
            finish: keeps it at hand.
        """
        if not _is_cached(key):
            raise NotCompiledError
        kernel = compile_kernel()
        finish(kernel)
        return kernel


def _is_cached(key: str) -> bool:
    """Whether Triton would find a kernel; False also where it keeps them elsewhere than in files."""
    from triton import knobs  # noqa: PLC0415 - not everywhere
    from triton.runtime.cache import FileCacheManager, get_cache_manager  # noqa: PLC0415 - as above

    kept = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    if knobs.compilation.always_compile or not isinstance(kept, FileCacheManager):
        return False
    names = (path.name.removeprefix(_GROUP) for path in Path(kept.cache_dir).glob(f"{_GROUP}*"))
    return any(name in (kept.get_group(name) or {}) for name in names)


def _name_compiler() -> None:
    """Have Triton tell itself from others by less than its files, of which it hashes 400 MB for half a second."""
    from triton.runtime import cache  # noqa: PLC0415 - not everywhere

    key = compiler_key(Path(cache.__file__).parents[1], _record())
    cache.triton_key = lambda: key


@contextlib.contextmanager
def compile_ahead() -> Iterator[None]:
    """Compile what is launched inside, and do not launch it; on leaving, all of it is compiled.

    What the kernels would write stays as it was: nothing inside may take it for a number that decides anything, as an
    index. For one thread at a time. Without Triton it does nothing. Kernels that do not compile keep no other from it.

    Raises:
        Exception: on leaving, what is raised inside; else what the compiler raises, of several kernels for the first.
    """
    try:
        from triton import AsyncCompileMode  # noqa: PLC0415 - not everywhere
        from triton.runtime._async_compile import active_mode  # noqa: PLC0415 - as above
        from triton.runtime.jit import JITFunction  # noqa: PLC0415 - as above
    except ImportError:
        yield
        return
    _name_compiler()
    launch = JITFunction.run

    def compile_only(function: object, *arguments: object, **options: object) -> object:
        kernel: Any = launch(function, *arguments, **options | {"warmup": True})
        # Triton keeps it at hand from then on; until then each launch looks for it anew.
        if hasattr(kernel, "future") and kernel.future.done():
            kernel.result(ignore_errors=True)
        return kernel

    threads, before = min(_MOST_THREADS, os.cpu_count() or 1), active_mode.get()
    try:
        with (
            ThreadPoolExecutor(threads) as workers,
            AsyncCompileMode(workers, ignore_errors=True) as mode,
        ):
            JITFunction.run = compile_only
            try:
                yield
            finally:
                JITFunction.run = launch
    finally:
        # Triton does not leave its mode when it is interrupted, or its hooks fail, while it waits for compilations:
        # all later ones would then go to threads that have ended.
        active_mode.set(before)
    for compilation in mode.raw_futures:
        if error := compilation.exception():
            raise error


def compiler_key(folder: Path, record: str | None = None) -> str:
    """Tell a compiler from others, so that what one has compiled is not taken for what another would.

    Args:
        folder: of its Python modules and libraries.
        record: what its package says of its files, a line for each with its hash; None has the files themselves
            looked at.

    Returns:
        A hash of its files' hashes, the same wherever they lie; of their names, sizes and times where nothing is said.
    """
    facts = [line for line in (record or "").splitlines() if _HASHED.search(line)]
    if not facts:
        files = sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".so"))
        facts = [
            f"{path.relative_to(folder)} {(it := path.stat()).st_size} {it.st_mtime_ns}"
            for path in files
        ]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def _record() -> str | None:
    """Read what Triton's package says of its files; None where it was not installed from one, or may be edited."""
    try:
        package = metadata.distribution("triton")
    except metadata.PackageNotFoundError:
        return None
    return None if package.read_text("direct_url.json") else package.read_text("RECORD")
