"""The random numbers of draws against the vectors that their authors published."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.philox import philox, uniforms

ONES = 0xFFFFFFFF


def words(*values: int):
    return tuple(np.array([value], np.uint64) for value in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_blocks_are_those_of_the_published_vectors(counter, key, expected):
    assert tuple(int(word[0]) for word in philox(words(*counter), words(*key))) == expected


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**40)), min_size=1))
def test_a_number_depends_on_its_seed_and_index_alone(pairs):
    seeds, indexes = (np.array(column, np.uint64) for column in zip(*pairs, strict=True))
    together = uniforms(seeds, indexes)
    alone = [uniforms(seeds[i : i + 1], indexes[i : i + 1])[0] for i in range(len(pairs))]
    assert together.tolist() == alone
    assert ((together >= 0) & (together < 1)).all()
    assert (uniforms(seeds, indexes + np.uint64(1)) != together).all()
