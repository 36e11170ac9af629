"""`scripts/install`, which `make serve` and `make test` run first: uv gets the settings that pip has."""

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "install"


@pytest.fixture
def install():
    spec = spec_from_loader("install", SourceFileLoader("install", str(SCRIPT)))
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_uv_gets_pips_indexes_and_the_environment_overrides_them(install):
    config = (
        "global.extra-index-url='\\nfile:///a/simple\\nfile:///b/simple'\n"
        "global.find-links='/wheels'\n"
        "global.timeout='5'\n"
        ":env:.find-links='/other wheels'\n"
    )
    assert install.uv_settings(config) == {
        "UV_INDEX": "file:///a/simple file:///b/simple",
        "UV_FIND_LINKS": "/other wheels",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }


def test_the_lock_pins_the_requirements_without_urls(install):
    lock, constraints = (file.read_text() for file in install.PINS)
    assert "://" not in lock
    assert "torch==" in constraints
    pinned = {line.partition("==")[0] for line in lock.splitlines() if "==" in line}
    assert {"aiohttp", "transformers", "numba", "pytest", "ruff"} <= pinned
