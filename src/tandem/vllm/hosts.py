"""The ranks of a node on several hosts: their addresses, and connections by which the end of one ends all. No vLLM.

```
 rank 0 ◀── a connection of every other rank, on which nothing is sent; its end means that a rank has ended
```

Without it, vLLM's ranks on the other hosts would wait for the next step forever.
"""

import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from tandem.telemetry.log import get_logger
from tandem.wire.errors import ConfigInvalid, EngineFailed

log = get_logger(__name__)

# Time for the other ranks to connect, which they do at once.
JOIN_S = 60.0
TOKEN_BYTES = 16
# A host that no longer answers is noticed after 5 + 3 * 2 s.
KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 3}


def join_hosts(
    host: str,
    index: int,
    settings: str,
    gather: Callable[[object], Sequence[Any]],
    on_lost: Callable[[], None] | None = None,
) -> Sequence[str]:
    """Exchange the addresses of all ranks of a node, and watch the other ranks from now on. Every rank calls it.

    Args:
        host: IP address of this rank's host.
        index: Index of this rank.
        settings: Digest of the settings that all hosts share.
        gather: Returns what each rank gave it, by index.
        on_lost: Called in a thread when a rank has ended; by default this process ends.

    Returns:
        The IP address of each rank's host.

    Raises:
        ConfigInvalid: The hosts have different settings.
        EngineFailed: Rank 0 cannot be reached.
    """
    on_lost, token = on_lost or end_with_node, secrets.token_bytes(TOKEN_BYTES)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = None if index else socket.create_server((host, 0), family=family)
    port = 0 if server is None else server.getsockname()[1]
    ranks = gather((host, port, token, settings))
    hosts = [each[0] for each in ranks]
    if server is not None:
        watch = threading.Thread(
            target=_watch, args=(server, token, len(hosts) - 1, on_lost), daemon=True
        )
    else:
        first, port, token, _ = ranks[0]
        try:
            connection = socket.create_connection((first, port), JOIN_S)
            connection.sendall(token)
        except OSError as error:
            raise EngineFailed(
                f"rank {index} does not reach rank 0 at {first}, port {port}: {error}; set --host to addresses that reach each other"
            ) from error
        watch = threading.Thread(target=watch_until_lost, args=([connection], on_lost), daemon=True)
    watch.start()
    if others := {each[0] for each in ranks if each[3] != settings}:
        raise ConfigInvalid(
            f"{host} and {', '.join(sorted(others))} have different models or flags; start all hosts of a node with the same "
            "ones, except --host and --node-rank",
            topic="docs/vllm.md#several-hosts",
        )
    return hosts


def _watch(
    server: socket.socket, token: bytes, num_others: int, on_lost: Callable[[], None]
) -> None:
    """Accept the connections of the other ranks, then watch them."""
    ranks: list[socket.socket] = []
    end_s = time.monotonic() + JOIN_S
    with server, selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        while len(ranks) < num_others and (left_s := end_s - time.monotonic()) > 0:
            for key, _events in selector.select(left_s):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection is server:
                    accepted, _ = server.accept()
                    accepted.setblocking(False)
                    selector.register(accepted, selectors.EVENT_READ)
                    continue
                selector.unregister(connection)
                if _has_sent(connection, token):
                    ranks.append(connection)
                else:
                    connection.close()
        for key in [*selector.get_map().values()]:
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
    if len(ranks) == num_others:
        watch_until_lost(ranks, on_lost)
    else:
        for each in ranks:
            each.close()
        on_lost()


def _has_sent(connection: socket.socket, token: bytes) -> bool:
    try:
        return secrets.compare_digest(connection.recv(TOKEN_BYTES), token)
    except OSError:
        return False


def watch_until_lost(connections: Sequence[socket.socket], on_lost: Callable[[], None]) -> None:
    """Call `on_lost` when a connection ends. Nothing is sent on them, so each event is an end."""
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for each in connections:
            stack.enter_context(each)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE.items():
                each.setsockopt(socket.IPPROTO_TCP, option, value)
            selector.register(each, selectors.EVENT_READ)
        selector.select()
    on_lost()


def end_with_node() -> None:
    """End this process, because a rank of its node has ended."""
    log.error("hosts.rank_lost", effect="the ranks of the node on this host end")
    os._exit(1)
