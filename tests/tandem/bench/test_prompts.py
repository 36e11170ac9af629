from hypothesis import given
from hypothesis import strategies as st

from tandem.bench.prompts import PromptMaker
from tandem.bench.records import Job, PromptRules, Turn
from tandem.bench.trace import BLOCK_TOKENS


def job(index: int, *inputs: int, **fields) -> Job:
    return Job(index=index, turns=[Turn(count, 1) for count in inputs], **fields)


def maker(**rules) -> PromptMaker:
    return PromptMaker(PromptRules(**{"vocab_size": 1000, **rules}))


@given(st.integers(0, 10**6), st.integers(1, 2000), st.integers(1, 10**5), st.integers(0, 99))
def test_prompts_have_their_length_and_ids_of_the_vocabulary(index, count, vocab_size, seed):
    ids = maker(vocab_size=vocab_size, seed=seed).ids(job(index, count), 0)
    assert len(ids) == count
    assert 0 <= min(ids) <= max(ids) < vocab_size


def test_every_maker_makes_the_same_prompt_of_a_job_and_other_prompts_of_others():
    assert maker().ids(job(3, 64), 0) == maker().ids(job(3, 64), 0)
    different = [maker().ids(job(4, 64), 0), maker(seed=1).ids(job(3, 64), 0)]
    assert maker().ids(job(3, 64), 0) not in different


def test_turns_of_a_conversation_say_different_things():
    talk = job(0, 32, 32)
    assert maker().ids(talk, 0) != maker().ids(talk, 1)


def test_jobs_of_one_prefix_share_it_and_nothing_else():
    making = maker(shared_prefix_tokens=50)
    first, second = (making.ids(job(index, 10), 0) for index in (1, 2))
    other = making.ids(job(3, 10, prefix=1), 0)
    assert len(first) == 60
    assert first[:50] == second[:50] != other[:50]
    assert first[50:] != second[50:]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=4), st.integers(1, 4 * BLOCK_TOKENS))
def test_equal_blocks_of_a_trace_are_equal_tokens_and_the_length_is_kept(block_ids, count):
    making = maker()
    ids = making.ids(job(0, count, block_ids=block_ids), 0)
    assert len(ids) == count
    for place, block_id in enumerate(block_ids[: count // BLOCK_TOKENS]):
        alone = making.ids(job(9, BLOCK_TOKENS, block_ids=[block_id]), 0)
        assert ids[place * BLOCK_TOKENS :][:BLOCK_TOKENS] == alone


def test_what_a_trace_has_no_block_for_is_nobody_elses():
    first, second = (maker().ids(job(i, 600, block_ids=[7]), 0) for i in (1, 2))
    assert first[:512] == second[:512]
    assert first[512:] != second[512:]


def test_text_has_a_word_for_each_id():
    assert len(maker().text(job(0, 40), 0).split()) == 40
