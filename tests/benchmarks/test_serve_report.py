import pytest

from benchmarks.processes import split
from benchmarks.serve_client import Sample
from benchmarks.serve_report import report, table


def sample(sent_s, *arrivals, error="") -> Sample:
    return Sample(sent_s=sent_s, arrivals=list(arrivals), error=error)


def test_times_are_those_of_tokens_as_they_arrived():
    one = report("t", 1, [sample(10.0, (10.1, 1), (10.3, 3), (10.4, 4))], output_tokens=4)
    medians = {name: values[0] for name, values in one.times_ms.items()}
    assert medians == pytest.approx({"TTFT": 100, "TPOT": 100, "ITL": 100, "E2E": 400})
    assert one.tokens_per_s == pytest.approx(10)


def test_throughput_is_over_the_whole_load_and_not_per_stream():
    samples = [sample(0.0, (1.0, 2)), sample(0.5, (2.0, 2))]
    assert report("t", 2, samples, output_tokens=2).tokens_per_s == pytest.approx(2)


def test_a_request_that_failed_or_lacks_tokens_is_counted_as_failed_only():
    samples = [
        sample(0.0, (1.0, 4)),
        sample(0.0, (9.0, 3)),
        sample(0.0, error="503"),
    ]
    one = report("t", 3, samples, output_tokens=4)
    assert (one.num_requests, one.num_failed, one.duration_s) == (3, 2, 1.0)


def test_a_load_of_which_everything_failed_is_still_shown():
    one = report("t", 1, [sample(0.0, error="503")], output_tokens=4)
    assert one.tokens_per_s == 0
    assert "nan" in table([one])


def test_streams_are_split_evenly_over_client_processes():
    assert split(8, 3) == [3, 3, 2]
