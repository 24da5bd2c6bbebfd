"""Makes the GGUF files that llama.cpp reads, and Tessera too with `--files gguf`."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from benchmarks.cpu_peers import gguf
from model.hub.installed_models import INSTALLED
from model.hub.resolve import BUNDLED, resolve

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.cpu_peers.contenders import Round


def stored_format(file: Path) -> str:
    """Return the format in the name of a GGUF file, such as "Q4_1" of "model.Q4_1.gguf" and "model-Q4_1.gguf"."""
    return file.stem.replace("-", ".").rpartition(".")[2]


def model_files(round_: Round, cache: Path, formats: Sequence[str]) -> dict[str, Path]:
    """Return the GGUF file of each format; write those that are missing.

    A model of a Python package is that package's file, from whose numbers the other formats are rounded once more. The
    others are written in bfloat16 and rounded from that.

    Args:
        round_: the model, llama.cpp's build, and whether Tessera reads the files.
        cache: folder whose folder `models` has the files.
        formats: as `llama-quantize` names them.

    Raises:
        subprocess.CalledProcessError: `llama-quantize` failed.
        ModelFolderError: the model's package is not installed.
    """
    folder = cache / "models"
    folder.mkdir(parents=True, exist_ok=True)
    if round_.model in INSTALLED:
        source = resolve(round_.model)
        own = stored_format(source)
    else:
        own = "BF16"
        source = folder / f"{round_.model}-{own}.gguf"
        if not source.exists():
            gguf.write(source, round_.folder, random=round_.model != BUNDLED)
    # A file in one format alone has the fewest bytes that the format allows; the Hub's files are mixed.
    kind, pure = ("-mixed", []) if round_.same_files else ("", ["--pure"])
    files = {own: source}
    for name in formats:
        path = files.setdefault(name, folder / f"{round_.model}-{name}{kind}.gguf")
        if not path.exists():
            part = path.with_suffix(".part")
            quantize = [round_.program.program("llama-quantize"), "--allow-requantize", *pure]
            command = [*quantize, str(source), str(part), name, str(round_.threads)]
            subprocess.run(command, check=True, capture_output=True)
            part.rename(path)
    return files
