"""A plain install has what the router and its clients import; the other commands name the extra they need."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
# By their names on import, which are those of the packages. tokenizers brings the hub's client.
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
from tandem.__main__ import main
sys.exit(main())
"""


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RUN, *argv]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("command", ["lb", "top", "drain", "batch"])
def test_the_router_and_its_clients_start_without_the_packages_of_nodes(command):
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
def test_a_command_that_needs_more_names_the_extra(argv, extra):
    done = run(*argv)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.endswith(f"is not installed, which this command needs: pip install {extra}")


def test_a_router_that_shall_parse_replies_names_the_extra():
    done = run("lb", "--discover-announced", "--tool-call-parser", "hermes")
    assert done.returncode == 2
    assert (
        "--tool-call-parser needs transformers: pip install 'tandem-serve[parsers]'" in done.stderr
    )
