"""The top-level folders form one package."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "tandem"
ROOMS = sorted(path.name for path in PACKAGE.iterdir() if path.is_symlink())


def test_every_room_is_a_relative_link_to_a_folder_at_the_top():
    assert {"decode", "engine", "kvtransfer", "prefill", "router"} <= set(ROOMS)
    targets = {room: str((PACKAGE / room).readlink()) for room in ROOMS}
    assert targets == {room: f"../../{room}" for room in ROOMS}
    assert all((ROOT / room / "__init__.py").is_file() for room in ROOMS)


def test_a_wheel_installs_one_name_with_every_module_and_file_of_the_rooms(tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in (*ROOMS, "src", "docs", "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        options = {"symlinks": True} if copy is shutil.copytree else {}
        copy(ROOT / name, tree / name, **options)
    build = "import setuptools.build_meta as b; b.build_wheel('.')"
    subprocess.run([sys.executable, "-c", build], cwd=tree, check=True, capture_output=True)
    (wheel,) = tree.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"tandem"}
    wanted = {
        f"tandem/{room}/{path.relative_to(ROOT / room)}"
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
    }
    assert wanted <= names
    docs = ROOT / "docs"
    pages = {f"tandem/manual/text/{page.relative_to(docs)}" for page in docs.rglob("*.md")}
    assert {"tandem/router/page/index.html", *pages} <= names


def test_a_checkout_whose_links_became_files_reports_it_at_the_first_import(tmp_path):
    package = tmp_path / "tandem"
    package.mkdir()
    shutil.copy(PACKAGE / "__init__.py", package)
    for room in ROOMS:
        (package / room).write_text(f"../../{room}")
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import tandem"],
        env={"PYTHONPATH": str(tmp_path)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "core.symlinks=true" in done.stderr
