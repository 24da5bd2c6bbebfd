"""Kernels are compiled in parallel without a launch, or found in the cache, for an absent GPU."""

import json
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

from kernels.gpu.compile_ahead import compiler_key
from tests.kernels.triton_interpreter import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not built for this host")

FORKS = """
import json, os, runpy, sys
import torch, triton
import kernels.gpu.compile_ahead
import tests.kernels.compile.cross_compile_worker

for line in sys.stdin:
    folder, done = json.loads(line), os.fork()
    if done == 0:
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
        os.environ["TRITON_CACHE_DIR"] = f"{folder}/cache"
        runpy.run_path(f"{folder}/script.py", run_name="__main__")
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(done, 0)[1]), flush=True)
"""
"""Runs the script of each folder in a fork of this process, since importing PyTorch takes longer than a script."""
BEGIN = """
import time
import torch
import triton
import triton.language as tl
from triton.runtime.driver import driver
from kernels.gpu.compile_ahead import NotCompiledError, compile_ahead, compile_nothing
from tests.kernels.compile.cross_compile_worker import AbsentGPU

driver.set_active(AbsentGPU())
AbsentGPU.sm = 90
x = torch.zeros(64)
"""
KERNELS = """
@triton.jit
def add(x, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(x + at, tl.load(x + at) + 1.0)

@triton.jit
def broken(x, SIZE: tl.constexpr):
    tl.static_assert(SIZE == 1)
"""


@pytest.fixture(scope="module")
def forks():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    with subprocess.Popen(
        [sys.executable, "-c", FORKS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def run(forks, tmp_path):
    """Run a script in its own file, since Triton reads the source of kernels from files."""

    def run_script(body):
        (tmp_path / "script.py").write_text(BEGIN + KERNELS + textwrap.dedent(body))
        forks.stdin.write(json.dumps(str(tmp_path)) + "\n")
        forks.stdin.flush()
        status = int(forks.stdout.readline())
        out, err = ((tmp_path / name).read_text() for name in ("out", "err"))
        return SimpleNamespace(returncode=status, stdout=out, stderr=err)

    return run_script


def test_kernels_launched_inside_are_compiled_and_not_launched(run):
    done = run(
        """
        with compile_ahead():
            for size in (16, 32, 64, 16):
                add[(1,)](x, SIZE=size)
        assert not x.any()
        kernels = add.device_caches[90][0]
        print(sorted(kernel.metadata.name for kernel in kernels.values()))
        try:
            add[(1,)](x, SIZE=16)
        except Exception as error:
            print("launched outside:", type(error).__name__)
        """,
    )

    assert done.stdout.splitlines()[0] == "['add', 'add', 'add']", done.stderr
    assert done.stdout.splitlines()[1].startswith("launched outside")


def test_a_compiler_error_is_raised_on_leaving_and_launches_are_restored(run):
    done = run(
        """
        run = type(add).run
        try:
            with compile_ahead():
                broken[(1,)](x, SIZE=16)
                print("left")
        except triton.compiler.errors.CompileTimeAssertionFailure as error:
            print("raised")
        assert type(add).run is run
        """,
    )

    assert done.stdout.split() == ["left", "raised"], done.stderr


def test_a_kernel_that_fails_to_compile_does_not_prevent_others_from_compiling(run):
    done = run(
        """
        from triton.runtime._async_compile import active_mode
        for size in (16, 32):
            try:
                with compile_ahead():
                    for _ in range(2):
                        broken[(1,)](x, SIZE=size)
                        time.sleep(0.5)
                    add[(1,)](x, SIZE=size)
            except triton.compiler.errors.CompileTimeAssertionFailure:
                print("raised")
            assert active_mode.get() is None
            print(len(add.device_caches[90][0]))
        print(add.warmup(x, SIZE=64, grid=(1,)).metadata.name)
        """,
    )

    assert done.stdout.split() == ["raised", "1", "raised", "2", "add"], done.stderr


@pytest.mark.parametrize("error", ["KeyError", "KeyboardInterrupt"])
def test_an_exception_inside_is_raised_on_leaving_and_launches_are_restored(error, run):
    done = run(
        f"""
        from triton.runtime._async_compile import active_mode
        run = type(add).run
        try:
            with compile_ahead():
                broken[(1,)](x, SIZE=16)
                raise {error}
        except {error}:
            print("raised")
        assert type(add).run is run
        assert active_mode.get() is None
        """,
    )

    assert done.stdout.split() == ["raised"], done.stderr


def test_an_interruption_while_kernels_compile_does_not_change_later_compilations(run):
    done = run(
        """
        import triton.runtime._async_compile as asynchronous

        def interrupted(compilations):
            raise KeyboardInterrupt

        wait = asynchronous.as_completed
        asynchronous.as_completed = interrupted
        try:
            with compile_ahead():
                add[(1,)](x, SIZE=16)
        except KeyboardInterrupt:
            print("raised")
        asynchronous.as_completed = wait
        with compile_ahead():
            add[(1,)](x, SIZE=32)
        print(add.warmup(x, SIZE=64, grid=(1,)).metadata.name)
        """,
    )

    assert done.stdout.split() == ["raised", "add"], done.stderr


def test_a_kernel_that_is_not_in_the_cache_raises_and_is_not_compiled(run):
    done = run(
        """
        from triton.runtime._async_compile import active_mode
        try:
            with compile_nothing():
                add.warmup(x, SIZE=16, grid=(1,))
        except NotCompiledError:
            print("refused")
        assert active_mode.get() is None
        print(len(add.device_caches[90][0]))
        print(add.warmup(x, SIZE=16, grid=(1,)).metadata.name)
        """,
    )

    assert done.stdout.split() == ["refused", "0", "add"], done.stderr


@pytest.mark.parametrize("way", ["with compile_ahead():", "if True:"])
def test_kernels_compiled_by_another_process_are_found(run, way):
    compiled = run(
        f"""
        from kernels.gpu.compile_ahead import _make_keys_stable
        _make_keys_stable()
        {way}
            for size in (16, 32):
                add.warmup(x, SIZE=size, grid=(1,))
        """,
    )
    assert compiled.returncode == 0, compiled.stderr

    found = run(
        """
        with compile_nothing():
            print([add.warmup(x, SIZE=size, grid=(1,)).metadata.name for size in (16, 32, 16)])
            try:
                add.warmup(x, SIZE=64, grid=(1,))
            except NotCompiledError:
                print("refused")
        """,
    )

    assert found.stdout.splitlines() == ["['add', 'add', 'add']", "refused"], found.stderr


def test_a_kernel_whose_files_are_deleted_counts_as_not_compiled(run, tmp_path):
    compiled = run("with compile_ahead(): add[(1,)](x, SIZE=16)")
    assert compiled.returncode == 0, compiled.stderr
    for file in (tmp_path / "cache").glob("*/add.json"):
        file.unlink()

    found = run(
        """
        try:
            with compile_nothing():
                add.warmup(x, SIZE=16, grid=(1,))
        except NotCompiledError:
            print("refused")
        """,
    )

    assert found.stdout.split() == ["refused"], found.stderr


def test_the_compiler_key_depends_on_the_compilers_files(tmp_path):
    (tmp_path / "deep").mkdir()
    library, text = tmp_path / "deep" / "compiler.so", tmp_path / "readme.txt"
    library.write_text("one")
    first = compiler_key(tmp_path)

    text.write_text("anything")
    assert compiler_key(tmp_path) == first
    os.utime(library, ns=(0, library.stat().st_mtime_ns + 1))
    second = compiler_key(tmp_path)
    library.write_text("other")

    assert len({first, second, compiler_key(tmp_path)}) == 3


def test_the_compiler_key_of_a_package_depends_on_its_hashes_and_not_on_its_folder(
    tmp_path,
):
    record = "triton/a.py,sha256=1,5\ntriton/libtriton.so,sha256=2,9\ntriton/a.pyc,,\n"
    moved = record.replace("triton/a.pyc,,\n", "bin/tool,sha256=7,3\n")
    other = record.replace("sha256=2", "sha256=3")

    assert compiler_key(tmp_path, record) == compiler_key(tmp_path / "elsewhere", moved)
    assert compiler_key(tmp_path, record) != compiler_key(tmp_path, other)


@pytest.mark.slow
def test_the_key_of_a_kernel_does_not_depend_on_which_kernel_was_launched_first(run):
    body = """
    from kernels.gpu.compile_ahead import _make_keys_stable
    _make_keys_stable()
    _make_keys_stable()
    WIDTH = tl.constexpr(16)

    @triton.jit
    def at():
        return tl.arange(0, WIDTH)

    @triton.jit
    def first(x):
        tl.store(x + at(), 0.0)

    @triton.jit
    def second(x):
        tl.store(x + at(), 1.0)

    ORDER
    print(second.cache_key)
    """
    alone, after = (run(body.replace("ORDER", it)) for it in ("at", "first.cache_key"))

    assert alone.stdout, alone.stderr
    assert alone.stdout == after.stdout
