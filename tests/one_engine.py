"""An engine without processes and links: whose tokens those of a cluster must be."""

from collections.abc import Sequence
from pathlib import Path

import torch

from engine.attention_backends import choose_backend
from engine.config import EngineConfig
from engine.core import Engine
from engine.launcher import ModelLauncher
from engine.model import load_model
from engine.kv_pool import make_pool
from engine.runner import ModelRunner
from wire.generation import GenerateRequest, SamplingParams
from wire.ids import RequestId


def tokens_of_one_engine(
    path: Path,
    prompts: Sequence[list[int]],
    sampling: Sequence[SamplingParams],
    *,
    num_pages: int = 256,
    **settings,
) -> list[list[int]]:
    """Return the tokens of all prompts, computed together on one thread as by `--num-threads 1`."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        config = EngineConfig(model_dir=str(path), dtype="float32", **settings)
        model, shape = load_model(config)
        pool = make_pool(shape, num_pages, config.page_size, "cpu")
        runner = ModelRunner(model, pool, choose_backend(config, shape))
        launcher = ModelLauncher(runner, shape, config.page_size)
        engine = Engine(launcher, shape, config, num_pages)
        names = [RequestId(str(i)) for i in range(len(prompts))]
        for name, prompt, params in zip(names, prompts, sampling, strict=True):
            engine.submit(GenerateRequest(request_id=name, prompt_ids=prompt, sampling=params))
        tokens: dict[str, list[int]] = {name: [] for name in names}
        while engine.has_work:
            for token in engine.step().tokens:
                tokens[token.request.request.request_id].append(token.token)
    finally:
        torch.set_num_threads(num_threads)
    return [tokens[name] for name in names]
