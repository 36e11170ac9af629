"""The ranks of a node on several hosts: their addresses, and connections that end all ranks with any one. Imports no vLLM.

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
# Time for an accepted connection to send the token.
TOKEN_S = 1.0
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
        settings: What must be equal on all hosts, such as a hash of the model.
        gather: Returns what each rank gave it, by index.
        on_lost: Called in a thread when a rank has ended; by default this process ends.

    Returns:
        The IP address of each rank's host.

    Raises:
        ConfigInvalid: The hosts have different settings.
        EngineFailed: Rank 0 cannot be reached.
    """
    on_lost, token = on_lost or _end, secrets.token_bytes(TOKEN_BYTES)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = None if index else socket.create_server((host, 0), family=family)
    port = 0 if server is None else server.getsockname()[1]
    ranks = gather((host, port, token, settings))
    hosts = [each[0] for each in ranks]
    if others := {each[0] for each in ranks if each[3] != settings}:
        raise ConfigInvalid(
            f"{host} and {', '.join(sorted(others))} have different models or flags; start all hosts of a node with the same "
            "ones, except --host and --node-rank",
            topic="docs/vllm.md#several-hosts",
        )
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
        watch = threading.Thread(target=_wait, args=([connection], on_lost), daemon=True)
    watch.start()
    return hosts


def _watch(
    server: socket.socket, token: bytes, num_others: int, on_lost: Callable[[], None]
) -> None:
    connections: list[socket.socket] = []
    end_s = time.monotonic() + JOIN_S
    with server:
        while len(connections) < num_others and (left_s := end_s - time.monotonic()) > 0:
            server.settimeout(left_s)
            try:
                connection, _ = server.accept()
                connection.settimeout(TOKEN_S)
                sent = connection.recv(TOKEN_BYTES, socket.MSG_WAITALL)
            except OSError:
                continue
            if secrets.compare_digest(sent, token):
                connections.append(connection)
            else:
                connection.close()
    _wait(connections, on_lost, are_all=len(connections) == num_others)


def _wait(
    connections: Sequence[socket.socket], on_lost: Callable[[], None], *, are_all: bool = True
) -> None:
    """Wait until a connection ends, unless one is missing. Nothing is sent on them, so each event is an end."""
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for each in connections:
            stack.enter_context(each)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE.items():
                each.setsockopt(socket.IPPROTO_TCP, option, value)
            selector.register(each, selectors.EVENT_READ)
        if are_all:
            selector.select()
    on_lost()


def _end() -> None:
    log.error("hosts.rank_lost", effect="the ranks of the node on this host end")
    os._exit(1)
