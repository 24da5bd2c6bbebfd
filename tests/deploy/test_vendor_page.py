"""What bundles the libraries of the page."""

import json

import pytest

from deploy import vendor_page


def test_without_npm_it_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(vendor_page.shutil, "which", lambda _name: None)

    with pytest.raises(vendor_page.VendorError, match=r"npm and Node\.js are needed"):
        vendor_page.build()


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("markdown.js", ""),
        ("node_modules/linkify-it/build/index.mjs", "linkify-it"),
        ("node_modules/@types/hast/index.js", "@types/hast"),
        ("node_modules/a/node_modules/b/c.js", "b"),
    ],
)
def test_files_of_a_build_belong_to_packages(path, name):
    assert vendor_page._package(path) == name


def test_every_module_of_a_bundle_exists_and_every_version_is_exact():
    for name in vendor_page._BUNDLES:
        assert (vendor_page.SOURCES / name).is_file()
    package = json.loads((vendor_page.SOURCES / "package.json").read_text())
    versions = [*package["dependencies"].values(), *package["devDependencies"].values()]
    assert all(version.replace(".", "").isdigit() for version in versions)


def test_a_library_without_a_licence_is_refused(tmp_path):
    (tmp_path / "node_modules/free").mkdir(parents=True)

    with pytest.raises(vendor_page.VendorError, match="the package free has no file"):
        vendor_page._licenses(tmp_path, ["free"])
