"""The other ranks of a node as rank 0, the engine process, sees them: started, told, watched, ended.

```
 Ranks(...)   processes started, each loading its shard ─▶ wait_ready ─▶ Forward ... ─▶ close
                 └─ one that fails or ends by itself: `ended` is called once, and the node is over
```

A rank lives as long as its standard input is open, so none outlives rank 0.
"""

import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from typing_extensions import override

from tandem.engine.config import config_of_rank
from tandem.engine.forward import ForwardInputs
from tandem.node.config import NodeConfig
from tandem.node.rank_messages import (
    FetchedHere,
    FromAgent,
    FromRank,
    FromTiers,
    PlacedHere,
    RankFailed,
    RankReady,
    RankStart,
    SavedHere,
    TiersHere,
    ToRank,
    pack_inputs,
)
from tandem.node.rank_pipe import RankPipe
from tandem.telemetry.log import get_logger
from tandem.wire.channel import Waker
from tandem.wire.errors import EngineFailed, PeerLost, TandemError, error_from_info

log = get_logger(__name__)

# A rank has nothing to drain when rank 0 is done; below the 5 s that the HTTP process gives rank 0.
STOP_TIMEOUT_S = 3.0


class RankProcess:
    """One other rank.

    Args:
        heard: Called, in a thread of this rank's own, whenever there are events to take.
        ended: Called there once with why, unless `hang_up` was called before.

    Attributes:
        bootstrap_port: Where its agent takes grants, once `is_ready` is set; 0 for nowhere.
    """

    def __init__(
        self, start: RankStart, heard: Callable[[], None], ended: Callable[[TandemError], None]
    ) -> None:
        self.rank = start.config.engine.tp_rank
        self._events: deque[FromAgent] = deque()
        self._tier_events: deque[FromTiers] = deque()
        self.bootstrap_port = 0
        self.is_ready = threading.Event()
        self._heard, self._ended = heard, ended
        self._is_closing = False
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tandem.node.rank"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._pipe: RankPipe[FromRank] = RankPipe(
            self._process.stdout, self._process.stdin, FromRank
        )
        self._reader = threading.Thread(target=self._read, name=f"rank-{self.rank}", daemon=True)
        self._reader.start()
        self.send(start)

    def send(self, message: ToRank) -> None:
        """Tell it something. One that is gone is noticed by its reader, not here."""
        try:
            self._pipe.send(message)
        except PeerLost as error:
            log.debug("rank.unreachable", rank=self.rank, reason=str(error))

    def take_events(self) -> Iterator[FromAgent]:
        """Yield what its transfer agent said and nobody took yet, oldest first."""
        for _ in range(len(self._events)):
            yield self._events.popleft()

    def take_tier_events(self) -> Iterator[FromTiers]:
        """Yield what its tiers said, likewise."""
        for _ in range(len(self._tier_events)):
            yield self._tier_events.popleft()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def hang_up(self) -> None:
        """Ask it to end; `join` waits for that."""
        self._is_closing = True
        self._pipe.hang_up()

    def join(self) -> None:
        """Wait for its end, which is forced after a while."""
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            log.warning("rank.killed", rank=self.rank, reason="it did not stop in time")
            self._process.kill()
            self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> None:
        error: TandemError | None = None
        while (message := self._pipe.receive()) is not None:
            match message:
                case RankReady():
                    self.bootstrap_port = message.bootstrap_port
                    self.is_ready.set()
                case RankFailed():
                    error = error_from_info(message.error)
                case FetchedHere() | PlacedHere() | SavedHere() | TiersHere():
                    self._tier_events.append(message)
                    self._heard()
                case _:
                    self._events.append(message)
                    self._heard()
        if not self._is_closing:
            status = self._process.wait()
            self._ended(error or EngineFailed(f"rank {self.rank} ended with status {status}"))

    @override
    def __repr__(self) -> str:
        return f"RankProcess({self.rank}, pid={self._process.pid})"


class Ranks:
    """All ranks but 0. Also the `Followers` of rank 0's runner.

    Args:
        waker: Rung when one of their agents said something.
        ended: See `RankProcess`.
    """

    def __init__(
        self, config: NodeConfig, waker: Waker, ended: Callable[[TandemError], None]
    ) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="tandem-ranks-")
        self.store = Path(self._directory.name) / "store"
        self.others = [
            RankProcess(self._start_of(config, rank), waker.wake, ended)
            for rank in range(1, config.engine.tp_size)
        ]

    def wait_ready(self) -> None:
        """Return when every one is ready; one that cannot become so ends the node instead."""
        for rank in self.others:
            rank.is_ready.wait()

    def forward(self, inputs: ForwardInputs, num_sampled: int) -> None:
        """See `Followers.forward`."""
        message = pack_inputs(inputs, num_sampled)
        for rank in self.others:
            rank.send(message)

    def abandon(self) -> None:
        """See `Followers.abandon`."""
        for rank in self.others:
            rank.kill()

    def close(self) -> None:
        """End all of them. Safe to call twice."""
        for rank in self.others:
            rank.hang_up()
        for rank in self.others:
            rank.join()
        self._directory.cleanup()

    def _start_of(self, config: NodeConfig, rank: int) -> RankStart:
        engine = config_of_rank(config.engine, rank)
        return RankStart(
            config=msgspec.structs.replace(config, engine=engine), store=str(self.store)
        )
