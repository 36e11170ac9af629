"""How Tandem's programs start other Tandem processes."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMAND = re.compile(r'sys\.executable,\s*(?P<flags>(?:"[^"]*",\s*)*)"-m",\s*(?P<module>[\w".]+)')
# Modules that are not installed; Python finds them in the working directory, a checkout.
OTHERS = ('"pytest', '"tests.', '"benchmarks.', "INTERPRETED")


def test_no_module_of_ours_is_started_with_the_working_directory_on_its_path():
    """Python would import a user's `router.py` from there instead of our package."""
    commands = [
        (path.relative_to(ROOT), command)
        for path in sorted(ROOT.glob("[a-z]*/**/*.py"))  # excludes .venv
        for command in COMMAND.finditer(path.read_text())
        if not command["module"].startswith(OTHERS)
    ]
    modules = {command["module"] for _, command in commands}
    assert {
        '"tandem.node.process.rank_host"',
        '"tandem.router.workers.worker"',
        '"tandem"',
        "self._module",
    } <= modules
    unsafe = [f"{path}: {command[0]}" for path, command in commands if '"-P"' not in command[0]]
    assert unsafe == []
