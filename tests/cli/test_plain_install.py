"""A plain install suffices for the router and its clients; other commands name the extra they need."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tandem.node.machine import NODE_PACKAGES

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
RUN = """
import sys
for name in sys.argv.pop(1).split():
    sys.modules[name] = None  # as if it were not installed
from tandem.cli.main import main
sys.exit(main())
"""


def run(*argv: str, absent=tuple(ABSENT), **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RUN, " ".join(absent), *argv]
    environment = os.environ | variables
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


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


@pytest.mark.parametrize(
    ("command", "package"),
    [("prefill", "torch"), ("decode", "numba"), ("serve", "gguf"), ("up", "transformers")],
)
def test_nothing_starts_while_one_package_of_nodes_is_missing(command, package, tmp_path):
    done = run(command, absent=[package], XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 2
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert f"this command needs {package}, which is not installed: pip install" in line
    assert list(tmp_path.iterdir()) == []


def test_packages_of_nodes_are_those_of_the_extra():
    named = {name.replace("-", "_") for name in ABSENT} | {"huggingface_hub"}
    assert sorted(NODE_PACKAGES) == sorted(named)


def test_router_names_an_unknown_variable_without_node_packages():
    done = run("lb", "--help", TANDEM_POLICI="least_load")
    assert done.returncode == 0
    assert "no command here reads the variable TANDEM_POLICI" in done.stderr
    assert "did you mean TANDEM_POLICY?" in done.stderr


def test_router_reply_parser_without_transformers_names_the_extra():
    done = run("lb", "--discover-announced", "--tool-call-parser", "hermes")
    assert done.returncode == 2
    assert (
        "--tool-call-parser needs transformers: pip install 'tandem-serve[parsers]'" in done.stderr
    )
