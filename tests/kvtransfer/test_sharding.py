"""Every head of every decode rank is copied exactly once."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.kvtransfer.sharding import Shard, held_heads, pair_ranks


@st.composite
def nodes(draw):
    """Return the heads of each rank of two nodes of one model."""
    num_heads = draw(st.integers(1, 12))
    sides = []
    for _ in range(2):
        size = draw(st.integers(1, 9))
        is_split = draw(st.booleans())
        own = len(split(num_heads, size)[0]) if is_split else num_heads
        sides.append(held_heads(Shard(0, size, num_heads), own))
    return num_heads, *sides


def split(num_heads, size):
    """Return an even split, said in another way: heads dealt to ranks in turn, then put in order."""
    if size > num_heads:
        return [[rank * num_heads // size] for rank in range(size)]
    counts = Counter(i % size for i in range(num_heads))
    firsts = [sum(counts[before] for before in range(rank)) for rank in range(size)]
    return [list(range(first, first + counts[rank])) for rank, first in enumerate(firsts)]


@given(st.integers(1, 40), st.integers(1, 20))
def test_every_rank_derives_the_same_heads_of_all_ranks(num_heads, size):
    expected = split(num_heads, size)
    for rank in range(size):
        held = held_heads(Shard(rank, size, num_heads), len(expected[rank]))
        if len(expected[rank]) == num_heads and size > 1:
            assert held == [range(num_heads)] * size  # one head: split or not, each rank has it
        else:
            assert [list(heads) for heads in held] == expected


@given(nodes())
def test_every_head_of_every_destination_is_copied_once_from_a_rank_that_holds_it(problem):
    _, sources, destinations = problem
    written: Counter[tuple[int, int]] = Counter()
    for source, destination, heads in pair_ranks(sources, destinations):
        for i in range(heads.num_heads):
            head = sources[source][heads.source_first + i]
            assert head == destinations[destination][heads.destination_first + i]
            written[destination, head] += 1
    wanted = {(rank, head) for rank, held in enumerate(destinations) for head in held}
    assert written == Counter(dict.fromkeys(wanted, 1))


@given(nodes())
def test_a_pair_of_ranks_has_one_run_of_heads_and_only_idle_ranks_have_none(problem):
    _, sources, destinations = problem
    pairs = pair_ranks(sources, destinations)
    assert len({pair[:2] for pair in pairs}) == len(pairs)
    links_of = Counter(pair.source for pair in pairs)
    assert set(links_of) == set(range(len(sources)))
    for pair in pairs:
        assert pair.heads.num_heads or links_of[pair.source] == 1


@given(nodes())
def test_ranks_that_hold_the_same_heads_share_the_copies(problem):
    _, sources, destinations = problem
    copied: Counter[int] = Counter()
    for pair in pair_ranks(sources, destinations):
        copied[pair.source] += pair.heads.num_heads
    for held in set(sources):
        loads = [copied[rank] for rank, heads in enumerate(sources) if heads == held]
        assert max(loads) - min(loads) <= 1


@given(nodes())
def test_rank_0_copies_to_rank_0(problem):
    _, sources, destinations = problem
    first = pair_ranks(sources, destinations)[0]
    assert first[:2] == (0, 0)
    assert first.heads.num_heads


@given(nodes())
def test_nodes_with_equal_splits_pair_rank_with_rank_and_all_heads(problem):
    _, sources, _ = problem
    pairs = pair_ranks(sources, sources)
    assert pairs == [(r, r, (0, 0, len(held))) for r, held in enumerate(sources)]


def test_sizes_that_divide_each_other_take_the_fewest_links():
    two, four = (held_heads(Shard(0, size, 8), 8 // size) for size in (2, 4))
    assert pair_ranks(two, four) == [
        (0, 0, (0, 0, 2)),
        (0, 1, (2, 0, 2)),
        (1, 2, (0, 0, 2)),
        (1, 3, (2, 0, 2)),
    ]
    assert pair_ranks(four, two) == [
        (0, 0, (0, 0, 2)),
        (1, 0, (0, 2, 2)),
        (2, 1, (0, 0, 2)),
        (3, 1, (0, 2, 2)),
    ]


def test_idle_rank_is_paired_with_one_rank():
    heads_twice = held_heads(Shard(0, 4, 2), 1)  # 0 0 1 1
    assert pair_ranks(heads_twice, [range(2)]) == [
        (0, 0, (0, 0, 1)),
        (1, 0, (0, 0, 0)),
        (2, 0, (0, 1, 1)),
        (3, 0, (0, 0, 0)),
    ]


@pytest.mark.parametrize(
    ("shard", "own", "fault"),
    [
        (Shard(2, 2, 8), 4, "rank 2 is not one of 2 ranks"),
        (Shard(0, 2, 8), 3, "holds 3 of 8 KV heads; its share is 4"),
        (Shard(2, 3, 8), 3, "rank 2 of 3 holds 3 of 8 KV heads; its share is 2"),
        (Shard(0, 16, 8), 2, "its share is 1"),
    ],
)
def test_invalid_rank_is_named_in_the_error(shard, own, fault):
    with pytest.raises(ValueError, match=fault):
        held_heads(shard, own)
