from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tandem.vllm.halves import (
    DecodeHalves,
    First,
    Grant,
    Group,
    Pages,
    PrefillHalves,
    Reports,
    Source,
    draws_first,
    places,
    room_of,
    source_of,
)
from tandem.wire.errors import PeerLost

PAGE = 4
PLAIN = [Group(PAGE)]
WINDOW = Group(PAGE, window=6)
ROOM = 7
LOST = PeerLost("lost").info()


def granted(num: int = 1) -> Reports:
    reports = Reports()
    reports.granted["a"] = num
    return reports


def begun(num_tokens: int = 10, num_ranks: int = 1) -> PrefillHalves:
    halves = PrefillHalves(PLAIN, num_ranks)
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
    assert PrefillHalves(PLAIN).may_compute("whole")


def test_a_prompt_whose_hand_off_failed_waits_no_longer():
    halves = begun()
    halves.heard(Reports(failed={"a": LOST}))
    assert halves.may_compute("a")
    halves.computes("a", [[1, 2, 3]], 0, 10)
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
        halves.computes("a", [blocks[given_blocks:needed]], done, chunk)
        given_blocks, done = needed, done + chunk
        for pages in halves.take_orders().pushes:
            assert pages.first_page == len(pushed)
            pushed += pages.page_ids
            # Only blocks that no later chunk writes to.
            assert len(pushed) * PAGE <= done or done == num_tokens
    assert pushed == blocks[: len(pushed)]
    assert done < num_tokens or pushed == blocks
    assert halves.finished("a", 5, [blocks])
    assert halves.take_orders().computed == [(ROOM, First(5, num_cached))]


def test_tokens_behind_the_prompt_are_not_pushed():
    halves = begun(8)
    halves.computes("a", [[1, 2]], 0, 8)
    halves.take_orders()
    halves.computes("a", [[3]], 8, 1)
    assert halves.take_orders().pushes == []


def test_a_preempted_prompt_is_given_up_and_pushes_no_more():
    halves = begun()
    halves.computes("a", [[1, 2]], 0, 8)
    assert halves.take_orders().pushes == [Pages(ROOM, [1, 2], 0)]
    assert halves.preempted("a")
    assert halves.take_orders().given_up == ["a"]
    assert not halves.preempted("a")
    halves.computes("a", [[4, 5, 6]], 0, 10)
    # Held until the workers know that nothing reads its blocks.
    assert halves.finished("a", 5, [[4, 5, 6]])
    orders = halves.take_orders()
    assert (orders.pushes, orders.computed, orders.given_up) == ([], [], [])


def test_an_aborted_prompt_is_given_up_and_its_blocks_are_held():
    halves = begun()
    assert halves.finished("a", None, [[]])
    assert halves.take_orders().given_up == ["a"]


def test_a_prompt_aborted_before_any_worker_heard_of_it_leaves_nothing():
    halves = PrefillHalves(PLAIN)
    halves.begin("a", ROOM, 10)
    assert not halves.finished("a", None, [[]])
    orders = halves.take_orders()
    assert (orders.expected, orders.given_up) == ([], [])


def computed(num_ranks: int) -> PrefillHalves:
    halves = begun(3, num_ranks)
    halves.computes("a", [[1]], 0, 3)
    assert halves.finished("a", 5, [[1]])
    return halves


def test_a_prompt_is_handed_off_once_every_rank_pushed_it():
    halves, one = computed(num_ranks=2), Reports(handed_off=Counter({"a": 1}))
    assert halves.heard(one) == []
    assert halves.heard(one) == ["a"]
    assert halves.heard(Reports()) == []


def test_what_a_rank_reports_after_another_failed_is_not_kept():
    halves, one = computed(num_ranks=2), Reports(handed_off=Counter({"a": 1}))
    assert halves.heard(Reports(failed={"a": LOST})) == []
    assert halves.heard(one) == []
    assert halves.heard(one) == []


def test_reports_of_ranks_add_up():
    one, other = granted(), granted()
    other.failed["b"] = LOST
    other.landed["c"] = First(1, 2)
    other.moved_bytes = 3
    one.add(other)
    assert one.granted == {"a": 2}
    assert (one.failed, one.landed, one.moved_bytes) == ({"b": LOST}, {"c": First(1, 2)}, 3)
    assert not Reports()


def test_blocks_that_a_window_leaves_behind_are_pushed_only_once_no_more_of_them_are_freed():
    halves = PrefillHalves([Group(PAGE), WINDOW])
    halves.begin("a", ROOM, 11)
    halves.computes("a", [[1, 2], [3, 4]], 0, 8)
    assert halves.take_orders().pushes == [Pages(ROOM, [1, 2], 0)]
    halves.computes("a", [[5], [6]], 8, 3)
    assert halves.take_orders().pushes == []
    halves.finished("a", 5, [[1, 2, 5], [0, 4, 6]])
    orders = halves.take_orders()
    assert orders.last_pushes == [Pages(ROOM, [4, 5, 6], 2)]
    assert orders.computed == [(ROOM, First(5, 0))]


def test_a_prompt_whose_blocks_were_freed_too_early_is_given_up():
    halves = PrefillHalves([WINDOW])
    halves.begin("a", ROOM, 11)
    halves.take_orders()
    halves.computes("a", [[3, 4, 6]], 0, 11)
    assert halves.finished("a", 5, [[0, 0, 6]])
    orders = halves.take_orders()
    assert (orders.given_up, orders.computed, orders.last_pushes) == (["a"], [], [])


GROUPS = st.sampled_from(
    [
        Group(PAGE),
        WINDOW,
        Group(PAGE, window=9),
        Group(PAGE, chunk=8),
        Group(PAGE, window=2),
        Group(1024, window=2),
    ]
)


@given(st.lists(GROUPS, min_size=1, max_size=4), st.integers(1, 60), st.integers(0, 15), st.data())
def test_what_prefill_pushes_lands_in_the_block_of_the_same_group_and_tokens(
    groups, num_tokens, num_cached_blocks, data
):
    if any(group.block_size != PAGE for group in groups):
        num_cached_blocks = 0  # states of a whole request are not cached
    num_cached = min(num_cached_blocks, (num_tokens - 1) // PAGE) * PAGE
    whole = [-(-num_tokens // group.block_size) for group in groups]
    # The name of a block tells what it holds.
    tables = [[100 * number + i + 1 for i in range(num)] for number, num in enumerate(whole)]
    kept = [
        [0 if i < group.num_skipped(num_tokens) else block for i, block in enumerate(table)]
        for group, table in zip(groups, tables, strict=True)
    ]
    prefill, decode = PrefillHalves(groups), DecodeHalves(groups)
    prefill.begin("a", ROOM, num_tokens)
    decode.allocated("a", SOURCE, kept, num_tokens, num_tokens - num_cached)
    [grant] = decode.take_orders().grants
    pushed: list[int] = []
    done, had = 0, [0] * len(groups)
    while done < num_tokens:
        chunk = min(data.draw(st.integers(1, 20)), num_tokens - done)
        needed = [-(-(done + chunk) // group.block_size) for group in groups]
        new = [t[a:b] for t, a, b in zip(tables, had, needed, strict=True)]
        prefill.computes("a", new, done, chunk)
        done, had = done + chunk, needed
        for pages in prefill.take_orders().pushes:
            assert pages.first_page == len(pushed)
            pushed += pages.page_ids
    prefill.finished("a", 5, kept)
    for pages in prefill.take_orders().last_pushes:
        assert pages.first_page == len(pushed)
        pushed += pages.page_ids
    assert pushed[grant.num_held :] == list(grant.page_ids)
    needed_blocks = {
        tables[group][index]
        for token, group, index in places(groups, num_tokens)
        if token >= num_cached
    }
    assert needed_blocks == set(grant.page_ids)


# ── decode ───────────────────────────────────────────────────────────────────────────────────────

SOURCE = Source(ROOM, "127.0.0.1", 8998)


def test_the_blocks_of_what_is_not_cached_are_granted():
    halves = DecodeHalves(PLAIN)
    assert halves.num_external("a", SOURCE, 6) == 6
    halves.allocated("a", SOURCE, [[10, 11, 12, 13]], 10, 6)
    assert halves.take_orders().grants == [Grant("a", ROOM, "127.0.0.1", 8998, [11, 12], 1)]


def test_blocks_outside_a_sliding_window_are_not_granted():
    halves = DecodeHalves([WINDOW])
    halves.allocated("a", SOURCE, [[0, 0, 12, 13]], 15, 15)
    assert halves.take_orders().grants == [Grant("a", ROOM, "127.0.0.1", 8998, [12, 13], 0)]


def test_a_prompt_that_is_cached_here_releases_its_prefill_with_an_empty_grant():
    halves = DecodeHalves(PLAIN)
    assert halves.num_external("a", SOURCE, 0) == 0
    halves.allocated("a", SOURCE, [[10, 11, 12]], 8, 0)
    assert halves.take_orders().grants == [Grant("", ROOM, "127.0.0.1", 8998, [], 0)]


def test_a_prompt_whose_load_failed_is_not_asked_for_again():
    halves = DecodeHalves(PLAIN)
    assert halves.allocated("a", SOURCE, [[10, 11, 12]], 10, 10)
    halves.take_orders()
    assert halves.num_external("a", SOURCE, 10) == 0
    assert not halves.allocated("a", SOURCE, [[20, 21, 22]], 10, 0)
    assert halves.take_orders().grants == []


def test_a_prompt_lands_once_however_many_ranks_report_it_and_never_after_its_end():
    halves, landed = DecodeHalves(PLAIN), Reports(landed={"a": First(5, 0)})
    assert halves.heard(landed) == {}
    halves.allocated("a", SOURCE, [[10, 11, 12]], 10, 10)
    assert halves.heard(landed) == {"a": First(5, 0)}
    assert halves.heard(landed) == {}
    halves.allocated("b", SOURCE, [[13]], 3, 3)
    halves.finished("b")
    assert halves.heard(Reports(landed={"b": First(5, 0)})) == {}


def test_a_prompt_that_comes_from_nowhere_is_computed_here():
    assert DecodeHalves(PLAIN).num_external("a", None, 10) == 0


def test_the_end_of_a_request_withdraws_what_was_granted_and_nothing_else():
    halves = DecodeHalves(PLAIN)
    halves.finished("whole")
    halves.allocated("a", SOURCE, [[10, 11, 12]], 10, 10)
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
