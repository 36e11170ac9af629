import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.bench.arguments import parse
from tandem.bench.config import Load
from tandem.bench.records import ClientPlan, Job, PromptRules, Server, Turn
from tandem.bench.trace import TraceRow
from tandem.bench.workload import make_jobs, num_clients, split_plan

SERVER = Server(url="http://x", api="native")


def jobs_of(*argv: str, first_index: int = 0) -> list[Job]:
    config = parse(argv)
    return make_jobs(config, config.loads[0], first_index)


def test_a_closed_loop_has_eight_requests_a_stream_all_due_at_once():
    jobs = jobs_of("--concurrency", "3")
    assert [job.due_s for job in jobs] == [0.0] * 24
    assert {turn for job in jobs for turn in job.turns} == {Turn(512, 128)}


def test_an_open_loop_has_its_arrivals_and_the_same_each_time():
    jobs = jobs_of("--rate", "5", "--num-prompts", "10")
    assert len({job.due_s for job in jobs}) == 10
    assert jobs == jobs_of("--rate", "5", "--num-prompts", "10")


def test_jobs_of_the_next_load_are_others():
    first, second = jobs_of(), jobs_of(first_index=128)
    assert not {job.index for job in first} & {job.index for job in second}


@given(st.floats(0, 1), st.integers(1, 1000))
def test_lengths_stay_within_the_ratio(ratio, mean):
    flags = ("--random-range-ratio", str(ratio), "--input-len", str(mean))
    lengths = [job.turns[0].input_tokens for job in jobs_of(*flags)]
    assert max(1, round(mean * (1 - ratio))) <= min(lengths)
    assert max(lengths) <= max(1, round(mean * (1 + ratio)))


def test_conversations_have_their_turns_and_take_prefixes_in_turn():
    jobs = jobs_of("--turns", "3", "--num-prefixes", "2", "--shared-prefix-tokens", "5")
    assert {len(job.turns) for job in jobs} == {3}
    assert [job.prefix for job in jobs[:4]] == [0, 1, 0, 1]


def test_a_trace_is_asked_for_as_it_was_recorded(tmp_path):
    config = parse(["--trace", str(tmp_path / "t"), "--trace-speed", "2"])
    rows = [TraceRow(500, 600, 7, [1, 2]), TraceRow(1500, 10, 3, [])]
    jobs = make_jobs(config, config.loads[0], 5, rows)
    assert jobs == [
        Job(index=5, turns=[Turn(600, 7)], due_s=0.0, block_ids=[1, 2]),
        Job(index=6, turns=[Turn(10, 3)], due_s=0.5),
    ]


@given(st.integers(0, 40), st.integers(1, 10), st.integers(1, 100))
def test_every_job_and_every_stream_belongs_to_one_client(concurrency, clients, count):
    clients = min(clients, concurrency or clients)
    jobs = [Job(index=i, turns=[Turn(1, 1)]) for i in range(count)]
    rules = PromptRules(vocab_size=10)
    whole = ClientPlan(server=SERVER, rules=rules, jobs=jobs, concurrency=concurrency)
    plans = split_plan(whole, clients)
    assert sorted(job.index for plan in plans for job in plan.jobs) == list(range(count))
    assert sum(plan.concurrency for plan in plans) == concurrency
    if concurrency:
        assert min(plan.concurrency for plan in plans) >= 1
        streams = [len(plan.jobs) / plan.concurrency for plan in plans]
        assert max(streams) - min(streams) <= 1


@pytest.mark.parametrize(("asked", "jobs", "most"), [(8, 100, 4), (8, 3, 3), (2, 100, 2)])
def test_there_are_no_more_clients_than_streams(asked, jobs, most):
    assert num_clients(asked, Load(concurrency=4), jobs) == most


def test_a_small_load_has_one_client():
    assert num_clients(0, Load(concurrency=16), 200) == 1
