"""Pages of a realistic size, and their keys."""

import random

from tandem.wire.prefixes import PageKey, PageSpace, page_keys
from tests.kvtier.fakes import FakePool

PAGE_BYTES = 64 << 10
SPACE = PageSpace("model", "float32", 128)


class SmallPool(FakePool):
    """A pool without pages, for stores whose pages never come from a pool."""

    def __init__(self) -> None:
        super().__init__(0, PAGE_BYTES)


def some_keys(num_pages: int, salt: str = "") -> list[PageKey]:
    return list(page_keys(SPACE, range(num_pages * SPACE.page_size), salt))


def some_pages(num_pages: int, seed: int = 0, page_bytes: int = PAGE_BYTES) -> list[memoryview]:
    draw = random.Random(seed)
    return [memoryview(draw.randbytes(page_bytes)) for _ in range(num_pages)]
