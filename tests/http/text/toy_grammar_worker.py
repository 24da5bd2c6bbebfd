"""A worker for `GrammarCompiler` that does what the constraint's value says.

Its folder gets a file for each worker, with the number of its tasks, and one for each task of which it matters how
often it was tried.
"""

import hashlib
import json
import os
import signal
import struct
import sys
import time
from pathlib import Path


def read():
    header = sys.stdin.buffer.read(12)
    if not header:
        return None
    size, seconds = struct.unpack("<Id", header)
    return json.loads(sys.stdin.buffer.read(size)), seconds


def reply(answer=None):
    data = json.dumps(answer).encode()
    sys.stdout.buffer.write(struct.pack("<Idd", len(data), 0.0, time.process_time()) + data)
    sys.stdout.buffer.flush()


def num_tries(folder, what):
    """Return how often a task was tried before."""
    name = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
    tries = folder.parent / f"{folder.name}-tries-{name}"
    count = len(tries.read_text()) if tries.exists() else 0
    tries.write_text("x" * (count + 1))
    return count


def do(what, count):
    if "signals" in what and count < len(what["signals"]):
        os.kill(os.getpid(), what["signals"][count])
        signal.pause()
    if count < what.get("times", 0):
        if "signal" in what:
            os.kill(os.getpid(), what["signal"])
            signal.pause()
        os._exit(what["exit"])
    if what.get("wait") or (what.get("wait once") and count == 0):
        signal.pause()
    if "sleep" in what:
        time.sleep(what["sleep"])
    if what.get("spin"):
        while True:
            pass


def main():
    config, _ = read()
    folder = Path(config["folder"])
    own, count = folder / str(os.getpid()), 0
    own.write_text("0")
    reply()
    while (message := read()) is not None:
        task, seconds = message
        count += 1
        what = task["constraint"]["value"]
        tries = num_tries(folder, what)
        own.write_text(str(count))
        signal.setitimer(signal.ITIMER_PROF, seconds)
        do(what, tries)
        signal.setitimer(signal.ITIMER_PROF, 0)
        reply({"grammar": "compiled"})


if __name__ == "__main__":
    main()
