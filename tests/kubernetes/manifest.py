"""What a pod's manifest says of its containers, read as a kubelet reads it."""

import base64
import os
import re
from collections.abc import Callable
from pathlib import Path

from tests.kubernetes.sandbox import ENTRYPOINT, ContainerPlan

# Returns the object of a kind and a name in the pod's namespace, such as ("secrets", "tandem").
Find = Callable[[str, str], dict]


class Manifest:
    """One pod.

    Args:
        directory: For its volumes.
    """

    def __init__(self, pod: dict, address: str, find: Find, directory: Path) -> None:
        self._pod, self._address, self._find, self._directory = pod, address, find, directory
        self._volumes = {one["name"]: one for one in pod["spec"].get("volumes") or []}

    def plan(
        self, container: dict, common_env: dict[str, str], files: dict[str, Path]
    ) -> ContainerPlan:
        env = {**common_env, **self._env(container)}
        argv = [*(container.get("command") or ENTRYPOINT), *(container.get("args") or [])]
        security = {
            **(self._pod["spec"].get("securityContext") or {}),
            **(container.get("securityContext") or {}),
        }
        group = security.get("fsGroup", security.get("runAsGroup", 0))
        mounts = {
            mount["mountPath"]: self._volume(mount["name"], group)
            for mount in container.get("volumeMounts") or []
        }
        return ContainerPlan(
            argv=[_expanded(part, env) for part in argv],
            env=env,
            mounts={**files, **mounts},
            user=security.get("runAsUser", 0),
            group=security.get("runAsGroup", 0),
            is_root_writable=not security.get("readOnlyRootFilesystem", False),
        )

    def _env(self, container: dict) -> dict[str, str]:
        env: dict[str, str] = {}
        for variable in container.get("env") or []:
            value = variable.get("value", "")
            source = variable.get("valueFrom")
            env[variable["name"]] = self._value(source) if source else _expanded(value, env)
        return env

    def _value(self, source: dict) -> str:
        (kind, reference), *_ = source.items()
        if kind == "fieldRef":
            return self._field(reference["fieldPath"])
        assert kind == "secretKeyRef", f"no such source is known here: {kind}"
        return self._entries("secrets", reference)[reference["key"]]

    def _field(self, path: str) -> str:
        if found := re.fullmatch(r"metadata\.labels\['(.+)'\]", path):
            return self._pod["metadata"]["labels"].get(found[1], "")
        return {"status.podIP": self._address}[path]

    def _entries(self, kind: str, reference: dict) -> dict[str, str]:
        found = self._find(kind, reference.get("name") or reference["secretName"])
        data = found.get("data") or {}
        if kind == "configmaps":
            return data
        return {name: base64.b64decode(text).decode() for name, text in data.items()}

    def _volume(self, name: str, group: int) -> Path:
        volume = self._volumes[name]
        if "hostPath" in volume:
            return Path(volume["hostPath"]["path"])
        path = self._directory / name
        if path.exists():
            return path
        path.mkdir(parents=True)
        path.chmod(0o777)
        if "secret" in volume:
            self._fill(path, "secrets", volume["secret"], group)
        elif "configMap" in volume:
            self._fill(path, "configmaps", volume["configMap"], group)
        else:
            assert "emptyDir" in volume, f"no such volume is known here: {volume}"
        return path

    def _fill(self, path: Path, kind: str, source: dict, group: int) -> None:
        entries = self._entries(kind, source)
        wanted = source.get("items") or [{"key": name, "path": name} for name in entries]
        for item in wanted:
            file = path / item["path"]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(entries[item["key"]])
            file.chmod(item.get("mode", source.get("defaultMode", 0o644)))
            _give_to_group(file, group)
        path.chmod(0o755)


def _give_to_group(file: Path, group: int) -> None:
    if group:
        os.chown(file, -1, group)
        file.chmod(file.stat().st_mode | 0o040)


def _expanded(text: str, env: dict[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda found: env.get(found[1], found[0]), text)
