"""Layers leave while the next are computed; the tokens are the same, and the first waits for no write."""

from itertools import product

import pytest

from tandem.kvtransfer.transports.loopback import Fault, LoopbackTransport
from tests.hand_off_rig import PAGE, Pair, prompt_of
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
def test_tokens_are_equal_however_pages_leave(make_pair, transport, pushes_layers, decode_page):
    pair = make_pair(transport, decode_page=decode_page, pushes_layers=pushes_layers)
    requests = [
        pair.start(str(n), prompt_of(n), max_new_tokens=5, temperature=0.8, seed=n)
        for n in (1, 24, 61, 100)
    ]
    names = [request.request_id for request in requests]
    pair.run_until(lambda: all(pair.decode_answers.finishes[name] for name in names))
    assert pair.decode_answers.tokens == pair.alone(*requests)
    pair.run_until(pair.all_pages_are_back)


class CountingTransport(LoopbackTransport):
    """Counts its writes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_writes = 0

    def next_fault(self):
        self.num_writes += 1
        return super().next_fault()


@pytest.mark.parametrize(("pushes_layers", "num_writes"), [(True, 3 * 3), (False, 3)])
def test_each_layer_of_each_chunk_is_a_write_of_its_own(make_pair, pushes_layers, num_writes):
    transport = CountingTransport()
    pair = make_pair(transport, pushes_layers=pushes_layers)
    pair.start("a", prompt_of(61), max_new_tokens=2)  # chunks of 24, 24 and 13; three layers
    pair.run_until(lambda: pair.decode_answers.finishes["a"])
    assert transport.num_writes == num_writes
    pair.run_until(pair.all_pages_are_back)


def test_the_first_token_does_not_wait_for_the_transfer(make_pair):
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
