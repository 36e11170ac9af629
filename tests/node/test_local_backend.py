"""Metrics and health of `LocalBackend` across the lifetimes of links and engines."""

import asyncio

import msgspec
import pytest

from tandem.engine.config import EngineConfig
from tandem.frontend.backend import Bootstrap
from tandem.kvtransfer.config import TransferConfig
from tandem.node.config import NodeConfig
from tandem.node.life.engine_process import Ready
from tandem.node.life.life import LifeEvent
from tandem.node.local_backend import LOOP_SILENCE_S, LocalBackend
from tandem.node.metrics import Measures
from tandem.wire.channel import Inbox
from tandem.wire.engine_client import EngineClient
from tandem.wire.errors import AdapterNotFound, InvalidRequest, NoNodeAvailable
from tandem.wire.generation import Epoch, GenerateRequest, RequestId, SamplingParams, address_of
from tandem.wire.messages import ModelInfo, NodeLoad, Pong, StartColocated, ToEngine
from tests.patience import until_async
from tests.receivers import Receiver
from tests.router.fake_node import FakeEngine

CONFIG = NodeConfig(role="decode", served_model_names=("m",), engine=EngineConfig(model_dir="m"))
READY = Ready(
    epoch=1,
    engine_port=1,
    bootstrap_port=None,
    max_prompt_tokens=127,
    model=ModelInfo(
        name="m", fingerprint="llama", context_length=128, vocab_size=10, eos_token_ids=[]
    ),
)


def client() -> EngineClient:
    return EngineClient("tcp://127.0.0.1:1", wants_measures=True)


@pytest.fixture
def backend():
    backend = LocalBackend(CONFIG, None, "")
    told = client()
    told.load = NodeLoad(generated_tokens=70, queued_tokens=-1)
    told.measured = Measures().report(Epoch(1))
    backend.attach(CONFIG, READY)
    backend.link(told)
    backend.life.apply(LifeEvent.LOADED)
    return backend


def test_node_reports_that_it_loads_until_its_engine_answers():
    backend, linked = LocalBackend(CONFIG, None, ""), client()
    backend.attach(CONFIG, READY)
    backend.link(linked)
    assert not backend.is_linked
    assert backend.health().detail == "loading the model"
    with pytest.raises(NoNodeAvailable, match="loading the model"):
        backend.server_info()
    linked.answered.set()
    assert backend.is_linked


async def test_node_loads_replaces_and_unloads_adapters_by_itself(backend):
    engine = FakeEngine()
    engine.disk = {"/old": "1", "/new": "2"}
    linked = EngineClient(engine.address)
    backend.link(linked)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(linked.run())
        await until_async(lambda: linked.is_up)
        await backend.load_adapter("sql", "/old", in_place=False)
        assert backend.models().choose(None).adapters == {"sql": "sql@1"}
        await backend.load_adapter("sql", "/new", in_place=True)
        assert [each.id for each in engine.load.adapters] == ["sql@2"]
        await backend.unload_adapter("sql")
        assert backend.models().choose(None).adapters == {}
        with pytest.raises(AdapterNotFound):
            await backend.unload_adapter("sql")
        linked.stop()
    engine.close()


def test_lost_link_does_not_reset_counters(backend):
    backend.link(client())
    lines = backend.metrics().splitlines()
    assert 'tandem_generated_tokens_total{role="decode"} 70.0' in lines
    assert 'tandem_step_cpu_seconds_count{role="decode"} 0.0' in lines


def test_node_reports_its_own_load(backend):
    assert [load.generated_tokens for load in backend.loads()] == [70]


def test_values_that_an_older_engine_omits_are_not_negative(backend):
    assert 'tandem_queued_tokens{role="decode"} 0.0' in backend.metrics().splitlines()


def test_node_without_an_engine_still_reports_its_state(backend):
    backend.life.apply(LifeEvent.END)
    backend.detach()
    text = backend.metrics()
    assert 'tandem_node_state{role="decode",state="leaving"} 1.0' in text
    assert 'tandem_node_state{role="decode",state="serving"} 0.0' in text
    assert 'process="http"' in text
    assert 'process="engine"' not in text


async def test_node_with_a_stuck_loop_is_unhealthy_even_if_its_link_is_up():
    config = msgspec.structs.replace(CONFIG, step_timeout_s=1.0, heartbeat_interval_ms=100.0)
    backend = LocalBackend(config, None, "")
    inbox: Inbox[ToEngine] = Inbox("tcp://127.0.0.1:0", ToEngine)
    linked = EngineClient(inbox.address, heartbeat=config.heartbeat)
    backend.attach(config, READY)
    backend.link(linked)
    backend.life.apply(LifeEvent.LOADED)
    running = asyncio.create_task(linked.run())

    def turn() -> None:
        while (envelope := inbox.receive()) is not None:
            inbox.send(envelope.peer, Pong(epoch=Epoch(1), load=NodeLoad()))

    async def until_health_is(is_serving: bool, meanwhile=lambda: None) -> None:
        def is_reported() -> bool:
            meanwhile()
            return backend.health().is_serving is is_serving

        await until_async(is_reported)

    try:
        await until_health_is(True, turn)
        await until_health_is(False)
        assert "loop has been stuck for 1 s" in backend.health().detail
        assert linked.is_up
        await until_health_is(True, turn)
    finally:
        running.cancel()
        await asyncio.wait([running])
        inbox.close()


@pytest.mark.parametrize(
    ("heartbeat_ms", "step_timeout_s"), [(500.0, 1.0), (20_000.0, 300.0), (60_000.0, 300.0)]
)
async def test_idle_engine_is_healthy_at_any_heartbeat_interval(heartbeat_ms, step_timeout_s):
    config = msgspec.structs.replace(
        CONFIG, heartbeat_interval_ms=heartbeat_ms, step_timeout_s=step_timeout_s
    )
    backend, linked = LocalBackend(config, None, ""), client()
    backend.attach(config, READY)
    backend.link(linked)
    backend.life.apply(LifeEvent.LOADED)
    linked.answered.set()
    for num_intervals, is_serving in ((2.5, True), (5.5, False)):
        silent_s = max(num_intervals * heartbeat_ms / 1000, 0 if is_serving else LOOP_SILENCE_S)
        linked._received_at_s = asyncio.get_running_loop().time() - silent_s
        assert backend.health().is_serving is is_serving


class Started(Exception):
    """The message that a backend sends to its engine."""


async def start(config, bootstrap):
    """Return what a backend sends to its engine for a request."""

    class Client:
        def generate(self, message, _on_change):
            raise Started(message)

    backend = LocalBackend(config, None, "")
    backend.attach(config, READY)
    backend.link(Client())
    backend.life.apply(LifeEvent.LOADED)
    request = GenerateRequest(request_id=RequestId("r"), prompt_ids=[5], sampling=SamplingParams())
    with pytest.raises(Started) as started:
        await backend.generate(request, Receiver(), bootstrap)
    return started.value.args[0]


@pytest.mark.parametrize(("named", "used"), [(None, 9100), (7, 7)])
async def test_decode_asks_at_the_flags_bootstrap_port_unless_the_request_names_one(named, used):
    config = msgspec.structs.replace(CONFIG, transfer=TransferConfig(bootstrap_port=9100))
    started = await start(config, Bootstrap(host="p", port=named, room=3))
    assert started.bootstrap_port == used


async def test_decode_computes_a_request_without_bootstrap_fields_alone():
    assert isinstance(await start(CONFIG, None), StartColocated)


async def test_prefill_refuses_a_request_without_bootstrap_fields():
    with pytest.raises(InvalidRequest, match="prefill node, which runs one half"):
        await start(msgspec.structs.replace(CONFIG, role="prefill"), None)


async def test_prefill_of_a_sequential_router_computes_one_token_without_a_grant():
    config = msgspec.structs.replace(CONFIG, role="prefill")
    started = await start(config, Bootstrap("", None, room=3, is_sequential=True))
    assert started.request.sampling.max_new_tokens == 1
    assert not started.waits_for_grant
    assert (await start(config, Bootstrap("p", 1, room=3))).waits_for_grant


async def test_decode_refuses_prefills_half_of_a_sequential_router():
    with pytest.raises(InvalidRequest, match="do_remote_decode names prefill's half"):
        await start(CONFIG, Bootstrap("", None, room=3, is_sequential=True))


def test_query_names_the_bootstrap_port_of_prefill():
    backend = LocalBackend(CONFIG, None, "")
    backend.life.apply(LifeEvent.LOADED)
    backend.attach(CONFIG, msgspec.structs.replace(READY, bootstrap_port=9100))
    engine = backend.query()["0"]["engine_id"]
    found = {"remote_bootstrap_addr": "http://10.0.0.1:7000", "remote_engine_id": engine}
    assert address_of(found) == ("10.0.0.1", 9100)
    backend.attach(CONFIG, msgspec.structs.replace(READY, bootstrap_port=None))
    with pytest.raises(InvalidRequest, match="no prefill node"):
        backend.query()
