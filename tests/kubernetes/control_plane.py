"""A real control plane: etcd, API server, controller manager and scheduler, in this network namespace.

```
 etcd ◀── kube-apiserver ◀── kube-controller-manager, kube-scheduler, kubectl, helm, kubelet.py, routers
```

It takes no nodes and runs no pods: `kubelet.py` does.
"""

import datetime as dt
import json
import os
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.kubernetes.network import GATEWAY, SERVICE_RANGE
from tests.patience import PATIENCE_S

API_PORT = 16443
ADMIN_TOKEN = "admin-of-these-tests"
ETCD = "http://127.0.0.1:12379"
START_TIMEOUT_S = 600
# Those that say nothing of a cluster without real hosts.
CONTROLLERS = "*,-ttl,-nodelifecycle,-nodeipam,-bootstrapsigner,-tokencleaner"


def now() -> str:
    """Return the time as the API writes it."""
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class ApiError(Exception):
    """The API server answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Api:
    """Asks the API server, as whoever bears `token`."""

    def __init__(self, url: str, authority: Path, token: str) -> None:
        self.url, self.authority, self._token = url, authority, token
        self._tls = ssl.create_default_context(cafile=str(authority))

    def ask(self, method: str, path: str, body=None, media="application/json") -> dict:
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": media}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30, context=self._tls) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            with error:
                raise ApiError(error.code, error.read().decode()) from None

    def get(self, path: str) -> dict:
        return self.ask("GET", path)

    def create(self, path: str, body: dict) -> dict:
        return self.ask("POST", path, body)

    def patch(self, path: str, body: dict) -> dict:
        return self.ask("PATCH", path, body, "application/strategic-merge-patch+json")

    def delete(self, path: str, **options) -> dict:
        return self.ask("DELETE", path, options or None)


class ControlPlane:
    """The programs of one control plane.

    Args:
        programs: Directory of them; etcd and kubectl may be elsewhere in the path.
        directory: For all that they write.
    """

    def __init__(self, programs: Path, directory: Path) -> None:
        self._programs, self._directory = programs, directory
        self._running: dict[str, subprocess.Popen] = {}
        self.url = f"https://{GATEWAY}:{API_PORT}"
        self.authority = directory / "certs" / "apiserver.crt"
        self.kubeconfig = directory / "kubeconfig"
        self._env = {
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "KUBECONFIG": str(self.kubeconfig),
            "HOME": str(directory),  # helm and kubectl keep caches there
        }

    def start(self) -> None:
        directory = self._directory
        (directory / "tokens.csv").write_text(f'{ADMIN_TOKEN},admin,admin,"system:masters"\n')
        self._command("openssl", "genrsa", "-out", str(directory / "sa.key"), "2048")
        self.kubeconfig.write_text(json.dumps(self._kubeconfig(ADMIN_TOKEN)))
        self._start(
            "etcd",
            *("--data-dir", str(directory / "etcd"), "--unsafe-no-fsync", "--log-level", "warn"),
            *("--listen-client-urls", ETCD, "--advertise-client-urls", ETCD),
            *("--listen-peer-urls", "http://127.0.0.1:12380"),
            *("--initial-advertise-peer-urls", "http://127.0.0.1:12380"),
            *("--initial-cluster", "default=http://127.0.0.1:12380"),
        )
        self._start_api_server()
        key = str(directory / "sa.key")
        own = (
            f"--kubeconfig={self.kubeconfig}",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
        )
        self._start(
            "kube-controller-manager",
            *(*own, "--port=0", "--secure-port=16257", f"--controllers={CONTROLLERS}"),
            *(f"--service-account-private-key-file={key}", f"--root-ca-file={self.authority}"),
            "--use-service-account-credentials=false",
        )
        self._start("kube-scheduler", *own, "--port=0", "--secure-port=16259")

    def _start_api_server(self) -> None:
        directory = self._directory
        self._start(
            "kube-apiserver",
            *(f"--etcd-servers={ETCD}", f"--bind-address={GATEWAY}", f"--secure-port={API_PORT}"),
            *(f"--advertise-address={GATEWAY}", "--insecure-port=0"),
            *(f"--cert-dir={self.authority.parent}", "--authorization-mode=RBAC"),
            *(
                f"--token-auth-file={directory}/tokens.csv",
                f"--service-cluster-ip-range={SERVICE_RANGE}",
            ),
            "--service-account-issuer=https://kubernetes.default.svc",
            *(f"--service-account-{use}-file={directory}/sa.key" for use in ("key", "signing-key")),
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._is_ready():
            assert time.monotonic() < deadline, self.log("kube-apiserver")
            assert self._running["kube-apiserver"].poll() is None, self.log("kube-apiserver")
            time.sleep(0.1)  # another process's state

    def stop(self) -> None:
        for name in reversed(tuple(self._running)):
            self._stop(name)

    def log(self, name: str) -> str:
        return (self._directory / f"{name}.log").read_text()[-4000:]

    @property
    def admin(self) -> Api:
        return self.as_who_bears(ADMIN_TOKEN)

    def as_who_bears(self, token: str) -> Api:
        return Api(self.url, self.authority, token)

    def service_account(self, namespace: str, name: str) -> Path:
        """Return a directory with the files that Kubernetes gives to the account's pods."""
        secret = self._token_of(namespace, name)
        directory = self._directory / "accounts" / namespace / name
        directory.mkdir(parents=True, exist_ok=True)
        for entry in ("token", "ca.crt", "namespace"):
            text = self.kubectl(
                *("get", "secret", secret, "--namespace", namespace),
                *("--output", f'go-template={{{{index .data "{entry}" | base64decode}}}}'),
            )
            (directory / entry).write_text(text)
        return directory

    def _token_of(self, namespace: str, name: str) -> str:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            path = f"/api/v1/namespaces/{namespace}/serviceaccounts"
            accounts = {one["metadata"]["name"]: one for one in self.admin.get(path)["items"]}
            if secrets := accounts.get(name, {}).get("secrets"):
                return secrets[0]["name"]
            time.sleep(0.1)  # the controller manager's work
        raise AssertionError(f"no token for {name}")

    def kubectl(self, *argv: str, text: str | None = None) -> str:
        return self._command("kubectl", *argv, text=text)

    def environment(self) -> dict[str, str]:
        """Return what a client of this control plane is started with."""
        return self._env

    def _is_ready(self) -> bool:
        try:
            request = urllib.request.Request(f"{self.url}/readyz")
            request.add_header("Authorization", f"Bearer {ADMIN_TOKEN}")
            tls = ssl.create_default_context(cafile=str(self.authority))
            with urllib.request.urlopen(request, timeout=2, context=tls) as response:
                return response.status == 200
        except OSError:  # not there, not ready, or without a certificate yet
            return False

    def _kubeconfig(self, token: str) -> dict:
        cluster = {"server": self.url, "certificate-authority": str(self.authority)}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "here", "cluster": cluster}],
            "users": [{"name": "who", "user": {"token": token}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "who"}}],
            "current-context": "here",
        }

    def kubeconfig_of(self, token: str) -> Path:
        """Write a kubeconfig of another user."""
        file = self._directory / f"kubeconfig-{abs(hash(token))}"
        file.write_text(json.dumps(self._kubeconfig(token)))
        return file

    def _start(self, program: str, *argv: str) -> None:
        with (self._directory / f"{program}.log").open("a") as log:
            self._running[program] = subprocess.Popen(
                [program, *argv], stdout=log, stderr=log, env=self._env, cwd=self._directory
            )

    def _stop(self, name: str) -> None:
        process = self._running.pop(name)
        process.kill()  # it would wait for the watches of others
        process.wait()

    def _command(self, *argv: str, text: str | None = None) -> str:
        done = subprocess.run(
            argv, input=text, capture_output=True, text=True, env=self._env, check=False
        )
        assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}{done.stdout}"
        return done.stdout
