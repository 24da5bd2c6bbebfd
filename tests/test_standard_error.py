"""Standard error to which writing never waits."""

import contextlib
import errno
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading

import pytest

from server import standard_error
from server.log import configure_logging
from server.standard_error import StandardError

LINE = "x" * 99
NOTICE = re.compile(r"(\d+) lines of the log were dropped")


@pytest.fixture
def pipe():
    """A pipe of 64 KiB: its reading end and a stream to it."""
    reading, writing = os.pipe()
    kept = os.dup(writing)  # as of another process
    stream = StandardError(writing, max_lines=1000)
    yield reading, stream
    with contextlib.suppress(OSError):
        os.close(reading)
    assert stream.drain(60)  # its thread must not write to another file with the same number
    os.close(writing)
    os.close(kept)


def lines_until(reading, last):
    """Read lines up to one that contains `last`."""
    data = b""
    while last.encode() not in data or not data.endswith(b"\n"):
        data += os.read(reading, 1 << 16)
    return data.decode().splitlines()


def test_lines_are_written_at_once_while_the_pipe_takes_them(pipe):
    reading, stream = pipe
    stream.write("one\ntwo\n")

    assert os.read(reading, 100) == b"one\ntwo\n"
    assert not [it for it in threading.enumerate() if it.name == "standard-error"]


def test_a_pipe_that_nobody_reads_delays_no_writer_and_what_it_takes_keeps_its_order(pipe):
    reading, stream = pipe
    for number in range(5000):
        stream.write(f"{number:05} {LINE}\n")

    assert stream.dropped > 3000
    dropped = stream.dropped
    written = lines_until(reading, "dropped")
    stream.write("last\n")
    written += lines_until(reading, "last")
    numbers = [int(line[:5]) for line in written if LINE in line]
    assert numbers == list(range(5000 - dropped))
    assert [line for line in written if LINE not in line] == [
        f"{dropped} lines of the log were dropped",
        "last",
    ]
    assert stream.dropped == dropped


def test_a_reader_that_is_slow_gets_a_notice_at_each_gap(pipe):
    reading, stream = pipe
    written = b""
    for number in range(20_000):
        stream.write(f"{number:05} {LINE}\n")
        if number % 200 == 0:
            written += os.read(reading, 4096)
    last = lines_until(reading, "dropped") if stream.dropped else []
    lines = (written.decode() + "\n".join(last)).splitlines()
    gaps, expected = [], 0
    for line in lines:
        if found := NOTICE.match(line):
            gaps.append(int(found[1]))
            expected += gaps[-1]
        else:
            assert int(line[:5]) == expected
            expected += 1

    assert gaps
    assert sum(gaps) <= stream.dropped


def test_the_descriptors_of_other_processes_still_block():
    reading, writing = os.pipe()
    other = os.dup(writing)
    StandardError(writing)

    assert os.get_blocking(other)
    assert not os.get_blocking(writing)
    for descriptor in (reading, writing, other):
        os.close(descriptor)


def test_a_reader_that_has_gone_makes_no_write_fail(pipe):
    reading, stream = pipe
    os.close(reading)
    for _ in range(10):
        stream.write("lost\n")
    stream.flush()

    assert stream.dropped == 10
    assert stream.drain(60)


def test_a_reader_that_goes_while_lines_wait_ends_their_waiting(pipe):
    reading, stream = pipe
    for _ in range(1500):
        stream.write(f"{LINE}\n")
    os.close(reading)

    assert stream.drain(60)
    stream.write("lost\n")
    assert stream.drain(60)


def test_a_closed_descriptor_makes_no_write_fail():
    reading, writing = os.pipe()
    stream = StandardError(writing)
    os.close(reading)
    os.close(writing)
    stream.write("lost\n")

    assert stream.dropped == 1


def test_a_full_disk_drops_lines_until_there_is_space(tmp_path, monkeypatch):
    path = tmp_path / "log"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    stream = StandardError(descriptor)
    write, space = os.write, 10

    def write_in_space(fd, data):
        nonlocal space
        if fd != descriptor:
            return write(fd, data)
        if not space:
            raise OSError(errno.ENOSPC, "no space")
        count = write(fd, data[:space])
        space -= count
        return count

    monkeypatch.setattr(standard_error.os, "write", write_in_space)
    stream.write("first line\n")
    assert stream.drain(60)
    for _ in range(3):
        stream.write("lost\n")
        assert stream.drain(60)
    space = 1 << 20
    stream.write("second line\n")
    assert stream.drain(60)

    assert path.read_text() == "first line\n4 lines of the log were dropped\nsecond line\n"
    assert stream.dropped == 4
    os.close(descriptor)


def test_a_socket_that_nobody_reads_delays_no_writer():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        stream = StandardError(theirs.fileno(), max_lines=10)
        for _ in range(20_000):
            stream.write(f"{LINE}\n")

        assert stream.dropped > 0
        assert theirs.gettimeout() is None  # blocks, as before
        ours.close()
        assert stream.drain(60)


def test_a_terminal_that_is_stopped_delays_no_writer():
    ours, theirs = os.openpty()
    stream = StandardError(theirs, max_lines=10)
    assert stream.isatty()
    for _ in range(20_000):
        stream.write(f"{LINE}\n")

    assert stream.dropped > 0
    os.close(ours)
    assert stream.drain(60)
    os.close(theirs)


def test_the_bytes_that_wait_are_limited(pipe):
    _, stream = pipe
    for _ in range(300):
        stream.write(f"{'x' * 100_000}\n")

    assert stream.dropped >= 250


def test_lines_of_several_threads_stay_whole(pipe):
    reading, stream = pipe

    def write(letter):
        for _ in range(100):
            stream.write(f"{letter * 99}\n")

    threads = [threading.Thread(target=write, args=(letter,)) for letter in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stream.write("last\n")

    written = lines_until(reading, "last")
    assert sorted(written) == sorted([it * 99 for it in "abcd"] * 100 + ["last"])


def test_a_line_is_written_when_it_ends_or_is_flushed(pipe):
    reading, stream = pipe
    stream.write("a")
    stream.write("b\nc")
    assert os.read(reading, 100) == b"ab\n"
    stream.flush()
    assert os.read(reading, 100) == b"c"
    print("d", "ü\udc80", file=stream)
    assert os.read(reading, 100) == "d ü\\udc80\n".encode()
    stream.close()
    assert not stream.closed


def test_dropped_lines_are_added_to_a_counter(pipe):
    _, stream = pipe
    cells = memoryview(bytearray(16)).cast("d")
    for _ in range(3000):
        stream.write(f"{LINE}\n")
    stream.count_dropped_in(cells, 1)
    assert cells.tolist() == [0, stream.dropped]
    stream.write(f"{LINE}\n")
    assert cells.tolist() == [0, stream.dropped]


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_notice_has_the_format_of_the_log(pipe, log_format, monkeypatch):
    reading, stream = pipe
    monkeypatch.setattr(sys, "stderr", stream)
    configure_logging("info", log_format, ".1")
    for _ in range(3000):
        logging.getLogger("tessera").info(LINE)
    (notice,) = (line for line in lines_until(reading, "dropped") if "dropped" in line)

    if log_format == "json":
        entry = json.loads(notice)
        assert entry["level"] == "warning"
        assert entry["logger"] == "tessera.1"
        notice = entry["message"]
    else:
        assert " WARNING tessera.1 " in notice
    assert f"{stream.dropped} lines of the log were dropped here" in notice


SCRIPT = """
import faulthandler, os, sys, threading, warnings
from server.standard_error import never_wait
never_wait()
never_wait()
"""


def run(script, **options):
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT + script], stderr=subprocess.PIPE, **options
    )


def test_everything_that_python_writes_goes_through_the_queue_in_order():
    script = """
print("print", file=sys.stderr)
warnings.warn("warning")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
sys.stderr.write("no line break")
raise ValueError("at the end")
"""
    with run(script) as process:
        written = process.communicate(timeout=60)[1].decode()

    order = ["print", "warning", "ZeroDivisionError", "no line break", "ValueError: at the end"]
    assert [written.index(it) for it in order] == sorted(written.index(it) for it in order)


def test_a_process_ends_and_can_dump_its_stacks_although_nobody_reads_its_pipe():
    script = """
for _ in range(30_000):
    print("x" * 99, file=sys.stderr)
os.write(1, b"written")
faulthandler.dump_traceback(all_threads=True)
os.write(1, b"dumped")
"""
    with run(script, stdout=subprocess.PIPE) as process:
        assert process.wait(60) == 0  # while nobody reads
        assert process.stdout.read() == b"writtendumped"


def test_what_is_logged_before_a_crash_is_in_the_pipe():
    script = 'print("last words", file=sys.stderr); os.kill(os.getpid(), 9)'
    with run(script) as process:
        assert process.communicate(timeout=60)[1] == b"last words\n"
        assert process.returncode == -signal.SIGKILL


def test_a_forked_process_has_a_queue_of_its_own():
    script = """
for _ in range(1000):
    print("x" * 99, file=sys.stderr)
pid = os.fork()
if not pid:
    try:
        print("c" * 4000, file=sys.stderr)
        os.write(1, b"%d" % sys.stderr._thread.is_alive())
    finally:
        os._exit(0)
os.waitpid(pid, 0)
"""
    with run(script, stdout=subprocess.PIPE) as process:
        assert (
            process.stdout.read() == b"1"
        )  # while nobody reads: the child's line waits for its own thread
        assert process.wait(60) == 0
