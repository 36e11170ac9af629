"""Tensor parallelism: rank 0 decides, and the other ranks do the same with their shards.

```
 rank 0, the engine process                                rank r: python -m tandem.node.rank SOCKET
 Ranks.forward, RemoteAgent.push, ... ── (target, method, arguments) ─▶ the rank's runner, agent or tiers
 RankProcess.take_events ◀──────────────────── (source, event) ──────── what its agent and tiers report
```

A rank makes all calls in the order in which rank 0 made them: a page is pushed, or saved, after the forward that
wrote it. A call has no result. Events that only hold when every rank has reported them are agreed on by rank 0:
`tandem.kvtransfer.group` for transfers, `tandem.node.tiers` for tiers.

A socket pair joins rank 0 to each rank, and nobody else has its ends, so objects go through it as Python pickles
them. The socket ends with the process at either end: no rank outlives rank 0, and rank 0 ends without a rank.
"""

import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from tandem.engine.config import config_of_rank
from tandem.engine.forward import ForwardInputs
from tandem.node.config import NodeConfig
from tandem.telemetry import log as logs
from tandem.wire.errors import EngineFailed, TandemError

log = logs.get_logger(__name__)

# A rank has nothing to drain when rank 0 is done; below the 5 s that the HTTP process gives rank 0.
STOP_TIMEOUT_S = 3.0


class RankProcess:
    """One other rank, as rank 0 sees it.

    Args:
        config: With `engine.tp_rank` and `engine.device` of this rank.
        store: The file through which the ranks find each other.
        heard: Called, in a thread of this rank's own, whenever there are events to take.
        ended: Called there once with the reason, unless `hang_up` was called before.

    Attributes:
        bootstrap_port: Where its agent takes grants, once `is_ready` is set; 0 for nowhere.
    """

    def __init__(
        self,
        config: NodeConfig,
        store: Path,
        heard: Callable[[], None],
        ended: Callable[[TandemError], None],
    ) -> None:
        self.rank = config.engine.tp_rank
        self.bootstrap_port = 0
        self.is_ready = threading.Event()
        self._events: dict[str, deque[Any]] = defaultdict(deque)
        self._heard, self._ended = heard, ended
        self._is_closing = False
        self._link, theirs = Pipe()
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-P", "-m", "tandem.node.rank", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._reader = threading.Thread(target=self._read, name=f"rank-{self.rank}", daemon=True)
        self._reader.start()
        self._send((config, store))

    def call(self, target: str, method: str, /, *args: object, **kwargs: object) -> None:
        """Have the rank make a call, after those before. The reader notices a rank that is gone."""
        self._send((target, method, args, kwargs))

    def take_events(self, source: str, /) -> Iterator[Any]:
        """Yield what its agent, or its tiers, reported since the last call, oldest first."""
        events = self._events[source]
        for _ in range(len(events)):
            yield events.popleft()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def hang_up(self) -> None:
        """Ask it to end; `join` waits for that. Never blocks, not even on a rank that reads nothing."""
        self._is_closing = True
        with suppress(OSError), socket.socket(fileno=os.dup(self._link.fileno())) as link:
            link.shutdown(socket.SHUT_WR)

    def join(self) -> None:
        """Wait for its end, which is forced after a while."""
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
            for source, event in received(self._link):
                if source == "ready":
                    self.bootstrap_port = event
                    self.is_ready.set()
                elif source == "failed":
                    error = event
                else:
                    self._events[source].append(event)
                    self._heard()
        except Exception as broken:  # its next message may depend on one that cannot be read
            log.exception("rank.message_unreadable", rank=self.rank, effect="the node ends")
            error = EngineFailed(f"rank {self.rank} sent a message that cannot be read: {broken!r}")
            self._process.kill()
        if not self._is_closing:
            status = self._process.wait()
            self._ended(error or EngineFailed(f"rank {self.rank} ended with status {status}"))


class Ranks:
    """All ranks but 0. Also the `Followers` of rank 0's runner.

    Args:
        heard: Called, from any thread, when an agent or the tiers of a rank reported something.
        ended: Called as by `RankProcess`.
    """

    def __init__(
        self, config: NodeConfig, heard: Callable[[], None], ended: Callable[[TandemError], None]
    ) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="tandem-ranks-")
        self.store = Path(self._directory.name) / "store"
        self.others = [
            RankProcess(config_for(config, rank), self.store, heard, ended)
            for rank in range(1, config.engine.tp_size)
        ]

    def wait_ready(self) -> None:
        """Return when every rank is ready; one that cannot become so ends the node instead."""
        for rank in self.others:
            rank.is_ready.wait()

    def forward(self, inputs: ForwardInputs, num_sampled: int) -> None:
        """Have every rank take part in a forward."""
        for rank in self.others:
            rank.call("rank", "forward", inputs, num_sampled)

    def abandon(self) -> None:
        """Kill every rank: no forward of theirs can end."""
        for rank in self.others:
            rank.kill()

    def close(self) -> None:
        """End all of them. Safe to call twice."""
        for rank in self.others:
            rank.hang_up()
        for rank in self.others:
            rank.join()
        self._directory.cleanup()


def config_for(config: NodeConfig, rank: int) -> NodeConfig:
    """Return the config of one rank of a node."""
    return msgspec.structs.replace(config, engine=config_of_rank(config.engine, rank))


def received(link: Connection) -> Iterator[Any]:
    """Yield what comes until the far side hangs up or is gone."""
    with suppress(EOFError, OSError):
        while True:
            yield link.recv()
