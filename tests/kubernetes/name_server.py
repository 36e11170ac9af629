"""The cluster's name server: the addresses of Services over UDP, as CoreDNS answers.

```
 headless Service ─▶ an A record for each address of its Endpoints
 other Service ────▶ an A record of its cluster IP
```

A Service without addresses, and any other name, is NXDOMAIN. There are no AAAA records.
"""

import socket
import socketserver
import struct
import threading

from tests.kubernetes.control_plane import Api, ApiError
from tests.kubernetes.network import GATEWAY

DOMAIN = "cluster.local"
TTL_S = 5
TYPE_A, CLASS_IN = 1, 1
SERVER_FAILURE, NO_SUCH_NAME = 2, 3
IS_ANSWER = 0x8400  # and authoritative


def resolv_conf(namespace: str) -> str:
    """Return the resolver configuration of a namespace's pods."""
    search = f"{namespace}.svc.{DOMAIN} svc.{DOMAIN} {DOMAIN}"
    return f"nameserver {GATEWAY}\nsearch {search}\noptions ndots:5\n"


class NameServer(socketserver.ThreadingUDPServer):
    """Serves the names of one cluster, each answer fresh from its API. Use as a context manager."""

    def __init__(self, api: Api) -> None:
        super().__init__((GATEWAY, 53), _Handler)
        self._api = api
        self._thread = threading.Thread(target=self.serve_forever)

    def __enter__(self) -> "NameServer":
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def addresses(self, name: str) -> list[str]:
        """Return the IPv4 addresses of a Service's full name; none for any other name."""
        suffix = f".svc.{DOMAIN}"
        service, _, namespace = name.removesuffix(suffix).partition(".")
        if not name.endswith(suffix) or not namespace or "." in namespace:
            return []
        root = f"/api/v1/namespaces/{namespace}"
        try:
            address = self._api.get(f"{root}/services/{service}")["spec"]["clusterIP"]
            if address != "None":
                return [address]
            subsets = self._api.get(f"{root}/endpoints/{service}").get("subsets") or []
        except ApiError as error:
            if error.status == 404:
                return []
            raise
        return [one["ip"] for subset in subsets for one in subset.get("addresses") or []]


class _Handler(socketserver.BaseRequestHandler):
    server: NameServer

    def handle(self) -> None:
        query, sock = self.request
        labels, at = [], 12
        while size := query[at]:
            labels.append(query[at + 1 : at + 1 + size].decode())
            at += 1 + size
        kind, _ = struct.unpack_from(">HH", query, at + 1)
        try:
            found = self.server.addresses(".".join(labels).lower())
            status = 0 if found else NO_SUCH_NAME
        except (ApiError, OSError):
            found, status = [], SERVER_FAILURE
        records = [
            b"\xc0\x0c" + struct.pack(">HHIH", TYPE_A, CLASS_IN, TTL_S, 4) + socket.inet_aton(one)
            for one in (found if kind == TYPE_A else ())
        ]
        header = struct.pack(">HHHHH", IS_ANSWER | status, 1, len(records), 0, 0)
        answer = query[:2] + header + query[12 : at + 5] + b"".join(records)
        sock.sendto(answer, self.client_address)
