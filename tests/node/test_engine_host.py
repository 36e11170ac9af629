"""The engine process of a node: its parent, its engine, and a lost or missing device."""

import asyncio
import json
import subprocess
import sys

import msgspec
import pytest

from tandem.engine.config import EngineConfig
from tandem.engine.profile import Simulation
from tandem.kvtransfer.region import MemoryRegion
from tandem.node.config import NodeConfig
from tandem.node.life.engine_process import EngineProcess, keep_linked
from tandem.node.process.engine_host import build_engine
from tandem.wire.channel import Waker
from tandem.wire.engine_client import EngineClient
from tandem.wire.errors import ConfigInvalid
from tests.patience import PATIENCE_S, until_async
from tests.router.fake_node import FakeEngine

HEAVY = {"torch", "transformers", "xgrammar", "numba", "triton"}


def config_of(path, role="prefill", **settings) -> NodeConfig:
    engine = EngineConfig(model_dir=str(path), page_size=8, **settings)
    return NodeConfig(role=role, served_model_names=("m",), engine=engine, log_format="json")


@pytest.fixture
def waker():
    made = Waker()
    yield made
    made.close()


def test_simulated_engine_does_not_import_torch():
    asked = f"print(sorted({HEAVY} & set(sys.modules)))"
    modules = "tandem.prefill.role, tandem.decode.role"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, {modules}; {asked}"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("kv", ["real", "none"])
def test_pool_has_the_requested_tokens_and_their_bytes(tiny_model, waker, kv):
    made = []

    def memory(plan):
        made.append(MemoryRegion.private(plan.memory_bytes))
        return made[0]

    config = config_of(tiny_model("llama"), max_total_tokens=804, simulation=Simulation(kv=kv))
    engine = build_engine(config, memory, waker)
    assert engine.cache.num_pages == 100
    token_bytes = 3 * 2 * 2 * 16 * 4 if kv == "real" else 2
    assert made[0].size_bytes == 800 * token_bytes
    made[0].close()


def test_pool_without_kv_holds_a_million_tokens(tiny_model, waker):
    config = config_of(tiny_model("llama"), "colocated", simulation=Simulation(kv="none"))
    assert build_engine(config, lambda _plan: None, waker).cache.num_pages * 8 == 1 << 20


def test_pool_without_a_page_is_rejected(tiny_model, waker):
    config = config_of(tiny_model("llama"), max_total_tokens=7, simulation=Simulation())
    with pytest.raises(ConfigInvalid, match="--max-total-tokens"):
        build_engine(config, lambda _plan: None, waker)


def test_device_is_selected_before_the_model_is_loaded(waker):
    """Here the device does not exist; otherwise the whole model would be loaded to it."""
    config = config_of("/there is no model", "colocated", device="cuda:99")
    with pytest.raises(ConfigInvalid, match="--device cuda:99 does not exist: torch finds"):
        build_engine(config, lambda _plan: None, waker)


LOSES_ITS_DEVICE = """
from tandem.decode.role import DecodeRole
from tandem.engine.errors import DeviceLost
from tandem.node.process.engine_host import main

class Role(DecodeRole):
    has_work = True

    def step(self):
        raise DeviceLost("cuda:0: CUDA error: an illegal memory access was encountered")

raise SystemExit(main(lambda parts: Role(parts.engine, None, parts.answers, 8, 8)))
"""


def test_lost_device_ends_the_engine_process_with_a_reason(tiny_model):
    config = config_of(
        tiny_model("llama"), "colocated", max_total_tokens=256, simulation=Simulation(kv="none")
    )
    engine = subprocess.Popen(
        [sys.executable, "-c", LOSES_ITS_DEVICE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with engine:
        engine.stdin.write(msgspec.json.encode(config) + b"\n")
        engine.stdin.flush()  # stays open: the parent is alive
        assert engine.wait(PATIENCE_S) == 1
        [ready] = [json.loads(line) for line in engine.stdout]
        logged = [json.loads(line) for line in engine.stderr]
    # A prompt needs room for one token behind it.
    assert (ready["type"], ready["max_prompt_tokens"]) == ("Ready", 255)
    (lost,) = [line for line in logged if line["event"] == "device.lost"]
    assert lost["reason"].startswith("cuda:0: CUDA error")


@pytest.mark.parametrize(("chosen", "policy"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_of_an_engine_leave_their_cores_to_other_nodes(monkeypatch, chosen, policy):
    if chosen is None:
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    else:
        monkeypatch.setenv("OMP_WAIT_POLICY", chosen)
    engine = EngineProcess("module", config_of("/model"), lambda: None)
    assert engine.environment()["OMP_WAIT_POLICY"] == policy
    assert int(engine.environment()["GOMP_SPINCOUNT"]) <= 1000


IS_LOADING = """
import threading
from tandem.node.process.engine_host import host

class Loading:
    def __init__(self, config, parent):
        pass

    def run(self):
        print("loading", flush=True)
        threading.Event().wait()

    def close(self):
        print("closed", flush=True)

raise SystemExit(host(Loading))
"""

HANGS = """
import threading
from tandem.decode.role import DecodeRole
from tandem.node.process import engine_host

engine_host.STOP_TIMEOUT_S = 0.1

class Role(DecodeRole):
    has_work = True

    def step(self):
        print("hanging", flush=True)
        threading.Event().wait()

make_role = lambda parts: Role(parts.engine, None, parts.answers, 8, 8)
raise SystemExit(engine_host.main(make_role))
"""


@pytest.mark.parametrize(
    ("program", "lines"), [(IS_LOADING, ["loading", "closed"]), (HANGS, ["hanging"])]
)
def test_engine_that_loads_or_hangs_ends_with_its_parent(tiny_model, program, lines):
    config = config_of(
        tiny_model("llama"), "colocated", max_total_tokens=256, simulation=Simulation(kv="none")
    )
    engine = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,  # where the engine sends what is printed
        text=True,
    )
    with engine:
        engine.stdin.write(msgspec.json.encode(config).decode() + "\n")
        engine.stdin.flush()
        assert any(line.strip() == lines[0] for line in engine.stderr)  # the engine has come so far
        engine.stdin.close()  # as the kernel does for a killed parent
        assert engine.wait(PATIENCE_S) == 1
        assert [line.strip() for line in engine.stderr] == lines[1:]


async def test_lost_link_reconnects_to_the_same_engine_epoch():
    engine, used = FakeEngine(), []
    make = lambda: EngineClient(engine.address, epoch=engine.epoch)  # noqa: E731
    linked = asyncio.create_task(keep_linked(make, used.append))
    try:
        await until_async(lambda: used and used[0].is_up)
        used[0].stop()  # as a timeout does
        await until_async(lambda: len(used) == 2 and used[1].is_up)
        assert not used[0].is_up
    finally:
        linked.cancel()
        await asyncio.wait([linked])
        engine.close()
    assert not used[-1].is_up
