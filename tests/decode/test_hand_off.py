"""Both roles in one process, over real links: the received KV equals the computed KV.

`tests/simulation` tests faults of a hand-off in any order, with the same roles and agents.
"""

import pytest
import xxhash

from tandem.kvtransfer.region import MemoryRegion
from tandem.wire.errors import EngineFailed, InvalidRequest
from tandem.wire.generation import GenerateRequest, RequestId, SamplingParams, new_room
from tandem.wire.messages import StartDecode, StartPrefill
from tests.hand_off_rig import NUM_PAGES, PAGE, BrokenRunner, Pair, prompt_of


@pytest.fixture(params=["shm", "tcp"])
def pair(request, tiny_model):
    made = Pair(tiny_model("qwen3"), request.param)
    yield made
    made.close()


def page_hashes(region: MemoryRegion, page_bytes: int, page_ids) -> list[int]:
    return [
        xxhash.xxh3_64_intdigest(region.buffer[page * page_bytes : (page + 1) * page_bytes])
        for page in page_ids
    ]


def test_received_pages_equal_the_computed_pages(pair):
    prompt = prompt_of(61)
    pair.start("a", prompt, max_new_tokens=40)
    halves = list(pair.prefill._by_room.values())
    seen: dict[str, list[int]] = {}

    def landed() -> bool:
        if (active := halves[0].active) is not None and active.page_ids:
            seen["source"] = list(active.page_ids)
        if running := pair.running():
            seen["target"] = list(running[0].page_ids)
        return "target" in seen

    pair.run_until(landed)
    page_bytes = pair.source.size_bytes // NUM_PAGES
    whole_pages = len(prompt) // PAGE
    # Compare the last page only as far as the prompt fills it: decode has written the rest.
    sent = page_hashes(pair.source, page_bytes, seen["source"][:whole_pages])
    came = page_hashes(pair.target, page_bytes, seen["target"][:whole_pages])
    assert sent == came
    assert len(set(sent)) == whole_pages
    pair.run_until(pair.all_pages_are_back)


@pytest.mark.parametrize("decode_first", [True, False])
def test_halves_may_start_in_either_order(pair, decode_first):
    request = pair.start(
        "a", prompt_of(30), decode_first, max_new_tokens=6, temperature=0.8, seed=4
    )
    expected = pair.alone(request)["a"]
    pair.run_until(lambda: pair.decode_answers.finishes["a"])
    pair.run_until(pair.all_pages_are_back)
    assert pair.decode_answers.tokens["a"] == expected
    assert pair.prefill_answers.tokens["a"] == expected[:1]
    assert pair.prefill_answers.finishes["a"] == ["handed_off"]


def test_second_turn_pushes_only_the_pages_that_decode_lacks(pair):
    prompt = prompt_of(48)
    pair.start("a", prompt, max_new_tokens=9)
    pair.run_until(pair.all_pages_are_back)
    page = pair.source.size_bytes // NUM_PAGES
    first = pair.decode.load()
    assert first.received_bytes == pair.prefill.load().pushed_bytes == 6 * page
    assert first.saved_bytes == 0
    turn = prompt + pair.decode_answers.tokens["a"] + [9, 9]
    pair.start("b", turn, max_new_tokens=2)
    pair.run_until(lambda: pair.decode_answers.finishes["b"])
    pair.run_until(pair.all_pages_are_back)
    # 48 prompt tokens and the 8 whose KV decode computed are 7 full pages; 1 page is new.
    prefill, decode = pair.prefill.load(), pair.decode.load()
    assert prefill.pushed_bytes == decode.received_bytes == (6 + 1) * page
    assert prefill.saved_bytes == decode.saved_bytes == 7 * page


def test_first_token_that_ends_the_answer_ends_both_halves(pair):
    pair.start("a", prompt_of(10), max_new_tokens=1)
    pair.run_until(pair.all_pages_are_back)
    assert pair.decode_answers.finishes["a"] == ["length"]
    assert pair.prefill_answers.finishes["a"][0] == "length"


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_failed_forward_fails_its_requests_and_loses_no_pages(pair, side):
    engine = pair.prefill_engine if side == "prefill" else pair.decode_engine
    role = pair.prefill if side == "prefill" else pair.decode
    launcher = engine._launcher
    healthy, launcher._runner = launcher._runner, BrokenRunner()
    pair.start("a", prompt_of(60), max_new_tokens=8)
    with pytest.raises(ZeroDivisionError):
        pair.run_until(lambda: False)
    role.fail_all(EngineFailed("as the loop does"))
    answers = pair.prefill_answers if side == "prefill" else pair.decode_answers
    assert isinstance(answers.errors["a"], EngineFailed)
    launcher._runner = healthy
    pair.run_until(pair.all_pages_are_back)
    pair.start("b", prompt_of(60), max_new_tokens=3)
    pair.run_until(lambda: pair.decode_answers.finishes["b"])
    pair.run_until(pair.all_pages_are_back)


def test_room_in_use_is_rejected_without_harming_its_owner(pair):
    request = pair.start("a", prompt_of(30), max_new_tokens=4)
    (room,) = pair.prefill._by_room
    with pytest.raises(InvalidRequest, match="in use"):
        pair.prefill.start(pair.ticket("thief"), StartPrefill(request=request, room=room))
    with pytest.raises(InvalidRequest, match="in use"):
        pair.decode.start(
            pair.ticket("thief"),
            StartDecode(request=request, room=room, bootstrap_host="127.0.0.1", bootstrap_port=1),
        )
    pair.run_until(lambda: pair.decode_answers.finishes["a"])
    pair.run_until(pair.all_pages_are_back)


def test_room_of_a_cancelled_request_is_in_use_until_its_pages_are_safe(pair):
    request = pair.start("a", prompt_of(30), max_new_tokens=4)
    (room,) = pair.decode._granted
    pair.decode.cancel(pair.ticket("a"))
    start = StartDecode(request=request, room=room, bootstrap_host="127.0.0.1", bootstrap_port=1)
    with pytest.raises(InvalidRequest, match="in use"):
        pair.decode.start(pair.ticket("thief"), start)
    assert pair.decode.load().num_transferring == 1  # so that a drain waits for it
    pair.prefill.cancel(pair.ticket("a"))
    pair.run_until(pair.all_pages_are_back)


def test_half_at_the_wrong_node_is_rejected(pair):
    request = GenerateRequest(request_id=RequestId("a"), prompt_ids=[5], sampling=SamplingParams())
    with pytest.raises(InvalidRequest):
        pair.decode.start(pair.ticket("a"), StartPrefill(request=request, room=new_room()))
    with pytest.raises(InvalidRequest):
        pair.prefill.start(
            pair.ticket("a"),
            StartDecode(request=request, room=new_room(), bootstrap_host="h", bootstrap_port=1),
        )


@pytest.mark.parametrize("first_token", [-1, 10**9, 2**63])
def test_invalid_first_token_fails_only_its_request(pair, first_token):
    honest = pair.sender.finish
    pair.sender.finish = lambda room, _token, *rest, **more: honest(
        room, first_token, *rest, **more
    )
    pair.start("lied to", prompt_of(30))
    pair.run_until(lambda: "lied to" in pair.decode_answers.errors)
    assert isinstance(pair.decode_answers.errors["lied to"], EngineFailed)
    pair.sender.finish = honest
    pair.start("next", prompt_of(30), max_new_tokens=3)
    pair.run_until(lambda: pair.decode_answers.finishes["next"])
    pair.run_until(pair.all_pages_are_back)
