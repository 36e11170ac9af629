"""Publishes the changes of a prefix cache over ZMQ, in the format of vLLM and SGLang.

```
 the engine's loop ── stored, removed ──▶ queue ── thread, every 50 ms ──▶ PUB       topic, number, batch
                                                                      └─▶ ROUTER    the latest batches again
```

A batch is an array: time, events, rank. A block has the name that our routers use, and its tokens: other routers hash
tokens themselves. The loop never waits: PUB drops batches for a slow subscriber, which requests them again.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import msgspec
import zmq

from tandem.settings.flags import Flag
from tandem.telemetry.log import get_logger
from tandem.wire.errors import ConfigInvalid
from tandem.wire.prefixes import BLOCK_TOKENS, MAX_BLOCKS

log = get_logger(__name__)

INTERVAL_S = 0.05
# 16 to 64 KiB.
MAX_EVENTS_PER_BATCH = 64
# Batches for one slow subscriber: 10 s and at most 64 MiB.
HIGH_WATER_MARK = 1024
# For replay: as many as vLLM keeps, within a limit of memory.
MAX_KEPT = 10_000
MAX_KEPT_BYTES = 64 << 20
# The whole cache can be evicted and filled between two batches.
MAX_QUEUED = 2 * MAX_BLOCKS
END_NUMBER = (-1).to_bytes(8, "big", signed=True)
CLEARED = {"type": "AllBlocksCleared"}


def checked_endpoint(flag: str, text: str) -> str:
    """Return a ZMQ endpoint; raise `ConfigInvalid` if it is none of TCP."""
    host, _, port = text.removeprefix("tcp://").rpartition(":")
    if text and not (text.startswith("tcp://") and host and port.isdigit() and int(port) < 65536):
        raise ConfigInvalid(f"{flag} {text} is not an endpoint: use one such as tcp://*:5557")
    return text


class KvEventsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the publisher, named as in vLLM. Without an endpoint, a node publishes nothing."""

    endpoint: Annotated[
        str,
        Flag(
            "--kv-events-endpoint",
            group="KV events",
            metavar="ENDPOINT",
            help="publish what the prefix cache holds, with the prompts' tokens, to routers of other projects, such as "
            "tcp://*:5557; see docs/kv-events.md",
            parse=partial(checked_endpoint, "--kv-events-endpoint"),
        ),
    ] = ""
    replay_endpoint: Annotated[
        str,
        Flag(
            "--kv-events-replay-endpoint",
            metavar="ENDPOINT",
            help="send the latest events again on request, such as tcp://*:5558",
            parse=partial(checked_endpoint, "--kv-events-replay-endpoint"),
        ),
    ] = ""
    topic: Annotated[
        str,
        Flag(
            "--kv-events-topic", metavar="TOPIC", help="topic of the events, such as kv@POD@MODEL"
        ),
    ] = ""


class KvEventPublisher:
    """Publishes from a thread until `close`.

    Raises:
        ConfigInvalid: An endpoint is in use or does not belong to this machine.
    """

    def __init__(self, config: KvEventsConfig) -> None:
        self._topic = config.topic.encode()
        self._queue: deque[dict[str, Any]] = deque()
        self._kept: deque[tuple[bytes, bytes]] = deque()
        self._kept_bytes, self._number = 0, 0
        # Own I/O thread: a flood of subscribers does not delay the links of this node.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub = self._open(zmq.PUB, config.endpoint, HIGH_WATER_MARK)
        self._router = None
        if config.replay_endpoint:
            self._router = self._open(zmq.ROUTER, config.replay_endpoint, MAX_KEPT + 1)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def on_stored(
        self, name: int, before: int | None, token_ids: Sequence[int], salt: str = ""
    ) -> None:
        """Publish that a block is cached. Never waits.

        Args:
            before: Name of the block before it; None: it starts a prompt.
            salt: Cache salt of the prompt.
        """
        event: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": [name],
            "parent_block_hash": before,
            "token_ids": list(token_ids),
            "block_size": BLOCK_TOKENS,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        }
        if salt and before is None:
            event.update(extra_keys=[[salt]], cache_salt=salt)
        self._put(event)

    def on_removed(self, name: int) -> None:
        """Publish that a block is no longer cached. Never waits."""
        self._put({"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU"})

    def close(self) -> None:
        """Publish the rest and release the endpoints. Safe to call twice."""
        self._closing.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _open(self, kind: int, endpoint: str, limit: int) -> zmq.Socket[bytes]:
        sock = self._context.socket(kind)
        sock.setsockopt(zmq.SNDHWM, limit)
        sock.setsockopt(zmq.IPV6, 1)
        try:
            # vLLM's rule.
            if "*" in endpoint or "::" in endpoint or kind == zmq.ROUTER:
                sock.bind(endpoint)
            else:
                sock.connect(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigInvalid(
                f"cannot publish KV events at {endpoint}: {zmq.strerror(error.errno or 0)}; set a different "
                "--kv-events-endpoint or --kv-events-replay-endpoint",
                topic="docs/kv-events.md",
            ) from error
        return sock

    def _put(self, event: dict[str, Any]) -> None:
        if len(self._queue) >= MAX_QUEUED:  # the thread does not run
            self._queue.clear()
            self._queue.append(CLEARED)
        self._queue.append(event)

    def _run(self) -> None:
        is_closing = False
        while not is_closing:
            is_closing = self._closing.wait(INTERVAL_S)
            try:
                self._publish()
                self._replay()
            except Exception:
                log.exception("kv_events.failed")

    def _publish(self) -> None:
        while self._queue:
            num_events = min(len(self._queue), MAX_EVENTS_PER_BATCH)
            events = [self._queue.popleft() for _ in range(num_events)]
            payload = msgspec.msgpack.encode([time.time(), events, 0])
            number = self._number.to_bytes(8, "big")
            self._number += 1
            self._kept.append((number, payload))
            self._kept_bytes += len(payload)
            # The last one always stays: by it, subscribers recognize this life of the node.
            while len(self._kept) > 1 and (
                len(self._kept) > MAX_KEPT or self._kept_bytes > MAX_KEPT_BYTES
            ):
                self._kept_bytes -= len(self._kept.popleft()[1])
            self._pub.send_multipart([self._topic, number, payload], zmq.NOBLOCK)

    def _replay(self) -> None:
        """Answer one request, if there is any: the next one waits, so that requests cannot occupy this process."""
        if self._router is None or not self._router.poll(0):
            return
        frames = self._router.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != len(END_NUMBER):
            return
        peer, _, first = frames
        for number, payload in self._kept:
            if number >= first:
                self._router.send_multipart([peer, b"", self._topic, number, payload], zmq.NOBLOCK)
        self._router.send_multipart([peer, b"", b"", END_NUMBER, b""], zmq.NOBLOCK)
