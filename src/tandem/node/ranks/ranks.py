"""Tensor parallelism: rank 0 decides, and the other ranks execute its calls on their shards.

```
 rank 0, the engine process                                rank r: python -m tandem.node.process.rank_host SOCKET
 Ranks.forward, RemoteAgent.push, ... ── (target, method, arguments) ─▶ the rank's runner, agent or tiers
 RankProcess.take_events ◀──────────────────── (source, event) ──────── events of its agent and tiers
```

A rank executes calls in rank 0's order, so it pushes or saves a page only after the forward that wrote it. Calls
return nothing. Events that hold only once every rank has reported them are merged at rank 0, by
`tandem.kvtransfer.agents.group` for transfers and `tandem.node.tiers.tiers` for tiers.

A private socket pair connects rank 0 to each rank, so messages can safely be pickled objects. The socket closes when
either process ends: no rank outlives rank 0, and rank 0 ends when it loses a rank.
"""

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from tandem.engine.config import config_of_rank
from tandem.engine.scheduling.forward import ForwardInputs
from tandem.node.config import NodeConfig
from tandem.telemetry import log as logs
from tandem.wire.errors import EngineFailed, TandemError

log = logs.get_logger(__name__)

# Ranks have nothing left to drain when rank 0 ends. Must be less than the 5 s that the HTTP process waits for rank 0.
STOP_TIMEOUT_S = 3.0
# Time for the other ranks to become ready after rank 0. All ranks load their shards before any makes its pool, so what
# remains takes seconds.
READY_TIMEOUT_S = 300.0


class RankProcess:
    """Rank 0's handle of the process of a different rank.

    Args:
        config: Config with this rank's `engine.tp_rank` and `engine.device`.
        store: File through which the ranks connect to each other.
        on_event: Called on this handle's reader thread when an event has arrived.
        on_end: Called once on the same thread with the reason, unless `hang_up` was called before.

    Attributes:
        bootstrap_port: Port on which the rank's agent accepts grants; 0: none. Valid once `is_ready` is set.
    """

    def __init__(
        self,
        config: NodeConfig,
        store: Path,
        on_event: Callable[[], None],
        on_end: Callable[[TandemError], None],
    ) -> None:
        self.rank = config.engine.tp_rank
        self.bootstrap_port = 0
        self.is_ready = threading.Event()
        self._events: dict[str, deque[Any]] = defaultdict(deque)
        self._on_event, self._on_end = on_event, on_end
        self._is_closing = False
        self._link, theirs = Pipe()
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-P", "-m", "tandem.node.process.rank_host", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._reader = threading.Thread(target=self._read, name=f"rank-{self.rank}", daemon=True)
        self._reader.start()
        self._send((config, store))

    def call(self, target: str, method: str, /, *args: object, **kwargs: object) -> None:
        """Queue a call on the rank. Send errors are ignored: the reader thread reports a dead rank."""
        self._send((target, method, args, kwargs))

    def take_events(self, source: str, /) -> Iterator[Any]:
        """Yield the events from `source` ("agent" or "tiers") since the last call, oldest first."""
        events = self._events[source]
        for _ in range(len(events)):
            yield events.popleft()

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    def hang_up(self) -> None:
        """Tell the process to exit; `join` waits for it. Never blocks, even if the rank does not read."""
        self._is_closing = True
        with suppress(OSError), socket.socket(fileno=os.dup(self._link.fileno())) as link:
            link.shutdown(socket.SHUT_WR)

    def join(self) -> None:
        """Wait for the process to exit; kill it after `STOP_TIMEOUT_S`."""
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            log.warning("rank.killed", rank=self.rank, reason="it did not stop in time")
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._link.close()

    def _send(self, message: object) -> None:
        try:
            self._link.send(message)
        except OSError as error:
            log.debug("rank.unreachable", rank=self.rank, reason=str(error))

    def _read(self) -> None:
        error: TandemError | None = None
        try:
            for source, event in messages_of(self._link):
                if source == "ready":
                    self.bootstrap_port = event
                    self.is_ready.set()
                elif source == "failed":
                    error = event
                else:
                    self._events[source].append(event)
                    self._on_event()
        except Exception as broken:  # later messages may depend on the unreadable one
            log.exception("rank.message_unreadable", rank=self.rank, effect="the node exits")
            error = EngineFailed(f"rank {self.rank} sent an unreadable message: {broken!r}")
            self._process.kill()
        if not self._is_closing:
            status = self._process.wait()
            self._on_end(error or EngineFailed(f"rank {self.rank} ended with status {status}"))


class Ranks:
    """All ranks except rank 0. Implements `Followers` for rank 0's runner.

    Args:
        on_event: Called on any thread when the agent or the tiers of a rank report an event.
        on_end: As for `RankProcess`.
    """

    def __init__(
        self,
        config: NodeConfig,
        on_event: Callable[[], None],
        on_end: Callable[[TandemError], None],
    ) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="tandem-ranks-")
        self.store = Path(self._directory.name) / "store"
        self.others = [
            RankProcess(config_for(config, rank), self.store, on_event, on_end)
            for rank in range(1, config.engine.tp_size)
        ]

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until every rank is ready. If a rank fails meanwhile, `on_end` must end the process.

        Raises:
            EngineFailed: A rank was not ready in time.
        """
        deadline_s = time.monotonic() + timeout_s
        for rank in self.others:
            if not rank.is_ready.wait(deadline_s - time.monotonic()):
                raise EngineFailed(
                    f"rank {rank.rank} was not ready {timeout_s:g} s after rank 0 had loaded its shard of the model"
                )

    def forward(self, inputs: ForwardInputs, num_sampled: int) -> None:
        """Run a forward on every rank."""
        for rank in self.others:
            rank.call("rank", "forward", inputs, num_sampled)

    def abandon(self) -> None:
        """Kill every rank, because their forwards cannot finish."""
        for rank in self.others:
            rank.kill()

    def close(self) -> None:
        """End all ranks. Safe to call twice."""
        for rank in self.others:
            rank.hang_up()
        for rank in self.others:
            rank.join()
        self._directory.cleanup()


def config_for(config: NodeConfig, rank: int) -> NodeConfig:
    """Return the config of one rank of a node."""
    return msgspec.structs.replace(config, engine=config_of_rank(config.engine, rank))


def messages_of(link: Connection) -> Iterator[Any]:
    """Yield messages until the peer closes the link or dies."""
    with suppress(EOFError, OSError):
        while True:
            yield link.recv()
