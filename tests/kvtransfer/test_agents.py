"""Both agents in one process, over a real wire, with each transport."""

import threading

import pytest

from tandem.kvtransfer.events import (
    PushDone,
    RoomFailed,
    RoomGranted,
    RoomLanded,
    RoomLost,
    RoomReleased,
    RoomSafe,
)
from tandem.kvtransfer.plan import PagedTokens, plan_copies
from tandem.kvtransfer.session import SenderState
from tandem.kvtransfer.transports.shm import ShmTransport
from tandem.kvtransfer.transports.tcp import TcpTransport
from tandem.wire.errors import (
    Aborted,
    EngineFailed,
    KVCorrupted,
    LayoutMismatch,
    PeerLost,
    TransferRefused,
    TransferTimeout,
)
from tandem.wire.generation import Room
from tandem.wire.keys import ChannelKey
from tests.calm import calm_receiver, calm_sender
from tests.kvtransfer.rig import (
    DECODE_PAGES,
    OWN_NAME,
    PROMPT_PAGES,
    ROOM,
    begin,
    has_turned,
    layout,
    pages,
    push_all,
    request,
    serve_the_next,
)
from tests.loopback import Fault, LoopbackTransport
from tests.patience import PATIENCE_S, until

# ── the happy path ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("make", [LoopbackTransport, ShmTransport, TcpTransport])
@pytest.mark.parametrize("is_request_first", [True, False])
def test_a_prompt_is_handed_off_whichever_half_comes_first(cluster, make, is_request_first):
    cluster.use(make())
    prefill, decode = cluster.prefill(), cluster.decode()
    if is_request_first:
        prefill.agent.expect(ROOM)
        prefill.wait_until(lambda now: now.num_waiting == 1)
        request(decode, prefill)
    else:
        request(decode, prefill)
        prefill.wait_until(lambda now: now.num_early_grants == 1)
        prefill.agent.expect(ROOM)
    assert prefill.next() == RoomGranted(ROOM, 0)
    push_all(prefill)
    assert prefill.next() == PushDone(ROOM, 4 * layout().page_bytes)
    assert decode.next() == RoomLanded(ROOM, first_token=9, seed=77, cached_tokens=4)
    assert (pages(decode, DECODE_PAGES) == pages(prefill, PROMPT_PAGES)).all()
    assert not pages(decode, [1, 3, 4, *range(7, 16)]).any()


def test_hand_offs_are_timed_at_both_ends(cluster):
    cluster.use(LoopbackTransport([Fault("hang")]))
    prefill = cluster.prefill(clock=cluster.clock)
    decode = cluster.decode(clock=cluster.clock)
    prefill.agent.expect(ROOM)
    prefill.wait_until(lambda now: now.num_waiting == 1)
    cluster.clock.now_s += 0.125
    request(decode, prefill)
    assert prefill.next() == RoomGranted(ROOM, 0)
    cluster.clock.now_s += 0.25
    prefill.agent.push(ROOM, PROMPT_PAGES, 0)
    assert cluster.transport.hanging.wait(PATIENCE_S)
    cluster.clock.now_s += 0.5
    prefill.agent.finish(ROOM, first_token=9, seed=77)
    cluster.clock.now_s += 0.0625
    cluster.transport.release()
    assert isinstance(prefill.next(), PushDone)
    assert isinstance(decode.next(), RoomLanded)
    times = prefill.agent.times
    assert times.bootstrap_seconds.spread().total == 0.125
    assert times.push_seconds.spread().total == 0.5625
    assert times.push_exposed_seconds.spread().total == 0.0625
    assert decode.agent.times.granted_seconds.spread().total == 0.8125


def test_room_that_decode_holds_completely_counts_as_no_push(cluster):
    prefill, decode = begin(cluster, page_ids=[], have_tokens=16)
    assert isinstance(prefill.next(), RoomGranted)
    push_all(prefill)
    assert prefill.next() == PushDone(ROOM, 0)
    decode.next(RoomLanded)
    times = prefill.agent.times
    assert sum(times.bootstrap_seconds.spread().counts) == 1
    assert sum(times.push_seconds.spread().counts) == 0


def test_pushes_and_finish_before_the_grant_are_queued(cluster):
    prefill, decode = cluster.prefill(), cluster.decode()
    prefill.agent.expect(ROOM)
    prefill.agent.push(ROOM, PROMPT_PAGES[:3], 0)
    prefill.agent.push(ROOM, PROMPT_PAGES[3:], 3)
    prefill.agent.finish(ROOM, 9, 77)
    request(decode, prefill)
    assert [type(prefill.next()) for _ in range(2)] == [RoomGranted, PushDone]
    decode.next(RoomLanded)
    assert (pages(decode, DECODE_PAGES) == pages(prefill, PROMPT_PAGES)).all()


def test_nodes_of_different_page_sizes_hand_off(cluster):
    cluster.use(TcpTransport())
    small = layout(page_size=2, num_pages=20)
    prefill, decode = cluster.prefill(), cluster.decode(shape=small)
    prefill.agent.expect(ROOM)
    request(decode, prefill, [9, 3, 5])  # for a prompt of 5 or 6 tokens: two of prefill's pages
    push_all(prefill, [3, 1])
    decode.next(RoomLanded)
    source = pages(prefill, [3, 1]).reshape(2, 2, 2, 2, 4, 32)  # (page, layer, k v, head, token, .)
    landed = pages(decode, [9, 3, 5], small).reshape(3, 2, 2, 2, 2, 32)
    for token in range(6):
        expected = source[token // 4, :, :, :, token % 4]
        assert (landed[token // 2, :, :, :, token % 2] == expected).all()


def test_many_rooms_share_one_link_of_nodes_that_know_the_secret(cluster):
    cluster.use(ShmTransport())
    key = ChannelKey.from_secret("of this cluster")
    prefill, decode = cluster.prefill(key=key), cluster.decode(key=key)
    for number in range(16):
        prefill.agent.expect(Room(number))
        request(decode, prefill, [number], room=Room(number))
        push_all(prefill, [15 - number], room=Room(number))
    landed = {decode.next(RoomLanded).room for _ in range(16)}
    assert landed == set(range(16))
    assert (pages(decode, range(16)) == pages(prefill, range(15, -1, -1))).all()
    assert decode.agent.statistics().num_links == 1


# ── giving up, at each stage ─────────────────────────────────────────────────────────────────────


def test_request_withdrawn_before_the_link_is_up_is_safe_immediately(cluster):
    decode = cluster.decode()
    decode.agent.request(ROOM, "127.0.0.1", 1, DECODE_PAGES)
    decode.agent.withdraw(ROOM)
    assert decode.next() == RoomSafe(ROOM)


@pytest.mark.parametrize("is_expected", [False, True])
def test_a_grant_withdrawn_before_a_push_is_safe_and_fails_the_request(cluster, is_expected):
    prefill, decode = cluster.prefill(), cluster.decode()
    request(decode, prefill)
    prefill.wait_until(lambda now: now.num_early_grants == 1)
    if is_expected:
        prefill.agent.expect(ROOM)
        prefill.next(RoomGranted)
    decode.agent.withdraw(ROOM)
    assert decode.next() == RoomSafe(ROOM)
    if not is_expected:
        prefill.agent.expect(ROOM)
    assert isinstance(prefill.next(RoomReleased).error, Aborted)


def test_withdrawn_room_that_is_granted_again_fails_alone(cluster):
    prefill, decode = cluster.prefill(), cluster.decode()
    for _ in range(2):  # a client may choose the same room again
        request(decode, prefill)
        prefill.wait_until(lambda now: now.num_early_grants == 1 or now.num_refused)
        decode.agent.withdraw(ROOM)
        assert decode.next() == RoomSafe(ROOM)
    assert prefill.agent.statistics().num_links == 1
    serve_the_next(prefill, decode)


def test_aborted_room_that_is_expected_again_ends_again(cluster):
    prefill = cluster.prefill()
    prefill.agent.expect(ROOM)
    prefill.agent.abort(ROOM)
    assert prefill.next() == RoomReleased(ROOM)
    prefill.agent.expect(ROOM)  # its first half still waits for a grant to refuse
    prefill.next(RoomReleased)


@pytest.mark.parametrize("half", ["request", "grant"])
def test_half_without_its_other_half_times_out(cluster, half):
    limits = calm_sender(grant_s=10, early_grant_s=10)
    prefill, decode = cluster.prefill(timeouts=limits, clock=cluster.clock), cluster.decode()
    if half == "request":
        prefill.agent.expect(ROOM)
    else:
        request(decode, prefill)
    prefill.wait_until(lambda now: now.num_waiting + now.num_early_grants == 1)
    cluster.clock.now_s += 10.5
    last = prefill.next(RoomReleased) if half == "request" else decode.next(RoomFailed)
    assert isinstance(last.error, TransferTimeout)


@pytest.mark.parametrize("by", ["prefill", "decode"])
def test_room_aborted_during_a_write_ends_only_after_the_write(cluster, by):
    prefill, decode = begin(cluster, Fault("hang"))
    push_all(prefill)
    assert cluster.transport.hanging.wait(PATIENCE_S)
    if by == "prefill":
        prefill.agent.abort(ROOM)
        has_turned(prefill.agent)
        assert prefill.agent.statistics().num_pushing == 1
    else:
        prefill.next(RoomGranted)
        decode.agent.withdraw(ROOM)
        decode.wait_until(lambda now: now.num_withdrawn == 1)
        # Prefill reads a later grant after the Withdraw.
        prefill.agent.expect(Room(43))
        request(decode, prefill, [9, 10, 11, 12], room=Room(43))
        assert prefill.next(RoomGranted).room == Room(43)
    assert list(decode.agent.events()) == []
    cluster.transport.release()
    if by == "prefill":
        assert prefill.next() == RoomReleased(ROOM)
        assert isinstance(decode.next(RoomFailed).error, Aborted)
    else:
        assert decode.next() == RoomSafe(ROOM)
        assert isinstance(prefill.next(RoomReleased).error, Aborted)


def test_withdraw_that_crossed_landed_reports_only_room_safe(cluster):
    prefill, decode = begin(cluster)
    push_all(prefill)
    decode.wait_until(lambda now: now.num_landed == 1)
    decode.agent.withdraw(ROOM)
    assert decode.next() == RoomSafe(ROOM)
    decode.agent.withdraw(ROOM)  # it is over
    assert list(decode.agent.events()) == []


def test_abort_before_the_grant_is_answered_when_the_grant_arrives(cluster):
    prefill, decode = cluster.prefill(), cluster.decode()
    prefill.agent.expect(ROOM)
    prefill.agent.abort(ROOM, EngineFailed("the forward raised"))
    assert prefill.next() == RoomReleased(ROOM)
    request(decode, prefill)
    failed = decode.next(RoomFailed)
    assert isinstance(failed.error, EngineFailed)
    assert failed.error.message == "the forward raised"


def test_a_prefill_that_never_pushes_loses_its_grant(cluster):
    prefill = cluster.prefill()
    decode = cluster.decode(timeouts=calm_receiver(landed_s=0.05))
    prefill.agent.expect(ROOM)
    request(decode, prefill)
    assert isinstance(decode.next(RoomLost).error, TransferTimeout)
    assert decode.next() == RoomSafe(ROOM)
    prefill.next(RoomGranted)
    prefill.next(RoomReleased)


def test_a_prefill_that_does_not_answer_a_withdraw_is_cut_off(cluster):
    cluster.use(LoopbackTransport([Fault("hang")]))
    prefill = cluster.prefill()
    decode = cluster.decode(timeouts=calm_receiver(released_s=10), clock=cluster.clock)
    prefill.agent.expect(ROOM)
    request(decode, prefill)
    push_all(prefill)
    assert cluster.transport.hanging.wait(PATIENCE_S)
    decode.agent.withdraw(ROOM)
    # What a cut takes with it that has not arrived, prefill would never hear.
    until(lambda: any(p.session.state is SenderState.RELEASING for p in prefill.agent._parts()))
    has_turned(decode.agent)  # it has noted when it sent the withdrawal
    assert list(decode.agent.events()) == []
    cluster.clock.now_s += 10.5
    assert decode.next() == RoomSafe(ROOM)
    prefill.next(RoomGranted)
    assert isinstance(prefill.next(RoomReleased).error, Aborted)


# ── faults ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "changes",
    [{"fingerprint": "qwen"}, {"shape": layout(dtype="bfloat16")}, {"shape": layout(head_dim=4)}],
)
def test_different_model_or_layout_is_refused_with_both_descriptions(cluster, changes):
    prefill, decode = cluster.prefill(), cluster.decode(**changes)
    request(decode, prefill)
    error = decode.next(RoomFailed).error
    assert isinstance(error, LayoutMismatch)
    assert f"llama ({layout()})" in error.message
    name, shape = changes.get("fingerprint", "llama"), changes.get("shape", layout())
    assert f"{name} ({shape})" in error.message


def test_a_prefill_that_is_not_there_fails_the_request(cluster):
    decode = cluster.decode(timeouts=calm_receiver(connect_s=0.05))
    decode.agent.request(ROOM, "127.0.0.1", 1, DECODE_PAGES)
    assert isinstance(decode.next(RoomFailed).error, PeerLost)


def test_no_transport_in_common_fails_the_request_with_the_reason(cluster):
    prefill = cluster.prefill()
    cluster.use(TcpTransport())
    decode = cluster.decode()
    request(decode, prefill)
    error = decode.next(RoomFailed).error
    assert isinstance(error, TransferRefused)
    assert "tcp: not enabled here" in error.message


SMALL = layout(page_size=2, num_pages=20)


@pytest.mark.parametrize(
    ("receiver", "granted", "pushed", "num_pages"),
    [
        ({}, DECODE_PAGES, PROMPT_PAGES, 4),
        ({}, [5], [3], 1),
        ({"shape": SMALL}, [9, 3, 5], [3, 1], 3),
    ],
)
def test_a_corrupted_page_is_found_and_does_not_land(cluster, receiver, granted, pushed, num_pages):
    prefill, decode = begin(cluster, Fault("corrupt"), page_ids=granted, receiver=receiver)
    push_all(prefill, pushed)
    error = decode.next(RoomFailed).error
    assert isinstance(error, KVCorrupted)
    assert f"1 of {num_pages} pages" in error.message
    now = decode.agent.statistics()
    assert (now.num_corrupted, now.received_bytes) == (1, 0)
    request(decode, prefill, granted, room=Room(43))  # the fault was of one write
    prefill.agent.expect(Room(43))
    push_all(prefill, pushed, Room(43))
    decode.next(RoomLanded)


@pytest.mark.parametrize("off", ["prefill", "decode"])
def test_checksums_are_skipped_if_either_end_disables_them(cluster, off):
    verify = {"prefill": "always", "decode": "always", off: "off"}
    prefill, decode = begin(
        cluster,
        Fault("corrupt"),
        sender={"verify": verify["prefill"]},
        receiver={"verify": verify["decode"]},
    )
    push_all(prefill)
    decode.next(RoomLanded)
    assert decode.agent.statistics().num_corrupted == 0


def test_layers_may_be_pushed_one_after_another(cluster):
    prefill, decode = begin(cluster, sender={"verify": "always"})
    for first, page_ids in ((0, PROMPT_PAGES[:3]), (3, PROMPT_PAGES[3:])):
        prefill.agent.push(ROOM, page_ids, first, range(1))
        prefill.agent.push(ROOM, page_ids, first)
        prefill.agent.push(ROOM, page_ids, first, range(2))  # late, and known already
    prefill.agent.finish(ROOM, 9, 77)
    assert [prefill.next(), prefill.next()] == [
        RoomGranted(ROOM, 0),
        PushDone(ROOM, 4 * layout().page_bytes),
    ]
    decode.next(RoomLanded)
    assert (pages(decode, DECODE_PAGES) == pages(prefill, PROMPT_PAGES)).all()


@pytest.mark.parametrize("is_granted", [True, False])
def test_recalled_room_lands_what_was_pushed_again(cluster, is_granted):
    prefill = cluster.prefill()
    decode = cluster.decode()
    prefill.agent.expect(ROOM)
    if is_granted:
        request(decode, prefill)
        prefill.next(RoomGranted)
    prefill.agent.push(ROOM, PROMPT_PAGES[:3], 0)
    prefill.agent.recall(ROOM)
    others = [9, 10, 11, 12]
    prefill.agent.push(ROOM, others, 0)
    prefill.agent.finish(ROOM, first_token=7, seed=0)
    if not is_granted:
        request(decode, prefill)
    assert isinstance(decode.next(), RoomLanded)
    assert (pages(decode, DECODE_PAGES) == pages(prefill, others)).all()


def test_recall_during_a_write_lands_what_was_pushed_again(cluster):
    prefill, decode = begin(cluster, Fault("hang"))
    prefill.next(RoomGranted)
    prefill.agent.push(ROOM, PROMPT_PAGES[:2], 0)
    assert cluster.transport.hanging.wait(PATIENCE_S)
    prefill.agent.push(ROOM, PROMPT_PAGES[2:], 2)
    prefill.agent.recall(ROOM)
    others = [9, 10, 11, 12]
    prefill.agent.push(ROOM, others, 0)
    prefill.agent.finish(ROOM, first_token=7, seed=0)
    cluster.transport.release()
    assert isinstance(decode.next(), RoomLanded)
    assert (pages(decode, DECODE_PAGES) == pages(prefill, others)).all()


def test_recall_of_a_room_that_is_over_does_nothing(cluster):
    prefill, _decode = begin(cluster)
    push_all(prefill)
    prefill.next(RoomGranted)
    prefill.next(PushDone)
    prefill.agent.recall(ROOM)
    has_turned(prefill.agent)
    assert list(prefill.agent.events()) == []


def test_only_what_decode_does_not_have_is_pushed_and_both_ends_count_it(cluster):
    prefill, decode = begin(cluster, Fault("duplicate"), page_ids=[5], have_tokens=12)
    assert prefill.next() == RoomGranted(ROOM, 12)
    push_all(prefill)
    assert prefill.next() == PushDone(ROOM, layout().page_bytes)
    decode.next(RoomLanded)
    assert (pages(decode, [5]) == pages(prefill, PROMPT_PAGES[3:])).all()
    prefill.wait_until(lambda now: now.num_landed == 1)
    page = layout().page_bytes
    told = decode.agent.statistics()
    assert (told.received_bytes, told.saved_bytes) == (page, 3 * page)
    told = prefill.agent.statistics()
    assert (told.pushed_bytes, told.saved_bytes) == (page, 3 * page)


@pytest.mark.parametrize(
    ("pushed", "layers", "fault"),
    [
        (PROMPT_PAGES[:3], None, "1 granted pages were not pushed"),
        (PROMPT_PAGES, range(1), "4 granted pages were not pushed"),
        ([3, 1, 7, 16], None, "outside the pool"),
    ],
)
def test_a_prompt_that_was_not_pushed_as_granted_does_not_land(cluster, pushed, layers, fault):
    prefill, decode = begin(cluster)
    prefill.agent.push(ROOM, pushed, 0, layers)
    prefill.agent.finish(ROOM, 9, 77)
    error = decode.next(RoomFailed).error
    assert isinstance(error, TransferRefused)
    assert fault in error.message
    prefill.next(RoomGranted)
    prefill.next(RoomReleased)


def test_broken_data_path_loses_the_link_and_the_next_request_makes_a_new_one(cluster):
    prefill, decode = begin(cluster, Fault("fail"))
    push_all(prefill)
    assert isinstance(decode.next(RoomLost).error, PeerLost)
    assert decode.next() == RoomSafe(ROOM)
    prefill.next(RoomGranted)
    assert isinstance(prefill.next(RoomReleased).error, PeerLost)
    prefill.agent.expect(Room(43))
    request(decode, prefill, room=Room(43))
    push_all(prefill, room=Room(43))
    decode.next(RoomLanded)


def test_request_at_a_second_address_keeps_rooms_of_the_first(
    cluster,
):
    prefill, decode = cluster.prefill("tcp://0.0.0.0:0"), cluster.decode()
    rooms = {Room(1): "127.0.0.1", Room(2): "127.0.0.2"}
    for room, host in rooms.items():
        prefill.agent.expect(room)
        decode.agent.request(room, host, prefill.agent.port, [DECODE_PAGES[room]])
        assert prefill.next(RoomGranted).room == room
    for room in rooms:
        push_all(prefill, [PROMPT_PAGES[room]], room)
        assert decode.next(RoomLanded).room == room


@pytest.mark.parametrize("make", [LoopbackTransport, ShmTransport, TcpTransport])
def test_prefill_that_ends_is_lost_and_its_successor_gets_a_new_link(cluster, make):
    cluster.use(make())
    prefill, decode = begin(cluster)
    prefill.next(RoomGranted)
    address = f"tcp://127.0.0.1:{prefill.agent.port}"
    prefill.agent.close()
    assert isinstance(decode.next(RoomLost).error, PeerLost)
    assert decode.next() == RoomSafe(ROOM)
    successor = cluster.prefill(address, epoch=11)
    successor.agent.expect(ROOM)
    request(decode, successor)
    push_all(successor)
    decode.next(RoomLanded)


@pytest.mark.parametrize("make", [LoopbackTransport, ShmTransport, TcpTransport])
def test_decode_that_ends_releases_the_pages_of_prefill(cluster, make):
    cluster.use(make())
    prefill, decode = begin(cluster)
    prefill.next(RoomGranted)
    decode.agent.close()
    prefill.agent.push(ROOM, PROMPT_PAGES, 0)
    assert isinstance(prefill.next(RoomReleased).error, PeerLost)


# ── late writes ──────────────────────────────────────────────────────────────────────────────────

MARK = 7


def mark(decode, page_ids=DECODE_PAGES):
    """Write into pages that came back, as their next owner does; return a check that it stays."""
    pages_of = decode.region.array().reshape(layout().num_pages, -1)
    pages_of[page_ids] = MARK

    def check():
        assert (pages_of[page_ids] == MARK).all()

    return check


def connection_of(prefill):
    (link,) = prefill.agent._bootstrap.links.values()
    return link.connection


@pytest.mark.parametrize("make", [LoopbackTransport, ShmTransport, TcpTransport])
@pytest.mark.parametrize("end", ["landed", "released", "withdrawn"])
def test_pages_are_closed_after_the_last_message_on_an_open_link(cluster, make, end):
    cluster.use(make())
    prefill, decode = begin(cluster)
    prefill.next(RoomGranted)
    match end:
        case "landed":
            push_all(prefill)
            decode.next(RoomLanded)
        case "released":
            prefill.agent.abort(ROOM)
            decode.next(RoomFailed)
        case "withdrawn":
            decode.agent.withdraw(ROOM)
            decode.next(RoomSafe)
    stays = mark(decode)
    whole = plan_copies(
        PagedTokens(layout(), PROMPT_PAGES), PagedTokens(layout(), DECODE_PAGES), range(16)
    )
    with pytest.raises(TransferRefused):
        connection_of(prefill).write(ROOM, whole)
    stays()
    assert decode.agent.statistics().num_links == 1


def test_write_after_landed_finds_the_pages_closed(cluster):
    prefill, decode = begin(cluster, Fault("late"), sender={"verify": "off"})
    push_all(prefill)
    decode.next(RoomLanded)
    stays = mark(decode)
    with pytest.raises(TransferRefused):
        cluster.transport.release()
    stays()


def test_grant_withdrawn_while_its_push_is_queued_is_safe_and_never_written(cluster):
    cluster.use(LoopbackTransport([Fault("hang")]))
    prefill, decode = cluster.prefill(), cluster.decode()
    other = Room(43)
    for room, granted in ((ROOM, DECODE_PAGES), (other, [9, 10])):
        prefill.agent.expect(room)
        request(decode, prefill, granted, room=room)
        assert prefill.next(RoomGranted).room == room
    push_all(prefill)
    assert cluster.transport.hanging.wait(PATIENCE_S)
    push_all(prefill, [4, 5], other)
    decode.agent.withdraw(other)
    assert decode.next() == RoomSafe(other)  # while the write of the other room hangs
    assert isinstance(prefill.next(RoomReleased).error, Aborted)
    stays = mark(decode, [9, 10])
    cluster.transport.release()
    assert decode.next(RoomLanded).room == ROOM
    prefill.next(PushDone)
    serve_the_next(prefill, decode)  # behind all that was queued
    stays()
    assert decode.agent.statistics().num_refused == 0, "a write of it was begun"


# ── the end ──────────────────────────────────────────────────────────────────────────────────────


def test_closed_agents_leave_no_thread_and_no_file(cluster):
    from tandem.kvtransfer.region import SHM_DIR

    before = set(threading.enumerate())
    cluster.use(ShmTransport())
    prefill, decode = cluster.prefill(), cluster.decode()
    request(decode, prefill)
    prefill.wait_until(lambda now: now.num_early_grants == 1)
    decode.close()
    prefill.close()
    assert not list(SHM_DIR.glob(f"tandem-{OWN_NAME}-*"))
    # A fence has a thread for a moment, for which nobody waits.
    until(lambda: set(threading.enumerate()) <= before)


def test_grant_to_an_invalid_address_fails_and_returns_its_pages(cluster):
    decode = cluster.decode()
    decode.agent.request(ROOM, "not a host", 1, DECODE_PAGES)
    failed = decode.next(RoomFailed)
    assert isinstance(failed.error, PeerLost)
    assert "not a host" in failed.error.message
    decode.agent.withdraw(ROOM)  # crossed with the failure: it is over already
    assert decode.agent.statistics().num_links == 0


def test_withdrawal_from_an_invalid_address_is_answered(cluster):
    decode = cluster.decode()
    decode.agent.request(ROOM, "not a host", 1, DECODE_PAGES)
    decode.agent.withdraw(ROOM)
    assert decode.next() == RoomSafe(ROOM)
