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


def test_a_limit_that_leaves_too_few_for_the_service_itself_is_an_error_with_both_numbers():
    program = PROGRAM.format(soft=32, hard=32)

    ended = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )

    assert ended.returncode
    assert ended.stderr.splitlines()[-1].endswith(
        "the limit of open files is 32 (ulimit -n), and the service needs at least 64"
    )
