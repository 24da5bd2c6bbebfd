"""A process for `HelperProcess`, which does what each task says; it imports little, so that it starts quickly."""

import json
import os
import signal
import struct
import sys
import time

SECONDS = 0.3


def read():
    header = sys.stdin.buffer.read(4)
    return json.loads(sys.stdin.buffer.read(struct.unpack("<I", header)[0])) if header else None


def report(answer=None):
    data = json.dumps([time.process_time(), answer]).encode()
    sys.stdout.buffer.write(struct.pack("<I", len(data)) + data)
    sys.stdout.buffer.flush()


def do(task):
    if task == "spin":
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        while True:
            pass
    elif task == "wait":
        signal.pause()
    elif task == "garbage":
        sys.stdout.buffer.write(struct.pack("<I", 2) + b"{]")
        sys.stdout.buffer.flush()
    elif isinstance(task, dict) and "signal" in task:
        os.kill(os.getpid(), task["signal"])
        signal.pause()
    elif isinstance(task, dict) and "exit" in task:
        os._exit(task["exit"])
    return task


def main():
    config = read()
    if config == "fail":
        os._exit(3)
    do(config)
    report()
    while (task := read()) is not None:
        report({"pid": os.getpid(), "task": do(task)})


if __name__ == "__main__":
    main()
