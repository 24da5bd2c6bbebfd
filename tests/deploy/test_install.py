"""`make setup`: which build of PyTorch it installs, and what it shows. pip itself runs in a slow test only."""

import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from deploy import install

ROOT = Path(__file__).parents[2]
CPU, CUDA = "2.13.0+cpu", "2.13.0"


@pytest.fixture
def linux(monkeypatch, tmp_path):
    """A Linux machine without a GPU."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(install.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(install, "has_nvidia_gpu", lambda: False)


class FakePip:
    """Records pip's commands; `install torch` has the version of the index that is asked for."""

    def __init__(self, monkeypatch, root, *, cpu_status=0, cpu_error="", own=CUDA):
        self.commands, self.root = [], root
        self._cpu_status, self._cpu_error, self._own = cpu_status, cpu_error, own
        (root / ".venv/bin").mkdir(parents=True)
        (root / ".venv/bin/pip").touch()
        (root / "pyproject.toml").write_text(
            '[project]\ndependencies = ["torch-like>=1", "torch>=2.11,<2.14"]\n'
        )
        monkeypatch.setattr(install, "pip", self)
        for name in install._SOURCES:
            monkeypatch.delenv(name, raising=False)

    def __call__(self, _python, *arguments, errors=None):
        self.commands.append(arguments)
        if arguments[0] == "uninstall":
            self.put(None)
        elif "--index-url" in arguments:
            if errors:
                errors.write(self._cpu_error.encode())
            if self._cpu_status:
                return self._cpu_status
            self.put(CPU)
        elif self.version is None:
            self.put(self._own)
        return 0

    def put(self, version):
        packages = self.root / ".venv/lib/python3.11/site-packages"
        for folder in packages.glob("torch-*"):
            folder.rmdir()
        if version:
            (packages / f"torch-{version}.dist-info").mkdir(parents=True)

    @property
    def version(self):
        return install.torch_version(self.root / ".venv")

    @property
    def used_cpu_index(self):
        return any(install.CPU_INDEX in command for command in self.commands)


def test_without_a_gpu_pytorch_comes_from_the_cpu_index_alone(monkeypatch, linux, tmp_path, capsys):
    pip = FakePip(monkeypatch, tmp_path)

    install.install("auto", root=tmp_path)

    torch, rest = pip.commands
    assert torch[:4] == ("install", "--no-deps", "--index-url", install.CPU_INDEX)
    assert torch[-2:] == ("torch>=2.11,<2.14", install.TESTED)
    assert rest == ("install", "--editable", str(tmp_path), install.TESTED)
    assert pip.version == CPU
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.parametrize(
    "message",
    ["No matching distribution found for torch", "ResolutionImpossible: for help visit x"],
)
def test_an_index_that_cannot_be_reached_is_reported_in_a_line_and_pips_own_is_used(
    monkeypatch, linux, tmp_path, capsys, message
):
    error = f"WARNING: Retrying (x)\nERROR: {message}\n"
    pip = FakePip(monkeypatch, tmp_path, cpu_status=1, cpu_error=error)

    install.install("auto", root=tmp_path)

    out, err = capsys.readouterr()
    assert pip.version == CUDA
    assert "cannot be reached: taking PyTorch from pip's own index" in out.splitlines()[1]
    assert err == ""


def test_another_error_of_the_download_ends_the_installation_and_is_shown(
    monkeypatch, linux, tmp_path, capsys
):
    error = "WARNING: Retrying (x)\nERROR: No space left on device\n"
    pip = FakePip(monkeypatch, tmp_path, cpu_status=1, cpu_error=error)

    with pytest.raises(install.InstallError):
        install.install("auto", root=tmp_path)

    assert capsys.readouterr().err == "ERROR: No space left on device\n"
    assert pip.version is None


@pytest.mark.parametrize("name", install._SOURCES)
def test_a_variable_that_names_a_source_of_packages_decides(linux, name):
    use_cpu, reason = install.choose("auto", {name: "x"})

    assert not use_cpu
    assert reason.startswith(name)


@pytest.mark.parametrize("name", ["PIP_CERT", "PIP_DEFAULT_TIMEOUT", "PIP_PROXY"])
def test_other_variables_of_pip_do_not_decide(linux, name):
    assert install.choose("auto", {name: "x"})[0]


@pytest.mark.parametrize(("build", "use_cpu"), [("cpu", True), ("cuda", False), ("default", False)])
def test_an_explicit_choice_wins(monkeypatch, linux, build, use_cpu):
    monkeypatch.setattr(install, "has_nvidia_gpu", lambda: build == "cpu")

    assert install.choose(build, {"PIP_INDEX_URL": "x"})[0] is use_cpu


def test_with_a_gpu_pips_own_index_is_used(monkeypatch, linux):
    monkeypatch.setattr(install, "has_nvidia_gpu", lambda: True)

    assert install.choose("auto", {}) == (False, "")


@pytest.mark.parametrize("build", ["auto", "cpu"])
@pytest.mark.parametrize(("system", "machine"), [("darwin", "arm64"), ("linux", "riscv64")])
def test_systems_with_a_single_build_use_pips_own_index(monkeypatch, linux, build, system, machine):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(install.platform, "machine", lambda: machine)

    assert install.choose(build, {}) == (False, "")


@pytest.mark.parametrize(("build", "before"), [("cpu", CUDA), ("cuda", CPU)])
def test_an_explicit_choice_replaces_the_other_build(monkeypatch, linux, tmp_path, build, before):
    pip = FakePip(monkeypatch, tmp_path)
    pip.put(before)

    install.install(build, root=tmp_path)

    assert pip.commands[0] == ("uninstall", "--yes", "torch")
    assert pip.version == (CPU if build == "cpu" else CUDA)
    assert (tmp_path / ".venv/.torch").read_text() == build


def test_an_index_without_a_cuda_build_is_an_error_if_one_is_asked_for(
    monkeypatch, linux, tmp_path
):
    FakePip(monkeypatch, tmp_path, own=CPU)

    with pytest.raises(install.InstallError, match=r"only PyTorch 2\.13\.0\+cpu"):
        install.install("cuda", root=tmp_path)


def test_the_drivers_list_of_gpus_shows_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(install.shutil, "which", lambda _: None)
    assert not install.has_nvidia_gpu(tmp_path)

    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    assert install.has_nvidia_gpu(tmp_path)


@pytest.mark.parametrize(
    ("script", "found"),
    [("echo 'GPU 0: NVIDIA H100 (UUID: x)'", True), ("exit 9", False), ("true", False)],
)
def test_nvidia_smi_shows_a_gpu(tmp_path, monkeypatch, script, found):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")

    assert install.has_nvidia_gpu(tmp_path) is found


# What pip 23 writes, with colours as on a terminal.
OUTPUT = "".join(
    (
        "Collecting torch\n",
        "  Downloading torch.whl.metadata (29 kB)\n",
        "  Downloading tiny.whl (9 kB)\n",
        "\x1b[?25l     \x1b[90m━━━\x1b[0m 9.0/9.0 kB\n\x1b[?25h",
        "Requirement already satisfied: numpy in ./.venv\n",
        "  Downloading torch.whl (191.8 MB)\n",
        "\x1b[?25l     \x1b[90m━━━\x1b[0m 0.0/191.8 MB",
        "\r\x1b[2K     \x1b[90m━━━\x1b[0m 191.8/191.8 MB\n\x1b[?25h",
        "Installing collected packages: torch\n",
    )
).encode()


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_only_large_downloads_and_their_bars_are_shown(size):
    chunks = [OUTPUT[at : at + size] for at in range(0, len(OUTPUT), size)]

    assert b"".join(install.shown(chunks)).decode() == (
        "  Downloading torch.whl (191.8 MB)\n"
        "     \x1b[90m━━━\x1b[0m 0.0/191.8 MB"
        "\r\x1b[2K     \x1b[90m━━━\x1b[0m 191.8/191.8 MB\n"
    )


def wheel(folder, version):
    """Write an empty package torch."""
    data = io.BytesIO()
    info = f"torch-{version}.dist-info"
    with zipfile.ZipFile(data, "w") as archive:
        metadata = f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
        archive.writestr(f"{info}/METADATA", metadata)
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", tags)
        archive.writestr(f"{info}/RECORD", "")
    folder.mkdir(parents=True)
    (folder / f"torch-{version}-py3-none-any.whl").write_bytes(data.getvalue())
    name = f"torch-{version}-py3-none-any.whl"
    (folder / "index.html").write_text(f'<a href="{name}">{name}</a>')


@pytest.mark.slow
def test_pip_installs_the_cpu_build_although_its_own_index_has_a_newer_version(
    monkeypatch, linux, tmp_path
):
    wheel(tmp_path / "cpu/torch", CPU)
    wheel(tmp_path / "own/torch", "2.13.1")
    (tmp_path / "pyproject.toml").write_text('[project]\ndependencies = ["torch>=2.11,<2.14"]\n')
    monkeypatch.setattr(install, "CPU_INDEX", (tmp_path / "cpu").as_uri())
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "own").as_uri())
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    venv = tmp_path / ".venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)

    assert install._install_cpu_torch(venv / "bin/python", tmp_path)
    assert install.torch_version(venv) == CPU


def test_make_keeps_the_last_choice_and_installs_another_one_again(tmp_path):
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/.torch").write_text("cpu")
    (tmp_path / ".venv/.installed").touch()

    def commands(*arguments):
        command = ["make", "--dry-run", "setup", "PYTHON=python3", *arguments]
        # `TORCH=cpu make test` sets both for the tests too.
        environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "TORCH")}
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=True, env=environment
        )
        return [line for line in done.stdout.splitlines() if "install.py" in line]

    assert commands() == commands("TORCH=cpu") == []
    assert commands("TORCH=cuda") == ["python3 deploy/install.py --torch cuda"]
