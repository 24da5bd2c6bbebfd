"""Prepares the training data: `python -m model.training.prepare --output build/training-data`.

Writes a folder for `train` and `evaluate`: the tokenizer, the encoded streams, the held-out files as text and a
manifest of the data.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import platform
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from model.training.corpus import Corpus, SourceFile, build_corpus, repeated_share, shared_share
from model.training.infilling import LINES_SHARE, SPM_SHARE, infilling_documents
from model.training.instructions import instruction_documents
from model.training.tokenization import encode_documents, save_tokenizer, train_tokenizer

TEXT_STREAMS = ("library", "tests", "library_fragments", "test_fragments")
STREAMS = (*TEXT_STREAMS, "instructions")
CONTEXT_LENGTH = 2048
TOKENS_FILE = "tokens.npz.xz"
_XZ_WINDOW = 256 << 20


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the preparation from command-line arguments (default: `sys.argv`)."""
    options = _parse(arguments)
    output: Path = options.output
    output.mkdir(parents=True, exist_ok=True)
    folders = options.stdlib or [Path(sysconfig.get_paths()["stdlib"])]
    print("reading", *folders)
    corpus = build_corpus(folders, options.held_out_share, options.seed)
    print("training the tokenizer")
    tokenizer = train_tokenizer(
        [file.text for file in (*corpus.library, *corpus.tests)], options.vocab_size
    )
    save_tokenizer(tokenizer, output, CONTEXT_LENGTH)
    texts = {
        "library": [file.text for file in corpus.library],
        "tests": [file.text for file in corpus.tests],
        "library_fragments": list(corpus.library_fragments),
        "test_fragments": list(corpus.test_fragments),
    }
    arrays: dict[str, np.ndarray] = {}
    for number, name in enumerate(TEXT_STREAMS):
        copies = infilling_documents(texts[name], options.infilling_copies, options.seed + number)
        texts[infilling_stream(name)] = list(copies)
    fragments = (*corpus.library_fragments, *corpus.test_fragments)
    texts["instructions"] = list(instruction_documents(fragments, options.seed))
    for name, documents in texts.items():
        tokens, starts = encode_documents(tokenizer, documents)
        arrays[name], arrays[f"{name}_starts"] = tokens, starts.astype(np.uint32)
        print(f"{name}: {len(starts)} documents, {len(tokens)} tokens")
    write_arrays(output, arrays)
    _write_held_out(corpus, output)
    manifest = _manifest(corpus, arrays, folders, options)
    (output / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    print(f"wrote {output}")


def infilling_stream(name: str) -> str:
    """Return the name of the stream with a text stream's documents rearranged for fill-in-the-middle."""
    return f"{name}_infilling"


def write_arrays(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write the token streams as an NPZ archive inside an xz file.

    xz finds a fragment in its file and a rearranged document in its original, which zip does not: the text of all
    streams is that of the files several times over.
    """
    packed = io.BytesIO()
    np.savez(packed, **arrays)  # type: ignore[arg-type]  # NumPy's types have `allow_pickle` among them
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 2, "dict_size": _XZ_WINDOW}]
    (folder / TOKENS_FILE).write_bytes(lzma.compress(packed.getvalue(), filters=filters))


def read_arrays(folder: Path) -> dict[str, np.ndarray]:
    """Read the token streams and the starts of their documents, as `encode_documents` returns them."""
    packed = io.BytesIO(lzma.decompress((folder / TOKENS_FILE).read_bytes()))
    with np.load(packed) as arrays:
        return dict(arrays)


def read_held_out(folder: Path) -> list[SourceFile]:
    """Read the held-out files that `prepare` wrote to `folder`."""
    entries = json.loads((folder / "held_out.json").read_text())
    return [SourceFile(**entry) for entry in entries]


def xz_bytes(text: str) -> int:
    """Return the size of `text` in bytes after `xz -9e`."""
    return len(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--stdlib",
        type=Path,
        action="append",
        help="a standard library folder; repeat for more versions, the primary one first "
        "(default: the running interpreter's)",
    )
    parser.add_argument("--output", type=Path, default=Path("build/training-data"))
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--held-out-share", type=float, default=0.04)
    parser.add_argument(
        "--infilling-copies",
        type=int,
        default=1,
        help="how often each document is rearranged for fill-in-the-middle, each time with other cuts",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="chooses the held-out files, the cuts and the wording"
    )
    return parser.parse_args(arguments)


def _write_held_out(corpus: Corpus, output: Path) -> None:
    entries = [
        {"version": file.version, "path": file.path, "text": file.text} for file in corpus.held_out
    ]
    (output / "held_out.json").write_text(json.dumps(entries, indent=1) + "\n")


def _manifest(
    corpus: Corpus,
    arrays: dict[str, np.ndarray],
    folders: Sequence[Path],
    options: argparse.Namespace,
) -> dict[str, object]:
    def summary(files: Sequence[SourceFile]) -> dict[str, int]:
        return {"files": len(files), "bytes": sum(len(file.text.encode()) for file in files)}

    def fragments(texts: Sequence[str]) -> dict[str, int]:
        return {"documents": len(texts), "bytes": sum(len(text.encode()) for text in texts)}

    files = [file.text for file in (*corpus.library, *corpus.tests)]
    everything = (*files, *corpus.library_fragments, *corpus.test_fragments)
    return {
        "versions": [folder.name for folder in folders],
        "prepared_with": f"CPython {platform.python_version()}",
        "seed": options.seed,
        "held_out_share": options.held_out_share,
        "vocab_size": options.vocab_size,
        "library": summary(corpus.library),
        "tests": summary(corpus.tests),
        "library_fragments": fragments(corpus.library_fragments),
        "test_fragments": fragments(corpus.test_fragments),
        "repeated_share": {
            "files": round(repeated_share(files), 4),
            "files_and_fragments": round(repeated_share(everything), 4),
            "held_out_in_training": round(
                shared_share([file.text for file in corpus.held_out], everything), 4
            ),
        },
        "instructions": {"documents": len(arrays["instructions_starts"])},
        "infilling": {
            "copies": options.infilling_copies,
            "spm_share": SPM_SHARE,
            "lines_share": LINES_SHARE,
        },
        "tokens": {name: len(arrays[name]) for name in STREAMS},
        "held_out": {
            **summary(corpus.held_out),
            "library_bytes": sum(len(f.text.encode()) for f in corpus.held_out if not f.is_test),
            "paths": [file.path for file in corpus.held_out],
        },
        "dropped_files": corpus.dropped,
    }


if __name__ == "__main__":
    main()
