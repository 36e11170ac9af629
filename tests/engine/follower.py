"""`python -m tests.engine.follower STORE`: rank 1 of 2, for one model after another, as it is told."""

import sys
from pathlib import Path

import torch

from tandem.engine.attention_backends import choose_backend
from tandem.engine.config import EngineConfig
from tandem.engine.kv_pool import make_pool
from tandem.engine.model import load_model
from tandem.engine.runner import ModelRunner
from tandem.engine.tensor_parallel import follow, join
from tandem.node.rank_messages import Forward, RankStart, ToRank, unpack_inputs
from tandem.node.rank_pipe import RankPipe, claim_stdout
from tandem.wire.errors import ConfigInvalid

NUM_PAGES = 64


def load_shard(config: EngineConfig):
    """Return a rank's runner and the shape of its shard."""
    model, shape = load_model(config)
    pool = make_pool(shape, NUM_PAGES, config.page_size, "cpu")
    return ModelRunner(model, pool, choose_backend(config, shape)), shape


def main() -> None:
    torch.set_num_threads(1)
    pipe: RankPipe[ToRank] = RankPipe(sys.stdin.buffer, claim_stdout(), ToRank)
    join(EngineConfig(model_dir="", tp_size=2, tp_rank=1), Path(sys.argv[1]))
    runner = None
    while (message := pipe.receive()) is not None:
        if isinstance(message, RankStart):
            try:
                runner, _ = load_shard(message.config.engine)
            except ConfigInvalid:
                runner = None
        elif isinstance(message, Forward):
            follow(runner, unpack_inputs(message), message.num_sampled)


if __name__ == "__main__":
    main()
