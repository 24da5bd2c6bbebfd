"""Says what an operator can do about an error that a device, its driver or the kernels' compiler raised at start-up.

Knows messages, because most of these errors have no type of their own.
"""

from __future__ import annotations

import subprocess
from typing import Final

from model.device.memory import is_out_of_memory

_LESS_MEMORY: Final = (
    "end other programs on this device, or take a smaller --max-num-batched-tokens, --max-num-seqs or "
    "--max-model-len"
)
_COMPILER: Final = (
    "Triton builds the launchers of its kernels with a C compiler: install gcc and the headers of C and Python "
    "(Debian, Ubuntu: apt-get install gcc libc6-dev python3-dev), or name another compiler in the variable CC"
)


def explain(error: Exception, phase: str) -> str:
    """Describe an error in a line or two.

    Args:
        error: what was raised.
        phase: what the engine was doing.
    """
    text = f"{phase} failed: {type(error).__name__}: {_first_line(error)}"
    if is_out_of_memory(error):
        return f"{text}; {_LESS_MEMORY}"
    if _is_compilers(error):
        return f"{text}; {_COMPILER}"
    return text


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _is_compilers(error: Exception) -> bool:
    """Whether Triton found no C compiler, or the one it found could not build a launcher.

    Source: triton 3.6, `runtime/build.py`.
    """
    if isinstance(error, subprocess.CalledProcessError):
        return "-shared" in error.cmd
    return isinstance(error, FileNotFoundError) or "Failed to find C compiler" in str(error)
