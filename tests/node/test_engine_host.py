"""An engine process whose device is lost, run as its parent runs it."""

import json
import subprocess
import sys

import msgspec
import pytest

from tandem.engine.config import EngineConfig
from tandem.engine.profile import Profile, Simulation
from tandem.node.config import NodeConfig
from tests.patience import PATIENCE_S

LOSES_ITS_DEVICE = """
from tandem.decode.role import DecodeRole
from tandem.engine.errors import DeviceLost
from tandem.node.engine_host import main

class Role(DecodeRole):
    has_work = True

    def step(self):
        raise DeviceLost("cuda:0: CUDA error: an illegal memory access was encountered")

raise SystemExit(main(lambda parts: Role(parts.engine, None, parts.answers, 8, 8)))
"""


@pytest.fixture
def config(tiny_model) -> NodeConfig:
    engine = EngineConfig(
        model_dir=str(tiny_model("llama")),
        max_total_tokens=256,
        simulation=Simulation(profile=Profile(), kv="none"),
    )
    return NodeConfig(role="colocated", served_model_name="m", engine=engine, log_format="json")


def test_a_lost_device_ends_the_engine_process_which_says_why(config):
    engine = subprocess.Popen(
        [sys.executable, "-c", LOSES_ITS_DEVICE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with engine:
        engine.stdin.write(msgspec.json.encode(config) + b"\n")
        engine.stdin.flush()  # and open: the parent lives
        assert engine.wait(PATIENCE_S) == 1
        reports = [json.loads(line)["type"] for line in engine.stdout]
        logged = [json.loads(line) for line in engine.stderr]
    assert reports == ["Ready"]
    (lost,) = [line for line in logged if line["event"] == "device.lost"]
    assert lost["reason"].startswith("cuda:0: CUDA error")
