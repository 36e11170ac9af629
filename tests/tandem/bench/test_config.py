import math

import pytest

from tandem.bench.config import Load, parse
from tandem.wire.errors import ConfigInvalid


def loads(*argv: str) -> tuple[Load, ...]:
    return parse(argv).loads


def test_flags_describe_loads():
    assert [load.name for load in loads("--concurrency", "1", "8")] == ["1 stream", "8 streams"]
    assert loads("--max-concurrency", "5") == loads("--concurrency", "5") == (Load(5),)
    assert loads("--rate", "inf", "--max-concurrency", "5") == (Load(5, math.inf),)
    assert loads("--rate", "2")[0].kind == "open"


def test_names_of_other_clients_mean_the_same():
    ours = ["--rate", "3", "--num-requests", "5", "--input-len", "7", "--output-len", "9"]
    theirs = ["--request-rate", "3", "--num-prompts", "5"]
    theirs += ["--random-input-len", "7", "--random-output-len", "9"]
    assert parse(ours) == parse(theirs)


@pytest.mark.parametrize("url", ["http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_a_base_url_of_openai_clients_is_taken(url):
    assert parse(["--url", url]).url == "http://h:1"


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("--url", "localhost:8000"), "give a URL such as"),
        (("--url", "http://h:port"), "give a URL such as"),
        (("--concurrency", "1", "--rate", "2"), "one of them"),
        (("--trace", "t", "--shared-prefix-tokens", "2"), "its own prompts"),
        (("--concurrency", "1", "--max-concurrency", "2"), "bounds an open loop"),
        (("--extra-request-body", "[1]"), "JSON object"),
        (("--concurrency", "0"), "give at least 1"),
        (("--concurrency", "many"), "give at least 1"),
        (("--rate", "-1"), "give at least 0"),
        (("--rate", "nan"), "give at least 0"),
        (("--input-len", "0"), "give at least 1"),
        (("--random-range-ratio", "2"), "give 0 to 1"),
        (("--burstiness", "0"), "give at least 0.001"),
        (("--slo-ttft-ms", "0"), "give at least 0.001"),
    ],
)
def test_values_that_cannot_work_are_rejected_with_what_to_give(argv, told):
    with pytest.raises(ConfigInvalid, match=told):
        parse(argv)
