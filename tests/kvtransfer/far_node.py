"""A prefill or a decode node without a model, in a process of its own: tests kill it, stop it, cut it off.

`far_node prefill|decode TRANSPORT HOST DIRECTORY calm|alert` takes dicts from the connection that is its standard
input: `do` names a method below, the rest are its arguments. It sends dicts: what its agent reports to its
role, and answers. It owns its pages as a role does, in a `KVCache`. A calm node takes no silence for a loss: it
stays linked to whoever is alive on a machine that is slow. An alert one is as nodes are by default.
"""

import os
import select
import sys
import threading
from multiprocessing.connection import Connection

import numpy as np

from tandem.engine.kv_cache import KVCache
from tandem.kvtransfer.events import Failed, Landed, Lost, PushDone, Released, Safe
from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import TransportConfig
from tandem.wire.channel import DEFAULT_HEARTBEAT, Waker
from tandem.wire.generation import Room
from tests.agents import decode_agent, prefill_agent
from tests.calm import CALM, calm_receiver, calm_sender
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


def prompt():
    """Return the bytes of every prompt: not 0, which is what a fresh grant holds, and not the mark."""
    return np.random.default_rng(1).integers(
        MARK + 1, 256, (PROMPT_PAGES, LAYOUT.page_bytes), np.uint8
    )


class EndlessConnection:
    """A real connection whose writes are repeated until they may end: so a push is always under way."""

    def __init__(self, connection, may_end):
        self._connection, self._may_end = connection, may_end

    def write(self, room, plan):
        self._connection.write(room, plan)
        while not self._may_end.is_set():
            self._connection.write(room, plan)

    def close(self):
        self._connection.close()


class EndlessTransport:
    """A transport that connects so."""

    def __init__(self, transport, may_end):
        self._transport, self._may_end = transport, may_end
        self.name = transport.name

    def listen(self, pool):
        return self._transport.listen(pool)

    def connect(self, offer, region):
        return EndlessConnection(self._transport.connect(offer, region), self._may_end)


class Node:
    """What both have: pages by room, and a loop over commands and events."""

    def __init__(self, link, region):
        self.link, self.region = link, region
        self.waker = Waker()
        self.pool = KVCache(LAYOUT.num_pages, LAYOUT.page_size)
        self.pages = {}
        self.memory = region.array().reshape(LAYOUT.num_pages, -1)

    def run(self):
        while True:
            select.select([self.link, self.waker], [], [], self.watch_s)
            self.waker.clear()
            for event in self.agent.events():
                error = getattr(event, "error", None)
                self.say(event=type(event).__name__, room=event.room, error=error and error.code)
                self.hear(event)
            self.watch()
            if self.link.poll():
                try:
                    command = self.link.recv()
                except EOFError:
                    break
                getattr(self, command.pop("do"))(**command)
        self.agent.close()
        self.region.close()

    def say(self, **line):
        self.link.send(line)

    watch_s = None

    def watch(self):
        """Look at memory, where that is asked."""

    def report(self):
        self.pool.check_integrity()
        counts = self.pool.counts()
        self.say(
            answer="report",
            is_all_free=counts.free == counts.total,
            num_quarantined=counts.quarantined,
            **self.more(),
        )


class PrefillNode(Node):
    def __init__(self, link, allowed, host, heartbeat):
        super().__init__(link, MemoryRegion.private(LAYOUT.pool_bytes))
        self.may_end = threading.Event()
        allowed = [EndlessTransport(each, self.may_end) for each in allowed]
        self.agent = prefill_agent(
            LAYOUT,
            self.region,
            allowed,
            address=f"tcp://{host}:0",
            waker=self.waker,
            timeouts=calm_sender(heartbeat=heartbeat),
        )
        self.say(answer="port", port=self.agent.port)

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

    def hear(self, event):
        if isinstance(event, PushDone | Released):
            self.pool.release(self.pages.pop(event.room))

    def more(self):
        return {}


class DecodeNode(Node):
    def __init__(self, link, allowed, host, heartbeat):
        super().__init__(link, MemoryRegion.shared(LAYOUT.pool_bytes, "farnode"))
        del host
        self.watched = set()
        self.marked = set()
        limits = calm_receiver(heartbeat=heartbeat)
        self.agent = decode_agent(LAYOUT, self.region, allowed, waker=self.waker, timeouts=limits)
        self.say(answer="ready", region=str(self.region.path))

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
        for room in list(self.watched & self.pages.keys()):
            if self.memory[self.pages[room][-1], -1]:
                self.watched.discard(room)
                self.say(event="Bytes", room=room, error=None)

    def hear(self, event):
        pages = self.pages[event.room]
        match event:
            case Landed():
                self.pool.land(pages)
                self.say(answer="pages", is_equal=bool((self.memory[pages] == prompt()).all()))
                self.pool.release(pages)
            case Failed():
                self.pool.reclaim(pages)
            case Lost():
                self.pool.quarantine(pages)
                return
            case Safe():
                self.pool.reclaim(pages)
        del self.pages[event.room]
        self.watched.discard(event.room)
        self.memory[pages] = MARK
        self.marked |= set(pages)

    def more(self):
        """Say whether a byte came into pages after they were taken back."""
        return {"is_untouched": bool((self.memory[sorted(self.marked)] == MARK).all())}


def main(kind, transport, host, directory, mood):
    link = Connection(sys.stdin.fileno())
    allowed = all_transports(transport, TransportConfig(host=host, directory=directory))
    heartbeat = {"calm": CALM, "alert": DEFAULT_HEARTBEAT}[mood]
    node = {"prefill": PrefillNode, "decode": DecodeNode}[kind](link, allowed, host, heartbeat)
    node.run()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
