"""Keys of pages: equal exactly when everything that the bytes follow from is."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.wire.page_keys import KEY_BYTES, PageSpace, page_keys, shard_key
from tandem.wire.prefix_blocks import block_names

SPACE = PageSpace("llama-2layers-abc", "bfloat16", 16)
TOKENS = st.lists(st.integers(0, 2**31), max_size=300)


@given(TOKENS, st.sampled_from([1, 16, 48, 256]))
def test_the_names_of_all_blocks_are_in_the_keys_of_the_pages_they_end_in(tokens, page_size):
    keys = list(page_keys(replace(SPACE, page_size=page_size), tokens, "salt"))
    assert len(keys) == len(tokens) // page_size
    names = [name for key in keys for name in key.blocks]
    assert names == block_names(tokens[: len(keys) * page_size], "salt")


@given(TOKENS, TOKENS)
def test_two_prefixes_share_keys_as_far_as_they_share_pages(one, other):
    ours, theirs = list(page_keys(SPACE, one)), list(page_keys(SPACE, other))
    for number, (a, b) in enumerate(zip(ours, theirs, strict=False), 1):
        assert (a == b) == (one[: number * 16] == other[: number * 16])


@pytest.mark.parametrize(
    "other",
    [
        replace(SPACE, fingerprint="llama-2layers-abd"),
        replace(SPACE, kv_dtype="float8_e4m3fn"),
        replace(SPACE, page_size=8),
        replace(SPACE, shard="0/2"),
        replace(SPACE, fingerprint="llama-2layers-abcb", kv_dtype="float16"),
    ],
)
def test_nothing_of_another_model_dtype_page_size_or_shard_has_an_equal_key(other):
    tokens = list(range(16))
    assert next(page_keys(SPACE, tokens)).digest != next(page_keys(other, tokens)).digest


def test_two_tenants_share_no_key():
    tokens = list(range(64))
    ours = {key.digest for key in page_keys(SPACE, tokens, "ours")}
    assert not ours & {key.digest for key in page_keys(SPACE, tokens, "theirs")}
    assert not ours & {key.digest for key in page_keys(SPACE, tokens)}


def test_each_rank_calls_its_part_of_a_page_by_a_name_of_its_own():
    tokens = range(64)
    names = [key.digest for key in page_keys(SPACE, tokens)]
    for size in (2, 4):
        own = [key.digest for key in page_keys(replace(SPACE, shard=f"0/{size}"), tokens)]
        names += own
        for rank in range(1, size):
            names += [shard_key(digest, f"{rank}/{size}") for digest in own]
    assert len(set(names)) == len(names) == 4 * (1 + 2 + 4)
    assert {len(name) for name in names} == {KEY_BYTES}
