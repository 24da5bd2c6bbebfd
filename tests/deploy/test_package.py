"""What the index of packages shows of the package, and the workflow that publishes it."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import yaml

from deploy.build_hook import _TARGETS, ANY

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def workflow(name):
    return yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())


RELEASE = workflow("release")
STEPS = {name: job["steps"] for name, job in RELEASE["jobs"].items()}
COMMANDS = {name: "\n".join(it.get("run", "") for it in steps) for name, steps in STEPS.items()}


def pythons():
    prefix = "Programming Language :: Python :: 3."
    return [it.rpartition(" ")[2] for it in PROJECT["classifiers"] if it.startswith(prefix)]


def test_the_links_have_one_address_which_the_documents_have_too():
    addresses = {re.match(r"https://github\.com/\w+/\w+", it)[0] for it in PROJECT["urls"].values()}

    (address,) = addresses
    assert f"{address}/" in (ROOT / "docs/operations.md").read_text()
    assert set(PROJECT["urls"]) == {"Homepage", "Documentation", "Source", "Changelog", "Issues"}


def test_files_that_links_name_exist():
    for link in PROJECT["urls"].values():
        path = re.search(r"/(?:blob|tree)/main/(.+)", link)
        assert path is None or (ROOT / path[1]).exists(), link


def test_the_released_readme_has_no_links_that_lead_nowhere_on_an_index_of_packages(tmp_path):
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (step,) = (it["run"] for it in STEPS["build"] if it.get("name") == "The links lead here")
    owner = {"GITHUB_REPOSITORY": "acme/tessera", "GITHUB_REPOSITORY_OWNER": "acme"}
    subprocess.run(["bash", "-euc", step], cwd=tmp_path, env=os.environ | owner, check=True)
    readme = (tmp_path / "README.md").read_text()

    targets = re.findall(r"\]\(([^)\s]+)", readme) + re.findall(r"(?:src|href)=\"([^\"]+)", readme)

    assert "https://github.com/acme/tessera/blob/main/docs/index.md" in targets
    assert [it for it in targets if not re.match(r"https://|#", it)] == []


def test_all_versions_of_python_that_are_named_are_tested():
    assert workflow("ci")["jobs"]["test"]["strategy"]["matrix"]["python"] == pythons()
    assert RELEASE["jobs"]["install"]["strategy"]["matrix"]["python"] == pythons()
    assert PROJECT["requires-python"] == f">={pythons()[0]}"


def test_wheels_are_built_for_every_platform_that_has_pytorch():
    (platforms,) = re.findall(r"for platform in (.+); do", COMMANDS["build"])

    # There is no PyTorch for macOS on Intel processors.
    assert set(platforms.split()) == {*_TARGETS, ANY} - {"macosx_11_0_x86_64"}


def test_what_is_published_was_checked_and_installed_before():
    assert RELEASE["jobs"]["publish"]["needs"] == RELEASE["jobs"]["release"]["needs"] == "install"
    assert RELEASE["jobs"]["install"]["needs"] == "build"
    for tool in ("twine check --strict", "check-wheel-contents", "pyroma", "validate-pyproject"):
        assert f"\n{tool}" in COMMANDS["build"]
    assert RELEASE[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads `on` as true


def test_only_the_jobs_that_publish_have_an_identity_and_none_has_a_token():
    jobs = RELEASE["jobs"]

    assert RELEASE["permissions"] == {"contents": "read"}
    assert {name for name, job in jobs.items() if "permissions" in job} == {"publish", "release"}
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["publish"]["environment"]["name"] == "pypi"
    assert STEPS["publish"][-1]["with"] == {"attestations": True}
    assert "attest-build-provenance" in str(STEPS["release"])
    assert "secrets." not in str(RELEASE)
