"""An engine without processes and links: the reference for a cluster's tokens."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from tandem.engine.attention.backends import choose_backend
from tandem.engine.attention.paged import PagedModel
from tandem.engine.config import EngineConfig
from tandem.engine.execution.launcher import ModelLauncher
from tandem.engine.execution.runner import ModelRunner
from tandem.engine.model.loading import load_model
from tandem.engine.pages.pool import make_pool
from tandem.engine.scheduling.core import Engine
from tandem.engine.scheduling.request import ActiveRequest
from tandem.engine.scheduling.step import Token
from tandem.engine.shape import ModelShape
from tandem.wire.generation import GenerateRequest, LogprobOptions, RequestId, SamplingParams


def tokens_of_one_engine(
    path: Path,
    prompts: Sequence[list[int]],
    sampling: Sequence[SamplingParams],
    *,
    num_pages: int = 256,
    **settings,
) -> list[list[int]]:
    """Return the tokens of all prompts, computed together on one thread as with `--num-threads 1`."""
    with one_thread():
        config = EngineConfig(model_dir=str(path), dtype="float32", **settings)
        model, shape = load_model(config)
        engine = make_engine(config, model, shape, num_pages)
        answers = run_together(engine, prompts, sampling)
    return [[token.token for token in answer] for answer in answers]


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread within the block."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def make_engine(
    config: EngineConfig, model: PagedModel, shape: ModelShape, num_pages: int
) -> Engine:
    """Return an engine with its own pool; several may share a model."""
    pool = make_pool(shape, num_pages, config.page_size, "cpu")
    runner = ModelRunner(model, pool, choose_backend(config, shape))
    return Engine(ModelLauncher(runner, shape, config.page_size), shape, config, num_pages)


def ask(
    prompt: Sequence[int],
    name: str = "r",
    *,
    num_prior: int = 0,
    priority: int = 0,
    salt: str = "",
    logprobs: LogprobOptions | None = None,
    **sampling,
) -> GenerateRequest:
    """Return a request; by default it is greedy and ignores the end of sequence."""
    return GenerateRequest(
        request_id=RequestId(name),
        prompt_ids=list(prompt),
        num_prior_tokens=num_prior,
        sampling=SamplingParams(**{"temperature": 0, "ignore_eos": True, **sampling}),
        priority=priority,
        cache_salt=salt,
        logprobs=logprobs,
    )


def ask_remote(engine: Engine, request: GenerateRequest) -> ActiveRequest:
    """Queue a request whose prompt another node computes, and grant it pages if they fit."""
    active = engine.check(request, is_remote=True)
    engine.queue(active)
    engine.admit()
    return active


def run(engine: Engine, out: dict[str, list[int]] | None = None) -> dict[str, list[int]]:
    """Step until the engine has no work; return the tokens of each request, added to `out`."""
    out = {} if out is None else out
    newest: dict[str, int] = {}
    while engine.has_work:
        for token in engine.step().tokens:
            name = token.request.request.request_id
            assert token.index == newest.get(name, token.index - 1) + 1
            newest[name] = token.index
            out.setdefault(name, []).append(token.token)
        engine.cache.check_integrity()
    return out


def run_together(
    engine: Engine,
    prompts: Sequence[list[int]],
    sampling: Sequence[SamplingParams],
    logprobs: LogprobOptions | None = None,
) -> list[list[Token]]:
    """Submit all prompts at once; return the tokens that the engine generates for each."""
    names = [RequestId(str(i)) for i in range(len(prompts))]
    for name, prompt, params in zip(names, prompts, sampling, strict=True):
        engine.submit(
            GenerateRequest(request_id=name, prompt_ids=prompt, sampling=params, logprobs=logprobs)
        )
    tokens: dict[str, list[Token]] = {name: [] for name in names}
    while engine.has_work:
        for token in engine.step().tokens:
            tokens[token.request.request.request_id].append(token)
    return [tokens[name] for name in names]
