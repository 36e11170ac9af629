"""Which pieces of memory are kept for the next time."""

import pytest

from tandem.kvtier.page_memory import PageMemory


@pytest.mark.parametrize(("kept_bytes", "num_made"), [(None, 5), (50, 5), (30, 7), (0, 9)])
def test_pieces_that_are_kept_are_not_made_again(kept_bytes, num_made):
    made = []

    def make(num_bytes):
        made.append(num_bytes)
        return memoryview(bytearray(num_bytes))

    memory = PageMemory(make, 10, kept_bytes)
    for _ in range(2):
        memory.give_back([memory.take() for _ in range(5)])
    assert made == [10] * num_made
