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
from router.prefixes import NOTHING_CACHED, PrefixIndex
from wire.channel import tcp_address
from wire.errors import PeerLost
from wire.ids import Epoch
from wire.keys import ChannelKey
from wire.messages import NodeLoad
from wire.node_info import NodeInfo


class Work:
    """One half of an attempt: its stream, and its share of the node's load until it ends.

    A context manager: leaving it ends it.

    Attributes:
        is_counted: Whether it has not ended.
    """

    def __init__(self, node: "Node", stream: TokenStream, num_tokens: int) -> None:
        self.stream = stream
        self._node, self._num_tokens = node, num_tokens
        self.is_counted = True
        node.in_flight_requests += 1
        node.in_flight_tokens += num_tokens

    def end(self, *, is_done: bool = False) -> None:
        """Give the share back. Cancels at the engine unless it `is_done`. Safe to call twice."""
        if is_done:
            self.stream.forget()
        self.stream.close()
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

    Args:
        index: Of what all nodes have cached.

    Attributes:
        role: What it was given as: prefill or decode.
        info: What it last said of itself; None until it was reached.
        reason: Why it is not used; empty when nothing is wrong.
        is_admitted: Its last answer was that of a healthy node of its role.
        prefixes: What this life of it has cached.
    """

    def __init__(
        self,
        url: str,
        role: str,
        bootstrap_port: int | None = None,
        index: PrefixIndex | None = None,
    ) -> None:
        self.url, self.role = url, role
        self.info: NodeInfo | None = None
        self.client: EngineClient | None = None
        self.reason = "not reached yet"
        self.is_admitted = False
        self.in_flight_requests = 0
        self.in_flight_tokens = 0
        self.prefixes = NOTHING_CACHED
        self._index = PrefixIndex() if index is None else index
        self._bootstrap_port = bootstrap_port
        self._fresh_tokens = 0
        # The load that these were started after.
        self._load_before = NodeLoad()

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
        self.prefixes.forget()
        self.prefixes = self._index.new_life()
        self.client = EngineClient(address, key, Epoch(info.epoch), prefixes=self.prefixes)
        return self.client

    def start(self, start: Start, wake: asyncio.Event) -> Work:
        """Start one half of an attempt here.

        Raises:
            PeerLost: The node was lost since it was chosen.
        """
        if self.client is None:
            raise PeerLost(f"{self.role} node {self.url} was lost")
        stream = self.client.generate(start, wake)
        return Work(self, stream, len(start.request.prompt_ids))

    def expect(self, num_tokens: int) -> None:
        """A request was given to this node, which will have so many tokens more to do."""
        self._fresh_tokens = self.fresh_tokens() + num_tokens

    def fresh_tokens(self) -> int:
        """Return the tokens of what was given to this node since it last told its load."""
        load = self.client.load if self.client else NodeLoad()
        if load is not self._load_before:
            self._load_before, self._fresh_tokens = load, 0
        return self._fresh_tokens

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
            fresh_tokens=self.fresh_tokens(),
            zone=self.info.zone if self.info else "",
            prefixes=self.prefixes,
        )
