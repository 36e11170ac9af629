"""The control plane that these tests share, and a namespace for each. `make test-kubernetes` runs them."""

import itertools
import os
from pathlib import Path

import pytest

from tests.kubernetes.control_plane import ControlPlane
from tests.kubernetes.name_server import NameServer, resolv_conf
from tests.kubernetes.network import make_network, run

PROGRAMS = os.environ.get("KUBEBUILDER_ASSETS", "")
HELM = os.environ.get("HELM", "helm")
CHART = str(Path(__file__).resolve().parents[2] / "deploy" / "helm" / "tandem")
# They want programs and a network namespace that `make test` does not have.
collect_ignore_glob = [] if PROGRAMS else ["test_*.py"]


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory):
    directory = tmp_path_factory.mktemp("control-plane")
    make_network()
    # The mount namespace of these tests: the machine keeps its own file.
    (directory / "resolv.conf").write_text(resolv_conf("default"))
    run("mount", "--bind", str(directory / "resolv.conf"), "/etc/resolv.conf")
    plane = ControlPlane(Path(PROGRAMS).resolve(), directory)
    try:
        plane.start()
        with NameServer(plane.admin):
            yield plane
    finally:
        plane.stop()


@pytest.fixture(scope="session")
def names():
    return (f"test-{index}" for index in itertools.count())


@pytest.fixture
def namespace(control_plane, names):
    """Name of a namespace in which pods can be made."""
    name = next(names)
    api = control_plane.admin
    api.create("/api/v1/namespaces", {"metadata": {"name": name}})
    control_plane.wait_for_account(name)
    yield name
    api.delete(f"/api/v1/namespaces/{name}")
