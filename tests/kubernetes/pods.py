"""Pods that nothing runs: what the API server knows of them is all there is."""

from tests.kubernetes.control_plane import Api, now

RELEASE = "it"


class Pods:
    """Makes pods of one namespace and tells what a kubelet would tell of them."""

    def __init__(self, api: Api, namespace: str) -> None:
        self._api, self._url = api, f"/api/v1/namespaces/{namespace}/pods"

    def create(self, name: str, role: str) -> None:
        """Make a scheduled pod with the chart's labels and ports, in which nothing runs yet."""
        ports = [
            {"name": "bootstrap", "containerPort": 8998},
            {"name": "http", "containerPort": 7000},
        ]
        labels = {"name": "tandem", "instance": RELEASE, "component": role}
        pod = {
            "metadata": {
                "name": name,
                "labels": {f"app.kubernetes.io/{key}": value for key, value in labels.items()},
            },
            "spec": {
                "nodeName": "nowhere",
                "automountServiceAccountToken": False,
                "containers": [{"name": role, "image": "tandem", "ports": ports}],
            },
        }
        self._api.create(self._url, pod)

    def run(self, name: str, address: str, *, ready: bool = True) -> None:
        conditions = [
            {"type": kind, "status": str(ready), "lastTransitionTime": now()}
            for kind in ("Ready", "ContainersReady")
        ]
        status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}
        self._api.patch(
            f"{self._url}/{name}/status", {"status": {**status, "conditions": conditions}}
        )

    def delete(self, name: str) -> dict:
        """Have it told to end; it stays until `forget`. Returns what is known of it."""
        self._api.delete(f"{self._url}/{name}", gracePeriodSeconds=600)
        return self._api.get(f"{self._url}/{name}")

    def forget(self, name: str) -> None:
        self._api.delete(f"{self._url}/{name}", gracePeriodSeconds=0)
