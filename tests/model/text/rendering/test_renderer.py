"""Templates run in processes that their limits end, and a process that ends otherwise is replaced."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from model.text.rendering import renderer
from model.text.rendering.renderer import (
    Allowance,
    Program,
    Renderers,
    RenderingUnavailableError,
    TemplateFailureError,
    TemplateInvalidError,
    TemplateLimitError,
    TemplateRefusalError,
)

ENDLESS = Program("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")
PLAIN = Program("{{ x }}")
SHORT = 0.2


@pytest.fixture
def renderers():
    processes = Renderers()
    yield processes
    processes.end()


def render(renderers: Renderers, source: str, seconds: float = SHORT, **variables: object) -> str:
    program = Program(source)
    renderers.compile(program, Allowance(seconds))
    return renderers.render(program, variables, Allowance(seconds))


@pytest.mark.parametrize(
    "value", ["a", "é🙂\0\ud800", "", [1, -1.5, 10**30, True, None, {"k": ["v"]}], {"a": "b" * 300_000}]
)  # fmt: skip
def test_any_json_value_reaches_the_template_and_any_text_comes_back(renderers, value) -> None:
    assert render(renderers, "{{ x }}", x=value) == str(value)


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("{% for %}", TemplateInvalidError, "^line 1: "),
        ("{{ x | nothing }}", TemplateInvalidError, "No filter named 'nothing'"),
        ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", TemplateInvalidError, "RecursionError"),
        ("x" * (2 << 20), TemplateLimitError, "it has 2097152 characters, more than 1048576"),
        ("{{ raise_exception('no') }}", TemplateRefusalError, "^no$"),
        ("{{ 1 / 0 }}", TemplateFailureError, "^ZeroDivisionError: division by zero$"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", TemplateFailureError, "RecursionError"),
        ("{{ 'x'.encode('idna') }}", TemplateFailureError, "a template may not do this: import"),
        ("{{ 'a' * 10**12 }}", TemplateLimitError, "^it needs more than 256 MiB of memory$"),
        ("{{ 'a' * 9000000 }}", TemplateLimitError, "^its text has more than 8000000 characters$"),
        (ENDLESS.source, TemplateLimitError, "^it takes more than 0.2 s of processor time$"),
        ("{{ 9**(9**9) }}", TemplateLimitError, "^it takes more than 0.2 s of processor time$"),
    ],
)  # fmt: skip
def test_an_error_of_a_template_has_its_type_and_its_limit(
    renderers, source, error, message
) -> None:
    with pytest.raises(error, match=message):
        render(renderers, source)


def test_values_that_are_no_json_are_a_failure_of_the_rendering(renderers) -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(TemplateFailureError, match="RecursionError"):
        render(renderers, "{{ x }}", x=deep)


def test_a_template_reads_neither_files_nor_variables_and_starts_nothing(
    renderers, monkeypatch
) -> None:
    monkeypatch.setenv("TESSERA_API_KEY", "secret")
    render(renderers, "")
    (pid,) = renderers.pids
    environment = Path(f"/proc/{pid}/environ").read_bytes()
    limits = Path(f"/proc/{pid}/limits").read_text()

    assert b"secret" not in environment
    assert len(list(Path(f"/proc/{pid}/fd").iterdir())) == 3
    for limit in ("open files", "processes", "file size", "core file size"):
        line = next(line for line in limits.splitlines() if line.startswith(f"Max {limit} "))
        assert line.split(f"Max {limit} ")[1].split()[:2] == ["0", "0"]


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1]
)
def test_a_signal_for_all_processes_of_a_service_does_not_end_one_that_renders(
    renderers, number
) -> None:
    render(renderers, "")
    (pid,) = renderers.pids
    os.kill(pid, number)

    assert render(renderers, "{{ x }}", x=1) == "1"
    assert renderers.pids == [pid]


def test_a_killed_process_is_no_verdict(renderers) -> None:
    assert renderers.render(PLAIN, {"x": 1}, Allowance()) == "1"
    for _ in range(3):
        (pid,) = renderers.pids
        os.kill(pid, signal.SIGKILL)
        assert renderers.render(PLAIN, {"x": 2}, Allowance()) == "2"
        assert renderers.pids != [pid]


def test_a_process_that_is_killed_while_it_renders_is_no_verdict(renderers) -> None:
    def kill_three() -> None:
        killed: set[int] = set()
        while len(killed) < 3:
            for pid in set(renderers.pids) - killed:
                time.sleep(0.05)
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)

    thread = threading.Thread(target=kill_three)
    thread.start()
    with pytest.raises(RenderingUnavailableError, match="it ended by SIGKILL"):
        renderers.render(ENDLESS, {}, Allowance(1000))
    thread.join()

    assert renderers.render(PLAIN, {"x": 1}, Allowance()) == "1"


def test_a_stopped_process_is_replaced(renderers) -> None:
    renderers.render(PLAIN, {"x": 1}, Allowance())
    (pid,) = renderers.pids
    os.kill(pid, signal.SIGSTOP)

    assert renderers.render(PLAIN, {"x": 2}, Allowance()) == "2"
    assert pid not in renderers.pids


def test_memory_that_earlier_renderings_left_is_no_verdict(renderers) -> None:
    """The same rendering succeeds in a new process, so the limit was not its own."""
    kept = Program("{% set n = namespace(v=x * 90000000) %}{{ n.v | length }}")

    for _ in range(3):
        assert renderers.render(kept, {"x": "a"}, Allowance()) == "90000000"
        assert renderers.render(PLAIN, {"x": 1}, Allowance()) == "1"


def test_memory_that_a_compilation_left_is_no_verdict_of_the_rendering(renderers) -> None:
    long = Program("{{ x }}" * 10_000)
    assert renderers.render(PLAIN, {"x": 1}, Allowance()) == "1"

    assert renderers.render(long, {"x": 1}, Allowance()) == "1" * 10_000
    assert renderers.pids == []


def test_a_busy_process_does_not_delay_other_renderings(renderers) -> None:
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(renderers.render, ENDLESS, {}, Allowance(1000))
        while not renderers.pids:
            time.sleep(0.01)
        (busy,) = renderers.pids
        for i in range(20):
            assert renderers.render(PLAIN, {"x": i}, Allowance()) == str(i)
        assert len(renderers.pids) == 2
        assert not slow.done()
        os.kill(busy, signal.SIGPROF)
        with pytest.raises(TemplateLimitError):
            slow.result()


def test_no_more_processes_run_than_the_limit(renderers, monkeypatch) -> None:
    monkeypatch.setattr(renderers._pool, "busy_seconds", 0.0)
    wait = Program("{% for i in range(3000) %}{{ i }}{% endfor %}")
    with ThreadPoolExecutor(12) as pool:
        for text in pool.map(lambda _: renderers.render(wait, {}, Allowance()), range(60)):
            assert text.endswith("2999")

    assert 1 <= len(renderers.pids) <= renderer.MOST_PROCESSES


def test_ending_them_wakes_the_threads_that_render_and_later_ones_start_again(renderers) -> None:
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(renderers.render, ENDLESS, {}, Allowance(1000))
        while not renderers.pids:
            time.sleep(0.01)
        renderers.end()
        with pytest.raises(RenderingUnavailableError):
            slow.result(60)

    assert renderers.render(PLAIN, {"x": 1}, Allowance()) == "1"


def test_a_process_that_cannot_start_is_no_verdict(renderers, monkeypatch) -> None:
    monkeypatch.setattr(renderer, "_COMMAND", ("/no/such/program",))
    with pytest.raises(RenderingUnavailableError, match="cannot be started"):
        renderers.compile(PLAIN, Allowance())
    monkeypatch.setattr(renderer, "_COMMAND", (sys.executable, "-c", "1/0"))
    with pytest.raises(RenderingUnavailableError, match="ZeroDivisionError"):
        renderers.compile(PLAIN, Allowance())
    monkeypatch.undo()

    assert renderers.render(PLAIN, {"x": 1}, Allowance()) == "1"


def test_a_file_of_the_working_directory_is_not_imported(tmp_path) -> None:
    (tmp_path / "json.py").write_text("print('taken over')")
    code = (
        "import os, sys; from model.text.rendering.renderer import *; sys.path[:0] = ['', os.getcwd()];"
        "print(RENDERERS.render(Program('{{ 1 }}'), {}, Allowance()))"
    )
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONPATH": str(Path(renderer.__file__).parents[3])},
    )  # fmt: skip

    assert ran.stdout == "1\n"


def test_a_series_of_tasks_has_an_allowance_together(renderers) -> None:
    allowance = Allowance(SHORT)
    work = Program("{% for i in range(20000) %}{{ i }}{% endfor %}")

    def many() -> None:
        for _ in range(1000):
            renderers.render(work, {}, allowance)

    with pytest.raises(TemplateLimitError, match=r"it takes more than 0.\d+ s of processor"):
        many()
