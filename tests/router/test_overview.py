"""What is merged of several workers' overviews, and what a client gets of it."""

import msgspec
import pytest

from tandem.router.events import Event
from tandem.router.overview import (
    Histograms,
    HistogramView,
    NodeRates,
    NodeView,
    Overview,
    PairView,
    Rates,
    Totals,
    after,
    histogram,
    merged,
    shared_pushes,
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


def event(id_, at, node="") -> Event:
    return Event(id=id_, at_unix_s=at, kind="k", text="t", node=node)


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
        events=[event("a1", 3, node=D), event("a2", 5)],
        recent=[ended("x", 1), ended("z", 6)],
    )
    other = overview(
        num_in_flight=10,
        num_queued=20,
        nodes=[node(P, in_flight_requests=4, zone="other"), node(E, in_flight_requests=1)],
        totals=Totals(num_finished=7, num_refused=3),
        rates=Rates(requests=0.5, generated_tokens=70.0),
        events=[event("b1", 3, node=D), event("b2", 4)],
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
    assert [each.id for each in both.events] == ["a1", "b2", "a2"]
    assert [each["request_id"] for each in both.recent] == ["x", "y", "z"]


def test_pairs_of_several_workers_are_one_and_share_what_is_pushed_anew():
    nodes = [node(P, role="prefill", rates=NodeRates(pushed_bytes=90.0))]
    own = overview(nodes=nodes, pairs=[pair(P, D, 1, tokens=100.0)])
    other = overview(pairs=[pair(P, E, 2, tokens=300.0), pair(P, D, 3, tokens=500.0)])
    to_d, to_e = merged(own, [other], []).pairs
    assert (to_d.decode, to_d.num_running, to_d.num_started) == (D, 4, 40)
    assert (to_d.pushed_bytes_per_s, to_e.pushed_bytes_per_s) == (60.0, 30.0)


def test_a_pair_that_was_given_nothing_lately_pushes_nothing():
    nodes = [node(P, role="prefill", rates=NodeRates(pushed_bytes=90.0))]
    alone = pair("", D, 1, tokens=10.0)
    assert [each.pushed_bytes_per_s for each in shared_pushes([pair(P, D, 1), alone], nodes)] == [
        0.0,
        0.0,
    ]


def test_times_are_added_up_by_bucket_whoever_measured_nothing():
    def with_ttft(view):
        return overview(histograms=Histograms(ttft=view))

    measured = histogram([0.1, 0.2], [1, 2, 3])
    both = merged(
        with_ttft(HistogramView()), [with_ttft(measured), with_ttft(measured)], []
    ).histograms
    assert both.ttft == histogram([0.1, 0.2], [2, 4, 6])
    assert both.itl == HistogramView()


@pytest.mark.parametrize(
    ("counts", "p50", "p99"),
    [
        ([0, 0, 0], None, None),
        ([10, 0, 0], 0.05, 0.099),
        ([0, 10, 0], 0.2, 0.298),
        ([5, 0, 5], 0.1, 0.3),  # beyond the last bound nothing more is known
        ([], None, None),
    ],
)
def test_quantiles_are_read_from_buckets(counts, p50, p99):
    view = histogram([0.1, 0.3], counts)
    assert view.p50_s == pytest.approx(p50)
    assert view.p99_s == pytest.approx(p99)


def test_a_client_gets_what_is_younger_than_what_it_has():
    shown = overview(events=[event("a", 3), event("b", 5)], recent=[ended("x", 4), ended("y", 5)])
    newer = after(shown, 4)
    assert [each.id for each in newer.events] == ["b"]
    assert [each["request_id"] for each in newer.recent] == ["y"]
    assert after(shown, 0) == shown


def test_an_overview_passes_between_workers_as_it_is():
    shown = overview(
        nodes=[node(P)], pairs=[pair(P, D, 1)], events=[event("a", 3)], recent=[ended("x", 4)]
    )
    assert msgspec.convert(msgspec.json.decode(msgspec.json.encode(shown)), Overview) == shown
