"""The requests of a load and their prompts."""

from hypothesis import given
from hypothesis import strategies as st

from tandem.bench.arguments import parse
from tandem.bench.trace import BLOCK_TOKENS, TraceRow
from tandem.bench.workload import Job, PromptRules, make_jobs


def jobs_of(*argv: str, first_index: int = 0) -> list[Job]:
    config = parse(argv)
    return make_jobs(config, config.loads[0], first_index)


def test_a_closed_loop_has_eight_requests_a_stream_all_due_at_once():
    jobs = jobs_of("--concurrency", "3")
    assert [job.due_s for job in jobs] == [0.0] * 24
    assert {(job.input_tokens, job.output_tokens) for job in jobs} == {(512, 128)}


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
    lengths = [job.input_tokens for job in jobs_of(*flags)]
    assert max(1, round(mean * (1 - ratio))) <= min(lengths)
    assert max(lengths) <= max(1, round(mean * (1 + ratio)))


def test_requests_take_prefixes_in_turn():
    jobs = jobs_of("--num-prefixes", "2", "--shared-prefix-tokens", "5")
    assert [job.prefix for job in jobs[:4]] == [0, 1, 0, 1]


def test_a_trace_is_asked_for_as_it_was_recorded(tmp_path):
    config = parse(["--trace", str(tmp_path / "t"), "--trace-speed", "2"])
    rows = [TraceRow(500, 600, 7, [1, 2]), TraceRow(1500, 10, 3, [])]
    jobs = make_jobs(config, config.loads[0], 5, rows)
    assert jobs == [
        Job(index=5, input_tokens=600, output_tokens=7, block_ids=(1, 2)),
        Job(index=6, input_tokens=10, output_tokens=3, due_s=0.5),
    ]


def job(index: int, count: int, **fields) -> Job:
    return Job(index=index, input_tokens=count, output_tokens=1, **fields)


def rules(**fields) -> PromptRules:
    return PromptRules(**{"vocab_size": 1000, **fields})


@given(st.integers(0, 10**6), st.integers(1, 2000), st.integers(1, 10**5), st.integers(0, 99))
def test_prompts_have_their_length_and_ids_of_the_vocabulary(index, count, vocab_size, seed):
    ids = rules(vocab_size=vocab_size, seed=seed).ids(job(index, count))
    assert len(ids) == count
    assert 0 <= min(ids) <= max(ids) < vocab_size


def test_a_job_always_has_the_same_prompt_and_others_have_others():
    assert rules().ids(job(3, 64)) == rules().ids(job(3, 64))
    different = [rules().ids(job(4, 64)), rules(seed=1).ids(job(3, 64))]
    assert rules().ids(job(3, 64)) not in different


def test_jobs_of_one_prefix_share_it_and_nothing_else():
    making = rules(shared_prefix_tokens=50)
    first, second = (making.ids(job(index, 10)) for index in (1, 2))
    other = making.ids(job(3, 10, prefix=1))
    assert len(first) == 60
    assert first[:50] == second[:50] != other[:50]
    assert first[50:] != second[50:]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=4), st.integers(1, 4 * BLOCK_TOKENS))
def test_equal_blocks_of_a_trace_are_equal_tokens_and_the_length_is_kept(block_ids, count):
    making = rules()
    ids = making.ids(job(0, count, block_ids=tuple(block_ids)))
    assert len(ids) == count
    for place, block_id in enumerate(block_ids[: count // BLOCK_TOKENS]):
        alone = making.ids(job(9, BLOCK_TOKENS, block_ids=(block_id,)))
        assert ids[place * BLOCK_TOKENS :][:BLOCK_TOKENS] == alone


def test_what_a_trace_has_no_block_for_is_nobody_elses():
    first, second = (rules().ids(job(i, 600, block_ids=(7,))) for i in (1, 2))
    assert first[:512] == second[:512]
    assert first[512:] != second[512:]


def test_text_has_a_word_for_each_id():
    assert len(rules().text(job(0, 40)).split()) == 40
