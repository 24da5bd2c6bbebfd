"""Selects the training text: files of the standard library, held-out files, and fragments cut out of files.

The first of several library versions is the primary one: it contributes whole files and the held-out set. Each further
version contributes only text that the earlier ones do not contain.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from model.training.repetition import without_runs

SHINGLE_LINES = 4
"""Consecutive non-blank lines hashed together when two files are compared."""
NEW_TEXT_SHARE = 0.5
"""A file or fragment of a further version is used when at least this share of its shingles is new."""
LEAK_SHARE = 0.2
"""Training text is dropped when more than this share of its shingles occurs in a held-out file."""
MIN_FRAGMENT_LINES = 3
MAX_FRAGMENT_LINES = 400
MAX_HEAD_LINES = 60
"""A longer class or file head is cut after the last whole statement in this many lines: the rest is in the file."""
MIN_HELD_OUT_BYTES, MAX_HELD_OUT_BYTES = 1_000, 60_000
"""Limits for held-out files: stubs are excluded, and so are files that would dominate the measurement."""

_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "lib-dynload"})
_SKIPPED_FILES = re.compile(
    r"^pydoc_data/|^encodings/(cp|iso|mac_|koi|euc|big5|gb|hz|johab|kz|ptcp|shift|tis|hp_|latin)|^_sysconfigdata|^config-|(^|/)lib2to3/tests/data/|^test/.*bad_?(syntax|coding|char)"
)
_TABLE_LINE = re.compile(r"^\s*[\[({]*\s*(['\"\d(\[{-]|b['\"]|u['\"])")
_TABLE_SHARE = 0.5
_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
_FRAGMENTS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.For, ast.While, ast.With)
_HEADER_DEFINITIONS = 3
_LICENCE = re.compile(r"copyright|licen[cs]e|all rights reserved", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class SourceFile:
    """One source file: its version's label, its path inside the library and its text."""

    version: str
    path: str
    text: str

    @property
    def is_test(self) -> bool:
        """Whether the file belongs to a test suite (by a folder of its path)."""
        return not _TEST_FOLDERS.isdisjoint(Path(self.path).parts[:-1])


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Training texts, and whole files that are held out.

    Fragments are definitions, loops and headers, cut out of files and dedented. Each is a separate document, so that
    training also contains text that begins like a user's input.
    """

    library: tuple[SourceFile, ...]
    tests: tuple[SourceFile, ...]
    library_fragments: tuple[str, ...]
    test_fragments: tuple[str, ...]
    held_out: tuple[SourceFile, ...]
    dropped: dict[str, int]


def read_library(folder: Path) -> tuple[list[SourceFile], dict[str, int]]:
    """Read the usable `.py` files of a standard library folder, sorted by path.

    Args:
        folder: such as `lib/python3.11`; its name labels the version.

    Returns:
        The files, and the number of files left out by reason.

    Raises:
        FileNotFoundError: `folder` holds no `.py` file.
    """
    files: list[SourceFile] = []
    dropped: dict[str, int] = {}
    for path in sorted(folder.rglob("*.py")):
        relative = path.relative_to(folder)
        if not _SKIPPED_FOLDERS.isdisjoint(relative.parts):
            continue
        text, reason = read_source(path, relative.as_posix())
        if reason:
            dropped[reason] = dropped.get(reason, 0) + 1
        else:
            files.append(SourceFile(folder.name, relative.as_posix(), text))
    if not files:
        raise FileNotFoundError(f"no usable .py file in {folder}")
    return files, dropped


def build_corpus(folders: Sequence[Path], held_out_share: float, seed: int) -> Corpus:
    """Collect, split by whole files, remove near-duplicates and cut fragments.

    A held-out file is held out under its module path in every version. Other text that repeats it (a moved module, a
    copied helper) is dropped from training.

    Args:
        folders: standard library folders, the primary one first.
        held_out_share: share of the primary version's bytes to hold out, in (0, 0.5].
        seed: chooses the held-out files.

    Raises:
        ValueError: `held_out_share` is out of range.
    """
    if not 0 < held_out_share <= 0.5:
        raise ValueError(f"held_out_share is {held_out_share}, must be above 0 and at most 0.5")
    primary, dropped = read_library(folders[0])
    held_out = _choose_held_out(primary, held_out_share, seed)
    held_out_paths = {file.path for file in held_out}
    leak: set[bytes] = set()
    for file in held_out:
        leak.update(shingles(file.text))
        leak.update(shingles(without_runs(file.text)))
    seen: set[bytes] = set()
    files: list[SourceFile] = []
    fragments: dict[str, bool] = {}
    for index, folder in enumerate(folders):
        version = primary if index == 0 else read_library(folder)[0]
        for file in version:
            if file.path in held_out_paths:
                continue
            reason = _take(file, seen, leak, files, fragments, whole=index == 0)
            if reason:
                dropped[reason] = dropped.get(reason, 0) + 1
    return Corpus(
        library=tuple(file for file in files if not file.is_test),
        tests=tuple(file for file in files if file.is_test),
        library_fragments=tuple(text for text, is_test in fragments.items() if not is_test),
        test_fragments=tuple(text for text, is_test in fragments.items() if is_test),
        held_out=tuple(held_out),
        dropped=dropped,
    )


def shingles(text: str) -> list[bytes]:
    """Hash every run of `SHINGLE_LINES` stripped non-blank lines (all lines at once if fewer)."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    count = max(1, len(lines) - SHINGLE_LINES + 1)
    joined = ("\n".join(lines[i : i + SHINGLE_LINES]) for i in range(count))
    return [hashlib.blake2b(part.encode(), digest_size=8).digest() for part in joined]


def repeated_share(texts: Iterable[str]) -> float:
    """Return the share of shingles, of all texts together, that occur in an earlier text or earlier in their own."""
    found = [shingle for text in texts for shingle in shingles(text)]
    return 1 - len(set(found)) / max(1, len(found))


def shared_share(texts: Iterable[str], others: Iterable[str]) -> float:
    """Return the share of the shingles of some texts that occur in others."""
    known = {shingle for text in others for shingle in shingles(text)}
    return _share([shingle for text in texts for shingle in shingles(text)], known)


def without_licence(text: str) -> str:
    """Return a file's text without its first comment if that states a copyright or a licence."""
    lines = text.splitlines(keepends=True)
    count = 0
    while count < len(lines) and (lines[count].startswith("#") or not lines[count].strip()):
        count += 1
    return "".join(lines[count:]) if _LICENCE.search("".join(lines[:count])) else text


def distinct(pieces: Iterable[str]) -> list[str]:
    """Return the pieces of a file without functions that mostly repeat an earlier function of it.

    Only functions are compared, because a class contains its methods and a function its loops.
    """
    kept: list[str] = []
    seen: set[bytes] = set()
    for piece in pieces:
        if piece.startswith(("def ", "async def ")):
            own = shingles(piece)
            if 1 - _share(own, seen) < NEW_TEXT_SHARE:
                continue
            seen.update(own)
        kept.append(piece)
    return kept


def fragments_of(text: str) -> Iterator[str]:
    """Yield every function, loop and `with` block of a source file and the head of every class, dedented.

    Also yields the head of the file without its leading comments and docstring: the imports and the text up to the
    third definition, since users begin with `import`. A head has `MAX_HEAD_LINES`, or its first statement if that is
    longer.
    """
    lines = text.splitlines(keepends=True)
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, _FRAGMENTS):
            decorators = getattr(node, "decorator_list", [])
            first = min([node.lineno, *(d.lineno for d in decorators)])
            last = node.end_lineno or node.lineno
            if isinstance(node, ast.ClassDef):
                last = _head_end(node.body, first + MAX_HEAD_LINES, last)
            if MIN_FRAGMENT_LINES <= last - first + 1 <= MAX_FRAGMENT_LINES:
                yield _dedent(lines[first - 1 : last], node.col_offset)
    header = _header(tree, lines)
    if header:
        yield header


def _header(tree: ast.Module, lines: list[str]) -> str:
    imports = [node.lineno for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    if not imports:
        return ""
    definitions = [node for node in tree.body if isinstance(node, _FRAGMENTS[:3])]
    last = definitions[:_HEADER_DEFINITIONS][-1].end_lineno if definitions else len(lines)
    body = [node for node in tree.body if node.lineno >= imports[0]]
    stop = _head_end(body, imports[0] + MAX_HEAD_LINES, last or len(lines))
    stop = min(stop, imports[0] + MAX_FRAGMENT_LINES)
    return "".join(lines[imports[0] - 1 : stop]) if stop - imports[0] >= MIN_FRAGMENT_LINES else ""


def _head_end(body: Sequence[ast.stmt], limit: int, last: int) -> int:
    """Return the last line of a head: of the last statement that ends before a limit, else of the first one."""
    if last < limit:
        return last
    ends = [node.end_lineno or node.lineno for node in body]
    return min(last, max((end for end in ends if end < limit), default=ends[0]))


def _dedent(lines: Iterable[str], indent: int) -> str:
    # Lines inside a string may be indented less; they are kept, and the text still parses.
    prefix = " " * indent
    text = "".join(line.removeprefix(prefix) for line in lines)
    return text if text.endswith("\n") else text + "\n"


def _take(
    file: SourceFile,
    seen: set[bytes],
    leak: set[bytes],
    files: list[SourceFile],
    fragments: dict[str, bool],
    *,
    whole: bool,
) -> str:
    """Add a file, or only its new fragments, to the training text.

    Args:
        file: to add.
        seen: shingles of the text so far; updated.
        leak: shingles of the held-out files.
        files: of the training text; updated.
        fragments: each with whether it is from a test suite; updated.
        whole: whether a file that is mostly not new is left out entirely.

    Returns:
        Why the file is left out; empty if it is not.
    """
    if _share(shingles(file.text), leak) > LEAK_SHARE:
        return "repeats a held-out file"
    file = dataclasses.replace(file, text=without_runs(file.text))
    own = shingles(file.text)
    new = 1 - _share(own, seen)
    if new < NEW_TEXT_SHARE and whole:
        return "repeats an earlier file"
    if new >= NEW_TEXT_SHARE:
        files.append(dataclasses.replace(file, text=without_licence(file.text)))
    pieces = distinct(fragments_of(file.text))
    pieces = [piece for piece in pieces if 1 - _share(shingles(piece), seen) >= NEW_TEXT_SHARE]
    for piece in pieces:
        if _share(shingles(piece), leak) <= LEAK_SHARE:
            fragments.setdefault(piece, file.is_test)
    seen.update(own)
    for piece in pieces:
        seen.update(shingles(piece))
    return ""


def _share(own: Sequence[bytes], other: set[bytes]) -> float:
    return sum(shingle in other for shingle in own) / len(own)


def _choose_held_out(files: Sequence[SourceFile], share: float, seed: int) -> list[SourceFile]:
    eligible = [
        file
        for file in files
        if MIN_HELD_OUT_BYTES <= len(file.text.encode()) <= MAX_HELD_OUT_BYTES
        and Path(file.path).name != "__init__.py"
    ]
    budget = share * sum(len(file.text.encode()) for file in files)
    chosen: list[SourceFile] = []
    for index in np.random.default_rng(seed).permutation(len(eligible)):
        size = len(eligible[index].text.encode())
        if size <= budget:
            chosen.append(eligible[index])
            budget -= size
    return sorted(chosen, key=lambda file: file.path)


def read_source(path: Path, relative: str) -> tuple[str, str]:
    """Return a file's text, and why it is not used; one of them is empty."""
    if _SKIPPED_FILES.search(relative):
        return "", "generated, documentation data or invalid on purpose"
    raw = path.read_bytes()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        text = raw.decode(encoding).replace("\r\n", "\n")
        ast.parse(text)
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return "", "does not parse with the running interpreter"
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return "", "empty"
    if sum(bool(_TABLE_LINE.match(line)) for line in lines) > _TABLE_SHARE * len(lines):
        return "", "a table of literals"
    if sum(ord(character) > 127 for character in text) > 0.05 * len(text):
        return "", "mostly not ASCII"
    return text, ""
