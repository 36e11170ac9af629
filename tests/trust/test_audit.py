"""The check of dependencies: no floor of ours lets a known hole in, and it would say so."""

import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "audit"


@pytest.fixture
def audit():
    spec = spec_from_loader("audit", SourceFileLoader("audit", str(SCRIPT)))
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_nothing_with_a_known_hole_is_allowed_or_installed():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "nothing in advisories.toml is allowed or installed" in done.stdout


def test_a_hole_that_a_floor_lets_in_or_that_is_installed_is_named(audit, tmp_path, capsys):
    audit.ADVISORIES = tmp_path / "advisories.toml"
    audit.ADVISORIES.write_text(
        '[[advisory]]\npackage = "aiohttp"\nversions = "<999"\nid = "CVE-0"\nwhat = "a hole"\n'
    )
    audit.look_up = lambda: 0
    assert audit.main() == 1
    said = capsys.readouterr().out
    assert "pyproject.toml allows aiohttp" in said
    assert "is installed: CVE-0, a hole" in said


def test_a_service_that_does_not_answer_is_said_and_is_no_failure(audit, capsys):
    failed = subprocess.CompletedProcess([], 1, "", "ConnectionError: no route")
    audit.importlib = SimpleNamespace(util=SimpleNamespace(find_spec=lambda _name: True))
    audit.subprocess = SimpleNamespace(
        run=lambda *_args, **_more: failed, TimeoutExpired=subprocess.TimeoutExpired
    )
    assert audit.look_up() == 0
    assert "no advisory service reachable" in capsys.readouterr().out
