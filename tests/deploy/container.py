"""A container of a rendered pod as its process meets it: arguments, environment and mounted files."""

import base64
import re
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.helm import Manifest, of_kind

# What a pod is told of itself, and what a Secret has that somebody else made.
FIELDS = {"status.podIP": "10.1.2.3", "metadata.labels['topology.kubernetes.io/zone']": "zone-a"}
ELSEWHERE = "abcdef-of-a-secret-that-the-chart-does-not-make"


@dataclass(frozen=True, slots=True)
class Started:
    """What a process is started with."""

    args: list[str]
    env: dict[str, str]


def start(manifests: tuple[Manifest, ...], pod: Manifest, root: Path) -> Started:
    """Lay a pod's files out under `root`, and return how its process is started, with paths there."""
    (container,) = pod["spec"]["containers"]
    secrets, maps = of_kind(manifests, "Secret"), of_kind(manifests, "ConfigMap")
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", ())}
    for mount in container.get("volumeMounts", ()):
        place = root / mount["mountPath"].lstrip("/")
        place.mkdir(parents=True)
        for name, text in _files(volumes[mount["name"]], secrets, maps).items():
            (place / name).write_text(text)
    env = {each["name"]: _value(each, secrets) for each in container.get("env", ())}
    args = [_expanded(arg, env) for arg in container["args"]]
    return Started([re.sub(r"=/etc/tandem/", f"={root}/etc/tandem/", arg) for arg in args], env)


def _files(
    volume: Manifest, secrets: dict[str, Manifest], maps: dict[str, Manifest]
) -> dict[str, str]:
    if "configMap" in volume:
        return dict(maps[volume["configMap"]["name"]]["data"])
    if "secret" not in volume:
        return {}
    entries = _decoded(secrets.get(volume["secret"]["secretName"]))
    items = volume["secret"].get("items")
    if items is None:
        return entries
    return {item["path"]: entries.get(item["key"], ELSEWHERE) for item in items}


def _value(variable: Manifest, secrets: dict[str, Manifest]) -> str:
    if "value" in variable:
        return str(variable["value"])
    source = variable["valueFrom"]
    if "fieldRef" in source:
        return FIELDS[source["fieldRef"]["fieldPath"]]
    reference = source["secretKeyRef"]
    return _decoded(secrets.get(reference["name"])).get(reference["key"], ELSEWHERE)


def _decoded(secret: Manifest | None) -> dict[str, str]:
    data = {} if secret is None else secret["data"]
    return {name: base64.b64decode(text).decode() for name, text in data.items()}


def _expanded(text: str, env: dict[str, str]) -> str:
    """Replace `$(NAME)` as Kubernetes does."""
    return re.sub(r"\$\((\w+)\)", lambda found: env[found[1]], text)
