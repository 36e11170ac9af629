import subprocess
import sys

import pytest

from tandem.engine.config import EngineConfig
from tandem.engine.profile import Simulation
from tandem.kvtransfer.region import MemoryRegion
from tandem.node.config import NodeConfig
from tandem.node.engine_host import build_simulated
from tandem.wire.errors import ConfigInvalid

HEAVY = {"torch", "transformers", "xgrammar", "numba", "triton"}


def config(path, role="prefill", **settings) -> NodeConfig:
    engine = EngineConfig(model_dir=str(path), page_size=8, **settings)
    return NodeConfig(role=role, served_model_name="m", engine=engine)


def test_a_simulated_engine_loads_nothing_that_computes():
    asked = f"print(sorted({HEAVY} & set(sys.modules)))"
    modules = "tandem.prefill.engine, tandem.decode.engine"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, {modules}; {asked}"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("kv", ["real", "none"])
def test_a_pool_has_as_many_tokens_as_asked_for_and_their_bytes(tiny_model, kv):
    made = []

    def memory(plan):
        made.append(MemoryRegion.private(plan.memory_bytes))
        return made[0]

    simulation = Simulation(kv=kv)
    engine = build_simulated(config(tiny_model("llama"), max_total_tokens=804), simulation, memory)
    assert engine.cache.num_pages == 100
    token_bytes = 3 * 2 * 2 * 16 * 4 if kv == "real" else 2
    assert made[0].size_bytes == 800 * token_bytes
    made[0].close()


def test_without_kv_a_pool_holds_a_million_tokens(tiny_model):
    engine = build_simulated(
        config(tiny_model("llama"), role="colocated"), Simulation(kv="none"), lambda _plan: None
    )
    assert engine.cache.num_pages * 8 == 1 << 20


def test_a_pool_without_a_page_is_refused(tiny_model):
    with pytest.raises(ConfigInvalid, match="--max-total-tokens"):
        build_simulated(
            config(tiny_model("llama"), max_total_tokens=7), Simulation(), lambda _plan: None
        )
