from hypothesis import given
from hypothesis import strategies as st

from tandem.vllm.halves import (
    DecodeHalves,
    First,
    Grant,
    Pages,
    PrefillHalves,
    Reports,
    Source,
    draws_first,
    room_of,
    source_of,
)
from tandem.wire.errors import PeerLost

PAGE = 4
ROOM = 7
LOST = PeerLost("lost").info()


def granted(num: int = 1) -> Reports:
    reports = Reports()
    reports.granted["a"] = num
    return reports


def begun(num_tokens: int = 10, num_ranks: int = 1) -> PrefillHalves:
    halves = PrefillHalves(PAGE, num_ranks)
    halves.begin("a", ROOM, num_tokens)
    assert halves.take_orders().expected == [("a", ROOM)]
    return halves


# ── prefill ──────────────────────────────────────────────────────────────────────────────────────


def test_a_prompt_is_computed_once_every_rank_heard_of_its_grant():
    halves = begun(num_ranks=2)
    assert not halves.may_compute("a")
    halves.heard(granted())
    assert not halves.may_compute("a")
    halves.heard(granted())
    assert halves.may_compute("a")


def test_a_prompt_that_goes_nowhere_is_computed_at_once():
    assert PrefillHalves(PAGE).may_compute("whole")


def test_a_prompt_whose_hand_off_failed_waits_no_longer():
    halves = begun()
    halves.heard(Reports(failed={"a": LOST}))
    assert halves.may_compute("a")
    halves.computes("a", [1, 2, 3], 0, 10)
    assert halves.take_orders().pushes == []


@given(
    st.integers(1, 40),
    st.lists(st.integers(1, 12), min_size=40, max_size=40),
    st.integers(0, 40),
)
def test_the_chunks_of_a_prompt_push_each_of_its_blocks_once_and_in_order(
    num_tokens, chunks, num_cached
):
    num_cached = min(num_cached // PAGE * PAGE, (num_tokens - 1) // PAGE * PAGE)
    halves, num_blocks = begun(num_tokens), -(-num_tokens // PAGE)
    blocks = list(range(100, 100 + num_blocks))
    pushed, done, given_blocks = [], num_cached, 0
    for size in chunks:
        if done == num_tokens:
            break
        chunk = min(size, num_tokens - done)
        needed = -(-(done + chunk) // PAGE)
        halves.computes("a", blocks[given_blocks:needed], done, chunk)
        given_blocks, done = needed, done + chunk
        for pages in halves.take_orders().pushes:
            assert pages.first_page == len(pushed)
            pushed += pages.page_ids
            # Only blocks that no later chunk writes to.
            assert len(pushed) * PAGE <= done or done == num_tokens
    assert pushed == blocks[: len(pushed)]
    assert done < num_tokens or pushed == blocks
    assert halves.finished("a", 5)
    assert halves.take_orders().computed == [(ROOM, First(5, num_cached))]


def test_tokens_behind_the_prompt_are_not_pushed():
    halves = begun(8)
    halves.computes("a", [1, 2], 0, 8)
    halves.take_orders()
    halves.computes("a", [3], 8, 1)
    assert halves.take_orders().pushes == []


def test_a_preempted_prompt_is_given_up_and_pushes_no_more():
    halves = begun()
    halves.computes("a", [1, 2], 0, 8)
    assert halves.take_orders().pushes == [Pages(ROOM, [1, 2], 0)]
    assert halves.preempted("a")
    assert halves.take_orders().given_up == ["a"]
    assert not halves.preempted("a")
    halves.computes("a", [4, 5, 6], 0, 10)
    assert halves.finished("a", 5)  # held until the workers know that nothing reads its blocks
    orders = halves.take_orders()
    assert (orders.pushes, orders.computed, orders.given_up) == ([], [], [])


def test_an_aborted_prompt_is_given_up_and_its_blocks_are_held():
    halves = begun()
    assert halves.finished("a", None)
    assert halves.take_orders().given_up == ["a"]


def test_a_prompt_aborted_before_any_worker_heard_of_it_leaves_nothing():
    halves = PrefillHalves(PAGE)
    halves.begin("a", ROOM, 10)
    assert not halves.finished("a", None)
    orders = halves.take_orders()
    assert (orders.expected, orders.given_up) == ([], [])


def test_a_prompt_is_handed_off_once_every_rank_pushed_it():
    halves = begun(num_ranks=2)
    one = Reports()
    one.handed_off["a"] = 1
    assert halves.heard(one) == []
    assert halves.heard(one) == ["a"]
    assert halves.heard(Reports()) == []


def test_reports_of_ranks_add_up():
    one, other = granted(), granted()
    other.failed["b"] = LOST
    other.landed["c"] = First(1, 2)
    other.moved_bytes = 3
    one.add(other)
    assert one.granted == {"a": 2}
    assert (one.failed, one.landed, one.moved_bytes) == ({"b": LOST}, {"c": First(1, 2)}, 3)
    assert not Reports()


# ── decode ───────────────────────────────────────────────────────────────────────────────────────

SOURCE = Source(ROOM, "127.0.0.1", 8998)


def test_the_blocks_of_what_is_not_cached_are_granted():
    halves = DecodeHalves(PAGE)
    assert halves.num_external("a", SOURCE, 6) == 6
    halves.allocated("a", SOURCE, [10, 11, 12, 13], 10, 6)
    assert halves.take_orders().grants == [Grant("a", ROOM, "127.0.0.1", 8998, [11, 12], 4)]


def test_blocks_outside_a_sliding_window_are_not_granted():
    halves = DecodeHalves(PAGE)
    halves.allocated("a", SOURCE, [0, 0, 12, 13], 15, 15)
    assert halves.take_orders().grants == [Grant("a", ROOM, "127.0.0.1", 8998, [12, 13], 8)]


def test_a_prompt_that_is_cached_here_releases_its_prefill_with_an_empty_grant():
    halves = DecodeHalves(PAGE)
    assert halves.num_external("a", SOURCE, 0) == 0
    halves.allocated("a", SOURCE, [10, 11, 12], 8, 0)
    assert halves.take_orders().grants == [Grant("", ROOM, "127.0.0.1", 8998, [], 8)]


def test_a_prompt_whose_load_failed_is_not_asked_for_again():
    halves = DecodeHalves(PAGE)
    assert halves.allocated("a", SOURCE, [10, 11, 12], 10, 10)
    halves.take_orders()
    assert halves.num_external("a", SOURCE, 10) == 0
    assert not halves.allocated("a", SOURCE, [20, 21, 22], 10, 0)
    assert halves.take_orders().grants == []


def test_a_prompt_that_comes_from_nowhere_is_computed_here():
    assert DecodeHalves(PAGE).num_external("a", None, 10) == 0


def test_the_end_of_a_request_withdraws_what_was_granted_and_nothing_else():
    halves = DecodeHalves(PAGE)
    halves.finished("whole")
    halves.allocated("a", SOURCE, [10, 11, 12], 10, 10)
    halves.finished("a")
    assert halves.take_orders().given_up == ["a"]
    halves.finished("a")
    assert halves.take_orders().given_up == []


def test_only_whole_parameters_name_a_source():
    whole = {"bootstrap_room": ROOM, "bootstrap_host": "127.0.0.1", "bootstrap_port": 8998}
    assert source_of(whole) == SOURCE
    for name in whole:
        assert source_of({key: value for key, value in whole.items() if key != name}) is None
    assert source_of(None) is None
    assert room_of({"bootstrap_room": ROOM}) == ROOM
    assert room_of({"bootstrap_room": "7"}) is None
    assert not draws_first({"draws_first": "yes"})
    assert draws_first({"draws_first": True})
