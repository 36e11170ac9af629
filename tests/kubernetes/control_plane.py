"""A real control plane: etcd, API server, controller manager and scheduler, in this network namespace.

```
 etcd ◀── kube-apiserver ◀── kube-controller-manager, kube-scheduler, kubectl, helm, kubelet.py, name_server.py
```

It takes no nodes and runs no pods: `kubelet.py` does.
"""

import datetime as dt
import json
import os
import ssl
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

from tests.kubernetes.network import GATEWAY, SERVICE_RANGE
from tests.patience import eventually, until

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
        self.kubeconfig.write_text(json.dumps(self._kubeconfig()))
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

        def is_ready() -> bool:
            assert self._running["kube-apiserver"].poll() is None, self.log("kube-apiserver")
            return self._is_ready()

        assert eventually(is_ready, within_s=START_TIMEOUT_S), self.log("kube-apiserver")

    def stop(self) -> None:
        for name in reversed(tuple(self._running)):
            self._stop(name)

    def log(self, name: str) -> str:
        return (self._directory / f"{name}.log").read_text()[-4000:]

    @property
    def admin(self) -> Api:
        return Api(self.url, self.authority, ADMIN_TOKEN)

    def wait_for_account(self, namespace: str) -> None:
        """Wait for the namespace's default account, without which no pod can be made."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts"
        until(
            lambda: any(account.get("secrets") for account in self.admin.get(path)["items"]),
            what=f"no account in {namespace}",
        )

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

    def _kubeconfig(self) -> dict:
        cluster = {"server": self.url, "certificate-authority": str(self.authority)}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "here", "cluster": cluster}],
            "users": [{"name": "who", "user": {"token": ADMIN_TOKEN}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "who"}}],
            "current-context": "here",
        }

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
