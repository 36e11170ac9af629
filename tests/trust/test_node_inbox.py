"""Whatever is sent to an engine's inbox: the loop goes on, every page is accounted for, the next is served."""

import contextlib
from contextlib import ExitStack

import pytest
import structlog.testing
from hypothesis import given
from hypothesis import strategies as st

from tandem.wire.channel import Codec
from tandem.wire.errors import MessageInvalid
from tandem.wire.hand_off import FromPrefill, ToPrefill
from tandem.wire.messages import ToEngine
from tests.trust.hostile import FUZZ, frames_of
from tests.trust.node_rig import COLOCATED, DECODE, PREFILL, Cluster

HINTS = {
    "request_id": st.sampled_from(["a", "b"]),
    "room": st.integers(1, 3) | st.sampled_from([-(2**63), 2**63]),
    "attempt": st.integers(0, 1),
    "prompt_ids": st.lists(st.integers(2, 49), min_size=1, max_size=40),
    "num_prior_tokens": st.just(0),
    "bootstrap_host": st.just("127.0.0.1"),
    "max_new_tokens": st.integers(1, 6),
    "logit_bias": st.dictionaries(st.integers(0, 49), st.floats(width=32), max_size=2),
    "stop_token_ids": st.lists(st.integers(0, 49), max_size=2),
    "grammar": st.none(),
    "temperature": st.sampled_from([0.0, 1.0]),
    "repetition_penalty": st.just(1.0),
}


@pytest.fixture(scope="module")
def cluster():
    with ExitStack() as stack:
        made = Cluster(stack)
        yield made
        made.serve_one()


@pytest.mark.parametrize("node", [PREFILL, DECODE, COLOCATED], ids=["prefill", "decode", "both"])
def test_no_message_stops_an_engine_or_keeps_a_page(cluster, node):
    hints = HINTS | {"bootstrap_port": st.just(cluster.sender.port)}

    @FUZZ
    @given(st.lists(frames_of(ToEngine, hints), max_size=6))
    def knock(frames):
        cluster.tell(node, frames)
        for _ in range(3):
            cluster.step()
        cluster.settle()

    with structlog.testing.capture_logs([structlog.processors.format_exc_info]) as logs:
        knock()
    # The loop survives what it did not foresee; here everything was.
    assert not [log for log in logs if log["log_level"] == "error"]
    cluster.serve_one()


@pytest.mark.parametrize("union", [ToEngine, ToPrefill, FromPrefill])
def test_what_is_decoded_can_be_sent_again_and_means_the_same(union):
    codec = Codec(union)

    @FUZZ
    @given(frames_of(union))
    def decode(frame):
        with contextlib.suppress(MessageInvalid):
            again = codec.encode(codec.decode(frame))
            assert codec.encode(codec.decode(again)) == again

    decode()
