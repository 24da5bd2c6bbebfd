"""The build hook of hatchling: compiles the C library of `kernels/cpu`, and puts the packages of a wheel into one.

The compiler is Zig's C compiler, which pip downloads as a package for the time of the build, so that users need none
and all builds have the same code. docs/decisions/0029-cpu-library.md has the reasons.

In a wheel, `kernels`, `model` and `server` are inside `tessera`, and their imports of each other are renamed; an
editable installation uses the source tree as it is. docs/decisions/0040-one-top-level-package.md has the reasons.

A wheel is for all versions of Python, since ctypes loads the library, and for one platform: that of this machine, or
the one that the variable WHEEL_PLATFORM names. docs/decisions/0051-package.md has the reasons.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface
from packaging.tags import platform_tags

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

WHEEL_PACKAGE = "tessera"
PACKAGES = ("kernels", "model", "server")
_PACKAGE_FOLDER = Path("deploy/package") / WHEEL_PACKAGE
_LIBRARIES = Path("kernels/cpu/lib")
# kernels/cpu/lib has the libraries of an editable installation; model/training is the recipe of the bundled model.
_NOT_IN_WHEEL = ("/__pycache__/", "/native/", "/kernels/cpu/lib/", "/model/training/")
# What type checkers read of an editable installation, where the packages are not inside this one.
_ONLY_IN_SOURCE_TREE = (".pyi",)
COMPILER = "ziglang==0.15.2"
_FLAGS = (
    "-std=c11", "-O3", "-g0", "-shared", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-fno-sanitize=all",
    "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-lpthread",
)  # fmt: skip
_X86 = {
    "avx512_vnni.so": "x86_64_v4+avx512vnni",
    "avx_vnni.so": "x86_64_v3+avxvnni",
    "avx2.so": "x86_64_v3",
}
_TARGETS = {
    # The oldest C library that any supported version of PyTorch runs with.
    "manylinux_2_28_x86_64": ("x86_64-linux-gnu.2.28", _X86),
    "manylinux_2_28_aarch64": ("aarch64-linux-gnu.2.28", {"neon.so": "generic+dotprod"}),
    # The oldest macOS of these processors.
    "macosx_11_0_arm64": ("aarch64-macos.11.0", {"neon.dylib": "apple_m1"}),
    "macosx_11_0_x86_64": ("x86_64-macos.11.0", {"avx2.dylib": "x86_64_v3"}),
}
"""Platform of a wheel -> what the compiler calls it, and for each library its file and processor."""
ANY = "any"
"""The platform of a wheel without a library."""
_VARIABLE = "WHEEL_PLATFORM"


def wheel_platform(environment: Mapping[str, str], supported: Iterable[str]) -> str:
    """Return the platform of a wheel, a key of the table or `ANY`.

    Args:
        environment: WHEEL_PLATFORM names another platform than this machine's.
        supported: platforms whose wheels this machine can install.

    Raises:
        ValueError: WHEEL_PLATFORM is unknown.
    """
    given = environment.get(_VARIABLE)
    if not given:
        return next((platform for platform in supported if platform in _TARGETS), ANY)
    if given not in (*_TARGETS, ANY):
        raise ValueError(
            f"{_VARIABLE} is {given!r}; it must be one of {', '.join((*_TARGETS, ANY))}"
        )
    return given


def builds(platform: str) -> list[tuple[str, str, str]]:
    """Return (file name, target, processor) of the libraries for a platform; none for one without a library."""
    target, processors = _TARGETS.get(platform, ("", {}))
    return [(name, target, processor) for name, processor in processors.items()]


def compile_library(source: Path, output: Path, target: str, processor: str, *options: str) -> None:
    """Compile one library; `options` are further ones of the compiler.

    Raises:
        subprocess.CalledProcessError: the compiler failed; its messages are on stderr.
    """
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "ziglang", "cc", "-target", target, f"-mcpu={processor}"]
        subprocess.run(  # noqa: S603 - no shell, and no argument comes from outside
            [*command, *_FLAGS, *options, str(source), "-o", str(output)],
            check=True,
            env=os.environ | {"ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache},
        )


def place_packages(root: Path, folder: Path) -> dict[str, str]:
    """Write our modules with renamed imports.

    Args:
        root: of the source tree.
        folder: where the modules are written.

    Returns:
        Every file of a wheel's `tessera/`, and its path in the wheel.

    Raises:
        ValueError: a module has an import that cannot be renamed.
    """
    files = {
        path.relative_to(root): Path(WHEEL_PACKAGE) / path.relative_to(root)
        for name in PACKAGES
        for path in _files(root / name)
    }
    modules = {
        ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        for path in files
        if path.suffix == ".py"
    }
    own = root / _PACKAGE_FOLDER
    files |= {
        path.relative_to(root): Path(WHEEL_PACKAGE) / path.relative_to(own)
        for path in _files(own)
        if path.suffix not in _ONLY_IN_SOURCE_TREE
    }
    placed = {}
    for path, target in files.items():
        source = root / path
        if path.suffix == ".py":
            source = folder / path
            source.parent.mkdir(parents=True, exist_ok=True)
            try:
                source.write_bytes(renamed((root / path).read_bytes(), modules))
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
        placed[str(source)] = target.as_posix()
    return placed


def renamed(source: bytes, modules: Collection[str]) -> bytes:
    """Return a module whose imports of ours, and texts that are the names of our modules, begin with `tessera.`.

    Nothing else changes, so that every line keeps its number.

    Args:
        source: text of the module.
        modules: names of our modules.

    Raises:
        ValueError: it has an import that cannot be renamed.
    """
    lines = source.split(b"\n")
    inserts: list[tuple[ast.stmt | ast.expr, str, bytes]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and _is_ours(node.module):
            inserts.append((node, node.module, b"tessera."))
        elif isinstance(node, ast.Import) and any(_is_ours(it.name) for it in node.names):
            name = node.names[0]
            if len(node.names) > 1 or ("." in name.name and not name.asname):
                raise ValueError(f"line {node.lineno}: write `from {name.name} import ...`")
            if name.asname:
                inserts.append((node, name.name, b"tessera."))
            else:
                inserts.append((node, "import", b"from tessera "))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            module = node.value.partition(":")[0]
            if "." in module and module in modules:
                inserts.append((node, node.value, b"tessera."))
    # From right to left, so that the places of the others stay what they are.
    for node, text, added in sorted(
        inserts, key=lambda it: (it[0].lineno, it[0].col_offset), reverse=True
    ):
        line = lines[node.lineno - 1]
        at = line.index(text.encode(), node.col_offset)
        lines[node.lineno - 1] = line[:at] + added + line[at:]
    return b"\n".join(lines)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        name = f"/{path.relative_to(folder.parent).as_posix()}"
        if path.is_file() and not any(part in name for part in _NOT_IN_WHEEL):
            yield path


class PackageBuildHook(BuildHookInterface[Any]):
    """Adds the compiled libraries to a wheel or an editable installation, and our packages to a wheel."""

    _folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def _platform(self) -> str:
        return wheel_platform(os.environ, platform_tags())

    def dependencies(self) -> list[str]:
        """Return what pip installs for the build."""
        return [COMPILER] if builds(self._platform) else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the libraries of the platform, and place the packages of a wheel."""
        root = Path(self.root)
        libraries = root / _LIBRARIES
        if version == "standard":
            self._folder = tempfile.TemporaryDirectory()
            libraries = Path(self._folder.name) / "lib"
            build_data["force_include"] |= place_packages(root, Path(self._folder.name))
        libraries.mkdir(exist_ok=True)
        found = builds(self._platform)

        def compile_one(build: tuple[str, str, str]) -> None:
            name, target, processor = build
            compile_library(root / "kernels/cpu/native/step.c", libraries / name, target, processor)

        with ThreadPoolExecutor() as pool:
            list(pool.map(compile_one, found))
        build_data["tag"] = f"py3-none-{self._platform}"
        build_data["pure_python"] = not found
        if version == "standard":
            for name, _, _ in found:
                path = f"{WHEEL_PACKAGE}/{_LIBRARIES.as_posix()}/{name}"
                build_data["force_include"][str(libraries / name)] = path

    def finalize(self, _version: str, _build_data: dict[str, Any], _artifact_path: str) -> None:
        """Remove the renamed modules and the libraries of a wheel."""
        if self._folder is not None:
            self._folder.cleanup()


class ReadmeHook(MetadataHookInterface):
    """Makes the README the description of the package."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the README to the metadata."""
        text = described((Path(self.root) / "README.md").read_text(), metadata["urls"]["Source"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def described(readme: str, source: str) -> str:
    """Return the README with links to files as links to the repository: an index of packages has no other files.

    Args:
        readme: its text.
        source: address of the repository.
    """
    return re.sub(r"\]\((?!https://|#)", f"]({source}/blob/main/", readme)
