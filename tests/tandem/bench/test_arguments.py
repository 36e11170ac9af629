import math

import pytest

from tandem.bench.arguments import parse
from tandem.bench.config import Load
from tandem.wire.errors import ConfigInvalid


def loads(*argv: str) -> tuple[Load, ...]:
    return parse(argv).loads


def test_streams_one_after_the_other_are_loads_of_their_own():
    assert [load.name for load in loads("--concurrency", "1", "8")] == ["1 stream", "8 streams"]


def test_names_of_other_clients_mean_the_same():
    ours = parse(["--rate", "3", "--num-requests", "5", "--input-len", "7", "--output-len", "9"])
    theirs = parse(
        [
            *("--request-rate", "3", "--num-prompts", "5"),
            *("--random-input-len", "7", "--random-output-len", "9"),
        ]
    )
    assert ours == theirs


def test_a_bound_without_a_rate_is_a_closed_loop():
    assert loads("--max-concurrency", "5") == loads("--concurrency", "5") == (Load(5),)
    assert loads("--rate", "inf", "--max-concurrency", "5") == (Load(5, math.inf),)


@pytest.mark.parametrize("url", ["http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_a_base_url_of_openai_clients_is_taken(url):
    assert parse(["--url", url]).url == "http://h:1"


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("--url", "localhost:8000"), "http://HOST:PORT"),
        (("--url", "http://h:port"), "http://HOST:PORT"),
        (("--concurrency", "1", "--rate", "2"), "one of them"),
        (("--concurrency", "0"), "at least 1"),
        (("--trace", "t", "--turns", "2"), "--trace-limit"),
        (("--rate", "-1"), "--request-rate is -1"),
        (("--rate", "nan"), "--request-rate is nan"),
        (("--input-len", "0"), "--input-len is 0"),
        (("--random-range-ratio", "2"), "0 to 1"),
        (("--burstiness", "0"), "more than 0"),
        (("--slo-ttft-ms", "0"), "more than 0"),
        (("--extra-request-body", "[1]"), "JSON object"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_give(argv, told):
    with pytest.raises(ConfigInvalid, match=told):
        parse(argv)
