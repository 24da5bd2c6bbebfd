"""Finds the GGUF checkpoint that is meant among the files of a folder or a repository. Imports no PyTorch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Final

from model.errors import ModelFolderError
from model.gguf.source import SPLIT

SUFFIX: Final = ".gguf"
LATEST: Final = "latest"
"""The tag that Ollama has for no tag."""
QUANTIZATION: Final = re.compile(
    r"(ud-)?(i?q\d\w*|tq\d\w*|f16|bf16|f32|fp16|fp32|mxfp4\w*|nvfp4)", re.IGNORECASE
)
_LAST_WORD: Final = re.compile(rf"(?:^|[-._])(?P<kind>{QUANTIZATION.pattern})$", re.IGNORECASE)
_NO_MODEL: Final = re.compile(r"(^|[-._])(mmproj|imatrix)([-._]|$)", re.IGNORECASE)
"""Files of a repository that are no language model: an image encoder, and the statistics of a quantization."""
_LISTED: Final = 12


def gguf_in(folder: Path) -> list[str]:
    """Return the names of the GGUF files in a folder and the folders in it, sorted."""
    found = (*folder.glob("*.[gG][gG][uU][fF]"), *folder.glob("*/*.[gG][gG][uU][fF]"))
    return sorted(it.relative_to(folder).as_posix() for it in found)


def checkpoint_in(folder: Path, tag: str = "") -> Path:
    """Return the first file of the one GGUF checkpoint in a folder.

    Args:
        folder: has GGUF files.
        tag: as for `select`.

    Raises:
        ModelFolderError: none of them is meant, or several are.
    """
    names = select(gguf_in(folder), tag, str(folder), [f"{folder}/{{}}"])
    return folder / names[0]


def select(names: Iterable[str], tag: str, place: str, forms: Iterable[str]) -> list[str]:
    """Return the files of the checkpoint that is meant, in order.

    Args:
        names: of the files, relative to the folder or repository.
        tag: the quantization, such as "Q4_K_M" in any case, or the name of a file; "" for the only one.
        place: the folder or repository, for messages.
        forms: how to name a checkpoint, for messages: by its file, or, of two, by its quantization if that is its own.

    Raises:
        ModelFolderError: none of them is meant, or several are; says which there are.
    """
    groups = _groups(names)
    forms = [*forms]
    if not groups:
        raise ModelFolderError(f"{place} has no language model in a GGUF file")
    if tag.casefold() == LATEST:
        tag = ""
    found = _meant(groups, tag)
    if len(found) == 1:
        return groups[found[0]]
    listed = found or [*groups]
    words = [_name(it, groups, forms) for it in listed[:_LISTED]]
    more = f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
    if found:
        raise ModelFolderError(
            f"{place} has {len(found)} models in GGUF files: give {' or '.join(words)}{more}"
        )
    raise ModelFolderError(f"{place} has no GGUF file {tag!r:.80}: give {' or '.join(words)}{more}")


def checkpoints(names: Iterable[str], forms: Iterable[str]) -> dict[str, list[str]]:
    """Return the files of each checkpoint by what to call it; arguments as for `select`."""
    groups, forms = _groups(names), [*forms]
    return {_name(it, groups, forms): files for it, files in groups.items()}


def _groups(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the files of each checkpoint by its name without the number of a part."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        path = PurePosixPath(name)
        if path.suffix.lower() != SUFFIX or _NO_MODEL.search(path.stem):
            continue
        part = SPLIT.fullmatch(path.name)
        stem = part["stem"] if part else path.stem
        groups.setdefault(str(path.with_name(stem)), []).append(name)
    return groups


def _meant(groups: dict[str, list[str]], tag: str) -> list[str]:
    if not tag:
        return [*groups]
    wanted = tag.casefold()
    by_file = [it for it, names in groups.items() if wanted in (name.casefold() for name in names)]
    if by_file:
        return by_file
    if exact := [it for it in groups if quantization_of(it).casefold() == wanted]:
        return exact
    return [it for it in groups if re.search(rf"[-._/]{re.escape(wanted)}$", it.casefold())]


def quantization_of(stem: str) -> str:
    """Return the quantization in the name of a checkpoint without suffix; "" if there is none."""
    path = PurePosixPath(stem)
    for name in (path.name, path.parent.name):
        if found := _LAST_WORD.search(name):
            return found["kind"]
    return ""


def _name(group: str, groups: dict[str, list[str]], forms: list[str]) -> str:
    kind = quantization_of(group)
    is_own = kind and [quantization_of(it) for it in groups].count(kind) == 1
    if len(forms) > 1 and is_own:
        return forms[1].format(kind)
    return forms[0].format(groups[group][0])
