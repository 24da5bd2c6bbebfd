"""Compiles all kernels of some code in parallel before it runs, or checks that all of them are compiled.

Triton compiles a kernel, and the C program that launches it, at the first launch, one after the other. Nearly all of
that time is spent outside Python, so threads compile as many kernels at once as there are processors. To find the
kernels, this module runs the code without its launches, or until it launches a kernel that is not compiled.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from importlib import metadata
from pathlib import Path
from typing import Any, Final, TypeAlias

_MOST_THREADS: Final = 32
_REPORT_SECONDS: Final = 0.2

Report: TypeAlias = Callable[[int, int, str], None]
"""Called with the numbers of kernels that are compiled and that were found, and the name of one being compiled."""
_HASHED: Final = re.compile(r"\.(py|so),sha256=")


class NotCompiledError(Exception):
    """A launched kernel is not in Triton's cache."""


@contextlib.contextmanager
def compile_nothing() -> Iterator[None]:
    """Allow only launches of kernels that are in Triton's cache.

    Only one thread may use it at a time. Without Triton it does nothing.

    Raises:
        NotCompiledError: inside, instead of launching a kernel that would have to be compiled.
    """
    try:
        from triton.runtime._async_compile import active_mode  # noqa: PLC0415 - not everywhere
    except ImportError:
        yield
        return
    _make_keys_stable()
    before = active_mode.get()
    active_mode.set(_CacheAlone())
    try:
        yield
    finally:
        active_mode.set(before)


class _CacheAlone:
    """Replaces the executor to which Triton submits compilations."""

    def submit(
        self, key: str, compile_kernel: Callable[[], object], finish: Callable[[object], None]
    ) -> object:
        """Read a kernel from the cache.

        Args:
            key: of the kernel in the cache, before it is hashed.
            compile_kernel: reads the kernel from the cache, or compiles it.
            finish: registers it for later launches.
        """
        from kernels.gpu.kernel_cache import is_cached  # noqa: PLC0415 - imports Triton

        if not is_cached(key):
            raise NotCompiledError
        kernel = compile_kernel()
        finish(kernel)
        return kernel


def _make_keys_stable() -> None:
    """Replace two parts of a kernel's key in the cache.

    Triton's key of its own version is replaced by a cheaper one: Triton hashes 400 MB of files for half a second. And
    the key of a function includes the constants of the functions that it calls only if those have their own keys
    already, so it depends on which kernel was launched first; now they always have.
    """
    from triton.runtime import cache, jit  # noqa: PLC0415 - not everywhere

    key = compiler_key(Path(cache.__file__).parents[1], _record())
    cache.triton_key = lambda: key
    include = jit.DependenciesFinder._update_hash

    def include_callee(self: object, function: jit.JITCallable) -> None:
        assert function.cache_key
        include(self, function)

    if include.__name__ != include_callee.__name__:
        jit.DependenciesFinder._update_hash = include_callee


@contextlib.contextmanager
def compile_ahead(num_threads: int | None = None, report: Report | None = None) -> Iterator[None]:
    """Compile the kernels that are launched inside without launching them; on leaving, all of them are compiled.

    The outputs of the kernels stay unwritten, so nothing inside may depend on their values, for example as an index.
    Only one thread may use it at a time. Without Triton it does nothing. A kernel that fails to compile does not stop
    the others.

    Args:
        num_threads: compile at the same time, at most 32; None means as many as the machine has processors.
        report: called by this thread from time to time.

    Raises:
        Exception: on leaving, the exception raised inside; else the compiler's error for the first kernel that failed.
    """
    try:
        from triton import AsyncCompileMode  # noqa: PLC0415 - not everywhere
        from triton.runtime._async_compile import active_mode  # noqa: PLC0415 - as above
        from triton.runtime.jit import JITFunction  # noqa: PLC0415 - as above
    except ImportError:
        yield
        return
    _make_keys_stable()
    launch = JITFunction.run

    def compile_only(function: Any, *arguments: object, **options: object) -> object:  # noqa: ANN401 - Triton has no types
        workers.name = function.__name__
        kernel: Any = launch(function, *arguments, **options | {"warmup": True})
        workers.report(report)
        # Registers the compiled kernel; until then each launch looks it up again.
        if hasattr(kernel, "future") and kernel.future.done():
            kernel.result(ignore_errors=True)
        return kernel

    threads = min(_MOST_THREADS, num_threads or os.cpu_count() or 1)
    before = active_mode.get()
    try:
        with _Compilers(threads) as workers, AsyncCompileMode(workers, ignore_errors=True) as mode:
            JITFunction.run = compile_only
            try:
                yield
            finally:
                JITFunction.run = launch
            try:
                while wait(mode.raw_futures, timeout=_REPORT_SECONDS).not_done:
                    workers.report(report)
            except BaseException:
                # An interrupt waits only for the kernels that are being compiled.
                workers.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        # Triton does not leave its mode when it is interrupted, or a hook fails, while it waits for compilations: all
        # later compilations would then be submitted to threads that have ended.
        active_mode.set(before)
    for compilation in mode.raw_futures:
        if error := compilation.exception():
            raise error


class _Compilers(ThreadPoolExecutor):
    """Compiles kernels, and the C program that launches each: Triton would compile those at the first launches.

    Attributes:
        name: of the kernel that is submitted next.
    """

    def __init__(self, num_threads: int) -> None:
        super().__init__(num_threads)
        self.name = ""
        self._current = ""
        self._futures: list[Future[Any]] = []

    def submit(  # type: ignore[override]  # Triton passes no arguments
        self, compile_kernel: Callable[[], Any]
    ) -> Future[Any]:
        """Compile a kernel on another thread."""
        from triton.runtime.driver import driver  # noqa: PLC0415 - not everywhere

        name = self.name

        def compile_both() -> object:
            self._current = name
            kernel = compile_kernel()
            driver.active.launcher_cls(kernel.src, kernel.metadata)
            return kernel

        self._futures.append(super().submit(compile_both))
        return self._futures[-1]

    def report(self, to: Report | None) -> None:
        """Report how many of the submitted kernels are compiled."""
        if to is not None and self._futures:
            to(sum(it.done() for it in self._futures), len(self._futures), self._current)


def compiler_key(folder: Path, record: str | None = None) -> str:
    """Return a key that identifies a compiler, so that kernels compiled by another one are not reused.

    Args:
        folder: of its Python modules and libraries.
        record: the RECORD of its package, one line per file with its hash; None if there is none.

    Returns:
        A hash of the hashes in `record`, which does not depend on the folder; without such hashes, a hash of the names,
        sizes and modification times of the files in `folder`.
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
    """Read the RECORD of Triton's package; None if it was not installed from a package, or may be edited."""
    try:
        package = metadata.distribution("triton")
    except metadata.PackageNotFoundError:
        return None
    return None if package.read_text("direct_url.json") else package.read_text("RECORD")
