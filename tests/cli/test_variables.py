"""Environment variables that no command reads."""

import re
from pathlib import Path

import pytest

from tandem.cli.completion import parsers
from tandem.cli.variables import warn_of_unknown
from tandem.settings.parser import is_of_kubernetes

DEPLOY = Path(__file__).parents[2] / "deploy"
# The variables that the kubelet sets for the Services `tandem` and `tandem-prefill` with a named port.
OF_KUBERNETES = {
    "TANDEM_SERVICE_HOST": "10.96.0.7",
    "TANDEM_SERVICE_PORT": "8000",
    "TANDEM_SERVICE_PORT_HTTP": "8000",
    "TANDEM_PORT": "tcp://10.96.0.7:8000",
    "TANDEM_PORT_8000_TCP": "tcp://10.96.0.7:8000",
    "TANDEM_PORT_8000_TCP_PROTO": "tcp",
    "TANDEM_PORT_8000_TCP_PORT": "8000",
    "TANDEM_PORT_8000_TCP_ADDR": "10.96.0.7",
    "TANDEM_PREFILL_SERVICE_HOST": "10.96.0.8",
    "TANDEM_PREFILL_PORT": "tcp://10.96.0.8:7000",
}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("TANDEM_PAGESIZE", "did you mean TANDEM_PAGE_SIZE?"),
        ("TANDEM_CLUSTERKEY", "did you mean TANDEM_CLUSTER_KEY?"),
        ("TANDEM_Q", "see docs/configuration.md"),
    ],
)
def test_unknown_variable_is_named_once_with_the_nearest_known_one(capsys, name, hint):
    environment = {name: "1", "TANDEM_PORT": "8000", "HOME": "/"}
    warn_of_unknown("tandem lb", environment)
    assert (
        capsys.readouterr().err
        == f"tandem lb: warning: no command here reads the variable {name}: {hint}\n"
    )
    assert environment == {"TANDEM_PORT": "8000", "HOME": "/"}
    warn_of_unknown("tandem lb", environment)
    assert capsys.readouterr().err == ""


def test_variables_of_any_command_of_services_and_of_the_deployment_are_known(capsys):
    files = [*DEPLOY.glob("systemd/**/*"), DEPLOY / "docker" / "healthcheck.py"]
    text = "".join(path.read_text() for path in files if path.is_file())
    names = {"TANDEM_KV_TIER", "TANDEM_PREFILL", *re.findall(r"TANDEM_[A-Z_]+", text)}
    warn_of_unknown("tandem lb", dict.fromkeys(names, "1") | OF_KUBERNETES)
    assert capsys.readouterr().err == ""


def test_no_variable_of_a_flag_is_taken_for_one_of_kubernetes():
    names = set[str]().union(*(parser.variables() for parser in parsers().values()))
    assert "TANDEM_PORT" in names
    assert [name for name in names if is_of_kubernetes(name, "8000")] == []
