"""Explains errors of a device, its driver or the kernel compiler at start-up to the operator, with a remedy.

Recognizes many of them by their messages, because they have no types of their own.
"""

from __future__ import annotations

import subprocess
from typing import Final

from model.device.memory import is_out_of_memory

_LESS_MEMORY: Final = (
    "end other programs on this device, or set a smaller --max-num-batched-tokens, --max-num-seqs or "
    "--max-model-len"
)
_COMPILER: Final = (
    "Triton builds the launchers of its kernels with a C compiler: install gcc and the C and Python headers "
    "(Debian, Ubuntu: apt-get install gcc libc6-dev python3-dev), or set the variable CC to another compiler"
)


def explain(error: Exception, phase: str) -> str:
    """Describe an error in one line, with a remedy if there is one.

    Args:
        error: the exception.
        phase: start-up phase in which it was raised.
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
    """Return whether Triton found no C compiler, or the compiler could not build a launcher.

    Source: triton 3.6, `runtime/build.py`.
    """
    if isinstance(error, subprocess.CalledProcessError):
        return "-shared" in error.cmd
    return isinstance(error, FileNotFoundError) or "Failed to find C compiler" in str(error)
