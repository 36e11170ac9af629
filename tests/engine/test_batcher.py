from engine.batcher import next_batch
from engine.request import ActiveRequest
from wire.ids import RequestId
from wire.messages import GenerateRequest, SamplingParams


def request(num_prompt: int, num_computed: int, num_output: int = 0) -> ActiveRequest:
    prompt = list(range(num_prompt))
    generate = GenerateRequest(
        request_id=RequestId("r"), prompt_ids=prompt, sampling=SamplingParams()
    )
    tokens = prompt + [7] * num_output
    return ActiveRequest(generate, max_tokens=1000, token_ids=tokens, num_computed=num_computed)


def sizes(batch):
    return [(piece.num_tokens, piece.is_last) for piece in batch]


def test_a_long_prompt_is_cut_at_the_budget():
    assert sizes(next_batch([request(100, 0)], 32)) == [(32, False)]


def test_the_rest_of_a_prompt_ends_it():
    assert sizes(next_batch([request(100, 96)], 32)) == [(4, True)]


def test_decoding_requests_run_whatever_the_budget():
    running = [request(5, 5, 1), request(100, 0), request(5, 7, 3)]
    assert sizes(next_batch(running, 8)) == [(1, True), (8, False), (1, True)]


def test_prompts_share_the_budget_first_come_first_served():
    assert sizes(next_batch([request(6, 0), request(6, 0), request(6, 0)], 8)) == [
        (6, True),
        (2, False),
    ]


def test_the_last_single_token_of_a_prompt_counts_towards_the_budget():
    assert sizes(next_batch([request(8, 0), request(5, 4)], 8)) == [(8, True)]
