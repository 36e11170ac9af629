"""The engine of a node that only takes time (`--engine simulated`): no weights, and no torch."""

from collections.abc import Callable

from tandem.engine.core import Engine
from tandem.engine.profile import Simulation
from tandem.engine.simulated import SimulatedLauncher, SimulatedPages, read_model
from tandem.kvtransfer.region import MemoryRegion
from tandem.node.config import NodeConfig
from tandem.node.pool import PoolPlan
from tandem.telemetry import log as logs
from tandem.wire.errors import ConfigInvalid

log = logs.get_logger(__name__)

# Tokens in a pool of pages without bytes: of a 70B model's KV that would be 320 GiB, the room of a few large GPUs.
_TOKENS_WITHOUT_KV = 1 << 20


def build_simulated(
    config: NodeConfig,
    simulation: Simulation,
    memory: Callable[[PoolPlan], MemoryRegion | None],
) -> Engine:
    """Return an engine with a pool, as large as a model's or next to nothing.

    Raises:
        ConfigInvalid: There is no such model, or no page fits.
    """
    settings = config.engine
    shape, ordinary_ids = read_model(settings, simulation.kv)
    num_tokens = settings.max_total_tokens or (
        settings.kv_bytes // shape.kv_bytes_per_token
        if simulation.kv == "real"
        else _TOKENS_WITHOUT_KV
    )
    plan = PoolPlan(shape, num_tokens // settings.page_size, settings.page_size)
    if plan.num_pages < 1:
        raise ConfigInvalid(
            "the KV pool holds no page: raise --max-total-tokens",
            topic="troubleshooting#too-little-memory",
        )
    region = memory(plan)
    pages = None
    if region is not None and config.role != "decode":
        bytes_ = region.array()[: plan.layout.pool_bytes]
        num_planes = sum(1 + bool(layer.value_dim) for layer in shape.kv_layers)
        pages = SimulatedPages(bytes_, plan.num_pages, plan.page_size, num_planes)
    log.info(
        "engine.simulated",
        model=config.served_model_name,
        fingerprint=shape.fingerprint,
        num_pages=plan.num_pages,
        max_total_tokens=plan.num_pages * plan.page_size,
        pool_bytes=plan.layout.pool_bytes if region is not None else 0,
    )
    launcher = SimulatedLauncher(simulation.profile, ordinary_ids, shape.num_layers, pages=pages)
    return Engine(launcher, shape, settings, plan.num_pages)
