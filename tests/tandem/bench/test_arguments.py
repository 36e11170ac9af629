import math

import pytest

from tandem.bench.arguments import Load, parse
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
        (("--url", "localhost:8000"), "give a URL such as"),
        (("--url", "http://h:port"), "give a URL such as"),
        (("--concurrency", "1", "--rate", "2"), "one of them"),
        (("--trace", "t", "--num-prompts", "2"), "--trace-limit"),
        (("--extra-request-body", "[1]"), "JSON object"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_give(argv, told):
    with pytest.raises(ConfigInvalid, match=told):
        parse(argv)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("--concurrency", "0"), "give at least 1"),
        (("--rate", "-1"), "give at least 0"),
        (("--rate", "nan"), "give at least 0"),
        (("--input-len", "0"), "give at least 1"),
        (("--random-range-ratio", "2"), "give at least 0 and at most 1"),
        (("--burstiness", "0"), "give more than 0"),
        (("--slo-ttft-ms", "0"), "give more than 0"),
    ],
)
def test_numbers_out_of_bounds_are_wrong_usage(argv, told, capsys):
    with pytest.raises(SystemExit) as refused:
        parse(argv)
    assert refused.value.code == 2
    assert told in capsys.readouterr().err
