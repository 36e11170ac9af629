"""Engines that run in the benchmark's process, and the directories of their models."""

from pathlib import Path

import torch

from tandem.engine.attention.backends import choose_backend
from tandem.engine.config import DType, EngineConfig
from tandem.engine.execution.launcher import ModelLauncher
from tandem.engine.execution.runner import ModelRunner
from tandem.engine.model.loading import load_model
from tandem.engine.pages.pool import make_pool
from tandem.engine.scheduling.core import Engine
from tandem.node.command import default_cache_dir
from tandem.node.models.checkpoint import resolve_model
from tandem.wire.generation import GenerateRequest, SamplingParams, new_request_id


def model_dir(model: str | None) -> Path:
    """Return the directory of a model; None: the embedded model."""
    return resolve_model(model, default_cache_dir() / "models")


def make_engine(path: Path, dtype: DType, max_total_tokens: int, chunk: int) -> Engine:
    """Return an engine that uses this process's torch threads."""
    config = EngineConfig(
        model_dir=str(path),
        dtype=dtype,
        max_total_tokens=max_total_tokens,
        chunked_prefill_size=chunk,
        num_threads=torch.get_num_threads(),
        is_prefix_cache_enabled=False,
    )
    model, shape = load_model(config)
    num_pages = max_total_tokens // config.page_size
    pool = make_pool(shape, num_pages, config.page_size, "cpu")
    runner = ModelRunner(model, pool, choose_backend(config, shape))
    launcher = ModelLauncher(runner, shape, config.page_size)
    launcher.warm_up()
    return Engine(launcher, shape, config, num_pages)


def greedy_request(prompt: list[int], num_new: int) -> GenerateRequest:
    """Return a greedy request of exactly `num_new` tokens."""
    sampling = SamplingParams(max_new_tokens=num_new, temperature=0, ignore_eos=True)
    return GenerateRequest(request_id=new_request_id(), prompt_ids=prompt, sampling=sampling)
