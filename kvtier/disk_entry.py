"""One page as a file: how it is laid out, written whole or not at all, and looked over when read.

```
 0       8        12       16       24        56          72    128
 │ magic │ version │ header │ length │ key     │ xxh3-128  │ 0s  │ bytes of the page ...
```

All numbers are little-endian. Nothing is synced: what a power cut leaves of a file does not pass for a page.
"""

import errno
import os
import secrets
import stat
import struct
from collections.abc import Sequence
from contextlib import suppress

import xxhash

FORMAT_VERSION = 1
Checksum = xxhash.xxh3_128
HEADER_BYTES = 128
_MAGIC = b"TANDEMKV"
_HEADER = struct.Struct("<8sIIQ32s16s")
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# What opening a file says of a link that leads elsewhere, of one that we may not read, of a socket.
_NOT_OURS = {errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO}
# Read, then hashed while a core's cache has it: hashing costs a third of the speed else, and so a seventh.
# Smaller ones cost more calls than they save (2 MiB pages, 1 MiB of L2 cache).
PIECE_BYTES = 512 << 10
TEMPORARY = "."  # begins the names of files that are being written


class EntryCorrupted(Exception):
    """A file is not the page that its name says."""


def read_entry(directory: int, name: str, digest: bytes, into: memoryview) -> float:
    """Read a page straight into memory; return when it was last used, as the file system has it.

    Args:
        directory: Descriptor of the directory that the file is in.
        into: As long as the page.

    Raises:
        FileNotFoundError: It is not there.
        EntryCorrupted: It is there, and is not that page or cannot be read.
        OSError: The file system does not answer as it should.
    """
    try:
        # Not blocking: of a pipe by this name nobody may ever open the other end.
        file = os.open(name, _READ_FLAGS, dir_fd=directory)
    except OSError as error:
        if error.errno in _NOT_OURS:
            raise EntryCorrupted(error.strerror) from error
        raise
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise EntryCorrupted("no regular file")
        if status.st_size != HEADER_BYTES + len(into):
            raise EntryCorrupted(f"{status.st_size} bytes long")
        _read_all(file, digest, into)
        return status.st_mtime
    finally:
        os.close(file)


def write_entry(directory: int, name: str, digest: bytes, page: memoryview) -> None:
    """Write a page under its name, in place of what is there.

    Raises:
        OSError: It was not; nothing is left of it.
    """
    checksum = Checksum(page).digest()
    header = _HEADER.pack(_MAGIC, FORMAT_VERSION, HEADER_BYTES, len(page), digest, checksum)
    write_file(directory, name, [memoryview(header.ljust(HEADER_BYTES, b"\0")), page])


def write_file(directory: int, name: str, parts: Sequence[memoryview]) -> None:
    """Write a file by another name first, so that no half of one is ever seen.

    Raises:
        OSError: It was not written; nothing is left of it.
    """
    temporary = write_temporary(directory, parts)
    try:
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        remove(directory, temporary)
        raise


def write_temporary(directory: int, parts: Sequence[memoryview]) -> str:
    """Write a file that only its user can read; return its name.

    Raises:
        OSError: It was not written; nothing is left of it.
    """
    name = TEMPORARY + secrets.token_hex(16)
    file = os.open(name, _WRITE_FLAGS, 0o600, dir_fd=directory)
    try:
        try:
            _write_all(file, list(parts))
        finally:
            os.close(file)  # where NFS says that the disk is full
    except OSError:
        remove(directory, name)
        raise
    return name


def remove(directory: int, name: str) -> bool:
    """Remove a file or link, not what it leads to; return whether it is gone by this call."""
    with suppress(OSError):
        os.unlink(name, dir_fd=directory)
        return True
    return False


def _read_all(file: int, digest: bytes, into: memoryview) -> None:
    header = bytearray(HEADER_BYTES)
    checksum = Checksum()
    try:
        _read_exactly(file, [memoryview(header), into[:PIECE_BYTES]], 0)
        expected = _checksum_of(header, digest, len(into))
        checksum.update(into[:PIECE_BYTES])
        for first in range(PIECE_BYTES, len(into), PIECE_BYTES):
            piece = into[first : first + PIECE_BYTES]
            _read_exactly(file, [piece], HEADER_BYTES + first)
            checksum.update(piece)
    except OSError as error:
        if error.errno == errno.EIO:  # a bad sector
            raise EntryCorrupted(error.strerror) from error
        if error.errno == errno.ESTALE:  # removed by another node of an NFS since it was opened
            raise FileNotFoundError(errno.ENOENT, error.strerror) from error
        raise
    if checksum.digest() != expected:
        raise EntryCorrupted("its bytes have another checksum")


def _checksum_of(header: bytearray, digest: bytes, num_bytes: int) -> bytes:
    """Return the checksum that a header tells."""
    magic, version, header_bytes, length, key, checksum = _HEADER.unpack_from(header)
    if (magic, version, header_bytes, length) != (_MAGIC, FORMAT_VERSION, HEADER_BYTES, num_bytes):
        raise EntryCorrupted("its header is none of ours")
    if key != digest:
        raise EntryCorrupted("it is another page")
    return bytes(checksum)


def _read_exactly(file: int, parts: list[memoryview], offset: int) -> None:
    while parts:
        count = os.preadv(file, parts, offset)
        if not count:
            raise EntryCorrupted(f"ends after {offset} bytes")
        offset += count
        parts = _rest(parts, count)


def _write_all(file: int, parts: list[memoryview]) -> None:
    while parts:
        parts = _rest(parts, os.writev(file, parts))


def _rest(parts: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of some memory behind its first bytes."""
    rest = []
    for part in parts:
        if len(part) > count:
            rest.append(part[count:])
        count = max(0, count - len(part))
    return rest
