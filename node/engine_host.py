"""The engine process of a node: reads its config, loads the model, says that it is ready, loops.

```
 parent (HTTP) ── stdin: one line of NodeConfig, then open while the parent lives ──▶ engine
 parent (HTTP) ◀── stdout: one line of Ready or ErrorInfo ────────────────────────── engine
```

Standard input's end is the order to stop, so an engine never outlives its parent, however that died.
"""

import os
import signal
import sys
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from engine.attention_backends import choose_backend
from engine.core import Engine
from engine.cuda_graphs import is_recording, make_runner
from engine.grammar_compiler import GrammarCompiler
from engine.model import ModelShape, load_model
from engine.runner import make_pool, pool_pages
from kvtransfer.layout import KVLayout
from node.config import NodeConfig
from node.engine_report import Failed, Ready
from node.loop import Answers, EngineLoop, Role
from telemetry import log as logs
from wire.channel import Inbox, Waker, tcp_address
from wire.errors import ConfigInvalid, TandemError
from wire.ids import Epoch, new_epoch
from wire.keys import ChannelKey, cluster_key
from wire.messages import ToEngine

log = logs.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """How large the pool is going to be: what a role needs to make memory for it."""

    shape: ModelShape
    num_pages: int
    page_size: int

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


@dataclass(frozen=True, slots=True)
class Parts:
    """What a role is built from."""

    config: NodeConfig
    epoch: Epoch
    engine: Engine
    answers: Answers
    waker: Waker
    key: ChannelKey | None


class RoleHost(ABC):
    """What differs between the engine processes of the roles.

    `memory` is called once, before `role`.
    """

    def memory(self, config: NodeConfig, plan: PoolPlan) -> memoryview | None:
        """Return the memory of the pool; None leaves it to torch."""
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
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=NodeConfig)
    logs.configure(config.log_level, config.log_format, role=config.role)
    try:
        _serve(config, host)
    except TandemError as error:
        _tell(Failed(error=error.info()))
        return 1
    finally:
        host.close()
    return 0


def _serve(config: NodeConfig, host: RoleHost) -> None:
    epoch, waker = new_epoch(), Waker()
    key = cluster_key(config.host, is_insecure=config.is_insecure)
    engine = build_engine(config, host, waker)
    inbox: Inbox[ToEngine] = Inbox(tcp_address(config.host, config.engine_port), ToEngine, key)
    answers = Answers(inbox, epoch)
    role = host.role(Parts(config, epoch, engine, answers, waker, key))
    loop = EngineLoop(role, inbox, answers, waker)
    threading.Thread(target=_stop_at_eof, args=(loop,), name="parent-watch", daemon=True).start()
    signal.signal(signal.SIGTERM, lambda _number, _frame: loop.stop())
    shape = engine.shape
    _tell(
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


def build_engine(config: NodeConfig, host: RoleHost, waker: Waker) -> Engine:
    """Load the model and make its pool in the memory that the role gives.

    Raises:
        ConfigInvalid: The model cannot be loaded, or no page fits.
    """
    settings = config.engine
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    model, shape = load_model(settings)
    plan = PoolPlan(shape, _num_pages(config, shape), settings.page_size)
    if plan.num_pages < 1:
        raise ConfigInvalid("the KV pool holds no page: raise --max-total-tokens")
    buffer = host.memory(config, plan)
    backend = choose_backend(settings, shape)
    kv = make_pool(
        shape,
        plan.num_pages,
        plan.page_size,
        settings.device,
        buffer,
        has_scratch_page=is_recording(settings, backend),
    )
    log.info(
        "engine.loaded",
        model=config.served_model_name,
        fingerprint=shape.fingerprint,
        num_pages=plan.num_pages,
        max_total_tokens=plan.num_pages * plan.page_size,
        pool_bytes=plan.layout.pool_bytes,
    )
    runner = make_runner(model, kv, backend, settings, shape, num_pages=plan.num_pages)
    compiler = GrammarCompiler(Path(settings.model_dir), shape.vocab_size, shape.eos_token_ids)
    engine = Engine(runner, shape, settings, plan.num_pages, compiler=compiler, wake=waker.wake)
    engine.warm_up()
    return engine


def _num_pages(config: NodeConfig, shape: ModelShape) -> int:
    settings = config.engine
    if settings.max_total_tokens:
        return settings.max_total_tokens // settings.page_size
    if settings.device == "cpu":
        return pool_pages(shape, settings.page_size, settings.kv_bytes)
    free, total = torch.cuda.mem_get_info(settings.device)
    budget = int(total * settings.mem_fraction_static) - (total - free)
    # One page stays behind those counted: recorded batches are padded into it.
    return pool_pages(shape, settings.page_size, max(0, budget)) - 1


def _tell(message: Ready | Failed) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def _stop_at_eof(loop: EngineLoop) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    loop.stop()
