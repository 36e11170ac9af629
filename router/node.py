"""One node as the router sees it: its address, its life, and what this process runs on it.

```
 unreachable ──meet──▶ connecting ──engine answers──▶ up
      ▲                                                │
      └──────── connection broke · other epoch ────────┘
```
"""

import asyncio
from typing import Self

from typing_extensions import override

from frontend.engine_client import EngineClient
from frontend.token_stream import Start, TokenStream
from router.config import host_of
from router.node_http import NodeUnusable
from router.policy import NodeSnapshot
from wire.channel import tcp_address
from wire.errors import PeerLost
from wire.ids import Epoch
from wire.keys import ChannelKey
from wire.messages import NodeLoad
from wire.node_info import NodeInfo


class Work:
    """One half of an attempt, or all of it: its stream, and its share of the node's load until it ends.

    A context manager: leaving it ends it.

    Args:
        num_to_compute: Prompt tokens that decode computes by itself.

    Attributes:
        is_counted: Whether it has not ended.
    """

    def __init__(
        self, node: "Node", stream: TokenStream, num_tokens: int, num_to_compute: int = 0
    ) -> None:
        self.stream = stream
        self._node, self._num_tokens, self._num_to_compute = node, num_tokens, num_to_compute
        self.is_counted = True
        node.count_own(num_to_compute)
        node.in_flight_requests += 1
        node.in_flight_tokens += num_tokens

    def prompt_done(self) -> None:
        """The prompt was computed: none of it waits at the node any more. Safe to call twice."""
        self._node.count_own(-self._num_to_compute)
        self._num_to_compute = 0

    def end(self, *, is_done: bool = False) -> None:
        """Give the share back. Cancels at the engine unless it `is_done`. Safe to call twice."""
        if is_done:
            self.stream.forget()
        self.stream.close()
        self.prompt_done()
        if self.is_counted:
            self.is_counted = False
            self._node.in_flight_requests -= 1
            self._node.in_flight_tokens -= self._num_tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.end()


class Node:
    """A node at one URL, over all of its lives.

    Attributes:
        role: What it was given as: prefill or decode.
        info: What it last said of itself; None until it was reached.
        reason: Why it is not used; empty when nothing is wrong.
        is_admitted: Its last answer was that of a healthy node of its role.
    """

    def __init__(self, url: str, role: str, bootstrap_port: int | None = None) -> None:
        self.url, self.role = url, role
        self.info: NodeInfo | None = None
        self.client: EngineClient | None = None
        self.reason = "not reached yet"
        self.is_admitted = False
        self.in_flight_requests = 0
        self.in_flight_tokens = 0
        # Prompt tokens that wait to be computed here: of this edge worker, and of all others when the load was
        # last told.
        self._own_tokens = self._others_tokens = 0
        self._load_counted = NodeLoad()
        self._bootstrap_port = bootstrap_port

    @override
    def __repr__(self) -> str:
        state = "up" if self.is_up else f"down ({self.reason})"
        return f"<Node {self.role} {self.url} {state} in_flight={self.in_flight_requests}>"

    @property
    def host(self) -> str:
        """The host of its URL, an IPv6 one without brackets: its other ports are there too."""
        return host_of(self.url)

    @property
    def bootstrap_port(self) -> int | None:
        """Where it listens for grants: as configured, else as it says."""
        told = self.info.bootstrap_port if self.info else None
        return self._bootstrap_port or told

    @property
    def is_up(self) -> bool:
        """Whether it may be given requests now."""
        return self.is_admitted and self.client is not None and self.client.is_up

    def check(self, info: NodeInfo) -> None:
        """Refuse what is no usable node of this role.

        Raises:
            NodeUnusable: With the reason.
        """
        if info.role != self.role:
            raise NodeUnusable(f"is a {info.role} node and was given as --{self.role}")
        if not info.is_healthy:
            raise NodeUnusable("says that it is not healthy")
        if self.role == "prefill" and not (self._bootstrap_port or info.bootstrap_port):
            raise NodeUnusable("tells no bootstrap port: give it behind the URL")

    def meet(self, info: NodeInfo, key: ChannelKey | None) -> EngineClient | None:
        """Take note of what the node says; return a new client, to be run, if this is a new life.

        The client of the life before is stopped, and its streams end with `PeerLost`.
        """
        is_same_life = self.info is not None and self.info.epoch == info.epoch
        self.info = info
        if self.client is not None:
            if is_same_life and not self.client.lost.is_set():
                return None
            self.client.stop()
        address = tcp_address(self.host, info.engine_port)
        self.client = EngineClient(address, key, Epoch(info.epoch))
        return self.client

    def start(self, start: Start, wake: asyncio.Event, num_to_compute: int = 0) -> Work:
        """Start an attempt here, or one half of it.

        Args:
            num_to_compute: Of a whole one, how many prompt tokens the node has to compute.

        Raises:
            PeerLost: The node was lost since it was chosen.
        """
        if self.client is None:
            raise PeerLost(f"{self.role} node {self.url} was lost")
        stream = self.client.generate(start, wake)
        return Work(self, stream, len(start.request.prompt_ids), num_to_compute)

    def count_own(self, num_tokens: int) -> None:
        """Count prompt tokens that this edge worker has the node compute, or with a minus, has no more."""
        self.backlog_tokens()
        self._own_tokens += num_tokens

    def backlog_tokens(self) -> int:
        """Return the prompt tokens that wait to be computed here.

        Our own are counted, so that they end with the first token and not with the next report. Of a
        report the others are what is over our count, which has not changed since it came: whatever
        changes the count looks here first.
        """
        load = self.client.load if self.client else NodeLoad()
        if load is not self._load_counted:
            self._load_counted = load
            self._others_tokens = max(0, load.queued_tokens - self._own_tokens)
        return self._own_tokens + self._others_tokens

    def snapshot(self) -> NodeSnapshot:
        """Return the node at this moment."""
        return NodeSnapshot(
            url=self.url,
            role=self.role,
            is_up=self.is_up,
            fingerprint=self.info.model.fingerprint if self.info else "",
            reason=self.reason,
            load=self.client.load if self.client else NodeLoad(),
            in_flight_requests=self.in_flight_requests,
            in_flight_tokens=self.in_flight_tokens,
            takes_prompts=self.info is not None and self.info.takes_prompts,
            backlog_tokens=self.backlog_tokens(),
        )
