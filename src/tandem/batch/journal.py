"""Results as they come, in a file beside the output, so that a command that dies goes on where it was.

```
 {"journal": "tandem.batch/1", "run": ..., "sha256": ..., "num_requests": ...}
 CRC32 NUMBER RESULT            a line each; the CRC is of what follows it
```

A line that is not whole, or not what its checksum says, does not count: its request is sent again. The last
one may be so when the machine or the disk gave up in the middle of it; it is cut off when the file is opened.
Held in memory are eight bytes for each request.
"""

import contextlib
import fcntl
import os
import secrets
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Self

import msgspec

from tandem.wire.errors import ConfigInvalid

SCHEMA = "tandem.batch/1"
NOT_DONE = 0  # the header is at 0


class JournalUnfit(ConfigInvalid):
    """There is a journal, and it is not of what is asked for."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first line.

    Attributes:
        run: Hex digits that make the ids of results unique.
        sha256: Of the input.
    """

    journal: str
    run: str
    sha256: str
    num_requests: int


class Journal:
    """An open journal, which no other process writes.

    Attributes:
        num_done: Results that are in it.
        num_corrupt: Lines that were not what was written, the torn last one not counted.
    """

    def __init__(self, path: Path, file: BinaryIO, header: Header) -> None:
        self.path, self._file = path, file
        self.run = header.run
        self.num_done = self.num_corrupt = 0
        self._offsets = array("Q", bytes(8 * header.num_requests))
        self._end = file.tell()

    @classmethod
    def open(
        cls, path: Path, sha256: str, num_requests: int, *, is_restarted: bool = False
    ) -> Self:
        """Open the journal of an input, or begin it.

        Args:
            is_restarted: Throw away what it has, whatever it is of.

        Raises:
            JournalUnfit: It is another input's, no journal, or in use.
            OSError: It cannot be written.
        """
        fresh = Header(
            journal=SCHEMA, run=secrets.token_hex(8), sha256=sha256, num_requests=num_requests
        )
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)
        try:
            _lock(file, path)
            first = b"" if is_restarted else file.readline()
            if not first.endswith(b"\n"):  # begun now, or it died before it had written as much
                file.seek(0)
                file.truncate()
                _write(file, msgspec.json.encode(fresh) + b"\n")
                _sync_folder(path)
                return cls(path, file, fresh)
            journal = cls(path, file, _checked(first, path, fresh))
            journal._read_on()
        except BaseException:
            file.close()
            raise
        return journal

    def _read_on(self) -> None:
        """Take in what is there, and cut off what is not whole."""
        with self.path.open("rb") as lines:
            lines.seek(self._end)
            for line in lines:
                number = _number(line, len(self._offsets))
                if number is None:
                    self.num_corrupt += line.endswith(b"\n")
                else:
                    self.num_done += not self.is_done(number)
                    self._offsets[number] = self._end
                if line.endswith(b"\n"):
                    self._end += len(line)
        self._file.seek(self._end)
        self._file.truncate()

    def is_done(self, number: int) -> bool:
        """Whether there is a result."""
        return self._offsets[number] != NOT_DONE

    def append(self, number: int, result: bytes) -> None:
        """Write a result; it outlives this process at once, and the machine after `sync`.

        Raises:
            OSError: It could not be written, and nothing of it is there.
        """
        told = b"%d %s" % (number, result)
        line = b"%08x %s\n" % (zlib.crc32(told), told)
        try:
            _write(self._file, line)
        except OSError:
            with contextlib.suppress(OSError):  # else it is cut off when it is opened
                self._file.seek(self._end)
                self._file.truncate()
            raise
        self._offsets[number] = self._end
        self._end += len(line)
        self.num_done += 1

    def sync(self) -> None:
        """Have the disk hold what was appended.

        Raises:
            OSError: It does not.
        """
        os.fsync(self._file.fileno())

    def results(self) -> Iterator[bytes]:
        """Give the results in the order of their numbers."""
        with self.path.open("rb") as lines:
            for offset in self._offsets:
                lines.seek(offset)
                yield lines.readline().split(b" ", 2)[2]

    def close(self) -> None:
        """Close it; another process may open it."""
        self._file.close()

    def remove(self) -> None:
        """Forget it: what it held is elsewhere."""
        self.path.unlink()


def _lock(file: BinaryIO, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise JournalUnfit(f"{path} is in use: another tandem batch writes it now") from error
    if not path.exists() or not os.path.samestat(path.stat(), os.fstat(file.fileno())):
        raise JournalUnfit(f"{path} was in use until now: look at what the other command says")


def _checked(first: bytes, path: Path, fresh: Header) -> Header:
    try:
        header = msgspec.json.decode(first, type=Header)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise JournalUnfit(
            f"{path} is no journal of tandem batch: move it away, or give another -o"
        ) from error
    if header.journal != SCHEMA:
        raise JournalUnfit(
            f"{path} is of another release ({header.journal}): finish with that one, or begin again with "
            "--restart"
        )
    if (header.sha256, header.num_requests) != (fresh.sha256, fresh.num_requests):
        raise JournalUnfit(
            f"{path} has results of another input, or of this one before it was changed: put that one back to "
            "go on, give another -o, or begin again with --restart, which throws them away"
        )
    return header


def _number(line: bytes, num_requests: int) -> int | None:
    """Return whose result a line is; None: it is not what was written."""
    crc, _, told = line.removesuffix(b"\n").partition(b" ")
    try:
        if not line.endswith(b"\n") or int(crc, 16) != zlib.crc32(told):
            return None
        number = int(told.partition(b" ")[0])
    except ValueError:
        return None
    return number if number < num_requests else None


def _write(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _sync_folder(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_outputs(
    results: Iterable[bytes], output: Path, errors: Path | None, is_ok: Callable[[bytes], bool]
) -> None:
    """Write results to the output, or what failed of them to a file of its own; whole, or not at all.

    Args:
        is_ok: Called once with each result.

    Raises:
        OSError: One could not be written; what was there before is.
    """
    partial = {path: path.with_name(f"{path.name}.partial") for path in (errors, output) if path}
    try:
        with contextlib.ExitStack() as stack:
            files = {path: stack.enter_context(name.open("wb")) for path, name in partial.items()}
            good = files[output]
            bad = files[errors] if errors else good
            for result in results:
                (good if is_ok(result) else bad).write(result)
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())
        for path, name in partial.items():
            name.replace(path)
            _sync_folder(path)
    except OSError:
        for name in partial.values():
            name.unlink(missing_ok=True)
        raise
