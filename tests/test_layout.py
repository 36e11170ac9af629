"""The tree: one package, four links to it at the root, and what its wheel holds."""

import ast
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections import Counter
from pathlib import Path

import tandem

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "tandem"


def test_the_links_at_the_root_lead_to_the_roles_and_the_transfer():
    links = {path.name: str(path.readlink()) for path in ROOT.iterdir() if path.is_symlink()}
    names = ("prefill", "decode", "router", "kvtransfer")
    assert links == {name: f"src/tandem/{name}" for name in names}


def test_package_has_the_version_of_its_metadata():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == tandem.__version__


def test_the_packages_hold_every_module_of_tandem_and_no_test(tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("src", "tests", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tree / name)
    build = "import setuptools.build_meta as b; b.build_sdist('.'); b.build_wheel('.')"
    subprocess.run([sys.executable, "-c", build], cwd=tree, check=True, capture_output=True)
    [source], [wheel] = tree.glob("*.tar.gz"), tree.glob("*.whl")
    with tarfile.open(source) as archive:
        assert not [name for name in archive.getnames() if "/tests/" in name]
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"tandem"}
    modules = {f"tandem/{path.relative_to(PACKAGE)}" for path in PACKAGE.rglob("*.py")}
    assert modules <= names
    assert "tandem/router/console/page/index.html" in names


ROOMS = {
    path.parent.relative_to(PACKAGE).as_posix(): path.parent
    for path in PACKAGE.rglob("__init__.py")
    if path.parent != PACKAGE
}


def test_the_architecture_lists_every_room_and_no_other():
    page = (ROOT / "docs" / "architecture.md").read_text().partition("## Processes")[0]
    listed = re.findall(r"^\| `([a-z]+(?:/[a-z]+)*)` \|", page, re.MULTILINE)
    assert sorted(listed) == sorted(ROOMS)


def test_no_room_has_more_than_twelve_files():
    sizes = {name: len([*path.glob("*.py")]) - 1 for name, path in ROOMS.items()}
    assert {name: size for name, size in sizes.items() if size > 12} == {}


def test_class_names_are_unique():
    classes = Counter(
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in classes.items() if count > 1] == []
