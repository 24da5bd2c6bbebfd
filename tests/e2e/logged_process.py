"""Processes whose standard error goes to a file."""

import os
import subprocess
import tempfile
from pathlib import Path


def start_logged(command, **options):
    """Start a process; return it and the file that has its standard error, which the caller deletes.

    Not a pipe: nobody reads it while the process runs, and the access log would fill it.
    """
    descriptor, path = tempfile.mkstemp(prefix="tessera-test-")
    with os.fdopen(descriptor, "w") as log:
        return subprocess.Popen(command, stderr=log, text=True, **options), Path(path)
