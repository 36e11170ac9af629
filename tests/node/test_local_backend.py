"""What a node's own backend tells Prometheus over the lives of its link and its engine."""

import pytest

from engine.config import EngineConfig
from frontend.engine_client import EngineClient
from node.config import NodeConfig
from node.engine_report import Ready
from node.life import Event, Life
from node.local_backend import LocalBackend
from node.measures import Measures
from wire.ids import Epoch
from wire.messages import NodeLoad

CONFIG = NodeConfig(role="decode", served_model_name="m", engine=EngineConfig(model_dir="m"))
READY = Ready(
    epoch=1,
    engine_port=1,
    bootstrap_port=None,
    fingerprint="llama",
    context_length=128,
    max_prompt_tokens=127,
    vocab_size=10,
    eos_token_ids=[],
)


def client() -> EngineClient:
    return EngineClient("tcp://127.0.0.1:1", wants_measures=True)


@pytest.fixture
def life():
    return Life("decode")


@pytest.fixture
def backend(life):
    backend = LocalBackend(CONFIG, "0", life)
    told = client()
    told.load = NodeLoad(generated_tokens=70, queued_tokens=-1)
    told.measured = Measures().report(Epoch(1))
    backend.attach(CONFIG, READY, told, None, "")
    life.apply(Event.LOADED)
    return backend


def test_a_lost_link_to_the_engine_lets_no_counter_begin_again(backend):
    backend.relink(client())
    lines = backend.metrics().splitlines()
    assert 'tandem_generated_tokens_total{role="decode"} 70.0' in lines
    assert 'tandem_step_cpu_seconds_count{role="decode"} 0.0' in lines


def test_what_an_older_engine_does_not_tell_is_no_negative_number(backend):
    assert 'tandem_queued_tokens{role="decode"} 0.0' in backend.metrics().splitlines()


def test_a_node_without_an_engine_still_says_what_state_it_is_in(backend, life):
    life.apply(Event.END)
    backend.detach()
    text = backend.metrics()
    assert 'tandem_node_state{role="decode",state="leaving"} 1.0' in text
    assert 'tandem_node_state{role="decode",state="serving"} 0.0' in text
    assert 'process="http"' in text
    assert 'process="engine"' not in text
