"""Reads an input file: once to its end before anything is sent, and then again, a line at a time.

Held for each line are eight bytes, a hash of its `custom_id`, so that a name that is there twice is found
among millions; lines whose hashes are equal are read again.
"""

import hashlib
import os
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from tandem.batch.values import BatchRequest, LineInvalid, read_request
from tandem.wire.errors import ConfigInvalid

NUM_SHOWN = 20


@dataclass(slots=True)
class Examined:
    """What an input file is.

    Attributes:
        num_requests: Lines that are requests. They are numbered from 0, without the others.
        num_invalid: Lines that are none.
        invalid: The first of them, each with its line number and what is wrong.
        sha256: Of the whole file, in hex.
    """

    num_requests: int = 0
    num_invalid: int = 0
    invalid: list[str] = field(default_factory=list)
    sha256: str = ""

    def refuse(self, line: int, reason: str) -> None:
        """Note a line that is no request."""
        self.num_invalid += 1
        if len(self.invalid) < NUM_SHOWN:
            self.invalid.append(f"line {line}: {reason}")

    @property
    def told(self) -> str:
        """The invalid lines, for people."""
        more = self.num_invalid - len(self.invalid)
        return "\n".join([*self.invalid, *([f"and {more} more"] if more else [])])


class InputFile:
    """An open input file.

    Args:
        max_line_bytes: Longer lines are invalid, and are not held in memory.

    Raises:
        ConfigInvalid: It cannot be read, or only once.
    """

    def __init__(self, path: Path, max_line_bytes: int) -> None:
        self._path, self._max = path, max_line_bytes
        try:
            self._file: BinaryIO = path.open("rb")
        except OSError as error:
            raise ConfigInvalid(f"{path}: {error.strerror}") from error
        if not self._file.seekable():
            self._file.close()
            raise ConfigInvalid(f"{path} can be read only once: save it as a file first")
        self._was = self._stamp()

    def close(self) -> None:
        """Close it."""
        self._file.close()

    def examine(self, tell: Callable[[int], None] = lambda num_bytes: None) -> Examined:
        """Read all of it.

        Args:
            tell: Called now and then with how many bytes were read.

        Raises:
            ConfigInvalid: It cannot be read, or two lines have the same `custom_id`.
        """
        found, digest, hashes = Examined(), hashlib.sha256(), array("Q")
        for line, content in self._lines(digest.update, tell):
            try:
                request = self._request(content, 0)
            except LineInvalid as error:
                found.refuse(line, str(error))
                continue
            hashes.append(xxhash.xxh3_64_intdigest(request.custom_id.encode()))
            found.num_requests += 1
        found.sha256 = digest.hexdigest()
        self._refuse_duplicates(hashes)
        return found

    def requests(self, is_wanted: Callable[[int], bool]) -> Iterator[BatchRequest]:
        """Give the requests whose numbers are wanted, in order, each with its number.

        Raises:
            ConfigInvalid: The file was written to since it was opened: numbers may be of other requests.
        """
        number = 0
        for _, content in self._lines():
            if self._stamp() != self._was:
                raise ConfigInvalid(
                    f"{self._path} was written to while it was sent: put it back as it was to go on, or begin "
                    "again with --restart"
                )
            try:
                request = self._request(content, number)
            except LineInvalid:
                continue
            if is_wanted(number):
                yield request
            number += 1

    def _stamp(self) -> tuple[int, int]:
        """Return what changes when the file is written to."""
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns

    def _request(self, content: bytes, number: int) -> BatchRequest:
        if len(content) > self._max:
            raise LineInvalid(
                f"longer than {self._max} bytes: shorten it, or raise --max-line-bytes and the server's "
                "--max-body-bytes"
            )
        return read_request(content, number)

    def _lines(
        self,
        update: Callable[[bytes], object] = lambda data: None,
        tell: Callable[[int], None] = lambda num_bytes: None,
    ) -> Iterator[tuple[int, bytes]]:
        """Give each line that is not blank with its number from 1; of one too long, its beginning."""
        self._file.seek(0)
        line = num_bytes = 0
        while content := self._file.readline(self._max + 2):
            line += 1
            update(content)
            num_bytes += len(content)
            rest = content
            while not rest.endswith(b"\n") and (rest := self._file.readline(1 << 20)):
                update(rest)
                num_bytes += len(rest)
            if line % 1000 == 0:
                tell(num_bytes)
            if content := content.strip():
                yield line, content

    def _refuse_duplicates(self, hashes: "array[int]") -> None:
        """Find names that are there twice.

        Raises:
            ConfigInvalid: There is one.
        """
        order = np.sort(np.frombuffer(hashes, np.uint64)) if hashes else np.empty(0, np.uint64)
        suspects = set(order[1:][order[1:] == order[:-1]].tolist())
        if not suspects:
            return
        first: dict[str, int] = {}
        for line, content in self._lines():
            try:
                name = self._request(content, 0).custom_id
            except LineInvalid:
                continue
            if xxhash.xxh3_64_intdigest(name.encode()) not in suspects:
                continue
            if name in first:
                raise ConfigInvalid(
                    f"{self._path}: lines {first[name]} and {line} have the same custom_id {name!r}: give each "
                    "request a name of its own"
                )
            first[name] = line
