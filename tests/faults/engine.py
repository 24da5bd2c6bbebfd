"""An engine process that injects faults, to test what a service does about them.

    serve(settings, engine_command=tests.faults.engine.COMMAND)
    EngineClient(config, hang_seconds, tests.faults.engine.COMMAND)
    INJECTED_FAULTS='raise@step=5:row=2' python -m tests.faults.engine

The variable `INJECTED_FAULTS` says which (`tests.faults.spec.Fault` has the options):

    raise@step=5            the launch of step 5 raises once; computing the step again succeeds
    raise@step=5:row=2      the sequence in row 2 of step 5: every step with it raises
    raise@step=5:times=0    every launch raises from step 5 on
    oom@step=7              as `raise`, with an out-of-memory error
    nan@step=5:row=2        the logits of this sequence are NaN
    fatal@step=5            raises an error after which the device does not work
    hang@step=9             the step never ends
    slow@step=4:seconds=2   the launch takes 2 seconds longer
    exit@step=3             the process ends with status 1
    segfault@step=3         the process ends by SIGSEGV
    exit@step=3:every=100   again in steps 103, 203, ...

Several faults are separated by commas. Each engine process counts its own steps, so a restarted engine has the faults
again. If `INJECTED_FAULTS_ONCE` names a file, only the process that creates the file has them.

The names of both variables do not begin with TESSERA_: they are no settings, and the product does not read them. An
argument `fake` starts the engine with an arithmetic model (`tests.engine.link.fake_engine`), whose further argument
selects its behaviour.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if __name__ == "__main__":  # also works as a file, from any folder
    sys.path[0] = str(Path(__file__).parents[2])

from server.engine.core.engine import Engine
from tests.faults.runner import FaultyRunner
from tests.faults.spec import Fault, parse

if TYPE_CHECKING:
    from collections.abc import Sequence

VARIABLE: Final = "INJECTED_FAULTS"
ONCE_VARIABLE: Final = "INJECTED_FAULTS_ONCE"
COMMAND: Final = (sys.executable, __file__)
"""Starts an engine process with faults."""
FAKE_COMMAND: Final = (*COMMAND, "fake")
"""The same with an arithmetic model."""


def inject(engine: Engine, *faults: Fault | str) -> FaultyRunner:
    """Inject faults into an engine of this process; steps count from now on.

    Args:
        engine: without work.
        faults: records, or text as in the variable.
    """
    parsed = [f for fault in faults for f in (parse(fault) if isinstance(fault, str) else [fault])]
    runner = FaultyRunner(engine._runner, parsed)
    engine._runner = runner
    return runner


def main() -> None:
    """Start an engine process whose engine has the faults of the environment."""
    faults = _faults_of_environment()
    if faults:
        _patch_engines(faults)
    if sys.argv[1:2] == ["fake"]:
        from tests.engine.link import fake_engine as process

        del sys.argv[1]
    else:
        from server.engine.link.engine_process import process
    process.main()


def _faults_of_environment() -> list[Fault]:
    faults = parse(os.environ.get(VARIABLE, ""))
    once = os.environ.get(ONCE_VARIABLE)
    if once and faults:
        try:
            os.close(os.open(once, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return []
    return faults


def _patch_engines(faults: Sequence[Fault]) -> None:
    """Let every engine that is made from now on have the faults; the warm-up before has none."""
    construct = Engine.__init__

    def construct_faulty(engine: Engine, *arguments: Any, **options: Any) -> None:
        construct(engine, *arguments, **options)
        inject(engine, *faults)

    Engine.__init__ = construct_faulty


if __name__ == "__main__":
    main()
