"""Writes the page's libraries into its folder `vendor`, with `python -m deploy.vendor_page`.

`deploy/page_libraries` has their versions, the hashes of their packages (`package-lock.json`), and one module for each
bundle. npm and esbuild run in a temporary folder and execute no script of a package. The folder `vendor` gets the
bundles, the licences of what is in them, and a manifest with versions and hashes; all are committed, so that an
installation needs neither npm nor a build. docs/decisions/0055-page-libraries.md has the reasons.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ROOT: Final = Path(__file__).parents[1]
SOURCES: Final = ROOT / "deploy/page_libraries"
FOLDER: Final = ROOT / "server/http/page/assets/vendor"
MANIFEST: Final = "manifest.json"
LICENSES: Final = "LICENSES.txt"
_BUNDLES: Final = ("markdown.js", "highlight.js")
_BANNER: Final = f"/* Libraries, bundled by deploy/vendor_page.py. Versions: {MANIFEST}; licences: {LICENSES}. */"
_OPTIONS: Final = (
    "--bundle", "--format=esm", "--minify", "--target=es2022", "--legal-comments=none", "--charset=utf8",
    f"--banner:js={_BANNER}", "--metafile=meta.json", "--outdir=out", "--log-level=warning",
)  # fmt: skip


class VendorError(Exception):
    """npm is missing or failed, or a library has no licence; the text is for the user."""


def main() -> None:
    """Write the files, or compare them with a new build; exits with status 1 and a message if that fails."""
    parser = argparse.ArgumentParser(description="Bundle the libraries of the page.")
    parser.add_argument("--upgrade", action="store_true", help="write a new package-lock.json")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    options = parser.parse_args()
    try:
        files = build(upgrade=options.upgrade)
    except VendorError as error:
        sys.exit(f"error: {error}")
    present = {file.name: file.read_bytes() for file in FOLDER.glob("*")}
    if options.check:
        differing = sorted(
            n for n in files.keys() | present.keys() if files.get(n) != present.get(n)
        )
        if differing:
            sys.exit(
                f"error: {FOLDER.relative_to(ROOT)} differs from a build: {', '.join(differing)}"
            )
        return
    FOLDER.mkdir(exist_ok=True)
    for name in present.keys() - files.keys():
        (FOLDER / name).unlink()
    for name, content in files.items():
        (FOLDER / name).write_bytes(content)


def build(*, upgrade: bool = False) -> dict[str, bytes]:
    """Bundle the libraries.

    Args:
        upgrade: choose the versions of indirect dependencies again, and write `package-lock.json`.

    Returns:
        The files of the folder `vendor`, by name.

    Raises:
        VendorError: npm is missing or failed, or a library has no licence.
    """
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        raise VendorError("npm and Node.js are needed")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for file in SOURCES.iterdir():
            shutil.copy(file, folder)
        quiet = ("--ignore-scripts", "--no-audit", "--no-fund")
        if upgrade:
            # Without addresses of the registry, which each machine may reach in another way.
            (folder / "package-lock.json").unlink(missing_ok=True)
            _run([npm, "install", "--omit-lockfile-registry-resolved", *quiet], folder)
            shutil.copy(folder / "package-lock.json", SOURCES)
        else:
            _run([npm, "ci", *quiet], folder)
        _run([node, "node_modules/esbuild/bin/esbuild", *_BUNDLES, *_OPTIONS], folder)
        inputs = json.loads((folder / "meta.json").read_text())["inputs"]
        packages = sorted({name for path in inputs if (name := _package(path))})
        lock = json.loads((folder / "package-lock.json").read_text())["packages"]
        files = {name: (folder / "out" / name).read_bytes() for name in _BUNDLES}
        files[LICENSES] = _licenses(folder, packages).encode()
        files[MANIFEST] = _manifest(files, packages, lock).encode()
    return files


def _run(command: list[str], folder: Path) -> None:
    try:
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    except subprocess.CalledProcessError as error:
        raise VendorError(
            f"`{' '.join(command[:2])}` failed with status {error.returncode}"
        ) from error


def _package(path: str) -> str:
    """Return the name of the package that a file of the build is of; empty for our own."""
    parts = path.rpartition("node_modules/")[2].split("/") if "node_modules/" in path else [""]
    return "/".join(parts[:2]) if parts[0].startswith("@") else parts[0]


def _licenses(folder: Path, packages: Iterable[str]) -> str:
    texts = []
    for name in packages:
        found = sorted((folder / "node_modules" / name).glob("[Ll][Ii][Cc][Ee][Nn][SsCc][Ee]*"))
        if not found:
            raise VendorError(f"the package {name} has no file with its licence")
        texts.append(f"{name}\n{'=' * len(name)}\n\n{found[0].read_text().strip()}\n")
    return "\n\n".join(texts)


def _manifest(files: Mapping[str, bytes], packages: Iterable[str], lock: Mapping[str, Any]) -> str:
    entries = {name: lock[f"node_modules/{name}"] for name in packages}
    manifest = {
        "packages": {
            name: {key: entry[key] for key in ("version", "license", "integrity")}
            for name, entry in entries.items()
        },
        "files": {
            name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in files.items()
        },
    }
    return json.dumps(manifest, indent=2) + "\n"


if __name__ == "__main__":
    main()
