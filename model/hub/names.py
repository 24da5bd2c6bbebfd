"""Reads what people type for a model: a folder, a repository of the Hugging Face Hub, or a name of another program.

A GGUF file, and the quantization of a repository of GGUF files, are names too.

A name is followed if it can mean one model only, and answered with the right name otherwise; it is never guessed from
its spelling. docs/decisions/0053-names-of-models.md has the reasons.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn
from urllib.parse import unquote, urlsplit

from model.errors import ModelFolderError
from model.gguf.reader import is_gguf
from model.gguf.select import LATEST, QUANTIZATION, SUFFIX, checkpoint_in, gguf_in
from model.hub.cache import cached_spelling, repository_of, snapshot_in
from model.hub.installed_models import INSTALLED, installed_path
from model.hub.known_models import OLLAMA, REPOSITORIES, SEVERAL

BUNDLED: Final = "bundled"
BUNDLED_FOLDER: Final = Path(__file__).parents[1] / BUNDLED

# Models from before the Hub had organisations, such as gpt2, have no slash.
_REPOSITORY: Final = re.compile(r"([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.ASCII)
# As git has them: no `..`, no folder that begins with a dot, none of the characters with a meaning of their own. The
# cache has a file of this name.
_REVISION: Final = re.compile(
    r"(?!.*(?:\.\.|//|/\.|@\{))[^\0-\x20\x7f~^:?*\[\\/.-][^\0-\x20\x7f~^:?*\[\\]{0,249}(?<![/.])"
)
_TAG: Final = re.compile(r"[\w./-]*", re.ASCII)
_HUB_HOSTS: Final = frozenset({"huggingface.co", "www.huggingface.co", "hf.co", "www.hf.co"})
_OLLAMA_HOSTS: Final = frozenset({"ollama.com", "www.ollama.com", "registry.ollama.ai"})
_GIT_ADDRESS: Final = re.compile(r"(?:ssh://)?git@(huggingface\.co|hf\.co)[:/](.+)")
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://.*", re.DOTALL)
_WITH_REVISION: Final = frozenset({"tree", "blob", "resolve", "raw", "blame", "commit", "commits"})
_PAGES: Final = _WITH_REVISION | {"discussions", "settings", "edit"}
_NO_MODELS: Final = {
    "datasets": "a data set",
    "spaces": "a space",
    "collections": "a collection",
    "papers": "a paper",
    "kernels": "a kernel",
}
# A file of these kinds stands for the checkpoint that it belongs to.
_PART: Final = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|model\.safetensors\.index)\.json"
    r"|model(-\d{5}-of-\d{5})?\.safetensors"
)
_PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_OLLAMA_TAG: Final = re.compile(r"(latest|\d+(\.\d+)?[bm])(-.*)?", re.IGNORECASE)
_GGUF_PART: Final = re.compile(
    rf"[-._](gguf|{QUANTIZATION.pattern}|\d{{5}}-of-\d{{5}})$", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class ModelName:
    """A model, found from its name.

    Attributes:
        name: that the service shows; reading it again gives the same model.
        folder: of a checkpoint, or its GGUF file; None for a repository.
        repository: of the Hugging Face Hub; None for a folder.
        revision: branch, tag or commit of the repository; None for its main branch.
        tag: the quantization, or the file, of a repository of GGUF files; "" if none is given.
    """

    name: str
    folder: Path | None = None
    repository: str | None = None
    revision: str | None = None
    tag: str = ""


def read_name(model: str, revision: str | None = None) -> ModelName:
    """Find out what a name of a model means. Asks no server.

    Args:
        model: "bundled"; the path or the `file://` URL of a folder, of a file in it, of a GGUF file, or of a
            repository's folder in the cache of the Hub; a repository, `organisation/name` or `name`, in any case if it
            is well known or in the cache; `name@revision`; `name:quantization` or `name:file` of a repository of GGUF
            files; the address of one of its pages; a well-known name without the organisation; or that of a model of
            an installed package.
        revision: of the repository; None for that in the address, or the main branch.

    Raises:
        ModelFolderError: there is no such folder, the name is not one of a model that can be read, or a revision is
            given for a folder. The message says what to type if that is known.
    """
    text = model.strip()
    if text.casefold() == BUNDLED:
        if not BUNDLED_FOLDER.is_dir():
            raise ModelFolderError(
                f"the bundled model is missing from this installation: no {BUNDLED_FOLDER}"
            )
        return _folder(BUNDLED_FOLDER, BUNDLED, revision)
    scheme = found[1].lower() if (found := _SCHEME.fullmatch(text)) else ""
    try:
        if scheme == "file" or text.startswith("file:/"):
            path = _path_of(model, text)
            return _local(path, str(path), revision) or _refuse(model)
        if text and (local := _local(Path(text).expanduser(), text, revision)):
            return local
    except PermissionError as error:
        raise ModelFolderError(f"{error.filename} cannot be read: {error.strerror}") from None
    except (RuntimeError, OSError, ValueError):  # no such user, too long, or a null character
        _refuse(model)
    if text.casefold() in INSTALLED:
        name = text.casefold()
        return _without_revision(installed_path(name), name, revision)
    git = _GIT_ADDRESS.fullmatch(text)
    if git or scheme == "hf":
        path_on_hub = git[2] if git else text.partition("://")[2]
        return _read_path(model, path_on_hub, revision, is_page=False)
    return _read_address(model, text, scheme, revision)


def well_known(name: str) -> str | None:
    """Return the repository that a name without an organisation stands for; None if it is not well known."""
    return REPOSITORIES.get(name.casefold())


def _path_of(model: str, address: str) -> Path:
    """Return the path in a `file://` URL."""
    parts = urlsplit(address)
    if parts.netloc not in ("", "localhost"):
        raise ModelFolderError(f"{model!r} names another machine; give the path of a folder")
    return Path(unquote(parts.path))


def _local(path: Path, text: str, revision: str | None) -> ModelName | None:
    """Return the checkpoint at a path; None if there is nothing."""
    if path.is_dir():
        return _folder(path, text, revision)
    if not path.exists():
        return None
    if path.suffix.lower() == SUFFIX or is_gguf(path):
        return _without_revision(path, text, revision)
    folder = path.parent
    if not _PART.fullmatch(path.name) or not (folder / "config.json").is_file():
        hint = ""
        if path.suffix.lower() in _PICKLE_SUFFIXES:
            hint = " and safetensors files; pickle files are read only with --load-format pickle"
            if (folder / "config.json").is_file():
                hint = f"; give {folder} with --load-format pickle, if you trust the author of the pickle"
        elif (folder / "config.json").is_file():
            hint = f"; give {folder}"
        raise ModelFolderError(
            f"{path} is a file; a model is a folder with a config.json, or a GGUF file{hint}"
        )
    return _folder(folder, str(folder), revision)


def _folder(path: Path, name: str, revision: str | None) -> ModelName:
    """Return a checkpoint's folder, or the snapshot in a folder of the Hub's cache."""
    if not (path / "config.json").exists() and (path / "snapshots").is_dir():
        if snapshot := snapshot_in(path, revision):
            return ModelName(name, folder=_checkpoint(snapshot), revision=revision)
        of = f"revision {revision!r}" if revision else "its main branch"
        fetch = repository_of(path.resolve().name)
        hint = f"; give {fetch} to download it" if fetch else ""
        raise ModelFolderError(f"{path} of the Hugging Face cache has no snapshot of {of}{hint}")
    return _without_revision(_checkpoint(path), name, revision)


def _without_revision(path: Path, name: str, revision: str | None) -> ModelName:
    if revision is not None:
        raise ModelFolderError(
            f"revision {revision!r} is given, but {path} is a {'folder' if path.is_dir() else 'file'}; only"
            " repositories of the Hugging Face Hub have revisions"
        )
    return ModelName(name, folder=path)


def _checkpoint(folder: Path) -> Path:
    """Return a folder, or the GGUF file in it that is the checkpoint.

    Repositories of GGUF files may have a config.json, but no weights beside the GGUF files.

    Raises:
        ModelFolderError: there are several.
    """
    if (folder / "config.json").exists() and any(
        next(folder.glob(f"*{suffix}"), None) for suffix in (".safetensors", *_PICKLE_SUFFIXES)
    ):
        return folder
    return checkpoint_in(folder) if gguf_in(folder) else folder


def _read_address(model: str, text: str, scheme: str, revision: str | None) -> ModelName:
    """Read an address of the web, with or without a scheme, or the name of a repository."""
    try:
        address = urlsplit(text if scheme else f"https://{text}")
    except ValueError:  # a bracket
        _refuse(model)
    host = address.hostname or ""
    if scheme in ("http", "https") and text.startswith(f"{_endpoint()}/"):
        return _read_path(
            model, address.path.removeprefix(urlsplit(_endpoint()).path), revision, is_page=True
        )
    if scheme in ("", "http", "https") and host in _HUB_HOSTS:
        return _read_path(model, address.path, revision, is_page=True)
    if host in _OLLAMA_HOSTS:
        return _refuse_ollama(model, address.path.strip("/").removeprefix("library/"))
    if scheme:
        raise ModelFolderError(
            f"{model!r} is no address of the Hugging Face Hub; a model is the path of a folder,"
            f" 'organisation/name' on the Hugging Face Hub, or '{BUNDLED}'"
        )
    parts = text.rstrip("/").split("/")
    if len(parts) > 2 and (parts[1] in _WITH_REVISION or parts[2] in _WITH_REVISION):
        return _read_path(model, text, revision, is_page=True)
    return _read_repository(model, text.rstrip("/"), revision)


def _endpoint() -> str:
    from huggingface_hub import constants  # noqa: PLC0415 - as in `hub_cache`

    return constants.ENDPOINT


def _read_path(model: str, path: str, revision: str | None, *, is_page: bool) -> ModelName:
    """Read the path of a page or a file of the Hub.

    Args:
        model: as it was typed, for messages.
        path: `organisation/name`, perhaps with a page and a revision after it, or with a file (`hf://`).
        revision: that is given beside it.
        is_page: whether what follows the name is a page, as in a browser, and no file.
    """
    parts = [unquote(part) for part in path.split("/") if part]
    if parts[:1] == ["api"]:
        parts = parts[1:]
    if parts[:1] == ["models"]:
        parts = parts[1:]
    if parts and parts[0] in _NO_MODELS:
        raise ModelFolderError(
            f"{model!r} is {_NO_MODELS[parts[0]]} of the Hugging Face Hub, and no model"
        )
    size = 1 if len(parts) < 2 or parts[1] in _PAGES else 2
    name, rest = "/".join(parts[:size]), parts[size:]
    name, at, in_address = name.partition("@")
    if rest and is_page:
        page, rest = rest[0], rest[1:]
        if page not in _PAGES or (page in _WITH_REVISION and not rest):
            _refuse(model)
        if page in _WITH_REVISION:
            refs = 3 if rest[0] == "refs" else 1
            in_address, rest = "/".join(rest[:refs]), rest[refs:]
        else:
            rest = []
    elif rest and at and in_address == "refs":  # hf://organisation/name@refs/pr/1
        in_address, rest = "/".join(["refs", *rest[:2]]), rest[2:]
    if rest and rest[-1].lower().endswith(SUFFIX) and ":" not in name:
        name, rest = f"{name}:{'/'.join(rest)}", []
    if len(rest) > 1 or (rest and "." not in rest[0]):
        raise ModelFolderError(
            f"{model!r} is a part of a repository; a model is the whole repository: give {name}"
        )
    return _read_repository(model, name, _one_revision(in_address, revision))


def _one_revision(in_name: str, given: str | None) -> str | None:
    """Return the revision of a name and of a setting, which must not differ."""
    if in_name and given is not None and in_name != given:
        raise ModelFolderError(
            f"two revisions are given: {in_name!r} in the model's name and --revision {given!r}"
        )
    return in_name or given


def _read_repository(model: str, name: str, revision: str | None) -> ModelName:
    name = (repository_of(name) or name).removesuffix(".git")
    name, at, in_name = name.partition("@")
    if at:
        revision = _one_revision(in_name, revision)
    name, colon, tag = name.partition(":")
    if not _REPOSITORY.fullmatch(name) or (at and not in_name) or not _TAG.fullmatch(tag):
        if name.lower().endswith(SUFFIX):
            raise ModelFolderError(f"there is no file {model!r}{_original(name)}")
        _refuse(model)
    if name.lower().endswith(SUFFIX):
        raise ModelFolderError(f"there is no file {model!r}{_original(name)}")
    if colon and not _is_gguf_tag(model, name, tag):
        return _refuse_tag(model, name, tag)
    folded, (owner, _, last) = name.casefold(), name.rpartition("/")
    known = well_known(last)
    if known and (not owner or known.casefold() == folded):
        name = known
    elif folded in SEVERAL:
        raise ModelFolderError(
            f"{model!r} is no name of one model: give {' or '.join(SEVERAL[folded])}"
        )
    elif f"{folded}:latest" in OLLAMA:
        _refuse_ollama(model, name)
    if revision and not _REVISION.fullmatch(revision):
        raise ModelFolderError(
            f"revision {revision!r:.100} is not the name of a branch, a tag or a commit"
        )
    name = cached_spelling(name)
    tag = "" if tag.casefold() == LATEST else tag
    full = f"{name}:{tag}" if tag else name
    # A folder of this name would come first if it were read again.
    shown = model.strip() if Path(full).exists() else full
    return ModelName(shown, repository=name, revision=revision, tag=tag)


def _is_gguf_tag(model: str, name: str, tag: str) -> bool:
    """Whether a name with a colon is one of llama.cpp's: a repository of GGUF files, and one of its quantizations.

    Raises:
        ModelFolderError: it is one, but the quantization is missing.
    """
    if "/" not in name or name.startswith("library/"):
        return False
    if QUANTIZATION.fullmatch(tag) or tag.lower().endswith(SUFFIX):
        return True
    if not _GGUF_PART.search(name):
        return False
    if not tag:
        raise ModelFolderError(
            f"{model!r} ends in a colon; a quantization follows it, such as Q4_K_M"
        )
    return True


def _refuse_tag(model: str, name: str, tag: str) -> NoReturn:
    """Refuse a name with a colon: one of Ollama's, or with another tag."""
    if "/" not in name or name.startswith("library/") or _OLLAMA_TAG.fullmatch(tag):
        _refuse_ollama(model, f"{name.removeprefix('library/')}:{tag}")
    raise ModelFolderError(f"{model!r} has a tag; a revision is given as --revision {tag or 'TAG'}")


def _refuse_ollama(model: str, name: str) -> NoReturn:
    family, _, tag = name.casefold().partition(":")
    words = re.split(r"[-_]", tag or "latest")
    known = OLLAMA.get(f"{family}:{words[0]}")
    if known is None or {"text", "base"} & set(words):
        raise ModelFolderError(
            f"{model!r} is a name of Ollama's library; give the model's name on the Hugging Face Hub,"
            " 'organisation/name'"
        )
    raise ModelFolderError(
        f"{model!r} is Ollama's name of {known}: give {known}; its weights are not quantized unless"
        " --quantization says so"
    )


def _original(name: str) -> str:
    """Say which repository a GGUF file was made from, judging by its name, if that is well known."""
    last = name.rpartition("/")[2]
    while (shorter := _GGUF_PART.sub("", last)) != last:
        last = shorter
    original = well_known(last)
    return f"; {original} is the checkpoint that its name names" if original else ""


def _refuse(model: str) -> NoReturn:
    raise ModelFolderError(
        f"no folder {model!r}; a model is the path of a folder, 'organisation/name' on the"
        f" Hugging Face Hub, or '{BUNDLED}'"
    )
