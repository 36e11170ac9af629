"""Nodes under test that run in this process: our agents without an engine, and the half of `examples/`."""

import contextlib
import queue
import threading

import msgspec
import pytest

from tandem.kvtransfer.events import RoomLanded, RoomLost
from tandem.kvtransfer.transports.tcp import TcpTransport
from tandem.wire.channel import DEFAULT_HEARTBEAT, Heartbeat
from tests.calm import CALM, CalmHeartbeat, calm_receiver, calm_sender
from tests.conformance.played import Address
from tests.conformance.played_prefill import PlayedPrefill
from tests.kvtransfer.rig import PROMPT_PAGES, Cluster, layout, pages

# By the rhythm that a test is about: pings, or silence, which is a loss soon.
BEATS = {"silence": Heartbeat(0.2, busy_s=0.0), "pings": CalmHeartbeat(0.1), "": CALM}
RHYTHMS = {
    "test_both_ends_ping": "pings",
    "test_silent_decode_is_lost_with_its_grants": "silence",
    "test_silent_prefill_is_lost_and_fenced": "silence",
}


def rhythm_of(test):
    return RHYTHMS.get(test.__name__, "")


def _cluster(stack):
    cluster = Cluster(stack)
    cluster.use(TcpTransport())
    return cluster


class PrefillAgent(Address):
    """A prefill agent: every prompt is in its pages already."""

    def __init__(self, stack, rhythm):
        beat = BEATS[rhythm]
        limits = calm_sender(heartbeat=beat)
        self.node = _cluster(stack).prefill(verify="always", timeouts=limits)
        super().__init__(self.node.agent.port, beat)

    def start(self, room, num_tokens):
        self.node.agent.expect(room)
        self.node.agent.push(room, PROMPT_PAGES[: num_tokens // layout().page_size], 0)
        self.node.agent.finish(room, first_token=9, seed=77)

    def content(self, num_tokens):
        return pages(self.node, PROMPT_PAGES[: num_tokens // layout().page_size]).tobytes()


class DecodeAgent(Address):
    """A decode agent. It owns its pages as a role does: they rest until no write can come."""

    page_size = layout().page_size

    def __init__(self, stack, rhythm):
        super().__init__(beat=BEATS[rhythm])
        self.node = _cluster(stack).decode(timeouts=calm_receiver(heartbeat=self.beat))
        self.free, self.pages, self.outcomes = list(range(layout().num_pages)), {}, {}

    def start(self, room, num_tokens, host, port):
        num_pages = num_tokens // self.page_size
        self.pages[room], self.free = self.free[:num_pages], self.free[num_pages:]
        self.node.agent.request(room, host, port, self.pages[room])

    def cancel(self, room):
        self.node.agent.withdraw(room)

    def outcome(self, room):
        return self.outcomes.get(room, "")

    def keep_alive(self):
        for event in self.node.agent.events():
            if isinstance(event, RoomLanded):
                self.outcomes[event.room] = "landed"
            elif error := getattr(event, "error", None):
                self.outcomes[event.room] = error.code
            if not isinstance(event, RoomLost):
                self.free = self.pages.pop(event.room) + self.free


class Example(Address):
    """The half of `examples/` in a thread: it waits for Welcome, which a test sends later.

    Its pool has the pages of two requests, so that a page which does not come back is missed.
    """

    page_size = layout().page_size

    def __init__(self, module, beat):
        super().__init__(beat=beat)
        self._module, self.outcomes = module, {}
        self._open, self._half, self._jobs = {}, None, queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def start(self, room, num_tokens, host, port):
        self._jobs.put(lambda: self._grant(room, num_tokens, f"tcp://{host}:{port}"))

    def cancel(self, room):
        self._jobs.put(lambda: self._half and self._half.withdraw(room))

    def outcome(self, room):
        return self.outcomes.get(room, "")

    def close(self):
        self._jobs.put(None)
        self._thread.join()
        if self._half is not None:
            self._half.close()

    def _grant(self, room, num_tokens, address):
        self._open[room] = []
        if self._half is None:
            shape = msgspec.to_builtins(layout())
            self._half = self._module.DecodeHalf(address, 4, fingerprint="x", layout=shape)
        self._open[room] = self._half.grant(room, num_tokens)

    def _run(self):
        while True:
            try:
                if (job := self._jobs.get(timeout=0.001)) is None:
                    return
                job()
            except queue.Empty:
                self._look()
            except self._module.LinkLost as lost:
                self._lost(lost)

    def _look(self):
        try:
            for ended in self._half.poll(0.005) if self._half else ():
                reason = (ended.message.get("error") or {}).get("code", "")
                codes = {"landed": "landed", "corrupted": "kv_corrupted"}
                self.outcomes[ended.room] = codes.get(ended.kind, reason)
                page_ids = self._open.pop(ended.room)
                self._half.free += page_ids if ended.kind == "landed" else []
        except self._module.LinkLost as lost:
            self._lost(lost)

    def _lost(self, lost):
        code = lost.answer.get("error", {}).get("code", "peer_lost")
        self.outcomes |= dict.fromkeys(self._open, code)
        self._open.clear()
        self._half = None


def before_example(stack, rhythm, monkeypatch):
    """Return a prefill half for the example."""
    pytest.importorskip("msgpack")
    from examples import decode_half

    monkeypatch.setattr(decode_half, "BEAT_S", 0.2 if rhythm else 30.0)
    monkeypatch.setattr(decode_half, "BUSY_S", 0.7 if rhythm else 100.0)
    example = Example(decode_half, Heartbeat(0.2) if rhythm else DEFAULT_HEARTBEAT)
    half = PlayedPrefill(example)

    def end():
        with contextlib.suppress(AssertionError):  # so that it waits for no Welcome any more
            half.refuse()
        example.close()
        half.close()

    stack.callback(end)
    return half
