"""The requests of a load: arrivals, traces, prompts."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.bench.config import BenchConfig, parse
from tandem.bench.workload import (
    BLOCK_TOKENS,
    Job,
    TraceRow,
    arrival_times,
    due_times,
    make_jobs,
    prompt_ids,
    prompt_text,
    read_trace,
)
from tandem.wire.errors import ConfigInvalid

# The first lines of a trace that Mooncake published, with fewer ids.
PUBLISHED = b"""\
{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}

{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46, 47, 2366]}
"""


@given(st.floats(0.01, 1000), st.floats(0.05, 20), st.integers(0, 200), st.integers(0, 1000))
def test_arrivals_begin_at_zero_in_order_and_are_the_same_for_a_seed(rate, burstiness, count, seed):
    times = arrival_times(rate, burstiness, count, seed)
    assert len(times) == count
    assert times[:1] in ([], [0.0])
    assert times == sorted(times) == arrival_times(rate, burstiness, count, seed)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_burstiness(burstiness):
    gaps = np.diff(arrival_times(5.0, burstiness, 20_000, 1))
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_an_infinite_rate_sends_all_at_once_and_infinite_burstiness_evenly():
    assert arrival_times(math.inf, 1.0, 3, 0) == [0.0, 0.0, 0.0]
    assert arrival_times(4.0, math.inf, 3, 0) == [0.0, 0.25, 0.5]


def test_a_published_trace_is_read_and_a_limit_reads_no_further(tmp_path):
    path = tmp_path / "t"
    path.write_bytes(PUBLISHED)
    rows = read_trace(str(path))
    assert rows[0] == TraceRow(27482, 6955, 52, [46, 47, 48])
    assert due_times(rows, 2.0) == [0.0, pytest.approx(1.5265)]
    path.write_bytes(PUBLISHED + b"no json")
    assert read_trace(str(path), limit=2) == rows


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"{", "line 2"),
        (b'{"timestamp": 1, "input_length": 5}', "output_length"),
        (b'{"timestamp": 1, "input_length": 0, "output_length": 1}', "at least 1"),
        (b'{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [-1]}', "hash ids"),
        (b"\xff", "line 2"),
        (b"", "no requests"),
    ],
)
def test_a_line_that_is_no_request_is_rejected_with_its_number(line, told, tmp_path):
    (tmp_path / "t").write_bytes(b"\n" + line)
    with pytest.raises(ConfigInvalid, match=told):
        read_trace(str(tmp_path / "t"))


def jobs_of(*argv: str, first_index: int = 0) -> list[Job]:
    config = parse(argv)
    return make_jobs(config, config.loads[0], first_index)


def test_jobs_of_closed_and_open_loops():
    closed = jobs_of("--concurrency", "3")
    assert [job.due_s for job in closed] == [0.0] * 24
    assert {(job.input_tokens, job.output_tokens) for job in closed} == {(512, 128)}
    assert not {job.index for job in closed} & {job.index for job in jobs_of(first_index=24)}
    open_loop = jobs_of("--rate", "5", "--num-prompts", "10")
    assert len({job.due_s for job in open_loop}) == 10
    assert open_loop == jobs_of("--rate", "5", "--num-prompts", "10")


@given(st.floats(0, 1), st.integers(1, 1000))
def test_lengths_stay_within_the_ratio(ratio, mean):
    flags = ("--random-range-ratio", str(ratio), "--input-len", str(mean))
    lengths = [job.input_tokens for job in jobs_of(*flags)]
    assert max(1, round(mean * (1 - ratio))) <= min(lengths)
    assert max(lengths) <= max(1, round(mean * (1 + ratio)))


def test_a_trace_is_asked_for_as_it_was_recorded(tmp_path):
    config = parse(["--trace", str(tmp_path / "t"), "--trace-speed", "2"])
    rows = [TraceRow(500, 600, 7, [1, 2]), TraceRow(1500, 10, 3, [])]
    jobs = make_jobs(config, config.loads[0], 5, rows)
    assert jobs == [
        Job(index=5, input_tokens=600, output_tokens=7, block_ids=[1, 2]),
        Job(index=6, input_tokens=10, output_tokens=3, due_s=0.5),
    ]


RULES = BenchConfig(vocab_size=1000)


def ids(index: int, count: int, config: BenchConfig = RULES, **fields) -> list[int]:
    return prompt_ids(config, Job(index=index, input_tokens=count, output_tokens=1, **fields))


@given(st.integers(0, 10**6), st.integers(1, 2000), st.integers(1, 10**5), st.integers(0, 99))
def test_prompts_have_their_length_and_ids_of_the_vocabulary(index, count, vocab_size, seed):
    found = ids(index, count, BenchConfig(vocab_size=vocab_size, seed=seed))
    assert len(found) == count
    assert 0 <= min(found) <= max(found) < vocab_size


def test_a_job_always_has_the_same_prompt_and_others_have_others():
    assert ids(3, 64) == ids(3, 64)
    assert ids(3, 64) not in [ids(4, 64), ids(3, 64, msgspec.structs.replace(RULES, seed=1))]


def test_jobs_share_a_prefix_and_nothing_else():
    config = msgspec.structs.replace(RULES, shared_prefix_tokens=50)
    first, second = ids(1, 10, config), ids(2, 10, config)
    assert len(first) == 60
    assert first[:50] == second[:50]
    assert first[50:] != second[50:]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=4), st.integers(1, 4 * BLOCK_TOKENS))
def test_equal_blocks_of_a_trace_are_equal_tokens_and_the_length_is_kept(block_ids, count):
    found = ids(0, count, block_ids=block_ids)
    assert len(found) == count
    for place, block_id in enumerate(block_ids[: count // BLOCK_TOKENS]):
        alone = ids(9, BLOCK_TOKENS, block_ids=[block_id])
        assert found[place * BLOCK_TOKENS :][:BLOCK_TOKENS] == alone
    if count > len(block_ids) * BLOCK_TOKENS + 16:  # what has no block is nobody else's
        assert found != ids(1, count, block_ids=block_ids)


def test_text_has_a_word_for_each_id():
    assert len(prompt_text(RULES, Job(index=0, input_tokens=40, output_tokens=1)).split()) == 40
