from tandem.engine.batcher import MAX_LOGPROB_ROWS, next_chunks
from tandem.engine.request import ActiveRequest
from tandem.wire.generation import GenerateRequest, LogprobsWanted, SamplingParams
from tandem.wire.ids import RequestId


def request(num_prompt: int, num_computed: int, logprobs=None) -> ActiveRequest:
    prompt = list(range(num_prompt))
    generate = GenerateRequest(
        request_id=RequestId("r"), prompt_ids=prompt, sampling=SamplingParams(), logprobs=logprobs
    )
    return ActiveRequest(
        generate, arrival=0, max_tokens=1000, seed=0, token_ids=prompt, num_computed=num_computed
    )


def sizes(chunks):
    return [(chunk.num_tokens, chunk.is_last) for chunk in chunks]


def test_a_long_prompt_is_cut_at_the_budget():
    assert sizes(next_chunks([request(100, 0)], 32)) == [(32, False)]


def test_the_rest_of_a_prompt_ends_it():
    assert sizes(next_chunks([request(100, 96)], 32)) == [(4, True)]


def test_prompts_share_the_budget_first_come_first_served():
    assert sizes(next_chunks([request(6, 0), request(6, 0), request(6, 0)], 8)) == [
        (6, True),
        (2, False),
    ]


def test_a_prompt_that_tells_its_logprobs_goes_in_smaller_chunks():
    wanted = LogprobsWanted(prompt_start=0)
    asked = [request(2000, 0, wanted), request(100, 0)]
    assert sizes(next_chunks(asked, 1000)) == [(MAX_LOGPROB_ROWS, False), (100, True)]


def test_what_is_generated_alone_does_not_shrink_a_chunk():
    assert sizes(next_chunks([request(2000, 0, LogprobsWanted())], 1000)) == [(1000, False)]


def test_new_prompts_have_a_budget_of_their_own_and_an_answer_that_was_retracted_all_of_it():
    retracted = request(50, 0)
    retracted.token_ids = [*range(60)]
    prompts = [request(6, 0), request(6, 0), retracted, request(6, 0)]
    assert sizes(next_chunks(prompts, 40, 8)) == [(6, True), (2, False), (32, False)]
