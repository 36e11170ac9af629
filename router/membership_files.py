"""What was said over HTTP of a router's nodes, as files that all of its edge workers read.

One small file a node, written beside and moved into place: a worker that dies in the middle leaves
nothing half, nobody waits for a lock, and a worker that starts anew finds all that was said before it.
"""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import msgspec

from tandem.router.membership import Said
from tandem.wire.errors import TandemError


class MembersUnwritable(TandemError):
    """What was said of a node cannot be kept: the disk is full, or its directory is gone."""

    code = "members_unwritable"
    status = 503
    is_retryable = True


class MemberFiles:
    """A directory of them.

    Args:
        directory: As `new_member_files` yields it.
    """

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)
        self._decoder = msgspec.json.Decoder(Said)
        self._known: dict[str, tuple[int, int, Said]] = {}

    def read(self) -> dict[str, Said]:
        """Return what was last said of each node, by its URL, in the order of those.

        Raises:
            OSError: The directory is gone.
        """
        with os.scandir(self.directory) as entries:
            names = [entry.name for entry in entries if not entry.name.startswith(".")]
        known = {}
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # taken back since the names were read
                known[name] = self._read(name)
        self._known = known
        all_said = [said for _, _, said in known.values()]
        return {said.url: said for said in sorted(all_said, key=attrgetter("url"))}

    def _read(self, name: str) -> tuple[int, int, Said]:
        path = self.directory / name
        state = os.stat(path)
        known = self._known.get(name)
        if known is not None and known[:2] == (state.st_mtime_ns, state.st_ino):
            return known
        return state.st_mtime_ns, state.st_ino, self._decoder.decode(path.read_bytes())

    def write(self, said: Said) -> None:
        """Keep what is said of a node, in place of what was said of it before.

        Raises:
            MembersUnwritable: It cannot be written.
        """
        name = _name(said.url)
        beside = self.directory / f".{name}.{os.getpid()}"
        try:
            beside.write_bytes(msgspec.json.encode(said))
            beside.replace(self.directory / name)
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise MembersUnwritable(
                f"the router cannot keep what is said of its nodes: {error.strerror}; see the "
                "space that is left where its temporary files are"
            ) from error

    def forget(self, said: Said) -> None:
        """Forget what was said of a node."""
        (self.directory / _name(said.url)).unlink(missing_ok=True)


@contextlib.contextmanager
def new_member_files() -> Iterator[MemberFiles]:
    """Make a directory, readable by this user alone; remove it on leaving."""
    with tempfile.TemporaryDirectory(prefix="tandem-nodes-", ignore_cleanup_errors=True) as made:
        yield MemberFiles(made)


def _name(url: str) -> str:
    return hashlib.blake2b(url.encode(), digest_size=16).hexdigest()
