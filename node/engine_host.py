"""The engine process of a node: reads its config, loads the model, says that it is ready, loops.

```
 parent (HTTP) ── stdin: one line of NodeConfig, then open while the parent lives ──▶ engine
 parent (HTTP) ◀── stdout: one line of Ready or ErrorInfo ────────────────────────── engine
```

Standard input's end is the order to stop, so an engine never outlives its parent, however that died.
Under tensor parallelism this is rank 0, which starts the others (`ranks.py`) and ends with them.
"""

import os
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import msgspec
import torch

from engine.attention_backends import choose_backend
from engine.core import Engine
from engine.cuda_graphs import is_recording, make_runner
from engine.grammar_compiler import GrammarCompiler
from engine.model import ModelShape, load_model
from engine.runner import Runner, make_pool, pool_pages
from engine.tensor_parallel import ShardedRunner, config_of_rank, join, least
from kvtransfer.layout import KVLayout
from node.config import NodeConfig
from node.engine_report import Failed, Ready
from node.loop import Answers, EngineLoop, Role
from node.rank_pipe import claim_stdout, end_process_after
from node.ranks import RankProcess, Ranks
from telemetry import log as logs
from wire.channel import Inbox, Waker, tcp_address
from wire.errors import ConfigInvalid, TandemError
from wire.ids import Epoch, new_epoch
from wire.keys import ChannelKey, cluster_key
from wire.messages import ToEngine

log = logs.get_logger(__name__)

# Time for the loop's last answers after a rank died. On CPUs a forward under way fails at once.
RANK_LOST_GRACE_S = 2.0
# How long a thread in the interpreter makes another wait. The pushing thread waits for the loop's after the
# last layer, when every tenth of a millisecond is in the time to the second token; Python's own is 5 ms.
SWITCH_S = 0.0005


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """How large the pool is going to be: what a role needs to make memory for it.

    Attributes:
        has_scratch_page: One page more lies behind those counted; see `make_pool`.
    """

    shape: ModelShape
    num_pages: int
    page_size: int
    has_scratch_page: bool = False

    @property
    def layout(self) -> KVLayout:
        """The pool as transfer sees it."""
        return KVLayout(
            num_pages=self.num_pages,
            page_size=self.page_size,
            num_layers=self.shape.num_layers,
            num_kv_heads=self.shape.num_kv_heads,
            head_dim=self.shape.head_dim,
            dtype=self.shape.kv_dtype_name,
            itemsize=self.shape.kv_dtype.itemsize,
        )

    @property
    def memory_bytes(self) -> int:
        """Return what the pool takes."""
        return self.layout.pool_bytes + self.has_scratch_page * self.layout.page_bytes


@dataclass(frozen=True, slots=True)
class Parts:
    """What a role is built from.

    Attributes:
        others: The ranks beside this one.
    """

    config: NodeConfig
    epoch: Epoch
    engine: Engine
    answers: Answers
    waker: Waker
    key: ChannelKey | None
    others: Sequence[RankProcess] = ()


class RoleHost(ABC):
    """What differs between the engine processes of the roles.

    `memory` is called once, before `role`.
    """

    def memory(self, config: NodeConfig, plan: PoolPlan) -> torch.Tensor | None:
        """Return the memory of the pool, as bytes; None leaves it to torch."""
        del config, plan
        return None

    @abstractmethod
    def role(self, parts: Parts) -> Role:
        """Return the role."""

    def bootstrap_port(self) -> int | None:
        """Return where grants are taken, on prefill."""
        return None

    def close(self) -> None:  # noqa: B027 - a role that made nothing gives nothing back
        """Give back what `memory` and `role` made."""


def main(host: RoleHost) -> int:
    """Run an engine process to its end; return its exit status."""
    # Ctrl-C reaches the whole group; the parent decides what ends when.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = _Parent(claim_stdout())
    sys.setswitchinterval(SWITCH_S)
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=NodeConfig)
    logs.configure(config.log_level, config.log_format, role=config.role)
    process = _EngineProcess(config, host, parent)
    try:
        return process.run()
    except TandemError as error:
        parent.tell(Failed(error=error.info()))
        return 1
    finally:
        host.close()
        process.close()


class _Parent:
    """Standard output, where the one line goes."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out

    def tell(self, message: Ready | Failed) -> None:
        """Say what became of this process."""
        self._out.write(msgspec.json.encode(message) + b"\n")
        self._out.flush()


class _EngineProcess:
    """From the config to the end of the loop."""

    def __init__(self, config: NodeConfig, host: RoleHost, parent: _Parent) -> None:
        self._config = config
        self._host = host
        self._parent = parent
        self._waker = Waker()
        self._loop: EngineLoop | None = None
        self._lost_rank: TandemError | None = None
        self._ranks = (
            Ranks(config, self._waker, self._rank_ended) if config.engine.tp_size > 1 else None
        )

    def run(self) -> int:
        """Serve; return the exit status."""
        config, host, epoch = self._config, self._host, new_epoch()
        key = cluster_key(config.host, is_insecure=config.is_insecure)
        engine = build_engine(config, host, self._waker, self._ranks)
        inbox: Inbox[ToEngine] = Inbox(tcp_address(config.host, config.engine_port), ToEngine, key)
        answers = Answers(inbox, epoch)
        others = () if self._ranks is None else self._ranks.others
        role = host.role(Parts(config, epoch, engine, answers, self._waker, key, others))
        loop = self._loop = EngineLoop(role, inbox, answers, self._waker)
        threading.Thread(
            target=_stop_at_eof, args=(loop,), name="parent-watch", daemon=True
        ).start()
        signal.signal(signal.SIGTERM, lambda _number, _frame: loop.stop())
        shape = engine.shape
        self._parent.tell(
            Ready(
                epoch=epoch,
                engine_port=inbox.port,
                bootstrap_port=host.bootstrap_port(),
                fingerprint=shape.fingerprint,
                context_length=shape.context_length,
                max_prompt_tokens=engine.max_tokens - 1,
                vocab_size=shape.vocab_size,
                eos_token_ids=sorted(shape.eos_token_ids),
            )
        )
        try:
            loop.run()
        finally:
            inbox.close()
        return int(self._lost_rank is not None)

    def close(self) -> None:
        """End the other ranks."""
        if self._ranks is not None:
            self._ranks.close()

    def _rank_ended(self, error: TandemError) -> None:
        """A rank is gone: what it held of every request is, too. Called by the rank's reader."""
        log.error("rank.died", reason=str(error), effect="the node ends")
        self._lost_rank = error
        if self._loop is None:
            self._parent.tell(Failed(error=error.info()))
            os._exit(1)
        # The loop answers its requests and ends, unless it waits for the dead rank: NCCL may for ever.
        end_process_after(RANK_LOST_GRACE_S)
        self._loop.stop()


def build_engine(
    config: NodeConfig, host: RoleHost, waker: Waker, ranks: Ranks | None = None
) -> Engine:
    """Load the model and make its pool in the memory that the role gives.

    Returns once the other ranks have done so too.

    Raises:
        ConfigInvalid: The model cannot be loaded, or no page fits.
    """
    runner: Runner
    if ranks is not None:
        config = msgspec.structs.replace(config, engine=config_of_rank(config.engine, 0))
        join(config.engine, ranks.store)
    own, plan = build_shard(config, partial(host.memory, config))
    if ranks is None:
        runner = own
    else:
        ranks.wait_ready()
        runner = ShardedRunner(own, ranks)
    settings, shape = config.engine, plan.shape
    compiler = GrammarCompiler(Path(settings.model_dir), shape.vocab_size, shape.eos_token_ids)
    engine = Engine(runner, shape, settings, plan.num_pages, compiler=compiler, wake=waker.wake)
    engine.warm_up()
    return engine


def build_shard(
    config: NodeConfig, memory: Callable[[PoolPlan], torch.Tensor | None]
) -> tuple[Runner, PoolPlan]:
    """Load this rank's shard of the model and make its pool.

    Raises:
        ConfigInvalid: The model cannot be loaded, or no page fits.
    """
    settings = config.engine
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    model, shape = load_model(settings)
    num_pages = least(_num_pages(config, shape), settings)
    if num_pages < 1:
        raise ConfigInvalid("the KV pool holds no page: raise --max-total-tokens")
    backend = choose_backend(settings, shape)
    plan = PoolPlan(shape, num_pages, settings.page_size, is_recording(settings, backend))
    kv = make_pool(
        shape,
        plan.num_pages,
        plan.page_size,
        settings.device,
        memory(plan),
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
    return make_runner(model, kv, backend, settings, shape, num_pages=plan.num_pages), plan


def _num_pages(config: NodeConfig, shape: ModelShape) -> int:
    settings = config.engine
    if settings.max_total_tokens:
        return settings.max_total_tokens // settings.page_size
    if settings.device == "cpu":
        return pool_pages(shape, settings.page_size, settings.kv_bytes // settings.tp_size)
    free, total = torch.cuda.mem_get_info(settings.device)
    budget = int(total * settings.mem_fraction_static) - (total - free)
    # One page stays behind those counted: recorded batches are padded into it.
    return pool_pages(shape, settings.page_size, max(0, budget)) - 1


def _stop_at_eof(loop: EngineLoop) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    loop.stop()
