"""`follower STORE`: rank 1 of 2. Loads models and runs forwards as requested on standard input."""

import sys
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from tandem.engine.attention.backends import choose_backend
from tandem.engine.config import EngineConfig, EngineOptions
from tandem.engine.execution.runner import ModelRunner
from tandem.engine.execution.tensor_parallel import follow, join
from tandem.engine.model.loading import load_model
from tandem.engine.pages.pool import make_pool
from tandem.node.ranks.ranks import messages_of
from tandem.wire.errors import ConfigInvalid

NUM_PAGES = 64


def load_shard(config: EngineConfig):
    """Return a rank's runner and the shape of its shard."""
    model, shape = load_model(config)
    pool = make_pool(shape, NUM_PAGES, config.page_size, "cpu")
    return ModelRunner(model, pool, choose_backend(config, shape)), shape


def main() -> None:
    torch.set_num_threads(1)
    join(EngineOptions(tp_size=2, tp_rank=1), Path(sys.argv[1]))
    runner = None
    for message in messages_of(Connection(sys.stdin.fileno())):
        if isinstance(message, EngineConfig):
            try:
                runner, _ = load_shard(message)
            except ConfigInvalid:
                runner = None
        else:
            follow(runner, *message)


if __name__ == "__main__":
    main()
