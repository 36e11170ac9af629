"""Layers are pushed while the next are computed; tokens are equal, and the first one waits for no write."""

from itertools import product

import pytest

from tandem.kvtransfer.transports.tcp import TcpTransport
from tests.hand_off_rig import PAGE, Pair, prompt_of
from tests.loopback import Fault, LoopbackTransport
from tests.patience import PATIENCE_S
from tests.sample import sampled


@pytest.fixture
def make_pair(tiny_model):
    made = []

    def make(transport, **settings) -> Pair:
        made.append(Pair(tiny_model("llama"), transport, **settings))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


@pytest.mark.parametrize("decode_page", sampled([PAGE, 4, 16], PAGE, 16))
@pytest.mark.parametrize(
    ("transport", "pushes_layers"),
    sampled(product(["shm", "tcp"], [True, False]), ("shm", True), ("tcp", False)),
)
def test_tokens_do_not_depend_on_how_pages_are_pushed(
    make_pair, transport, pushes_layers, decode_page
):
    pair = make_pair(transport, decode_page=decode_page, pushes_layers=pushes_layers)
    requests = [
        pair.start(str(n), prompt_of(n), max_new_tokens=5, temperature=0.8, seed=n)
        for n in (1, 24, 61, 100)
    ]
    names = [request.request_id for request in requests]
    pair.run_until(lambda: all(pair.decode_answers.finishes[name] for name in names))
    assert pair.decode_answers.tokens == pair.alone(*requests)
    pair.run_until(pair.all_pages_are_back)


@pytest.mark.parametrize(("pushes_layers", "most_writes"), [(True, 3 * 3), (False, 3)])
def test_each_chunk_is_pushed_in_one_write_or_one_per_layer(make_pair, pushes_layers, most_writes):
    transport = LoopbackTransport()
    pair = make_pair(transport, pushes_layers=pushes_layers)
    pair.start("a", prompt_of(61), max_new_tokens=2)  # chunks of 24, 24 and 13; three layers
    pair.run_until(lambda: pair.decode_answers.finishes["a"])
    assert 3 <= transport.num_writes <= most_writes
    pair.run_until(pair.all_pages_are_back)


def test_first_token_does_not_wait_for_the_transfer(make_pair):
    transport = LoopbackTransport([Fault("hang")])
    pair = make_pair(transport)
    pair.start("a", prompt_of(30), max_new_tokens=3)
    pair.run_until(lambda: pair.prefill_answers.tokens["a"])
    assert transport.hanging.wait(PATIENCE_S)
    assert pair.decode_answers.tokens["a"] == []
    assert pair.prefill_answers.finishes["a"] == []
    transport.release()
    pair.run_until(lambda: pair.decode_answers.finishes["a"])
    assert pair.decode_answers.tokens["a"][:1] == pair.prefill_answers.tokens["a"]


def test_second_turn_pushes_only_new_pages_layer_by_layer(make_pair):
    pair = make_pair(TcpTransport())
    prompt = prompt_of(48)
    pair.start("a", prompt, max_new_tokens=9)
    pair.run_until(pair.all_pages_are_back)
    before = pair.decode.load().received_bytes
    pair.start("b", prompt + pair.decode_answers.tokens["a"] + [9, 9], max_new_tokens=2)
    pair.run_until(lambda: pair.decode_answers.finishes["b"])
    # Prefill counts the push only when it handles `PushDone`, which may come after decode's answer.
    pair.run_until(pair.all_pages_are_back)
    page_bytes = before // 6
    assert pair.decode.load().received_bytes - before == page_bytes
    assert pair.prefill.load().pushed_bytes == pair.decode.load().received_bytes


def test_cancel_during_a_layer_write_returns_all_pages(make_pair):
    transport = LoopbackTransport([Fault("hang", at_write=1)])
    pair = make_pair(transport)
    pair.start("a", prompt_of(100), max_new_tokens=8)
    pair.run_until(transport.hanging.is_set)
    pair.prefill.cancel(pair.ticket("a"))
    assert pair.prefill_engine.counts().held > 0
    transport.release()
    pair.run_until(pair.all_pages_are_back)
