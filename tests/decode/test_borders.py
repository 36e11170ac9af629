"""Border cases of a hand-off: an idle decode node, turns that end on a page border, bfloat16."""

import pytest

from tandem.wire.generation import GenerateRequest, RequestId, SamplingParams, new_room
from tandem.wire.messages import StartDecode
from tests.hand_off_rig import NUM_PAGES, PAGE, Pair, prompt_of
from tests.sample import sampled


@pytest.fixture
def make_pair(tiny_model):
    made = []

    def make(dtype="float32", **settings) -> Pair:
        made.append(Pair(tiny_model("qwen3"), "shm", dtype=dtype, **settings))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


def run(pair: Pair, name: str, prompt, **options) -> list[int]:
    """Return a request's tokens, after a comparison with those of one engine."""
    request = pair.start(name, prompt, **options)
    pair.run_until(lambda: pair.decode_answers.finishes[name])
    pair.run_until(pair.all_pages_are_back)
    tokens = pair.decode_answers.tokens[name]
    pair.colocated.cache.flush()
    assert tokens == pair.alone(request)[name]
    return tokens


def test_idle_decode_node_reuses_pages_of_withdrawn_grants(make_pair):
    """On an idle node no forward runs that would retry the admission of the request."""
    pair = make_pair()
    withdrawn = GenerateRequest(
        request_id=RequestId("withdrawn"),
        prompt_ids=prompt_of(NUM_PAGES * PAGE - 20),
        sampling=SamplingParams(),
    )
    pair.decode.start(
        pair.ticket("withdrawn"),
        StartDecode(
            request=withdrawn,
            room=new_room(),
            bootstrap_host="127.0.0.1",
            bootstrap_port=pair.sender.port,
        ),
    )
    assert pair.decode.load().pages_granted >= NUM_PAGES - 3
    pair.start("next", prompt_of(200)[::-1], max_new_tokens=4)
    pair.run_until(lambda: pair.prefill.load().num_waiting == 1)
    assert (pair.decode.load().num_waiting, pair.decode_engine.steps.num_collected) == (1, 0)
    pair.decode.cancel(pair.ticket("withdrawn"))
    pair.run_until(lambda: pair.decode_answers.finishes["next"])
    pair.run_until(pair.all_pages_are_back)


def test_reclaimed_pages_retry_admission_of_a_waiting_request(make_pair):
    pair, reserved = make_pair(), []
    engine = pair.decode_engine
    engine.watch_reserved(reserved.append)

    def queue(name: str, prompt, *, is_remote: bool) -> None:
        sampling = SamplingParams(max_new_tokens=1, ignore_eos=True)
        request = GenerateRequest(request_id=RequestId(name), prompt_ids=prompt, sampling=sampling)
        engine.queue(engine.check(request, is_remote=is_remote))
        engine.admit()

    queue("withdrawn", prompt_of(NUM_PAGES * PAGE - 20), is_remote=True)
    queue("next", prompt_of(200)[::-1], is_remote=False)
    (withdrawn,) = reserved
    engine.quarantine(withdrawn)
    while engine.has_work:  # until the engine finds that nothing can run
        assert not engine.step().tokens
    engine.reclaim(withdrawn)
    tokens = []
    while engine.has_work:
        tokens += engine.step().tokens
    assert [token.request.request.request_id for token in tokens] == ["next"]
    engine.cache.check_integrity()


@pytest.mark.parametrize("num_new", sampled([PAGE - 1, PAGE, PAGE + 1, PAGE + 2], PAGE, PAGE + 1))
@pytest.mark.parametrize("num_prompt", sampled([PAGE - 1, PAGE, 3 * PAGE], PAGE))
def test_turn_that_ends_on_a_page_border_can_be_continued(make_pair, num_prompt, num_new):
    """The last token of an answer has no KV, so the page that it would complete is not cached."""
    pair = make_pair()
    turn, num_cached = prompt_of(num_prompt), 0
    page_bytes = pair.source.size_bytes // NUM_PAGES
    for number in range(4):
        before = pair.decode.load()
        answer = run(pair, str(number), turn, max_new_tokens=num_new, temperature=0.7, seed=number)
        after = pair.decode.load()
        # Decode never takes the last token of a prompt from its cache, because a hand-off computes it.
        num_known = min(num_cached, (len(turn) - 1) // PAGE)
        assert after.saved_bytes - before.saved_bytes == num_known * page_bytes
        num_pushed = -(-len(turn) // PAGE) - num_known
        assert after.received_bytes - before.received_bytes == num_pushed * page_bytes
        turn = turn + answer
        num_cached = (len(turn) - 1) // PAGE


@pytest.mark.parametrize("decode_page", sampled([PAGE, 16], 16))
def test_hand_off_in_bfloat16_matches_one_engine(make_pair, decode_page):
    pair = make_pair("bfloat16", decode_page=decode_page)
    assert pair.receiver._layout.dtype == "bfloat16"
    for length in (1, PAGE, 61):
        run(pair, f"greedy {length}", prompt_of(length), max_new_tokens=6)
        run(
            pair,
            f"drawn {length}",
            prompt_of(length)[::-1],
            max_new_tokens=6,
            temperature=0.8,
            seed=7,
        )


@pytest.mark.parametrize("num_prior", [1, 3, PAGE])
def test_replay_in_bfloat16_continues_the_first_attempt(make_pair, num_prior):
    """The tokens that the first attempt computed one by one are now part of the prompt."""
    pair = make_pair("bfloat16")
    options = {"max_new_tokens": PAGE + 4, "temperature": 0.8, "seed": 3}
    whole = run(pair, "whole", prompt_of(29), **options)
    for role in (pair.prefill, pair.decode):
        role.flush_cache()
    replayed = pair.start(
        "replayed", prompt_of(29) + whole[:num_prior], num_prior_tokens=num_prior, **options
    )
    pair.decode_answers.tokens["replayed"] = whole[:num_prior]
    pair.prefill_answers.tokens["replayed"] = whole[:num_prior]
    assert replayed.num_prior_tokens == num_prior
    pair.run_until(lambda: pair.decode_answers.finishes["replayed"])
    assert pair.decode_answers.tokens["replayed"] == whole
