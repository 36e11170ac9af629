"""Errors end with the page of the documentation."""

import os
import subprocess
import sys

import pytest

import tandem.router.command


@pytest.mark.parametrize(
    ("argv", "page"),
    [
        (["prefill", "--host", "0.0.0.0"], "docs/troubleshooting.md#no-cluster-key"),
        (["decode", "--model", "/nowhere"], "docs/troubleshooting.md#no-such-model"),
    ],
)
def test_node_error_at_start_names_its_page(argv, page):
    env = {name: value for name, value in os.environ.items() if name != "TANDEM_CLUSTER_KEY"}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tandem", *argv],
        capture_output=True,
        check=False,
        text=True,
        env=env,
    )
    assert done.returncode == 2
    assert done.stderr.endswith(f"\nMore: {page}\n")


@pytest.mark.parametrize(
    ("argv", "page"),
    [([], "docs/membership.md"), (["--discover-dns", "x"], "docs/membership.md#dns")],
)
def test_router_flag_error_names_its_page(argv, page, capsys):
    assert tandem.router.command.main(argv) == 2
    assert capsys.readouterr().err.endswith(f"\nMore: {page}\n")
