"""The limit of open files."""

import resource
import subprocess
import sys

import pytest

PROGRAM = """
import resource
from server.engine.link.engine_process.process_setup import raise_descriptor_limit
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
raise_descriptor_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("soft", "hard"), [(256, 1024), (1024, 1024)])
def test_the_limit_of_open_files_is_raised_to_the_hard_limit(soft, hard):
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < hard:
        pytest.skip("this machine allows fewer files")
    program = PROGRAM.format(soft=soft, hard=hard)

    output = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)

    assert output.stdout.split() == [b"1024", b"1024"]
