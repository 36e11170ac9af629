"""A pool without a device, page keys, and a tier that a test controls."""

import itertools
import select
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence

from tandem.kvtier.memory import Loan
from tandem.kvtier.stack import TierEvent, TierStack
from tandem.kvtier.tier import NEVER_S, TierFailed
from tandem.wire.channel import Waker
from tandem.wire.messages import TierLoad
from tandem.wire.prefixes import PageKey, PageSpace, PrefixJournal, page_keys
from tests.patience import PATIENCE_S

PAGE_SIZE = 64
PAGE_BYTES = 256
SPACE = PageSpace("model", "bfloat16", PAGE_SIZE)


def keys(num: int, first_token: int = 0, salt: str = "") -> list[PageKey]:
    """Return the keys of a prefix's pages."""
    return list(page_keys(SPACE, range(first_token, first_token + num * PAGE_SIZE), salt))


def content(key: PageKey, page_bytes: int = PAGE_BYTES) -> bytes:
    """Return the content of a page with this key."""
    return (key.digest * (page_bytes // len(key.digest) + 1))[:page_bytes]


def views(of: Sequence[PageKey], page_bytes: int = PAGE_BYTES) -> list[memoryview]:
    return [memoryview(bytearray(content(key, page_bytes))) for key in of]


class FakePool:
    """Pages in plain memory."""

    def __init__(self, num_pages: int = 64, page_bytes: int = PAGE_BYTES) -> None:
        self.page_bytes = page_bytes
        self.pages = [bytearray(page_bytes) for _ in range(num_pages)]
        self.before_write: Callable[[], None] = lambda: None
        self.before_read: Callable[[], None] = lambda: None
        self.num_host_bytes = 0

    def read(self, page_ids: Sequence[int], into: Sequence[memoryview]) -> None:
        self.before_read()
        for page_id, view in zip(page_ids, into, strict=True):
            view[:] = self.pages[page_id]

    def write(self, page_ids: Sequence[int], pages: Sequence[memoryview]) -> None:
        self.before_write()
        for page_id, view in zip(page_ids, pages, strict=True):
            self.pages[page_id][:] = view

    def host_memory(self, num_bytes: int) -> memoryview:
        self.num_host_bytes += num_bytes
        return memoryview(bytearray(num_bytes))

    def fill(self, of: Sequence[PageKey]) -> list[int]:
        """Write the content of the keys' pages into the pool; return the page ids."""
        for page_id, key in enumerate(of):
            self.pages[page_id][:] = content(key, self.page_bytes)
        return list(range(len(of)))


class FakeTier:
    """A tier backed by a dictionary. `before` gets the name of each call, and may block or raise."""

    lends_own_memory = False

    def __init__(self, name: str, page_bytes: int = PAGE_BYTES) -> None:
        self.name = name
        self.journal = PrefixJournal()
        self.store: dict[bytes, bytes] = {}
        self.num_calls = Counter[str]()
        self.before: Callable[[str], None] = lambda call: None
        self.num_open = 0
        self.was_put = threading.Event()
        self.is_closed = False
        self.page_bytes = page_bytes

    def keep(self, of: Sequence[PageKey]) -> None:
        self.store |= {key.digest: content(key, self.page_bytes) for key in of}

    def get(self, of: Sequence[PageKey], deadline_s: float = NEVER_S) -> Loan:
        self._called("get")
        here = list(itertools.takewhile(lambda key: key.digest in self.store, of))
        self.num_open += 1
        return Loan([memoryview(bytearray(self.store[key.digest])) for key in here], self._end)

    def _end(self) -> None:
        self.num_open -= 1

    def put(self, of: Sequence[PageKey], pages: Sequence[memoryview]) -> int:
        self._called("put")
        new = [key for key in of if key.digest not in self.store]
        self.store |= {key.digest: bytes(page) for key, page in zip(of, pages, strict=True)}
        self.was_put.set()
        return len(new)

    def load(self) -> TierLoad:
        return TierLoad(name=self.name, num_pages=len(self.store))

    def close(self) -> None:
        self.is_closed = True

    def _called(self, call: str) -> None:
        self.num_calls[call] += 1
        self.before(call)


class Hanging:
    """Makes the calls with these names block until `end`."""

    def __init__(self, tier: FakeTier, *names: str) -> None:
        self.begun, self._go = threading.Event(), threading.Event()
        self._names = names
        tier.before = self._wait

    def end(self) -> None:
        self._go.set()

    def _wait(self, name: str) -> None:
        if name in self._names:
            self.begun.set()
            assert self._go.wait(PATIENCE_S)


def failing(tier: FakeTier, error: BaseException | None = None) -> None:
    """Make all further calls fail."""

    def fail(_: str) -> None:
        raise error or TierFailed("away")

    tier.before = fail


class Rig:
    """A stack with its pool and its events."""

    def __init__(self, *tiers: FakeTier, timeout_s: float = PATIENCE_S, max_pages: int = 64):
        self.pool, self.waker = FakePool(), Waker()
        self._reported = deque[TierEvent]()
        self.stack = TierStack(
            tiers,
            self.pool,
            self._report,
            timeout_s=timeout_s,
            max_staged_bytes=2 * max_pages * PAGE_BYTES,
            page_size=PAGE_SIZE,
        )

    def _report(self, event: TierEvent) -> None:
        self._reported.append(event)
        self.waker.wake()

    def events(self) -> list[TierEvent]:
        """Return the events since the last call."""
        return [self._reported.popleft() for _ in range(len(self._reported))]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stack.close()
        self.waker.close()

    def next(self):
        """Wait on the waker for the next event, and return it."""
        while not self._reported:
            assert select.select([self.waker], [], [], PATIENCE_S)[0], "nothing was reported"
            self.waker.clear()
        return self._reported.popleft()

    def has_more(self) -> bool:
        return bool(self._reported)

    def fetch(self, of: Sequence[PageKey], number: int = 1):
        self.stack.fetch(number, of)
        return self.next()
