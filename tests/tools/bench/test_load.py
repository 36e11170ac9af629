"""The flags and the requests of a load."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.settings.flags import SettingInvalid
from tandem.tools.bench.config import BenchConfig, parse
from tandem.tools.bench.load import WARM_UP, PlannedRequest, arrival_times, body_of, planned


def test_flags_select_a_closed_or_an_open_loop():
    closed, rate = parse(["--max-concurrency", "3"]), ("--rate", "2", "--num-prompts", "10")
    assert (closed.load, parse([]).load) == ("3 streams", "16 streams")
    assert [request.due_s for request in planned(closed)] == [0.0] * 24
    assert (parse(rate).load, parse(rate).concurrency) == ("2 requests/s", 0)
    assert parse([*rate, "--max-concurrency", "5"]).load == "2 requests/s, at most 5 streams"
    indexes = {request.index for request in planned(parse(rate))}
    assert len(indexes) == 10
    assert WARM_UP.index not in indexes


def test_flags_of_other_load_clients_are_accepted():
    ours = ["--rate", "3", "--num-requests", "5", "--input-len", "7", "--output-len", "9"]
    theirs = ["--request-rate", "3", "--num-prompts", "5"]
    theirs += ["--random-input-len", "7", "--random-output-len", "9"]
    assert parse(ours) == parse(theirs)
    assert parse(["--url", "http://h:1/v1/"]).url == "http://h:1"


@pytest.mark.parametrize("argv", ["--url localhost:8000", "--rate nan", "--slo-ttft-ms 0"])
def test_invalid_values_are_refused(argv):
    with pytest.raises(SettingInvalid, match="use "):
        parse(argv.split())


@given(st.floats(0.01, 1000), st.integers(1, 200), st.integers(0, 1000))
def test_arrivals_ascend_from_zero_and_depend_on_the_seed_alone(rate, count, seed):
    times = arrival_times(rate, count, seed)
    assert (len(times), times[0]) == (count, 0.0)
    assert times == sorted(times) == arrival_times(rate, count, seed)


def test_arrivals_are_a_poisson_process():
    gaps = np.diff(arrival_times(5.0, 20_000, 1))
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(1, rel=0.05)


def ids(index: int, **settings) -> list[int]:
    return json.loads(body_of(BenchConfig(**settings), PlannedRequest(index)))["input_ids"]


@given(st.integers(0, 10**6), st.integers(1, 2000), st.integers(1, 10**5), st.integers(0, 99))
def test_prompts_have_their_length_and_ids_of_the_vocabulary(index, count, size, seed):
    found = ids(index, input_tokens=count, vocab_size=size, seed=seed)
    assert len(found) == count
    assert 0 <= min(found) <= max(found) < size


def test_a_prompt_depends_on_index_and_seed():
    assert ids(3, vocab_size=1000) == ids(3, vocab_size=1000)
    assert ids(3, vocab_size=1000) not in (ids(4, vocab_size=1000), ids(3, vocab_size=1000, seed=1))
