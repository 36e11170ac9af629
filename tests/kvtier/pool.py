"""A pool's pages as a tier is given them, and keys and bytes for tests."""

import random
from collections.abc import Sequence

from tandem.wire.prefixes import PageKey, PageSpace, page_keys

PAGE_BYTES = 64 << 10
SPACE = PageSpace("model", "float32", 128)


class SmallPool:
    """Knows how large a page is and gives memory; what it holds is nobody's matter here."""

    page_bytes = PAGE_BYTES

    def host_memory(self, num_bytes: int) -> memoryview:
        return memoryview(bytearray(num_bytes))

    def read(self, page_ids: Sequence[int], into: Sequence[memoryview]) -> None:
        raise AssertionError("no tier reads the pool")

    def write(self, page_ids: Sequence[int], pages: Sequence[memoryview]) -> None:
        raise AssertionError("no tier writes the pool")


def some_keys(num_pages: int, salt: str = "") -> list[PageKey]:
    return list(page_keys(SPACE, range(num_pages * SPACE.page_size), salt))


def some_pages(num_pages: int, seed: int = 0, page_bytes: int = PAGE_BYTES) -> list[memoryview]:
    draw = random.Random(seed)
    return [memoryview(draw.randbytes(page_bytes)) for _ in range(num_pages)]
