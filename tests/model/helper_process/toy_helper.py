"""A program for `HelperProcess`, which does what each task says; it imports little, so that it starts quickly."""

import json
import os
import signal
import struct
import sys
import time


def read():
    header = sys.stdin.buffer.read(12)
    if not header:
        return None
    size, seconds = struct.unpack("<Id", header)
    return json.loads(sys.stdin.buffer.read(size)), seconds


def reply(answer=None):
    data = json.dumps(answer).encode()
    sys.stdout.buffer.write(struct.pack("<Idd", len(data), 0.25, time.process_time()) + data)
    sys.stdout.buffer.flush()


def do(task, seconds):
    if task == "spin":
        signal.setitimer(signal.ITIMER_PROF, seconds)
        while True:
            pass
    elif task == "wait":
        signal.pause()
    elif task == "garbage":
        sys.stdout.buffer.write(struct.pack("<Idd", 2, 0, 0) + b"{}")
        sys.stdout.buffer.flush()
    elif task == "files":
        return sorted(os.listdir("/proc/self/fd"), key=int)  # noqa: PTH208 - imports little
    elif task == "variables":
        return dict(os.environ)
    elif isinstance(task, dict) and "signal" in task:
        os.kill(os.getpid(), task["signal"])
        signal.pause()
    elif isinstance(task, dict) and "exit" in task:
        sys.stderr.write(task.get("words", ""))
        sys.stderr.flush()
        os._exit(task["exit"])
    return task


def main():
    config, seconds = read()
    if config == "fail":
        os._exit(3)
    do(config, seconds)
    reply()
    while (message := read()) is not None:
        reply({"pid": os.getpid(), "task": do(*message)})


if __name__ == "__main__":
    main()
