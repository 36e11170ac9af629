"""Answers proxies that were written for vLLM's MooncakeConnector: `GET /query` names prefill's engine.

```
 proxy ── GET /query ──▶ prefill: {"0": {"engine_id": "tandem:8998", "worker_addr": {"0": {"0": "10.0.0.1:8998"}}}}
       ── transfer_id ──▶ prefill
       ── transfer_id, remote_bootstrap_addr, remote_engine_id ──▶ decode, which connects to that port of that host
```
"""

import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import urlsplit

import msgspec
import xxhash
from typing_extensions import override

from tandem.wire.errors import ConfigInvalid
from tandem.wire.generation import NUM_ROOMS, Room
from tandem.wire.hosts import reason_of

_NAME = "tandem"
# A client that sends no request within this time is disconnected.
_TIMEOUT_S = 10.0


class QueryServer:
    """The HTTP server of `GET /query` in vLLM's process.

    Raises:
        ConfigInvalid: The port is in use.
    """

    def __init__(self, host: str, port: int, bootstrap_port: int) -> None:
        workers = {"0": {"0": f"{host}:{bootstrap_port}"}}
        answer = {"0": {"engine_id": f"{_NAME}:{bootstrap_port}", "worker_addr": workers}}
        body = msgspec.json.encode(answer)

        class Handler(BaseHTTPRequestHandler):
            timeout: ClassVar[float | None] = _TIMEOUT_S

            def do_GET(self) -> None:
                is_query = self.path == "/query"
                self.send_response(200 if is_query else 404)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body) if is_query else 0))
                self.end_headers()
                if is_query:
                    self.wfile.write(body)

            @override
            def log_message(self, *_args: object) -> None:
                """Log nothing."""

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise ConfigInvalid(
                f"query_port {port} cannot be opened on {host}: {reason_of(error)}; set a free one"
            ) from error
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="kv-query", daemon=True).start()

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()


def room_of_transfer(transfer_id: str) -> Room:
    """Return the room that both halves of a transfer use."""
    return Room(xxhash.xxh3_64_intdigest(transfer_id.encode(errors="replace")) % NUM_ROOMS)


def address_of(params: Mapping[str, object]) -> tuple[str, int] | None:
    """Return host and bootstrap port of prefill, as `GET /query` named them; None if they are invalid."""
    match params:
        case {"remote_bootstrap_addr": str(url), "remote_engine_id": str(engine)}:
            name, _, port = engine.rpartition(":")
            try:
                host = urlsplit(url).hostname
            except ValueError:
                return None
            is_ours = host and name == _NAME and port.isascii() and port.isdigit()
            return (host, int(port)) if host and is_ours else None
        case _:
            return None
