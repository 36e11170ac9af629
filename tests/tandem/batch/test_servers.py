"""Which server is given what, and when one is left alone."""

import asyncio
import random

import pytest

from tandem.batch.attempt import judge, retry_after_s
from tandem.batch.pace import Pace
from tandem.batch.servers import MAX_PAUSE_S, Server, Servers, Stopping, pause_s

CHANCE = random.Random(1)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def server(clock=None, limit=8) -> Server:
    return Server("http://a", Pace(1, limit), clock or Clock())


def test_a_server_is_left_alone_for_as_long_as_it_asks():
    clock = Clock()
    one = server(clock)
    one.refuse(20.0, CHANCE)
    clock.now_s += 19.9
    assert one.is_shut
    assert not one.has_room
    one.refuse(5.0, CHANCE)
    clock.now_s += 4.9
    assert one.is_shut, "what it says last counts, too"
    clock.now_s += 0.2
    assert one.has_room


def test_a_server_that_is_away_is_tried_with_one_request_at_growing_distances():
    clock, pauses = Clock(), []
    one = server(clock)
    for _ in range(12):
        one.lose("gone", CHANCE)
        one.lose("gone", CHANCE)  # what was under way beside it
        pauses.append(one.open_at - clock.now_s)
        clock.now_s = one.open_at
        assert (one.has_room, one.pace.limit) == (True, 1)
    assert pauses[0] <= 1 < 10 < pauses[-1] <= MAX_PAUSE_S
    one.hear()
    one.lose("gone", CHANCE)
    assert one.open_at - clock.now_s <= 1, "once it was there, it begins again"


def test_one_failure_is_the_requests_and_three_in_a_row_are_the_servers():
    one = server()
    one.fail(CHANCE)
    one.fail(CHANCE)
    one.hear()
    one.fail(CHANCE)
    one.fail(CHANCE)
    assert not one.is_shut
    one.fail(CHANCE)
    assert one.is_shut


def test_pauses_double_and_differ():
    for attempt in range(1, 12):
        drawn = [pause_s(attempt, CHANCE) for _ in range(50)]
        most_s = min(MAX_PAUSE_S, 0.5 * 2**attempt)
        assert most_s / 2 <= min(drawn) < max(drawn) <= most_s


async def test_places_are_bounded_for_all_servers_together_and_tries_go_first():
    loop = asyncio.get_running_loop()
    servers = Servers([server(loop.time), server(loop.time)], 3, CHANCE)
    taken = [await servers.take(is_first=False) for _ in range(3)]
    assert sorted(each.in_flight for each in servers.all) == [1, 2], "the least busy one first"
    new = asyncio.ensure_future(servers.take(is_first=False))
    gone = asyncio.ensure_future(servers.take(is_first=True))
    again = asyncio.ensure_future(servers.take(is_first=True))
    await asyncio.sleep(0)
    gone.cancel()
    servers.give_back(taken[0])
    await again
    assert not new.done()
    assert servers.in_flight == 3
    servers.stop()
    with pytest.raises(Stopping):
        await new
    with pytest.raises(Stopping):
        await servers.take(is_first=True)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("7", 7), ("0.5", 0.5), ("-3", 0), ("", 0), ("soon", 0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0)],
)
def test_retry_after_is_read_as_seconds_or_a_date(value, seconds):
    assert retry_after_s(value) == seconds
    assert retry_after_s("Wed, 21 Oct 2099 07:28:00 GMT") > 1e9


def test_answers_are_passed_on_as_they_were_written_but_on_one_line():
    told = b'{"id":"x","f":1.10,"big":123456789012345678901234567890}'
    assert judge(200, {}, told).content == told
    pretty = b'{\n "id": "x",\r\n "f": 1.10,\n "s": "a\\nb"}\n'
    assert judge(200, {"x-request-id": "q"}, pretty).content == b'{"id":"x","f":1.10,"s":"a\\nb"}'
    assert judge(404, {}, b"<html>no").content == b'{"error":{"message":"<html>no"}}'
