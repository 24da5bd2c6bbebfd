import os
import subprocess
import sys
import threading

import pytest

from model.device.niceness import give_way

_PROGRAM = """
import os
from model.device.niceness import give_way
before = os.nice(0)
give_way()
print(os.nice(0) - before)
"""


def test_a_process_that_gives_way_has_a_higher_niceness():
    printed = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True
    ).stdout
    assert int(printed) == 5


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no niceness of their own")
def test_a_thread_that_gives_way_changes_no_other_thread():
    before, found = os.nice(0), list[int]()

    def run() -> None:
        give_way()
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [min(19, before + 5)]
    assert os.nice(0) == before
