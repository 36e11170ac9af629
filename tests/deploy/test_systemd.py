"""The systemd units with the example files of /etc/tandem: commands, shutdown, sandboxing, order."""

import re
import shlex

import pytest

from tests.deploy.commands import ROOT, config_of

UNITS = ROOT / "deploy/systemd"
GRACE_S = 10  # what ending takes after the drain
SERVICES = {
    "prefill": ("tandem-prefill@.service", "prefill-0.env"),
    "decode": ("tandem-decode@.service", "decode-0.env"),
    "lb": ("tandem-router.service", "router.env"),
}
HARDENING = {
    "NoNewPrivileges": "yes",
    "ProtectSystem": "strict",
    "ProtectHome": "yes",
    "PrivateTmp": "yes",
    "RestrictSUIDSGID": "yes",
    "CapabilityBoundingSet": "",
}


def settings(name: str) -> dict[str, list[str]]:
    """Return what a unit says by key: systemd takes a key several times, and each is of one section only here."""
    lines = [
        line for line in (UNITS / name).read_text().splitlines() if line and line[0] not in "#["
    ]
    told: dict[str, list[str]] = {}
    for key, value in (line.split("=", 1) for line in lines):
        told.setdefault(key, []).append(value)
    return told


def environment(unit: dict[str, list[str]], env_file: str) -> dict[str, str]:
    words = [word for line in unit["Environment"] for word in shlex.split(line)]
    lines = [
        line for line in (UNITS / "etc" / env_file).read_text().splitlines() if line[:1] != "#"
    ]
    return dict(word.split("=", 1) for word in [*words, *(shlex.split(line)[0] for line in lines)])


def started(role: str, api_keys: str) -> list[str]:
    """Return the arguments of `tandem`, its variables put in as systemd does: $NAME is split at blanks."""
    name, env_file = SERVICES[role]
    unit = settings(name)
    variables = environment(unit, env_file)
    words = []
    for word in unit["ExecStart"][0].split():
        if found := re.fullmatch(r"\$(\w+)", word):
            words += variables[found[1]].replace("/etc/tandem/api-keys", api_keys).split()
        else:
            words.append(re.sub(r"\$\{(\w+)\}", lambda each: variables[each[1]], word))
    assert words[0] == "/opt/tandem/bin/tandem"
    return words[1:]


@pytest.fixture
def api_keys(tmp_path):
    file = tmp_path / "api-keys"
    file.write_text("k" * 32)
    return str(file)


def test_units_start_valid_commands_and_nodes_announce_themselves(api_keys):
    told = {role: config_of(started(role, api_keys)) for role in SERVICES}
    assert [config.port for config in told.values()] == [7000, 7001, 8000]
    assert told["lb"].discovers_announced
    assert told["prefill"].routers == told["decode"].routers
    assert told["prefill"].model == told["decode"].model


@pytest.mark.parametrize("role", SERVICES)
def test_a_unit_has_time_to_drain_and_signals_only_the_main_process(role, api_keys):
    unit = settings(SERVICES[role][0])
    assert (
        float(unit["TimeoutStopSec"][0])
        >= config_of(started(role, api_keys)).drain_timeout_s + GRACE_S
    )
    assert unit["KillMode"] == ["mixed"]
    assert unit["Restart"] == ["on-failure"]


@pytest.mark.parametrize("role", SERVICES)
def test_a_unit_runs_sandboxed_as_the_tandem_user(role):
    unit = settings(SERVICES[role][0])
    assert {key: unit[key][0] for key in HARDENING} == HARDENING
    kind, user = (UNITS / "tandem.sysusers.conf").read_text().splitlines()[-1].split()[:2]
    assert (kind, unit["User"], unit["Group"]) == ("u", [user], [user])
    # The secret is in a file that only root reads, and in no command line.
    assert unit["EnvironmentFile"][0] == "/etc/tandem/cluster.env"
    # All that is written at run time is where the unit may write.
    home = environment(unit, SERVICES[role][1])["XDG_CACHE_HOME"]
    assert home == f"/var/cache/{unit['CacheDirectory'][0]}"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_node_may_pin_memory_and_stops_after_the_router(role):
    unit = settings(SERVICES[role][0])
    assert unit["LimitMEMLOCK"] == ["infinity"]
    assert unit["Before"] == ["tandem-router.service"]
    assert unit["EnvironmentFile"][1] == f"/etc/tandem/{role}-%i.env"


def test_the_target_starts_and_stops_all_units():
    assert settings("tandem.target")["WantedBy"] == ["multi-user.target"]
    for name, _ in SERVICES.values():
        unit = settings(name)
        assert (unit["PartOf"], unit["WantedBy"]) == (["tandem.target"], ["tandem.target"])
