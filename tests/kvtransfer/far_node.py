"""A prefill or decode node without a model in a separate process, which tests kill, stop or cut off.

`far_node prefill|decode TRANSPORT HOST calm|alert` takes (method, arguments) from the connection that is its
standard input, and sends dicts: `event` is what its agent reports to its role, or an answer. It owns its pages as a
role does, in a `KVCache`. A calm node takes no silence for a loss: it stays linked to whoever is alive on a machine
that is slow. An alert one is as nodes are by default.
"""

import ctypes
import os
import select
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from tandem.engine.pages.kv_cache import KVCache
from tandem.kvtransfer.events import PushDone, RoomLanded, RoomLost, RoomReleased
from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import TransportConfig
from tandem.wire.channel import DEFAULT_HEARTBEAT, Waker
from tandem.wire.generation import Room
from tests.agents import decode_agent, prefill_agent
from tests.calm import CALM, calm_receiver, calm_sender
from tests.fork_server import Forked
from tests.kvtransfer.makers import all_transports

LAYOUT = KVLayout(
    num_pages=64,
    page_size=16,
    num_layers=4,
    num_kv_heads=8,
    head_dim=64,
    dtype="float32",
    itemsize=4,
)
PROMPT_PAGES = 24
# What decode writes into pages that came back: it must stay.
MARK = 7
WATCH_S = 0.002
# Only a guard against a hang: nothing waits this long in a run that is well.
GUARD_S = 120.0


# ── the test's side ──────────────────────────────────────────────────────────────────────────────


class FarNode:
    """A node's process.

    Args:
        namespace: A file of the network namespace that it runs in; empty for ours.
        mood: `alert` where a test is about silence.
    """

    def __init__(self, kind, transport, host="127.0.0.1", namespace="", mood="calm"):
        self._link, theirs = Pipe()
        self.kind, self.host, self.port, self.region = kind, host, 0, ""
        argv = [__name__, kind, transport, host, mood]
        self.process = Forked(argv, stdin=theirs.fileno(), namespace=namespace)
        theirs.close()
        self._kept = []

    def ready(self):
        """Wait until it is up."""
        self.port, self.region = self.hear("Ready")["where"]
        return self

    def do(self, method, *arguments):
        self._link.send((method, arguments))

    def hear(self, event, room=None):
        """Wait for the next event of a room, which must be this. Those of other rooms are kept."""
        kept, self._kept = self._kept, []
        while (line := kept.pop(0) if kept else self._receive()) is not None:
            is_asked = event == "Bytes" or line["event"] != "Bytes"
            if line["room"] == room and is_asked:
                self._kept += kept
                assert line["event"] == event, line
                return line
            self._kept.append(line)
        raise AssertionError(f"{self.kind} did not report {event} of {room}: {self._kept}")

    def _receive(self):
        try:
            return self._link.recv() if self._link.poll(GUARD_S) else None
        except (EOFError, ConnectionError) as error:
            status = self.process.wait()
            raise AssertionError(f"{self.kind} ended with status {status}") from error

    def report(self):
        """Return the state of its pages and links."""
        self.do("report")
        return self.hear("Report")

    def check_all_back(self):
        """Every page came back, and no byte came into it after that."""
        report = self.report()
        assert report["is_all_free"]
        assert report["is_untouched"]

    def signal(self, number):
        self.process.send_signal(number)

    def close(self):
        """End it, whatever became of it."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._link.close()
        if self.region:  # a killed node cannot remove its own
            region = Path(self.region)
            for path in [region, *region.parent.glob(region.stem + ".*")]:
                path.unlink(missing_ok=True)


def begin_push(prefill, decode, room):
    """Request a room of both, and return when bytes are landing and go on doing so."""
    prefill.do("push", room)
    decode.do("request", room, prefill.host, prefill.port)
    prefill.hear("RoomGranted", room)
    decode.hear("Bytes", room)


def hand_off(prefill, decode, room):
    """Do one from beginning to end, and compare the bytes."""
    begin_push(prefill, decode, room)
    prefill.do("finish", room)
    prefill.hear("PushDone", room)
    assert decode.hear("RoomLanded", room)["is_equal"]


# ── the process ──────────────────────────────────────────────────────────────────────────────────


def prompt():
    """Return the bytes of every prompt: not 0, which is what a fresh grant holds, and not the mark."""
    return np.random.default_rng(1).integers(
        MARK + 1, 256, (PROMPT_PAGES, LAYOUT.page_bytes), np.uint8
    )


def endless(transport, may_end):
    """Have the transport's writes repeated until they may end: so a push is always under way."""
    connect = transport.connect

    def connect_endlessly(offer, region):
        connection = connect(offer, region)
        write = connection.write

        def write_on(room, plan):
            write(room, plan)
            while not may_end.is_set():
                write(room, plan)

        connection.write = write_on
        return connection

    transport.connect = connect_endlessly
    return transport


class Node:
    """What both have: pages by room, and a loop over calls and events."""

    watch_s = None

    def __init__(self, link, region):
        self.link, self.region, self.waker = link, region, Waker()
        self.pool = KVCache(LAYOUT.num_pages, LAYOUT.page_size)
        self.pages, self.marked = {}, set()
        self.memory = region.array().reshape(LAYOUT.num_pages, -1)

    def run(self):
        self.say("Ready", where=(getattr(self.agent, "port", 0), str(self.region.path or "")))
        while True:
            select.select([self.link, self.waker], [], [], self.watch_s)
            self.waker.clear()
            for event in self.agent.events():
                error = getattr(event, "error", None)
                facts = self.take(event) or {}
                self.say(type(event).__name__, event.room, error=error and error.code, **facts)
            self.watch()
            if self.link.poll():
                try:
                    method, arguments = self.link.recv()
                except EOFError:
                    break
                getattr(self, method)(*arguments)
        self.agent.close()
        self.region.close()

    def say(self, event, room=None, **facts):
        self.link.send({"event": event, "room": room, **facts})

    def watch(self):
        """Look at memory, where that is asked."""

    def report(self):
        self.pool.check_integrity()
        counts = self.pool.counts()
        is_untouched = bool((self.memory[sorted(self.marked)] == MARK).all())
        is_all_free = counts.free == counts.total
        num_lost_links = self.agent.times.num_lost_links
        self.say(
            "Report",
            is_all_free=is_all_free,
            is_untouched=is_untouched,
            num_lost_links=num_lost_links,
        )

    def hold_gil(self, seconds):
        """Run no other thread of this process, as an extension module might."""
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))


class PrefillNode(Node):
    def __init__(self, link, allowed, host, heartbeat):
        super().__init__(link, MemoryRegion.private(LAYOUT.pool_bytes))
        self.may_end = threading.Event()
        self.agent = prefill_agent(
            LAYOUT,
            self.region,
            [endless(each, self.may_end) for each in allowed],
            address=f"tcp://{host}:0",
            waker=self.waker,
            timeouts=calm_sender(heartbeat=heartbeat),
        )

    def push(self, room):
        """Expect a room and push the whole prompt, over and over until `finish`."""
        self.may_end.clear()
        self.pages[room] = self.pool.allocate(PROMPT_PAGES)
        self.memory[self.pages[room]] = prompt()
        self.agent.expect(Room(room))
        self.agent.push(Room(room), self.pages[room], 0)

    def finish(self, room):
        self.may_end.set()
        self.agent.finish(Room(room), 9, 77)

    def take(self, event):
        if isinstance(event, PushDone | RoomReleased):
            self.pool.release(self.pages.pop(event.room))


class DecodeNode(Node):
    def __init__(self, link, allowed, host, heartbeat):
        super().__init__(link, MemoryRegion.shared(LAYOUT.pool_bytes, "farnode"))
        del host
        self.watched = set()
        limits = calm_receiver(heartbeat=heartbeat)
        self.agent = decode_agent(LAYOUT, self.region, allowed, waker=self.waker, timeouts=limits)

    def request(self, room, host, port):
        pages = self.pages[room] = self.pool.grant(PROMPT_PAGES)
        self.marked -= set(pages)
        self.memory[pages] = 0
        self.watched.add(room)
        self.agent.request(Room(room), host, port, pages)

    @property
    def watch_s(self):
        return WATCH_S if self.watched else None

    def watch(self):
        for room in list(self.watched):
            if self.memory[self.pages[room][-1], -1]:
                self.watched.discard(room)
                self.say("Bytes", room)

    def take(self, event):
        pages = self.pages[event.room]
        if isinstance(event, RoomLost):
            return self.pool.quarantine(pages)
        facts = {}
        if isinstance(event, RoomLanded):
            facts["is_equal"] = bool((self.memory[pages] == prompt()).all())
            self.pool.land(pages)
            self.pool.release(pages)
        else:
            self.pool.reclaim(pages)
        del self.pages[event.room]
        self.watched.discard(event.room)
        self.memory[pages] = MARK
        self.marked |= set(pages)
        return facts


def main(kind, transport, host, mood):
    link = Connection(sys.stdin.fileno())
    allowed = all_transports(transport, TransportConfig(host=host))
    heartbeat = {"calm": CALM, "alert": DEFAULT_HEARTBEAT}[mood]
    {"prefill": PrefillNode, "decode": DecodeNode}[kind](link, allowed, host, heartbeat).run()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
