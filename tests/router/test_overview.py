"""What is merged of several workers' overviews, and what a client gets of it."""

import pytest

from tandem.router.overview import (
    Latencies,
    NodeView,
    Overview,
    PairView,
    Quantiles,
    Rates,
    Totals,
    after,
    latencies,
    merged,
)

P, D, E = "http://p:1", "http://d:1", "http://e:1"


def node(url, **changes) -> NodeView:
    return NodeView(**{"id": url, "url": url, "role": "decode", "state": "up"} | changes)


def pair(prefill, decode, running, tokens=0.0) -> PairView:
    return PairView(
        prefill=prefill,
        decode=decode,
        num_running=running,
        num_started=10 * running,
        prompt_tokens_per_s=tokens,
    )


def ended(request_id, at) -> dict:
    return {"request_id": request_id, "ended_unix_s": at}


def overview(**changes) -> Overview:
    return Overview(
        **{"now_unix_s": 9.0, "version": "1", "is_serving": True, "detail": ""} | changes
    )


def test_what_workers_count_is_added_up_and_what_they_watch_is_the_asked_ones():
    own = overview(
        num_in_flight=1,
        num_queued=2,
        nodes=[node(P, in_flight_requests=1, zone="own"), node(D)],
        totals=Totals(num_finished=5, num_replays=1),
        rates=Rates(requests=2.0, generated_tokens=70.0),
        recent=[ended("x", 1), ended("z", 6)],
    )
    other = overview(
        num_in_flight=10,
        num_queued=20,
        nodes=[node(P, in_flight_requests=4, zone="other"), node(E, in_flight_requests=1)],
        totals=Totals(num_finished=7, num_refused=3),
        rates=Rates(requests=0.5, generated_tokens=70.0),
        recent=[ended("y", 2)],
    )
    both = merged(own, [other], [2])
    assert (both.num_workers, both.silent_workers) == (2, [2])
    assert (both.num_in_flight, both.num_queued) == (11, 22)
    assert [(n.url, n.zone, n.in_flight_requests) for n in both.nodes] == [
        (P, "own", 5),
        (D, "", 0),
    ]
    assert both.totals == Totals(num_finished=12, num_replays=1, num_refused=3)
    # Tokens are counted by nodes, of which both workers see the same.
    assert both.rates == Rates(requests=2.5, generated_tokens=70.0)
    assert [each["request_id"] for each in both.recent] == ["x", "y", "z"]


def test_pairs_of_several_workers_are_one():
    own = overview(pairs=[pair(P, D, 1, tokens=100.0)])
    other = overview(pairs=[pair(P, E, 2, tokens=300.0), pair(P, D, 3, tokens=500.0)])
    to_d, to_e = merged(own, [other], []).pairs
    assert (to_d.decode, to_d.num_running, to_d.num_started) == (D, 4, 40)
    assert (to_d.prompt_tokens_per_s, to_e.prompt_tokens_per_s) == (600.0, 300.0)


def timed(ttft_s, e2e_s, num_output_tokens=11, outcome="finished") -> dict:
    fields = {"ttft_s": ttft_s, "e2e_s": e2e_s, "num_output_tokens": num_output_tokens}
    return {**fields, "outcome": outcome, "ended_unix_s": 1.0}


def test_latencies_are_those_of_all_workers_requests_that_finished():
    own = overview(recent=[timed(number / 100, 1 + number / 100) for number in range(1, 100)])
    unfinished = [timed(None, 9.0, outcome="failed"), timed(7.0, 9.0, outcome="cancelled")]
    both = merged(own, [overview(recent=[timed(1.0, 3.0), *unfinished])], []).latencies
    assert both.ttft == Quantiles(p50_s=0.5, p99_s=0.99)
    assert both.e2e == Quantiles(p50_s=1.5, p99_s=1.99)
    assert both.itl.p50_s == pytest.approx(0.1)


def test_one_token_has_no_time_between_tokens_and_no_request_no_latency():
    assert latencies([timed(0.2, 0.2, num_output_tokens=1)]).itl == Quantiles()
    assert latencies([]) == Latencies()


def test_a_client_gets_what_is_younger_than_what_it_has():
    shown = overview(recent=[ended("x", 4), ended("y", 5)])
    newer = after(shown, 4)
    assert [each["request_id"] for each in newer.recent] == ["y"]
    assert after(shown, 0) == shown
