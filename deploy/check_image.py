"""Runs an image built by `deploy/build_images.sh` and checks what a cluster relies on, without a container engine.

    python -m deploy.check_image tessera:cpu

The service runs as the image's user, without new privileges, on a read-only root with `/cache` as the only volume and a
`/tmp` in memory. It must become healthy, by the image's own health check; answer `/generate`; refuse to write to its
root; and at its stop signal end all of 8 streams with status 0. Needs root, buildah, unshare and setpriv, on Linux.
The network is the machine's, so that the port must be free. Prints one line for each check, and exits with 1 at the
first failure.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

STREAMS: Final = 8
_TOKENS: Final = 600
_READY_SECONDS: Final = 120
_STOP_SECONDS: Final = 50
# Prepares what a container engine would, in namespaces of its own: $1 root, $2 volume, $3 user, the rest the command.
_CONTAINER: Final = """
set -e
root=$1 volume=$2 user=$3
shift 3
mount --make-rprivate /
mount --bind -o ro "$root" "$root" && mount -o remount,bind,ro "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount --bind "$volume" "$root/cache"
exec setpriv --no-new-privs chroot --userspec="$user" --groups= "$root" "$@"
"""

_PATH: Final = "/usr/sbin:/usr/bin:/sbin:/bin"
_CHROOT: Final = ("chroot", "--groups=")


class CheckError(Exception):
    """A check failed; the text is for the user."""


def main() -> None:
    """Run the checks."""
    parser = argparse.ArgumentParser(description="Run an image and check it.")
    parser.add_argument("image", help="its name")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("command", nargs="*", help="replaces the image's, as for docker run")
    options = parser.parse_args()
    try:
        check(options.image, options.port, options.command)
    except (CheckError, subprocess.SubprocessError) as error:
        sys.exit(f"error: {error}")


def check(image: str, port: int, command: Sequence[str] = ()) -> None:
    """Run all checks of an image.

    Raises:
        CheckError: a check failed.
        subprocess.SubprocessError: a program of the machine failed.
    """
    config = json.loads(_buildah("inspect", "--type", "image", image))["Docker"]["config"]
    with _root(image) as root, tempfile.TemporaryDirectory() as volume:
        user = config["User"]
        if user.split(":")[0] in ("", "0", "root"):
            raise CheckError(f"the image runs as the user {user!r}")
        _say(f"user {user}")
        prepare(Path(volume), user)
        words = [*(config["Entrypoint"] or ()), *(command or config["Cmd"] or ())]
        start = time.monotonic()
        with _container(root, volume, config, words) as service:
            _wait(lambda: _is_healthy(service.pid, root, config), service)
            _say(
                f"healthy after {time.monotonic() - start:.1f} s, by {config['Healthcheck']['Test'][1:]}"
            )
            _check_writes(service.pid, root, user)
            reply = _post(
                port, "/generate", {"inputs": "def f(", "parameters": {"max_new_tokens": 8}}
            )
            _say(f"/generate: {json.loads(reply)['generated_text']!r}")
            _check_drain(service, port, signal.Signals[config.get("StopSignal", "SIGTERM")])


def prepare(volume: Path, user: str) -> None:
    """Make a volume's folders, which a container engine copies from the image."""
    owner = int(user.split(":", maxsplit=1)[0])
    for folder in (volume, volume / "huggingface", volume / "triton"):
        folder.mkdir(exist_ok=True)
        os.chown(folder, owner, 0)


@contextlib.contextmanager
def _root(image: str) -> Iterator[str]:
    """Make a container of an image; the value is the folder of its root."""
    name = _buildah("from", "--pull-never", image).strip()
    try:
        yield _buildah("mount", name).strip()
    finally:
        _buildah("rm", name)


@contextlib.contextmanager
def _container(
    root: str, volume: str, config: dict[str, Any], words: Sequence[str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command in namespaces of its own; its process is the first in its own. Ends it at the end."""
    namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    script = ["sh", "-c", _CONTAINER, "sh", root, volume, config["User"]]
    variables = dict(it.split("=", 1) for it in config["Env"])
    with subprocess.Popen([*namespaces, *script, *words], env=variables) as process:
        try:
            yield process
        finally:
            # The end of its first process ends all of a namespace. `unshare` ends with it.
            with contextlib.suppress(CheckError, OSError):
                os.kill(_inside(process.pid), signal.SIGKILL)
            process.kill()


def _inside(pid: int) -> int:
    """Return the number of the container's first process, which `unshare` is the parent of."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    if not children:
        raise CheckError("the container has no process")
    return int(children[0])


def _is_healthy(pid: int, root: str, config: dict[str, Any]) -> bool:
    test = config["Healthcheck"]["Test"]
    if test[0] != "CMD":
        raise CheckError(f"the health check needs a shell: {test}")
    if not Path(f"/proc/{pid}/task/{pid}/children").read_text():
        return False  # not yet started
    variables = dict(it.split("=", 1) for it in config["Env"])
    return not _execute(pid, root, config["User"], test[1:], variables).returncode


def _execute(
    pid: int, root: str, user: str, words: Sequence[str], variables: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a command in the container, as `docker exec` does."""
    enter = ["nsenter", "--target", str(_inside(pid)), "--mount", "--pid"]
    return subprocess.run(
        [*enter, "setpriv", "--no-new-privs", *_CHROOT, f"--userspec={user}", root, *words],
        env=variables,
        check=False,
        capture_output=True,
        text=True,
    )


def _check_writes(pid: int, root: str, user: str) -> None:
    script = "touch /cache/a /tmp/a && ! touch /opt/a 2> /dev/null && ! touch /home/tessera/a 2> /dev/null"
    done = _execute(pid, root, user, ["sh", "-c", script], {"PATH": _PATH})
    if done.returncode:
        raise CheckError(f"wrong permissions to write: {done.stderr}")
    _say("writes to /cache and /tmp, and to nothing else")


def _check_drain(service: subprocess.Popen[bytes], port: int, stop: signal.Signals) -> None:
    """Stop the service by the image's signal under streams, all of which must end as if nothing had happened."""
    ended: list[str] = []
    begun = threading.Barrier(STREAMS + 1)

    def stream() -> None:
        body = {"inputs": "def f(", "parameters": {"max_new_tokens": _TOKENS, "ignore_eos": True}}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_STOP_SECONDS)
        connection.request(
            "POST", "/generate_stream", json.dumps(body), {"content-type": "application/json"}
        )
        reply = connection.getresponse()
        first = reply.readline()
        begun.wait()
        lines = [
            line for line in (first + reply.read()).decode().split("\n") if line.startswith("data:")
        ]
        ended.append(lines[-1])

    threads = [threading.Thread(target=stream, daemon=True) for _ in range(STREAMS)]
    for thread in threads:
        thread.start()
    begun.wait(timeout=_READY_SECONDS)
    start = time.monotonic()
    os.kill(_inside(service.pid), stop)
    for thread in threads:
        thread.join(timeout=_STOP_SECONDS)
    status = service.wait(timeout=_STOP_SECONDS)
    events = [json.loads(line.removeprefix("data:")) for line in ended]
    whole = [it for it in events if it.get("generated_text") and it["index"] == _TOKENS]
    if status or len(whole) != STREAMS:
        raise CheckError(f"status {status}, {len(whole)} of {STREAMS} streams are whole: {ended}")
    _say(
        f"drained: {STREAMS} streams of {_TOKENS} tokens are whole, status 0 after {time.monotonic() - start:.1f} s"
    )


def _wait(is_done: Any, service: subprocess.Popen[bytes]) -> None:  # noqa: ANN401 - a function
    end = time.monotonic() + _READY_SECONDS
    while not is_done():
        if service.poll() is not None:
            raise CheckError(f"the service has ended with status {service.returncode}")
        if time.monotonic() > end:
            raise CheckError(f"not healthy after {_READY_SECONDS} s")
        time.sleep(0.2)


def _post(port: int, path: str, body: dict[str, Any]) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_READY_SECONDS)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    reply = connection.getresponse()
    text = reply.read()
    if reply.status != http.client.OK:
        raise CheckError(f"{path}: {reply.status} {text[:500]!r}")
    return text


def _buildah(*arguments: str) -> str:
    folder = os.environ.get("ENGINE_ROOT")
    storage = ["--root", f"{folder}/storage", "--runroot", f"{folder}/run"] if folder else []
    driver = ["--storage-driver", os.environ.get("STORAGE_DRIVER", "vfs")]
    command = ["buildah", *storage, *driver, *arguments]
    variables = {"BUILDAH_ISOLATION": "chroot"} | os.environ
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=variables)
    if done.returncode:
        raise CheckError(f"{shlex.join(command)}: {done.stderr}")
    return done.stdout


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
