"""Answers `GET /query` of proxies that were written for vLLM's MooncakeConnector; see `wire/generation.py`."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import msgspec
from typing_extensions import override

from tandem.wire.errors import ConfigInvalid
from tandem.wire.generation import query_answer
from tandem.wire.hosts import reason_of

# A client that sends no request within this time is disconnected.
_TIMEOUT_S = 10.0


class QueryServer:
    """The HTTP server of `GET /query` in vLLM's process.

    Raises:
        ConfigInvalid: The port is in use.
    """

    def __init__(self, host: str, port: int, bootstrap_port: int) -> None:
        body = msgspec.json.encode(query_answer(host, bootstrap_port))

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
