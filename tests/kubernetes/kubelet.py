"""A kubelet over the real API, whose pods are real processes (`sandbox.py`), and a kube-proxy for their services.

```
 scheduled ─▶ network, volumes ─▶ containers ─▶ startup probe ─▶ readiness, liveness ─▶ status
                                      ▲──── ended, or no longer alive ────┘
 deleted ─▶ SIGTERM ─▶ grace period: SIGKILL ─▶ gone from the API
```

What differs from a real one: probes for the start and for readiness are asked twice a second, whatever the
manifest says, so that tests are short; resources are not limited, and what the chart's test does not use is not known.
"""

import itertools
import shutil
import threading
import time
import traceback
from functools import partial
from pathlib import Path

from tests.kubernetes import network
from tests.kubernetes.containers import RunningContainer
from tests.kubernetes.control_plane import Api, ApiError, now
from tests.kubernetes.manifest import Manifest
from tests.kubernetes.name_server import resolv_conf
from tests.kubernetes.network import GATEWAY
from tests.kubernetes.sandbox import Container, Sandbox

PERIOD_S = 0.1
HOST_RESOURCES = {"cpu": "64", "memory": "512Gi", "pods": "110", "ephemeral-storage": "999Gi"}


class Kubelet:
    """Runs all pods of a few hosts. Use as a context manager.

    Attributes:
        problems: What a kubelet would tell as events of pods; empty is well.
    """

    def __init__(self, api: Api, directory: Path, num_hosts: int = 2) -> None:
        self._api, self._directory = api, directory
        self._hosts = [f"host-{index}" for index in range(num_hosts)]
        self._addresses = (
            f"10.244.{1 + index // 250}.{1 + index % 250}" for index in itertools.count()
        )
        self._pods: dict[str, RunningPod] = {}
        self._rules = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.problems: list[str] = []

    def __enter__(self) -> "Kubelet":
        for host in self._hosts:
            self._register(host)
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stopping.set()
        self._thread.join()
        for pod in self._pods.values():
            pod.abandon()
        for pod in self._pods.values():
            pod.join()

    def log_of(self, name: str) -> str:
        """Return what all pods of a name said."""
        files = sorted(self._directory.glob(f"{name}-*/*.log"))
        return "\n".join(f"--- {file}\n{file.read_text()}" for file in files)

    def _register(self, name: str) -> None:
        labels = {"kubernetes.io/hostname": name, "topology.kubernetes.io/zone": f"zone-of-{name}"}
        self._api.create("/api/v1/nodes", {"metadata": {"name": name, "labels": labels}})
        ready = {"type": "Ready", "status": "True", "reason": "Kubelet", "lastHeartbeatTime": now()}
        status = {
            "capacity": HOST_RESOURCES,
            "allocatable": HOST_RESOURCES,
            "conditions": [{**ready, "message": "", "lastTransitionTime": now()}],
        }
        self._api.patch(f"/api/v1/nodes/{name}/status", {"status": status})
        self._api.patch(f"/api/v1/nodes/{name}", {"spec": {"taints": None}})

    def _run(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            try:
                self._look()
            except OSError as error:  # the API server is being restarted
                self.problems.append(f"the API cannot be reached: {error}")
            except Exception:  # noqa: BLE001 - the tests look whether there was any
                self.problems.append(traceback.format_exc())

    def _look(self) -> None:
        there = {pod["metadata"]["uid"]: pod for pod in self._api.get("/api/v1/pods")["items"]}
        for uid, pod in there.items():
            if uid not in self._pods and pod["spec"].get("nodeName") in self._hosts:
                self._pods[uid] = RunningPod(
                    pod, next(self._addresses), self._api, self._directory, self.problems
                )
            if uid in self._pods and "deletionTimestamp" in pod["metadata"]:
                self._pods[uid].delete(pod["metadata"]["deletionGracePeriodSeconds"])
        for uid in [uid for uid in self._pods if uid not in there]:
            self._pods.pop(uid).abandon()
        self._serve_services()

    def _serve_services(self) -> None:
        services, endpoints = (
            self._api.get(f"/api/v1/{kind}")["items"] for kind in ("services", "endpoints")
        )
        rules = network.rules(services, endpoints)
        if rules != self._rules:
            network.apply(rules)
            self._rules = rules


class RunningPod:
    """One pod, in a thread of its own."""

    def __init__(
        self, pod: dict, address: str, api: Api, directory: Path, problems: list[str]
    ) -> None:
        self._pod, self._address, self._api, self._problems = pod, address, api, problems
        meta = pod["metadata"]
        self._name, self._namespace = meta["name"], meta["namespace"]
        self._url = f"/api/v1/namespaces/{self._namespace}/pods/{self._name}"
        self._restarts = pod["spec"]["restartPolicy"] == "Always"
        self._directory = directory / f"{self._name}-{meta['uid']}"
        self._directory.mkdir(parents=True)
        self._grace_s: float | None = None
        self._is_abandoned = False
        self._wake = threading.Event()
        self._containers: dict[str, RunningContainer] = {}
        self._told: dict = {}
        self._started_at = now()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def delete(self, grace_s: float) -> None:
        """Begin to end it. Safe to call again, with less time."""
        self._grace_s = grace_s
        self._wake.set()

    def abandon(self) -> None:
        """End it at once, without a word to the API: it is gone there."""
        self._is_abandoned = True
        self._wake.set()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        sandbox = Sandbox(self._name, self._address)
        try:
            self._live(sandbox)
        except Exception:  # noqa: BLE001 - as above
            self._problems.append(f"{self._name}: {traceback.format_exc()}")
        finally:
            for container in self._containers.values():
                container.close()
            sandbox.close()
            if not self._is_abandoned:
                self._forget()
            for volume in self._directory.glob("volumes/*"):
                shutil.rmtree(volume)

    def _live(self, sandbox: Sandbox) -> None:
        manifest = Manifest(self._pod, self._address, self._find, self._directory / "volumes")
        assert not self._pod["spec"].get("initContainers"), "no init container is known here"
        for spec in self._pod["spec"]["containers"]:
            start = partial(self._start, sandbox, manifest, spec)
            self._containers[spec["name"]] = RunningContainer(
                spec, self._address, start, restarts=self._restarts
            )
        while not self._is_ending():
            for container in self._containers.values():
                container.look()
            self._tell()
            self._wake.wait(PERIOD_S)
        self._end()

    def _is_ending(self) -> bool:
        return self._is_abandoned or self._grace_s is not None

    def _start(self, sandbox: Sandbox, manifest: Manifest, spec: dict) -> Container:
        texts = {
            "hosts": f"127.0.0.1 localhost\n{self._address} {self._name}\n",
            "resolv.conf": resolv_conf(self._namespace),
        }
        for name, text in texts.items():
            (self._directory / name).write_text(text)
        files = {f"/etc/{name}": self._directory / name for name in texts}
        plan = manifest.plan(spec, {"HOSTNAME": self._name}, files)
        return Container(sandbox, plan, self._directory / f"{spec['name']}.log")

    def _find(self, kind: str, name: str) -> dict:
        return self._api.get(f"/api/v1/namespaces/{self._namespace}/{kind}/{name}")

    def _end(self) -> None:
        if self._is_abandoned:
            return
        assert self._grace_s is not None
        deadline = time.monotonic() + self._grace_s
        ending = [
            threading.Thread(target=container.end, args=(deadline,))
            for container in self._containers.values()
        ]
        for thread in ending:
            thread.start()
        for thread in ending:
            thread.join()

    def _tell(self) -> None:
        statuses = [container.status() for container in self._containers.values()]
        ready = all(status["ready"] for status in statuses)
        ended = [status["state"].get("terminated") for status in statuses]
        phase = "Running"
        if all(ended) and not self._restarts:
            phase = "Failed" if any(state["exitCode"] for state in ended if state) else "Succeeded"
        conditions = {
            "Initialized": True,
            "PodScheduled": True,
            "ContainersReady": ready,
            "Ready": ready,
        }
        told = {"phase": phase, "containerStatuses": statuses, "ready": ready}
        if told == self._told:
            return
        status = {
            "phase": phase,
            "podIP": self._address,
            "podIPs": [{"ip": self._address}],
            "hostIP": GATEWAY,
            "startTime": self._started_at,
            "containerStatuses": statuses,
            "conditions": [
                {"type": name, "status": str(value), "lastTransitionTime": now()}
                for name, value in conditions.items()
            ],
        }
        try:
            self._api.patch(f"{self._url}/status", {"status": status})
            self._told = told
        except (ApiError, OSError) as error:
            self._problems.append(f"{self._name}: its status cannot be told: {error}")

    def _forget(self) -> None:
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": self._pod["metadata"]["uid"]}}
        try:
            self._api.delete(self._url, **options)
        except ApiError as error:
            if error.status != 404:
                self._problems.append(f"{self._name}: cannot be deleted: {error}")
