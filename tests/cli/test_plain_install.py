"""A plain install suffices for the router and its clients; other commands name the extra they need."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
# Import names, which equal the package names. tokenizers installs the Hub's client.
ABSENT = sorted(
    {
        Requirement(line).name
        for extra in ("node", "cpu")
        for line in PROJECT["optional-dependencies"][extra]
        if not line.startswith(("tandem-serve", "huggingface-hub"))
    }
)
RUN = f"""
import sys
for name in {ABSENT}:
    sys.modules[name] = None  # as if it were not installed
from tandem.cli.main import main
sys.exit(main())
"""


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RUN, *argv]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("command", ["lb", "top", "drain", "batch"])
def test_router_and_client_commands_need_no_node_packages(command):
    done = run(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("argv", "extra"),
    [
        (("prefill",), "'tandem-serve[cpu]', with a GPU 'tandem-serve[cuda]'"),
        (("up",), "'tandem-serve[cpu]', with a GPU 'tandem-serve[cuda]'"),
        (("bench", "http://localhost:1"), "'tandem-serve[bench]'"),
    ],
)
def test_command_with_missing_packages_names_the_extra(argv, extra):
    done = run(*argv)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.endswith(f", which is not installed: pip install {extra}")


def test_router_reply_parser_without_transformers_names_the_extra():
    done = run("lb", "--discover-announced", "--tool-call-parser", "hermes")
    assert done.returncode == 2
    assert (
        "--tool-call-parser needs transformers: pip install 'tandem-serve[parsers]'" in done.stderr
    )
