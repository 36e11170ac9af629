"""A stand-in for the Hugging Face Hub on loopback: the few routes that `huggingface_hub` downloads models with."""

import contextlib
import hashlib
import http.server
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.patience import PATIENCE_S


@dataclass
class Repository:
    """Files by name in a commit for each revision; `token` is what a gated repository requires."""

    commits: dict[str, dict[str, bytes]]
    token: str = ""

    def commit(self, revision: str) -> str | None:
        """Return the hash of a revision, which may be one."""
        named = {self._hash(files): files for files in self.commits.values()}
        files = self.commits.get(revision)
        return revision if revision in named else None if files is None else self._hash(files)

    def files(self, commit: str) -> dict[str, bytes]:
        return next(files for files in self.commits.values() if self._hash(files) == commit)

    @staticmethod
    def _hash(files: dict[str, bytes]) -> str:
        return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


@dataclass
class Hub:
    """What the stand-in has, and what it was asked for.

    Attributes:
        breaks: Names of files whose next reader loses its connection halfway.
        pauses: Events for which it waits halfway through files, by their names.
        gets: How often each file was begun.
        num_resolved: How often the commit of a revision was asked for.
        status: Answers everything with this status; 0: does not.
    """

    repositories: dict[str, Repository] = field(default_factory=dict)
    breaks: set[str] = field(default_factory=set)
    pauses: dict[str, threading.Event] = field(default_factory=dict)
    gets: Counter = field(default_factory=Counter)
    num_resolved: int = 0
    status: int = 0
    url: str = ""

    def add(self, name: str, files: dict[str, bytes], revision: str = "main", token: str = ""):
        repository = self.repositories.setdefault(name, Repository({}, token))
        repository.commits[revision] = files

    def add_directory(self, name: str, directory: Path, *, without: tuple[str, ...] = (), **more):
        files = {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}
        self.add(name, {n: data for n, data in files.items() if n not in without}, **more)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if self.hub.status:
            return self.answer(b"", status=self.hub.status)
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/(.+)", path):
            return self.listing(found[1], found[2], found[3])
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        return self.file(found[1], found[2], found[3]) if found else self.failure(404, "")

    def listing(self, name: str, kind: str, revision: str) -> None:
        self.hub.num_resolved += kind == "revision"
        repository = self.hub.repositories.get(name)
        if repository is None:
            return self.failure(404, "RepoNotFound")
        commit = repository.commit(revision)
        if commit is None:
            return self.failure(404, "RevisionNotFound")
        files = repository.files(commit)
        tree = [
            {"type": "file", "path": path, "size": len(data), "oid": _etag(data)}
            for path, data in files.items()
        ]
        siblings = [{"rfilename": path} for path in files]
        told = tree if kind == "tree" else {"id": name, "sha": commit, "siblings": siblings}
        return self.answer(json.dumps(told).encode(), {"Content-Type": "application/json"})

    def file(self, name: str, revision: str, path: str) -> None:
        repository = self.hub.repositories[name]
        if repository.token and self.headers.get("Authorization") != f"Bearer {repository.token}":
            return self.failure(403, "GatedRepo")
        commit = repository.commit(revision)
        assert commit is not None
        data = repository.files(commit)[path]
        facts = {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": commit}
        if self.command == "GET":
            self.hub.gets[path] += 1
        return self.answer(data, facts, path=path)

    def failure(self, status: int, code: str) -> None:
        self.answer(b"{}", {"X-Error-Code": code} if code else {}, status=status)

    def answer(
        self,
        data: bytes,
        headers: dict[str, str] | None = None,
        *,
        status: int = 200,
        path: str = "",
    ) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        half = len(data) // 2
        self.wfile.write(data[:half])
        if path in self.hub.breaks:
            self.hub.breaks.remove(path)
            self.close_connection = True
            return
        if path in self.hub.pauses:
            self.hub.pauses[path].wait(PATIENCE_S)
        with contextlib.suppress(ConnectionError):  # a reader that was stopped
            self.wfile.write(data[half:])

    def log_message(self, *_args) -> None:
        pass


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextlib.contextmanager
def serving_hub() -> Iterator[Hub]:
    """Serve a hub without repositories until the end of the block."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
