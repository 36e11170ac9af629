from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.vllm.hand_offs import (
    BlockGrant,
    DecodeHandOffs,
    FirstToken,
    LayerGroup,
    Pages,
    PrefillHandOffs,
    PromptSource,
    WorkerReports,
    draws_first,
    places,
    room_of,
    source_of,
    waits_for_grant,
)
from tandem.wire.errors import PeerLost
from tandem.wire.generation import TokenLogprobs

PAGE = 4
PLAIN = [LayerGroup(PAGE)]
WINDOW = LayerGroup(PAGE, window=6)
ROOM = 7
LOST = PeerLost("lost").info()


def granted(num: int = 1) -> WorkerReports:
    reports = WorkerReports()
    reports.granted["a"] = num
    return reports


def begun(num_tokens: int = 10, num_ranks: int = 1) -> PrefillHandOffs:
    hand_offs = PrefillHandOffs(PLAIN, num_ranks)
    hand_offs.begin("a", ROOM, num_tokens)
    assert hand_offs.take_orders().expected == [("a", ROOM)]
    return hand_offs


# ── prefill ──────────────────────────────────────────────────────────────────────────────────────


def test_prompt_is_computed_once_every_rank_has_the_grant():
    hand_offs = begun(num_ranks=2)
    assert not hand_offs.may_compute("a")
    hand_offs.on_reports(granted())
    assert not hand_offs.may_compute("a")
    hand_offs.on_reports(granted())
    assert hand_offs.may_compute("a")


def test_prompt_that_needs_no_grant_is_computed_immediately_and_its_blocks_are_held():
    hand_offs = PrefillHandOffs(PLAIN)
    hand_offs.begin("a", ROOM, 10, waits_for_grant=False)
    assert hand_offs.may_compute("a")
    hand_offs.take_orders()
    hand_offs.on_scheduled("a", [[1, 2, 3]], 0, 10)
    assert hand_offs.take_orders().pushes == [Pages(ROOM, [1, 2, 3], 0)]
    assert hand_offs.on_finished("a", range(11), [[1, 2, 3]])


def test_prompt_that_needs_no_grant_does_not_replace_the_blocks_of_its_room():
    hand_offs = PrefillHandOffs(PLAIN)
    hand_offs.begin("a", ROOM, 10, waits_for_grant=False)
    hand_offs.on_scheduled("a", [[1, 2, 3]], 0, 10)

    def try_again():
        hand_offs.take_orders()
        hand_offs.begin("b", ROOM, 10, waits_for_grant=False)
        assert hand_offs.may_compute("b")
        hand_offs.on_scheduled("b", [[4, 5, 6]], 0, 10)
        orders = hand_offs.take_orders()
        assert orders.expected == orders.pushes == []
        assert not hand_offs.on_finished("b", range(11), [[4, 5, 6]])

    try_again()
    assert hand_offs.on_finished("a", range(11), [[1, 2, 3]])
    try_again()
    assert hand_offs.on_reports(WorkerReports(handed_off=Counter("a"))) == ["a"]
    hand_offs.begin("b", ROOM, 10, waits_for_grant=False)
    assert hand_offs.take_orders().expected == [("b", ROOM)]


@pytest.mark.parametrize(
    ("params", "does_wait"),
    [
        (None, True),
        ({"bootstrap_room": 3}, True),
        ({"transfer_id": "x"}, False),
        ({"transfer_id": "x", "waits_for_grant": True}, True),
        ({"bootstrap_room": 3, "waits_for_grant": False}, False),
    ],
)
def test_transfers_of_mooncake_connector_need_no_grant(params, does_wait):
    assert waits_for_grant(params) == does_wait


def test_prompt_without_hand_off_is_computed_immediately():
    assert PrefillHandOffs(PLAIN).may_compute("whole")


def test_prompt_with_failed_hand_off_stops_waiting():
    hand_offs = begun()
    hand_offs.on_reports(WorkerReports(failed={"a": LOST}))
    assert hand_offs.may_compute("a")
    hand_offs.on_scheduled("a", [[1, 2, 3]], 0, 10)
    assert hand_offs.take_orders().pushes == []


@given(
    st.integers(1, 40),
    st.lists(st.integers(1, 12), min_size=40, max_size=40),
    st.integers(0, 40),
)
def test_chunked_prefill_pushes_each_block_once_in_order(num_tokens, chunks, num_cached):
    num_cached = min(num_cached // PAGE * PAGE, (num_tokens - 1) // PAGE * PAGE)
    hand_offs, num_blocks = begun(num_tokens), -(-num_tokens // PAGE)
    blocks = list(range(100, 100 + num_blocks))
    pushed, done, given_blocks = [], num_cached, 0
    for size in chunks:
        if done == num_tokens:
            break
        chunk = min(size, num_tokens - done)
        needed = -(-(done + chunk) // PAGE)
        hand_offs.on_scheduled("a", [blocks[given_blocks:needed]], done, chunk)
        given_blocks, done = needed, done + chunk
        for pages in hand_offs.take_orders().pushes:
            assert pages.first_page == len(pushed)
            pushed += pages.page_ids
            # Only blocks that later chunks do not write to.
            assert len(pushed) * PAGE <= done or done == num_tokens
    assert pushed == blocks[: len(pushed)]
    assert done < num_tokens or pushed == blocks
    assert hand_offs.on_finished("a", [0] * num_tokens + [5], [blocks])
    assert hand_offs.take_orders().computed == {"a": (ROOM, FirstToken(5, num_cached))}


def test_tokens_after_the_prompt_are_not_pushed():
    hand_offs = begun(8)
    hand_offs.on_scheduled("a", [[1, 2]], 0, 8)
    hand_offs.take_orders()
    hand_offs.on_scheduled("a", [[3]], 8, 1)
    assert hand_offs.take_orders().pushes == []


def test_preempted_prompt_is_pushed_again_from_its_first_block():
    hand_offs = begun()
    hand_offs.on_scheduled("a", [[1, 2]], 0, 8)
    assert hand_offs.take_orders().pushes == [Pages(ROOM, [1, 2], 0)]
    hand_offs.on_preempted("a")
    hand_offs.on_preempted("unknown")
    orders = hand_offs.take_orders()
    assert (orders.recalled, orders.pushes, orders.cancelled) == ([ROOM], [], [])
    hand_offs.on_scheduled("a", [[4, 5, 6]], 0, 10)
    assert hand_offs.take_orders().pushes == [Pages(ROOM, [4, 5, 6], 0)]
    assert hand_offs.on_finished("a", [0] * 10 + [5], [[4, 5, 6]])
    assert hand_offs.take_orders().computed == {"a": (ROOM, FirstToken(5, 0))}


def test_preempted_prompt_whose_hand_off_is_over_recalls_nothing():
    hand_offs = begun()
    hand_offs.on_reports(WorkerReports(failed={"a": LOST}))
    hand_offs.on_preempted("a")
    assert hand_offs.take_orders().recalled == []


def test_aborted_prompt_is_cancelled_and_its_blocks_are_held():
    hand_offs = begun()
    assert hand_offs.on_finished("a", [0] * 10, [[]])
    assert hand_offs.take_orders().cancelled == ["a"]


def test_prompt_aborted_before_workers_know_it_leaves_no_orders():
    hand_offs = PrefillHandOffs(PLAIN)
    hand_offs.begin("a", ROOM, 10)
    assert not hand_offs.on_finished("a", [0] * 10, [[]])
    orders = hand_offs.take_orders()
    assert (orders.expected, orders.cancelled) == ([], [])


def test_log_probabilities_follow_the_first_token():
    hand_offs, logprobs = begun(3), TokenLogprobs(logprob=-0.5)
    hand_offs.on_scheduled("a", [[1]], 0, 3)
    hand_offs.on_finished("a", [0, 0, 0, 5], [[1]])
    hand_offs.add_logprobs("a", logprobs)
    hand_offs.add_logprobs("unknown", logprobs)
    first = FirstToken(5, 0, logprobs=logprobs)
    assert hand_offs.take_orders().computed == {"a": (ROOM, first)}


def computed(num_ranks: int) -> PrefillHandOffs:
    hand_offs = begun(3, num_ranks)
    hand_offs.on_scheduled("a", [[1]], 0, 3)
    assert hand_offs.on_finished("a", [0, 0, 0, 5], [[1]])
    return hand_offs


def test_prompt_is_handed_off_once_every_rank_has_pushed():
    hand_offs, one = computed(num_ranks=2), WorkerReports(handed_off=Counter({"a": 1}))
    assert hand_offs.on_reports(one) == []
    assert hand_offs.on_reports(one) == ["a"]
    assert hand_offs.on_reports(WorkerReports()) == []


def test_reports_after_a_failure_on_another_rank_are_dropped():
    hand_offs, one = computed(num_ranks=2), WorkerReports(handed_off=Counter({"a": 1}))
    assert hand_offs.on_reports(WorkerReports(failed={"a": LOST})) == []
    assert hand_offs.on_reports(one) == []
    assert hand_offs.on_reports(one) == []


def test_rank_reports_are_summed():
    one, other = granted(), granted()
    other.failed["b"] = LOST
    other.landed["c"] = FirstToken(1, 2)
    other.moved_bytes = 3
    one.add(other)
    assert one.granted == {"a": 2}
    assert (one.failed, one.landed, one.moved_bytes) == ({"b": LOST}, {"c": FirstToken(1, 2)}, 3)
    assert not WorkerReports()


def test_sliding_window_blocks_are_pushed_when_the_prompt_finishes():
    hand_offs = PrefillHandOffs([LayerGroup(PAGE), WINDOW])
    hand_offs.begin("a", ROOM, 11)
    hand_offs.on_scheduled("a", [[1, 2], [3, 4]], 0, 8)
    assert hand_offs.take_orders().pushes == [Pages(ROOM, [1, 2], 0)]
    hand_offs.on_scheduled("a", [[5], [6]], 8, 3)
    assert hand_offs.take_orders().pushes == []
    hand_offs.on_finished("a", [0] * 11 + [5], [[1, 2, 5], [0, 4, 6]])
    orders = hand_offs.take_orders()
    assert orders.last_pushes == [Pages(ROOM, [4, 5, 6], 2)]
    assert orders.computed == {"a": (ROOM, FirstToken(5, 0))}


def test_block_is_skipped_once_the_window_of_the_next_token_begins_after_it():
    group = LayerGroup(4, window=4)
    assert [group.num_skipped(num_tokens) for num_tokens in (6, 7, 10, 11)] == [0, 1, 1, 2]


def test_prompt_with_prematurely_freed_blocks_is_cancelled():
    hand_offs = PrefillHandOffs([WINDOW])
    hand_offs.begin("a", ROOM, 11)
    hand_offs.take_orders()
    hand_offs.on_scheduled("a", [[3, 4, 6]], 0, 11)
    assert hand_offs.on_finished("a", [0] * 11 + [5], [[0, 0, 6]])
    orders = hand_offs.take_orders()
    assert (orders.cancelled, orders.computed, orders.last_pushes) == (["a"], {}, [])


GROUPS = st.sampled_from(
    [
        LayerGroup(PAGE),
        WINDOW,
        LayerGroup(PAGE, window=9),
        LayerGroup(PAGE, chunk=8),
        LayerGroup(PAGE, window=2),
        LayerGroup(1024, window=2),
    ]
)


@given(st.lists(GROUPS, min_size=1, max_size=4), st.integers(1, 60), st.integers(0, 15), st.data())
def test_pushed_blocks_land_in_the_same_group_and_position(
    groups, num_tokens, num_cached_blocks, data
):
    if any(group.block_size != PAGE for group in groups):
        num_cached_blocks = 0  # recurrent state at the end of a request is not cached
    num_cached = min(num_cached_blocks, (num_tokens - 1) // PAGE) * PAGE
    whole = [-(-num_tokens // group.block_size) for group in groups]
    # The block's name encodes its group and tokens.
    tables = [[100 * number + i + 1 for i in range(num)] for number, num in enumerate(whole)]
    kept = [
        [0 if i < group.num_skipped(num_tokens) else block for i, block in enumerate(table)]
        for group, table in zip(groups, tables, strict=True)
    ]
    prefill, decode = PrefillHandOffs(groups), DecodeHandOffs(groups)
    prefill.begin("a", ROOM, num_tokens)
    decode.on_allocated("a", SOURCE, kept, num_tokens, num_tokens - num_cached)
    [grant] = decode.take_orders().grants
    pushed: list[int] = []
    done, had = 0, [0] * len(groups)
    while done < num_tokens:
        chunk = min(data.draw(st.integers(1, 20)), num_tokens - done)
        needed = [-(-(done + chunk) // group.block_size) for group in groups]
        new = [t[a:b] for t, a, b in zip(tables, had, needed, strict=True)]
        prefill.on_scheduled("a", new, done, chunk)
        done, had = done + chunk, needed
        for pages in prefill.take_orders().pushes:
            assert pages.first_page == len(pushed)
            pushed += pages.page_ids
    prefill.on_finished("a", [0] * num_tokens + [5], kept)
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

SOURCE = PromptSource(ROOM, "127.0.0.1", 8998)


def test_only_uncached_blocks_are_granted():
    hand_offs = DecodeHandOffs(PLAIN)
    assert hand_offs.num_external("a", SOURCE, 6) == 6
    hand_offs.on_allocated("a", SOURCE, [[10, 11, 12, 13]], 10, 6)
    assert hand_offs.take_orders().grants == [BlockGrant("a", ROOM, "127.0.0.1", 8998, [11, 12], 1)]


def test_blocks_outside_a_sliding_window_are_not_granted():
    hand_offs = DecodeHandOffs([WINDOW])
    hand_offs.on_allocated("a", SOURCE, [[0, 0, 12, 13]], 15, 15)
    assert hand_offs.take_orders().grants == [BlockGrant("a", ROOM, "127.0.0.1", 8998, [12, 13], 0)]


def test_fully_cached_prompt_sends_an_empty_grant():
    hand_offs = DecodeHandOffs(PLAIN)
    assert hand_offs.num_external("a", SOURCE, 0) == 0
    hand_offs.on_allocated("a", SOURCE, [[10, 11, 12]], 8, 0)
    assert hand_offs.take_orders().grants == [BlockGrant("", ROOM, "127.0.0.1", 8998, [], 0)]


def test_failed_prompt_is_not_granted_again():
    hand_offs = DecodeHandOffs(PLAIN)
    assert hand_offs.on_allocated("a", SOURCE, [[10, 11, 12]], 10, 10)
    hand_offs.take_orders()
    assert hand_offs.num_external("a", SOURCE, 10) == 0
    assert not hand_offs.on_allocated("a", SOURCE, [[20, 21, 22]], 10, 0)
    assert hand_offs.take_orders().grants == []


def test_prompt_lands_once_for_all_ranks_and_never_after_its_end():
    hand_offs, landed = DecodeHandOffs(PLAIN), WorkerReports(landed={"a": FirstToken(5, 0)})
    assert hand_offs.on_reports(landed) == {}
    hand_offs.on_allocated("a", SOURCE, [[10, 11, 12]], 10, 10)
    assert hand_offs.on_reports(landed) == {"a": FirstToken(5, 0)}
    assert hand_offs.on_reports(landed) == {}
    hand_offs.on_allocated("b", SOURCE, [[13]], 3, 3)
    hand_offs.on_finished("b")
    assert hand_offs.on_reports(WorkerReports(landed={"b": FirstToken(5, 0)})) == {}


def test_prompt_without_source_is_computed_locally():
    assert DecodeHandOffs(PLAIN).num_external("a", None, 10) == 0


def test_finished_request_withdraws_only_its_own_grant():
    hand_offs = DecodeHandOffs(PLAIN)
    hand_offs.on_finished("whole")
    hand_offs.on_allocated("a", SOURCE, [[10, 11, 12]], 10, 10)
    hand_offs.on_finished("a")
    assert hand_offs.take_orders().cancelled == ["a"]
    hand_offs.on_finished("a")
    assert hand_offs.take_orders().cancelled == []


def test_incomplete_transfer_params_name_no_source():
    whole = {"bootstrap_room": ROOM, "bootstrap_host": "127.0.0.1", "bootstrap_port": 8998}
    assert source_of(whole) == SOURCE
    for name in whole:
        assert source_of({key: value for key, value in whole.items() if key != name}) is None
    assert source_of(None) is None
    assert room_of({"bootstrap_room": ROOM}) == ROOM
    assert room_of({"bootstrap_room": "7"}) is None
    assert not draws_first({"draws_first": "yes"})
    assert draws_first({"draws_first": True})
