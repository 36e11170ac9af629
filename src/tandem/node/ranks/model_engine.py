"""Builds the engine for a real model: the model, its pool and the other ranks."""

from pathlib import Path

import torch

from tandem.engine.attention.backends import choose_backend
from tandem.engine.attention.paged import AttentionBackend
from tandem.engine.config import EngineConfig
from tandem.engine.device import use_device
from tandem.engine.execution.cuda_graphs import is_recording, make_runner
from tandem.engine.execution.launcher import ModelLauncher
from tandem.engine.execution.runner import Runner
from tandem.engine.execution.tensor_parallel import ShardedRunner, join, min_over_ranks
from tandem.engine.grammar.processes import GrammarProcesses
from tandem.engine.model.loading import load_model
from tandem.engine.pages.pool import make_pool, pool_pages
from tandem.engine.scheduling.core import Engine
from tandem.engine.shape import ModelShape
from tandem.node.config import NodeConfig
from tandem.node.machine import num_cores
from tandem.node.ranks.pool import MakeRegion, PoolPlan, bytes_of, checked_pages
from tandem.node.ranks.ranks import Ranks, config_for
from tandem.telemetry import log as logs
from tandem.wire.channel import Waker

log = logs.get_logger(__name__)

# Fraction of a GPU's memory that stays free for activations, even if other processes exceed their fraction.
SPARE = 0.05


def build_model(
    config: NodeConfig, memory: MakeRegion, waker: Waker, ranks: Ranks | None
) -> Engine:
    """Load the model and make its pool on every rank; return the engine once all ranks are ready."""
    runner: Runner
    if ranks is not None:
        config = config_for(config, 0)
    use_device(config.engine)
    if ranks is not None:
        join(config.engine, ranks.store)
    own, plan = build_shard(config, memory)
    if ranks is None:
        runner = own
    else:
        ranks.wait_ready()
        runner = ShardedRunner(own, ranks)
    settings, shape = config.engine, plan.shape
    grammars = GrammarProcesses(
        Path(settings.model_dir),
        shape.vocab_size,
        shape.eos_token_ids,
        {"level": config.log_level, "log_format": config.log_format, "role": config.role},
    )
    launcher = ModelLauncher(runner, shape, settings.page_size)
    launcher.warm_up()
    return Engine(launcher, shape, settings, plan.num_pages, grammars=grammars, wake=waker.wake)


def build_shard(config: NodeConfig, memory: MakeRegion) -> tuple[Runner, PoolPlan]:
    """Load this rank's shard of the model and make its pool. Call `use_device` first."""
    settings = config.engine
    torch.set_num_threads(num_threads(settings))
    model, shape = load_model(settings)
    num_pages = checked_pages(min_over_ranks(_num_pages(config, shape), settings))
    backend = choose_backend(settings, shape)
    plan = PoolPlan(shape, num_pages, settings.page_size, has_graphs(config, backend))
    region = memory(plan)
    pool = make_pool(
        shape,
        plan.num_pages,
        plan.page_size,
        settings.device,
        None if region is None else bytes_of(region),
        has_scratch_page=plan.has_scratch_page,
    )
    log.info(
        "engine.loaded",
        model=config.served_model_name,
        fingerprint=shape.fingerprint,
        num_pages=plan.num_pages,
        max_total_tokens=plan.num_pages * plan.page_size,
        pool_bytes=plan.layout.pool_bytes,
    )
    return make_runner(model, pool, backend, settings, shape, num_pages=plan.num_pages), plan


def num_threads(settings: EngineConfig) -> int:
    """Return the number of torch's CPU threads on one rank. The ranks of a node divide its cores."""
    return max(
        1, (settings.num_threads or min(torch.get_num_threads(), num_cores())) // settings.tp_size
    )


def has_graphs(config: NodeConfig, backend: AttentionBackend) -> bool:
    """Whether the node records CUDA graphs. They cover decode steps, which a prefill node does not run."""
    return config.role != "prefill" and is_recording(config.engine, backend)


def _num_pages(config: NodeConfig, shape: ModelShape) -> int:
    settings = config.engine
    if settings.max_total_tokens:
        return settings.max_total_tokens // settings.page_size
    if settings.device == "cpu":
        return pool_pages(shape, settings.page_size, settings.kv_bytes // settings.tp_size)
    free, total = torch.cuda.mem_get_info(settings.device)
    own = torch.cuda.memory_reserved(settings.device)
    budget = pool_budget(free, total, own, settings.mem_fraction_static)
    # One page is the scratch page, to which the padding rows of recorded batches write.
    return pool_pages(shape, settings.page_size, budget) - 1


def pool_budget(free: int, total: int, own: int, fraction: float) -> int:
    """Return the size of the pool in bytes on a GPU that other processes may share, each with its own fraction.

    Args:
        free: Free bytes on the GPU.
        own: Bytes reserved by this process: the weights, and torch's cache after loading them.
    """
    return max(0, min(int(total * fraction) - own, free - int(total * SPARE)))
