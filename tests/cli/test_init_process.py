"""The first process of a container: signals pass it, orphans do not stay, and the exit code is the service's."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import until

# The system gives orphans to a process that has asked for them as to the first one of a container.
BEGIN = """
import ctypes, os, signal, subprocess, sys, time
if {subreaper}:
    assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0
outer = os.getpid()
from server.cli.init_process import adopt_orphans
adopt_orphans()
"""


def start(code, *, subreaper=True, **options):
    program = BEGIN.format(subreaper=subreaper) + code
    return subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, **options
    )


def finish(process):
    output, _ = process.communicate(timeout=60)
    return process.returncode, output.split()


def state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def children(pid):
    return [int(it) for it in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_process_that_gets_no_orphans_goes_on_itself():
    assert finish(start("print(os.getpid() == outer)", subreaper=False)) == (0, ["True"])


def test_orphans_are_waited_for_and_the_service_keeps_the_exit_codes_of_its_children():
    process = start(
        """
assert os.getppid() == outer
for _ in range(20):
    subprocess.run(["sh", "-c", "sh -c 'exit 5' & exit 0"], check=True)
own = [subprocess.Popen(["sh", "-c", f"exit {i}"]) for i in range(10)]
print("ready", flush=True)
sys.stdin.readline()
print(*[it.wait() for it in own])
""",
        stdin=subprocess.PIPE,
    )
    assert process.stdout.readline() == "ready\n"
    (service,) = [it for it in children(process.pid) if state(it) != "Z"]
    until(lambda: children(process.pid) == [service])
    # They are the service's to wait for.
    until(lambda: [state(it) for it in children(service)] == ["Z"] * 10)

    process.stdin.write("\n")
    process.stdin.flush()
    assert finish(process) == (0, [str(i) for i in range(10)])


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1]
)
def test_signals_are_passed_on(number):
    process = start("""
def handle(number, _):
    os.write(1, str(int(number)).encode())  # `print` may be interrupted within the other one
    os._exit(9)
for number in (1, 2, 3, 10, 15):
    signal.signal(number, handle)
print("ready", flush=True)
while True:
    signal.pause()
""")
    assert process.stdout.readline() == "ready\n"

    process.send_signal(number)

    assert finish(process) == (9, [str(int(number))])


@pytest.mark.parametrize(
    ("end", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137), ("os.abort()", 134)]
)
def test_the_exit_code_is_that_of_the_service(end, code):
    assert finish(start(end)) == (code, [])


def test_the_service_ends_with_its_first_process():
    process = start("""
print(os.getpid(), flush=True)
time.sleep(60)
""")
    service = int(process.stdout.readline())
    process.kill()
    process.wait(60)

    until(lambda: not Path(f"/proc/{service}").exists() or state(service) == "Z")
    process.stdout.close()


def test_exit_codes_can_be_waited_for_although_the_parent_ignores_the_end_of_children():
    process = start(
        "print(subprocess.run(['sh', '-c', 'exit 4']).returncode)",
        subreaper=False,
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
    )

    assert finish(process) == (0, ["4"])
