"""Entries of pages as commands of Redis, packed. Pure."""

from collections.abc import Sequence

from tandem.kvtier.entry import HEADER_BYTES, entry_header
from tandem.wire.page_keys import PageKey

KEY_PREFIX = b"tandem:kv:1:"
STORE_KEY = b"tandem:kv:store"


def command(*parts: bytes) -> bytes:
    """Pack a command that carries no page."""
    return b"*%d\r\n" % len(parts) + b"".join(_packed(part) for part in parts)


def entry_key(key: PageKey) -> bytes:
    """Return under which name a page is kept."""
    return KEY_PREFIX + key.digest.hex().encode()


class EntryCommands:
    """What is sent for one page.

    Args:
        ttl_s: How long an entry stays that nobody asks for; 0: as long as the server keeps it.
    """

    def __init__(self, ttl_s: int) -> None:
        self._ttl = b"%d" % ttl_s if ttl_s else b""

    @property
    def has_two_replies(self) -> bool:
        """Whether `get` and `length` are answered by one more reply behind theirs."""
        return bool(self._ttl)

    def get(self, key: PageKey) -> bytes:
        """Ask for an entry, and let it stay for another while."""
        return command(b"GET", entry_key(key)) + self._stay(key)

    def length(self, key: PageKey) -> bytes:
        """Ask how long an entry is, which marks it as used, and let it stay for another while."""
        return command(b"STRLEN", entry_key(key)) + self._stay(key)

    def set(self, key: PageKey, page: memoryview) -> Sequence[bytes | memoryview]:
        """Return the parts of what writes an entry; the page is not copied."""
        options = [b"EX", self._ttl] if self._ttl else []
        words = (b"SET", entry_key(key))
        head = b"*%d\r\n" % (len(words) + 1 + len(options)) + b"".join(map(_packed, words))
        head += b"$%d\r\n" % (HEADER_BYTES + page.nbytes) + entry_header(key, page)
        return head, page, b"\r\n" + b"".join(map(_packed, options))

    def _stay(self, key: PageKey) -> bytes:
        return command(b"EXPIRE", entry_key(key), self._ttl) if self._ttl else b""


def _packed(part: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(part), part)
