"""The image's files, checked without a build: pins, the build context, the user, signals and the health check."""

import fnmatch
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import PurePosixPath

import pytest
from packaging.requirements import Requirement

from tandem.cli.up import free_ports
from tests.deploy.commands import ROOT, config_of
from tests.deploy.helm import pods, rendered
from tests.e2e.cluster import START_TIMEOUT_S, ask
from tests.patience import eventually
from tests.processes import Process

DOCKER = ROOT / "deploy/docker"
HEALTHCHECK = DOCKER / "healthcheck.py"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = {"cpu": ("node", "cpu"), "cuda": ("node", "cuda", "nixl")}


def pins(*names: str) -> dict[str, str]:
    text = "\n".join((ROOT / name).read_text() for name in names)
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    pairs = [line.split("==") for line in lines if line and not line.startswith("--")]
    return dict(pairs)


def pins_of(target: str) -> dict[str, str]:
    return pins("deploy/docker/requirements.txt", f"deploy/docker/requirements-{target}.txt")


@pytest.mark.parametrize("target", EXTRAS)
def test_each_requirement_is_pinned_at_an_accepted_version(target):
    extras = PROJECT["project"]["optional-dependencies"]
    lines = [
        *PROJECT["project"]["dependencies"],
        *(x for name in EXTRAS[target] for x in extras[name]),
    ]
    pinned = pins_of(target)
    wrong = []
    for requirement in map(Requirement, lines):
        if requirement.name == PROJECT["project"]["name"]:
            continue  # another extra
        version = pinned.get(requirement.name)
        if version is None or not requirement.specifier.contains(version):
            wrong.append(f"{requirement} and {version}")
    assert wrong == []


@pytest.mark.parametrize("target", EXTRAS)
def test_the_image_has_the_torch_of_the_tests(target):
    assert pins_of(target)["torch"] == pins("constraints.txt")["torch"]


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^\s*#.*\n", "", (DOCKER / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines if line.strip()]


def is_ignored(path: str) -> bool:
    """Tell as Docker does: by the last pattern that matches a path or one of its parents."""
    *parents, _ = PurePosixPath("/", path).parents
    names = ["/" + path, *map(str, parents)]
    verdict = False
    for pattern in (ROOT / ".dockerignore").read_text().splitlines():
        glob = "/" + pattern.removeprefix("!")
        if any(fnmatch.fnmatch(name, glob.replace("/**/", "*/")) for name in names):
            verdict = not pattern.startswith("!")
    return verdict


def test_the_build_context_has_every_copied_file_and_package():
    (source,) = PROJECT["tool"]["setuptools"]["packages"]["find"]["where"]
    files = {PROJECT["project"]["readme"], *PROJECT["project"]["license-files"], "pyproject.toml"}
    copied = {
        source.replace("${TARGET}", target)
        for verb, rest in instructions()
        if verb == "COPY" and "--from" not in rest
        for source in rest.split()[:-1]
        for target in EXTRAS
        if source != "."
    }
    assert "deploy/docker/requirements-cuda.txt" in copied
    missing = [p for p in {source} | files | copied if is_ignored(p) or not (ROOT / p).exists()]
    assert missing == []


@pytest.mark.parametrize(
    "path", [".git", ".venv", "tests", "deploy/compose/secrets", "src/tandem/node/__pycache__"]
)
def test_the_build_context_excludes_private_files(path):
    assert is_ignored(path)


def test_the_image_runs_as_the_charts_user_and_forwards_sigterm():
    last = dict(instructions())  # of each instruction the last
    context = dict(pods(rendered()))["router"]["spec"]["securityContext"]
    assert last["USER"] == f"{context['runAsUser']}:{context['runAsGroup']}"
    init, *_, command = json.loads(last["ENTRYPOINT"])
    assert (init, command, last["STOPSIGNAL"]) == ("tini", "tandem", "SIGTERM")
    assert "tandem-healthcheck" in last["HEALTHCHECK"]
    settings = " ".join(rest for verb, rest in instructions() if verb == "ENV")
    written = dict(word.split("=", 1) for word in shlex.split(settings))
    # The only directory besides /tmp that is writable in the chart's pods.
    for name in ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR", "TRITON_CACHE_DIR", "HF_HOME"):
        assert written[name].startswith("/var/cache/tandem"), name


def healthcheck_module():
    spec = importlib.util.spec_from_file_location("healthcheck", HEALTHCHECK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("flags", "url"),
    [
        ("prefill --host 0.0.0.0", "http://127.0.0.1:7000"),
        ("decode --host :: --port 7100", "http://[::1]:7100"),
        ("decode --port=7100 --host=10.0.0.5", "http://10.0.0.5:7100"),
        ("lb --prefill http://a:7000 --decode http://b:7001", "http://127.0.0.1:8000"),
        ("lb --discover-announced --host 0.0.0.0 --port 80", "http://127.0.0.1:80"),
        ("serve --ssl-certfile a.pem", "https://127.0.0.1:8000"),
    ],
)
def test_the_health_check_reads_the_url_from_the_command_line(flags, url):
    argv = ["tini", "--", "/opt/tandem/bin/tandem", *flags.split()]
    module = healthcheck_module()
    assert module.url_of(argv, {}) == url
    assert module.url_of(argv, {"TANDEM_HEALTH_URL": "http://x:1/"}) == "http://x:1"


@pytest.mark.parametrize("role", ["prefill", "decode", "lb --discover-announced"])
def test_the_health_check_has_the_default_ports_of_the_flags(role):
    config = config_of(role.split())
    assert healthcheck_module().url_of(role.split(), {}) == f"http://{config.host}:{config.port}"


def test_the_health_check_distinguishes_a_live_from_a_serving_router():
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    check = [sys.executable, "-I", str(HEALTHCHECK)]

    def status(*path: str) -> int:
        environment = {**os.environ, "TANDEM_HEALTH_URL": url}
        return subprocess.run(
            [*check, *path], env=environment, capture_output=True, check=False
        ).returncode

    assert status() == 1, "nobody is there"
    router = Process("lb", "--discover-announced", "--port", url.rpartition(":")[2])
    try:
        assert eventually(lambda: answers(url), within_s=START_TIMEOUT_S), router.output()
        # Again and again: one check gives up after a few seconds, for which a machine may stand still.
        assert eventually(lambda: status() == 0), router.output()
        assert status("/health") == 1, "it has no nodes"
    finally:
        router.stop()


def answers(url: str) -> bool:
    try:
        return bool(ask(f"{url}/health"))
    except OSError:
        return False
