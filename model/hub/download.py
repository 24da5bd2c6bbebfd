"""Downloads files of a repository of the Hugging Face Hub into its cache, and shows how far that is.

The hub library says which files there are, and places them in the folder of a commit once their content is in the
cache; `model.hub.file_download` fetches the content (docs/decisions/0054-downloads.md). Imports no PyTorch.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import queue
import re
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tqdm import tqdm

from model.errors import ModelFolderError
from model.hub.cache import folder_name, snapshot_in
from model.hub.file_download import RemoteFile, Stopped, fetch
from model.progress import Progress, bytes_text, duration_text

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile

_logger = logging.getLogger("tessera.download")

_THREADS: Final = 8
_POLL_SECONDS: Final = 0.1
_WORTH_A_LINE: Final = 2**20
"""Bytes of a download whose end is logged; less is a configuration."""
_DEFAULT_REVISION: Final = "main"

# Hashes on the Hub; mirrors have others, such as `5f3b-62`. Each becomes a part of a path in the cache, here and in the
# hub library, which does not check it.
_is_hash: Final = re.compile(r"[A-Za-z0-9][\w.+=-]{0,127}", re.ASCII).fullmatch

T = TypeVar("T")
R = TypeVar("R")


def download(
    repository: str,
    revision: str | None,
    wanted: Sequence[str],
    unwanted: Sequence[str],
    choose: Callable[[list[str]], list[str] | None] = lambda _: None,
) -> Path:
    """Download what is missing of a repository's files; resume files that an earlier call began.

    If the Hub cannot be asked, the files in the cache are used, provided that none is known to be missing.

    Args:
        repository: on the Hub.
        revision: branch, tag or commit; None for the main branch.
        wanted: patterns of names of files.
        unwanted: patterns of names of files that are not downloaded.
        choose: returns which of all files of the repository to download, whatever the patterns say; None for those
            that match the patterns.

    Returns:
        The folder of the files.

    Raises:
        ModelFolderError: the disk has too little space, or the content is damaged.
        Exception: errors of the hub library and of its HTTP library.
    """
    library = _Library(repository, revision, wanted, unwanted)
    try:
        commit, missing = library.missing(choose)
    except ModelFolderError:
        raise
    except library.errors.RevisionNotFoundError:
        raise
    # The HTTP library has errors of its own too.
    except Exception as error:  # noqa: BLE001 - as above
        try:
            folder = library.cached(choose) or library.place(local_files_only=True)
        except library.errors.LocalEntryNotFoundError as absent:
            raise error from absent
        if not isinstance(error, library.errors.OfflineModeIsEnabled):
            _logger.warning(
                "the Hub cannot be asked for %s; its files in the cache are used", repository
            )
        return folder
    if not missing and (current := library.current_folder(commit)) is not None:
        return current
    if missing:
        _download(repository, _in_threads(library.remote_file, missing), library)
    return library.place()


class _Library:
    """What is asked of the hub library about the files of one repository."""

    def __init__(
        self,
        repository: str,
        revision: str | None,
        wanted: Sequence[str],
        unwanted: Sequence[str],
    ) -> None:
        # Imported here because the import takes 0.2 s and a local folder does not need it.
        import huggingface_hub  # noqa: PLC0415 - slow
        from huggingface_hub import constants, errors  # noqa: PLC0415 - slow

        # Its own handler would write a second time what the handler of all processes writes.
        logging.getLogger(huggingface_hub.__name__).handlers.clear()
        self.errors = errors
        self.cache = Path(constants.HF_HUB_CACHE).expanduser()
        self._hub, self._constants = huggingface_hub, constants
        self._repository, self._revision = repository, revision
        self._wanted, self._unwanted = [*wanted], [*unwanted]
        self._storage = self.cache / folder_name(repository)
        self._commit = ""

    def missing(
        self, choose: Callable[[list[str]], list[str] | None]
    ) -> tuple[str, list[RepoFile]]:
        """Ask for the commit of the revision, and for its files that are not in the cache."""
        from huggingface_hub.hf_api import RepoFile  # noqa: PLC0415 - slow
        from huggingface_hub.utils import filter_repo_objects  # noqa: PLC0415 - slow

        api, timeout = self._hub.HfApi(), self._constants.HF_HUB_ETAG_TIMEOUT
        info = api.model_info(self._repository, revision=self._revision, timeout=timeout)
        self._commit = str(info.sha)
        if not _is_hash(self._commit):
            raise ModelFolderError(
                f"repository {self._repository!r} is not described as by the Hub: the commit "
                f"{self._commit!r:.100} is no hash"
            )
        entries = api.list_repo_tree(self._repository, revision=self._commit, recursive=True)
        files = {it.path: it for it in entries if isinstance(it, RepoFile)}
        if (chosen := choose(sorted(files))) is not None:
            self._wanted, self._unwanted = [*map(glob.escape, chosen)], []
        names = list(
            filter_repo_objects(files, allow_patterns=self._wanted, ignore_patterns=self._unwanted)
        )
        if not names:
            raise ModelFolderError(
                f"repository {self._repository!r} has no config.json and no weights in safetensors or GGUF files"
            )
        folder = self._folder(self._commit)
        return self._commit, [files[name] for name in names if not (folder / name).exists()]

    def cached(self, choose: Callable[[list[str]], list[str] | None]) -> Path | None:
        """Return the folder of the revision in the cache if `choose` chooses files of it; else None.

        The library would miss the other files of the repository.
        """
        folder = snapshot_in(self._storage, self._revision)
        if folder is None:
            return None
        names = sorted(
            it.relative_to(folder).as_posix() for it in folder.rglob("*") if it.is_file()
        )
        with contextlib.suppress(ModelFolderError):
            return folder if choose(names) else None
        return None

    def remote_file(self, file: RepoFile) -> RemoteFile:
        """Ask for what names the content of a file, and find what is here of it."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url  # noqa: PLC0415 - slow

        url = hf_hub_url(self._repository, file.path, revision=self._commit)
        metadata = get_hf_file_metadata(url, timeout=self._constants.HF_HUB_ETAG_TIMEOUT)
        if metadata.etag is None or metadata.commit_hash is None:
            raise ModelFolderError(
                f"{url} is not answered as by the Hub: headers that name the content and the commit are missing"
            )
        if not _is_hash(metadata.etag):
            raise ModelFolderError(
                f"{url} is not answered as by the Hub: the ETag {metadata.etag!r:.100} is no hash"
            )
        size = file.size if metadata.size is None else metadata.size
        found = RemoteFile(
            file.path,
            url,
            metadata.etag,
            size,
            self._storage / "blobs" / metadata.etag,
            self.cache / ".locks" / self._storage.name / f"{metadata.etag}.lock",
        )
        found.find()
        return found

    def current_folder(self, commit: str) -> Path | None:
        """Return the folder of a commit if the library has noted that it is the revision's; then nothing is to do."""
        note = self._storage / "refs" / (self._revision or _DEFAULT_REVISION)
        noted = self._revision == commit
        with contextlib.suppress(OSError):
            noted = noted or note.read_text(encoding="utf-8").strip() == commit
        return self._folder(commit) if noted else None

    def place(self, *, local_files_only: bool = False) -> Path:
        """Let the library place the files of the cache in the folder of the commit, and return it."""
        return Path(
            self._hub.snapshot_download(
                self._repository,
                revision=self._revision,
                allow_patterns=self._wanted,
                ignore_patterns=self._unwanted,
                local_files_only=local_files_only,
                tqdm_class=_NoBar,  # type: ignore[arg-type] # every tqdm will do
            )
        )

    def shows_bars(self) -> bool:
        """Whether the library would show bars: HF_HUB_DISABLE_PROGRESS_BARS applies."""
        return not self._hub.utils.are_progress_bars_disabled()

    def takes_over(self, file: RemoteFile) -> bool:
        """Whether the library is to fetch a file itself: it is asked to be fast, or HTTP has not so large files."""
        return bool(
            self._constants.HF_XET_HIGH_PERFORMANCE
            or file.size > self._constants.MAX_HTTP_DOWNLOAD_SIZE
        )

    def _folder(self, commit: str) -> Path:
        return self._storage / "snapshots" / commit


class _NoBar(tqdm):  # type: ignore[type-arg] # not generic at run time
    """Shows nothing: the library has a bar for each of several things."""

    def __init__(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - those of the library
        options.pop("name", None)
        super().__init__(*arguments, **options | {"disable": True})


def _download(repository: str, files: Sequence[RemoteFile], library: _Library) -> None:
    fetched = [it for it in files if not library.takes_over(it)]
    present = sum(it.done for it in fetched)
    total = sum(it.size for it in fetched)
    _check_space(repository, sum(it.size for it in files) - present, library.cache)
    if for_library := len(files) - len(fetched):
        _logger.info("the hub library fetches %d files of %s itself", for_library, repository)
    if total >= _WORTH_A_LINE:
        resumed = f"; resumed from {bytes_text(present)}" if present else ""
        count = f"{len(fetched)} file{'s' if len(fetched) > 1 else ''}"
        _logger.info("downloading %s: %s in %s%s", repository, bytes_text(total), count, resumed)
    stop = threading.Event()
    what, shown = f"downloading {repository}", library.shows_bars()
    with Progress(what, _logger.info, total, done=present, shown=shown) as progress:

        def poll() -> None:
            progress.update(sum(it.done for it in fetched))

        try:
            _in_threads(lambda file: fetch(file, stop), fetched, poll)
        except BaseException:
            stop.set()
            here = bytes_text(sum(it.done for it in fetched))
            _logger.info("%s of %s are here; the next download resumes there", here, repository)
            raise
    if total >= _WORTH_A_LINE:
        rate = (total - present) / max(1e-3, progress.seconds)
        took = duration_text(progress.seconds)
        _logger.info("downloaded %s in %s, %s/s", repository, took, bytes_text(rate))


def _check_space(repository: str, needed: int, cache: Path) -> None:
    folder = next(it for it in (cache, *cache.absolute().parents) if it.exists())
    if needed > (free := shutil.disk_usage(folder).free):
        raise ModelFolderError(
            f"model {repository!r} needs {bytes_text(needed)} of disk space, and {cache} has {bytes_text(free)}: "
            "make space, or set HF_HOME to a folder on another disk"
        )


def _in_threads(
    work: Callable[[T], R], items: Sequence[T], poll: Callable[[], None] = lambda: None
) -> list[R]:
    """Apply a function to all items on threads, and return the results in order.

    The threads do not keep the process from ending, so an interrupt is not delayed by an answer of the network.

    Args:
        work: called with each item.
        items: in the order in which they start.
        poll: called again and again by this thread.

    Raises:
        Exception: the first one that `work` raised; the other items are then not waited for.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    ended: queue.SimpleQueue[tuple[int, R | None, BaseException | None]] = queue.SimpleQueue()
    for index in range(len(items)):
        waiting.put(index)

    def run() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                index = waiting.get_nowait()
                try:
                    ended.put((index, work(items[index]), None))
                except Stopped:
                    return
                except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
                    ended.put((index, None, error))
                    return

    for _ in range(min(_THREADS, len(items))):
        threading.Thread(target=run, name="download", daemon=True).start()
    results: dict[int, Any] = {}
    polled = time.monotonic()
    while len(results) < len(items):
        with contextlib.suppress(queue.Empty):
            index, result, error = ended.get(timeout=_POLL_SECONDS)
            if error is not None:
                raise error
            results[index] = result
        if time.monotonic() - polled >= _POLL_SECONDS:
            polled = time.monotonic()
            poll()
    return [results[index] for index in range(len(items))]
