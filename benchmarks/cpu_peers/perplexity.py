"""Compares the perplexity of GGUF files that Tessera serves with llama.cpp's own of the same files.

    python -m benchmarks.cpu_peers.perplexity [--formats Q4_1 Q8_0 Q4_0 Q4_K_M] [--windows 8]

`llama-perplexity` cuts a text into windows, and predicts the second half of each from what precedes it in the window.
Tessera gets the same tokens in the same windows, over HTTP as a prompt with `echo`, from a service that has only the
file to go by. The texts are the reference of the Python language in prose, and files of its standard library.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import pydoc_data.topics
import re
import struct
import subprocess
import tempfile
import threading
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple

import numpy as np

from benchmarks.cpu_peers.build import CACHE, INSTRUCTION_SETS, VERSION, build
from benchmarks.cpu_peers.contenders import ContenderError, Round
from benchmarks.cpu_peers.model_files import model_files
from benchmarks.cpu_peers.streams import MODEL_NAME
from benchmarks.cpu_peers.work import FILE_FORMATS, OTHER_FILE_FORMATS, Work
from benchmarks.precision import held_out_files
from benchmarks.report import add_bookkeeping, write_report
from benchmarks.service import service
from model.gguf.reader import read_header
from model.hub.installed_models import INSTALLED

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

GOAL_PERCENT: Final = 0.5
"""By how much Tessera's perplexity may exceed llama.cpp's."""
_MAGIC: Final = b"_logits_"
_ESTIMATE: Final = re.compile(r"Final estimate: PPL = ([0-9.]+)")
_CHUNK: Final = 1 << 20
_TIMEOUT: Final = 3600.0


class Scored(NamedTuple):
    """What llama.cpp did with a text.

    Attributes:
        perplexity: as it prints it, with 4 decimals.
        windows: token ids of each, without a token that marks the beginning.
    """

    perplexity: float
    windows: list[list[int]]


def read_windows(file: BinaryIO) -> list[list[int]]:
    """Read the windows of a file that `--save-all-logits` writes: what precedes the probabilities.

    Raises:
        ContenderError: it is no such file, or ends too early.
    """
    header = file.read(len(_MAGIC) + 12)
    if header[: len(_MAGIC)] != _MAGIC or len(header) < len(_MAGIC) + 12:
        raise ContenderError(f"llama-perplexity wrote {header!r} instead of {_MAGIC!r} and sizes")
    length, _, count = struct.unpack("<iii", header[len(_MAGIC) :])
    data = file.read(4 * length * count)
    if len(data) < 4 * length * count:
        raise ContenderError(f"{len(data)} bytes of tokens instead of {4 * length * count}")
    rows: list[list[int]] = np.frombuffer(data, "<i4").reshape(count, length).tolist()
    return rows


def llama_perplexity(command: Sequence[str], text: str, window: int, windows: int) -> Scored:
    """Run `llama-perplexity` on a text.

    Args:
        command: the program and its arguments for the model and the processor.
        text: at least twice as long as a window.
        window: tokens of each.
        windows: how many of them are scored.

    Raises:
        ContenderError: the program failed, or its output is not understood.
    """
    with tempfile.TemporaryDirectory() as temporary:
        # The probabilities of a window take 50 MB, of which none are needed: they never reach a disk.
        folder = Path(temporary)
        found: list[list[list[int]] | ContenderError] = []
        pipe = folder / "logits"
        os.mkfifo(pipe)
        (folder / "text").write_text(text)

        def read() -> None:
            with pipe.open("rb") as file:
                try:
                    found.append(read_windows(file))
                except ContenderError as error:
                    found.append(error)
                while file.read(_CHUNK):
                    pass

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        sizes = ["-c", str(window), "-b", str(window), "--chunks", str(windows)]
        files = ["-f", str(folder / "text"), "--save-all-logits", str(pipe)]
        done = subprocess.run(
            [*command, *sizes, *files],
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT,
        )
        with contextlib.suppress(OSError):  # the reader still waits if the program never opened it
            os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        reader.join(_TIMEOUT)
        output = done.stdout + done.stderr
        estimate = _ESTIMATE.search(output)
        if done.returncode or estimate is None:
            last = "\n".join(output.splitlines()[-5:])
            raise ContenderError(f"llama-perplexity ended with status {done.returncode}: {last}")
    (result,) = found
    if isinstance(result, ContenderError):
        raise result
    return Scored(float(estimate[1]), result)


def begun(windows: Sequence[Sequence[int]], file: Path) -> list[list[int]]:
    """Return windows whose first token marks the beginning, as llama.cpp replaces it where the file asks for that.

    Raises:
        ContenderError: the file does not say, so that llama.cpp decides by the kind of tokenizer.
    """
    metadata = read_header(file).metadata
    asked = metadata.get("tokenizer.ggml.add_bos_token")
    if asked is None:
        raise ContenderError(f"{file} does not say whether a text begins with a token of its own")
    if not asked:
        return [list(ids) for ids in windows]
    first = metadata["tokenizer.ggml.bos_token_id"]
    assert isinstance(first, int), first
    return [[first, *ids[1:]] for ids in windows]


def served_perplexity(url: str, windows: Sequence[Sequence[int]]) -> float:
    """Return the perplexity of the second halves of windows by a service.

    The first half of a window, and its middle token, are predicted too but not counted, as in llama.cpp.
    """
    total, count = 0.0, 0
    for ids in windows:
        body = {"model": MODEL_NAME, "prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 0}
        request = urllib.request.Request(  # noqa: S310
            f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as reply:  # noqa: S310
            found = json.loads(reply.read())["choices"][0]["logprobs"]["token_logprobs"]
        if len(found) != len(ids):
            raise ContenderError(f"{len(found)} log-probabilities of {len(ids)} tokens")
        scored = found[len(ids) // 2 + 1 :]
        total -= sum(scored)
        count += len(scored)
    return math.exp(total / count)


def texts() -> Mapping[str, str]:
    """Return the texts by name."""
    topics = pydoc_data.topics.topics
    return {
        "prose": "\n".join(topics[name] for name in sorted(topics)),
        "code": "\n".join(file.text for file in held_out_files()),
    }


def compare(round_: Round, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the row of each format and text."""
    given = texts()
    for name in options.formats:
        file = round_.files[name]
        command = [
            round_.program.program("llama-perplexity"),
            "-m",
            str(file),
            "-t",
            str(round_.threads),
        ]
        theirs = {
            kind: llama_perplexity(command, text, options.window, options.windows)
            for kind, text in given.items()
        }
        settings = [f"--model={file}", "--device=cpu", f"--served-model-name={MODEL_NAME}"]
        with service(settings, round_.environment) as (url, _):
            with urllib.request.urlopen(f"{url}/info") as reply:  # noqa: S310
                held = json.loads(reply.read())["quantization"]
            for kind, (perplexity, windows) in theirs.items():
                ours = served_perplexity(url, begun(windows, file))
                worse = 100 * (ours / perplexity - 1)
                yield {
                    "model": round_.model, "metric": "perplexity", "weights": name, "text": kind,
                    "value": round(ours, 4), "llama": perplexity, "worse_percent": round(worse, 3),
                    "tokens": sum(len(ids) - len(ids) // 2 - 1 for ids in windows), "held": held,
                }  # fmt: skip


def main() -> None:
    """Compare, print the rows and write the result; exit with status 1 if Tessera's perplexity is too large."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    kinds = (*FILE_FORMATS, *OTHER_FILE_FORMATS)
    add("--model", choices=INSTALLED, default="smollm2", help="with real weights (%(default)s)")
    add("--formats", nargs="+", choices=kinds, default=FILE_FORMATS, metavar="FORMAT",
        help=f"of the files: {', '.join(kinds)}")  # fmt: skip
    add("--window", type=int, default=1024, help="tokens of a window (%(default)s)")
    add("--windows", type=int, default=8, help="windows of each text (%(default)s)")
    add("--isa", choices=INSTRUCTION_SETS, default="native", help="instructions of both")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of both")
    add("--cache", type=Path, default=CACHE, help="folder of builds and GGUF files (%(default)s)")
    add("--llama-version", default=VERSION, help="version of llama-cpp-python (%(default)s)")
    add_bookkeeping(parser)
    options = parser.parse_args()
    made = build(options.isa, cache=options.cache, version=options.llama_version)
    environment = INSTRUCTION_SETS[options.isa].environment
    round_ = Round(options.model, Work(), options.threads, environment, made, same_files=True)
    round_.files.update(model_files(round_, options.cache, options.formats))
    rows = []
    for row in compare(round_, options):
        print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
        rows.append(row)
    llama = {"llama-cpp-python": made.version, "flags": made.flags}
    extra = {
        "llama": llama,
        "isa": options.isa,
        "window": options.window,
        "windows": options.windows,
    }
    topic = f"perplexity-gguf-{options.isa}-{options.model}"
    write_report(
        topic,
        rows,
        ("torch", "tokenizers"),
        folder=options.out,
        revision=options.commit,
        echo=False,
        extra=extra,
    )
    if missed := [row for row in rows if row["worse_percent"] > GOAL_PERCENT]:
        raise SystemExit(
            f"{len(missed)} perplexities exceed llama.cpp's by more than {GOAL_PERCENT} %"
        )


if __name__ == "__main__":
    main()
