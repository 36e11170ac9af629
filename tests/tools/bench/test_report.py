import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tandem.tools.bench.client import Sample
from tandem.tools.bench.report import BenchReport, GoodputLimits, gaps, render, summarise


def sample(
    sent_s: float, *arrivals: tuple[float, int], failure: str = "", error: str = ""
) -> Sample:
    """A request; `arrivals` are (seconds after it was sent, tokens so far)."""
    return Sample(
        sent_s=sent_s,
        output_tokens=arrivals[-1][1] if arrivals else 0,
        prompt_tokens=10,
        failure=failure,
        error=error,
        times=[at_s for at_s, _ in arrivals],
        counts=[count for _, count in arrivals],
    )


def test_latencies_are_those_of_token_arrivals():
    one = summarise([sample(10.0, (0.1, 1), (0.3, 3), (0.4, 4))])
    medians = [times.p50 for times in (one.ttft_ms, one.itl_ms, one.tpot_ms, one.e2e_ms)]
    assert medians == pytest.approx([100, 100, 100, 400])
    assert one.output_tokens_per_s == pytest.approx(10)


def test_failed_requests_count_by_kind_and_for_nothing_else():
    failed = [sample(0, (9.0, 3), failure="short", error=f"{i}") for i in range(2)]
    one = summarise([sample(0, (1.0, 4)), *failed, sample(0, failure="HTTP 503")])
    assert (one.num_requests, one.num_done, one.num_failed, one.duration_s) == (4, 1, 3, 1.0)
    assert list(one.failures.items()) == [("short", 2), ("HTTP 503", 1)]
    assert one.errors == {"short": "0", "HTTP 503": ""}


def test_a_load_without_answers_has_a_report():
    one = summarise([sample(0, failure="HTTP 503")], limits=GoodputLimits(ttft_ms=1))
    assert (one.output_tokens_per_s, one.ttft_ms.count) == (0, 0)
    assert (one.goodput_share, one.goodput_requests_per_s) == (0, 0)
    assert summarise([]).num_requests == 0


@pytest.mark.parametrize(
    ("limits", "share"),
    [
        (GoodputLimits(ttft_ms=150), 0.5),
        (GoodputLimits(itl_ms=50), 0.5),  # of the mean: one gap of the first takes 300 ms
        (GoodputLimits(ttft_ms=150, itl_ms=50), 0.25),
        (GoodputLimits(ttft_ms=500, itl_ms=500), 0.75),
    ],
)
def test_goodput_counts_requests_within_every_limit(limits, share):
    requests = [
        sample(0, (0.1, 1), (0.2, 10), (0.5, 11)),  # 40 ms a token after the first
        sample(0, (0.1, 1), (1.1, 11)),  # 100 ms a token
        sample(0, (0.2, 1), (0.5, 11)),  # 30 ms a token
        sample(0, (0.1, 1), (0.2, 11), failure="cut off"),
    ]
    one = summarise(requests, limits=limits)
    assert one.goodput_share == share
    assert one.goodput_requests_per_s == pytest.approx(share * 4 / 1.1)


ARRIVALS = st.lists(
    st.tuples(st.floats(0.001, 10), st.integers(1, 8)), min_size=1, max_size=30
).map(lambda steps: [_sum(steps[: n + 1]) for n in range(len(steps))])


def _sum(steps):
    return sum(gap for gap, _ in steps), sum(count for _, count in steps)


@given(st.lists(st.tuples(st.floats(0, 100), ARRIVALS), min_size=1, max_size=8))
def test_sums_cover_every_token_and_gap(requests):
    samples = [sample(sent_s, *arrivals) for sent_s, arrivals in requests]
    one = summarise(samples)
    for each in samples:
        assert len(gaps(each)) == each.counts[-1] - each.counts[0]
        assert gaps(each).sum() == pytest.approx(each.times[-1] - each.times[0], abs=1e-9)
    assert one.output_tokens == sum(arrivals[-1][1] for _, arrivals in requests)
    for times in (one.ttft_ms, one.itl_ms, one.tpot_ms, one.e2e_ms):
        assert times.p50 <= times.p90 <= times.p99
        assert math.isfinite(times.mean)


def test_the_table_has_latencies_failures_and_warnings():
    console = Console(record=True, width=200, markup=False)
    limits = GoodputLimits(ttft_ms=500)
    samples = [sample(0.0, (0.1, 1), (2.0, 3)), sample(0.0, failure="cut off", error="after 5")]
    one = summarise(samples, limits=limits)
    one = msgspec.structs.replace(one, client_busy_share=0.9)
    render(BenchReport(version="1", started_at="now", settings={}, load=one), "2 streams", console)
    shown = console.export_text()
    for words in ("TTFT, ms", "ITL, ms", "TPOT, ms", "E2E, ms", "100.0", "950.0"):
        assert words in shown
    assert "2 streams: 1 of 2 requests" in shown
    assert "goodput: 50.0% of requests met the limits" in shown
    assert "failed, cut off: 1, such as: after 5" in shown
    assert "busy 90%" in shown
