"""Both agents in one process over a real wire, and scripted peers for each."""

import os
import threading
from collections import defaultdict

import numpy as np

from tandem.kvtransfer.events import PushDone, RoomGranted, RoomLanded
from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.region import MemoryRegion
from tandem.wire import hand_off
from tandem.wire.channel import Waker, wait
from tandem.wire.generation import Epoch, Room
from tests.agents import decode_agent, prefill_agent
from tests.calm import CALM
from tests.conformance.played import Address
from tests.conformance.played_decode import PlayedDecode
from tests.conformance.played_prefill import PlayedPrefill
from tests.loopback import (
    LoopbackConnection,
    LoopbackListener,
    LoopbackTransport,
)
from tests.patience import PATIENCE_S, Clock, eventually, patiently

ROOM = Room(42)
PROMPT_PAGES = [3, 1, 7, 8]
DECODE_PAGES = [5, 6, 2, 0]


def layout(**changes):
    return KVLayout(
        **{
            "num_pages": 16,
            "page_size": 4,
            "num_layers": 2,
            "num_kv_heads": 2,
            "head_dim": 8,
            "dtype": "float32",
            "itemsize": 4,
            **changes,
        }
    )


# Of files in /dev/shm: other processes run tests, too.
OWN_NAME = f"agents-{os.getpid()}"


class Node:
    """A role's loop, as far as a test needs one: waits for the next event of an agent."""

    def __init__(self, agent, waker, region):
        self.agent, self.waker, self.region = agent, waker, region
        self._seen = []

    def next(self, kind=None):
        """Return the next event, which must be of this kind."""
        for _ in patiently():
            self._seen += self.agent.events()
            if self._seen:
                event = self._seen.pop(0)
                assert kind is None or isinstance(event, kind), event
                return event
            wait([], 0.1, self.waker)
        raise AssertionError("no event")

    def wait_until(self, condition):
        """Wait until a condition on the agent's statistics is true."""
        is_true = eventually(
            lambda: condition(self.agent.statistics()), lambda: wait([], 0.005, self.waker)
        )
        assert is_true, self.agent.statistics()

    def close(self):
        self.agent.close()
        self.waker.close()
        self.region.close()


class Cluster:
    """Makes nodes; closes them all at the end."""

    def __init__(self, stack):
        self._stack = stack
        self.use(LoopbackTransport())
        self.clock = Clock(1000.0)

    def use(self, transport, *others):
        self.transport, self.transports = transport, [transport, *others]

    def prefill(self, address="tcp://127.0.0.1:0", *, shape=None, epoch=1, **more):
        shape, waker = shape or layout(), Waker()
        region = MemoryRegion.private(shape.pool_bytes)
        random = np.random.default_rng(epoch)
        region.array()[:] = random.integers(0, 256, shape.pool_bytes, np.uint8)
        more |= {"address": address, "epoch": Epoch(epoch), "waker": waker}
        return self._node(prefill_agent(shape, region, self.transports, **more), waker, region)

    def decode(self, *, shape=None, epoch=2, **more):
        shape, waker = shape or layout(), Waker()
        region = MemoryRegion.shared(shape.pool_bytes, OWN_NAME)
        more |= {"epoch": Epoch(epoch), "waker": waker}
        return self._node(decode_agent(shape, region, self.transports, **more), waker, region)

    def _node(self, agent, waker, region):
        node = Node(agent, waker, region)
        self._stack.callback(node.close)
        return node


def pages(node, page_ids, shape=None):
    shape = shape or layout()
    return node.region.array().reshape(shape.num_pages, -1)[page_ids]


def request(decode, prefill, page_ids=DECODE_PAGES, have_tokens=0, room=ROOM):
    decode.agent.request(room, "127.0.0.1", prefill.agent.port, page_ids, have_tokens)


def begin(cluster, *faults, sender=None, receiver=None, **granted):
    """Return both ends of a room that prefill expects and decode grants.

    Args:
        faults: Of loopback.
        sender: What prefill's agent is made with, beside what all are.
        receiver: The same of decode's.
        granted: See `request`.
    """
    if faults:
        cluster.use(LoopbackTransport(faults))
    prefill, decode = cluster.prefill(**sender or {}), cluster.decode(**receiver or {})
    prefill.agent.expect(ROOM)
    request(decode, prefill, **granted)
    return prefill, decode


def push_all(prefill, page_ids=PROMPT_PAGES, room=ROOM):
    prefill.agent.push(room, page_ids, 0)
    prefill.agent.finish(room, first_token=9, seed=77, cached_tokens=4)


def has_turned(agent):
    """Return when the control thread has looked at all its links at the time that it is."""
    for _ in range(2):
        is_done = threading.Event()
        agent._control.post(is_done.set)
        assert is_done.wait(PATIENCE_S)


def refused_in_a_turn(node, send, num):
    """Send `num` messages that the node refuses; return how many delay a call of its control thread."""
    send()
    node.wait_until(lambda now: now.num_refused == 1)  # connected
    hold, seen = Hold(), []
    hold.begin()
    node.agent._control.post(hold.pass_by)
    assert hold.reached.wait(PATIENCE_S)
    for _ in range(num):
        send()
    node.agent._control.post(lambda: seen.append(node.agent.statistics().num_refused))
    hold.let_go()
    node.wait_until(lambda now: seen and now.num_refused == 1 + num)
    return seen[0] - 1


def receive(end):
    for _ in patiently():
        if (got := end.receive()) is not None:
            return got
        wait([end], 0.1)
    raise AssertionError("nothing came")


def serve_the_next(prefill, decode):
    """Do a hand-off between two honest ends."""
    room = Room(777)
    prefill.agent.expect(room)
    request(decode, prefill, room=room)
    push_all(prefill, room=room)
    assert isinstance(prefill.next(), RoomGranted)
    assert isinstance(prefill.next(), PushDone)
    assert isinstance(decode.next(), RoomLanded)


class Hold:
    """Stops whoever comes to it, once it is told to, until it is let go.

    Attributes:
        threads: Names of those that came.
    """

    def __init__(self):
        self._is_on, self.reached, self._let_go = False, threading.Event(), threading.Event()
        self.threads = set()

    def begin(self):
        self._is_on = True

    def pass_by(self):
        self.threads.add(threading.current_thread().name)
        if self._is_on:
            self.reached.set()
            assert self._let_go.wait(PATIENCE_S)

    def let_go(self):
        self._is_on = False
        self._let_go.set()


class Scripted(LoopbackTransport):
    """Loopback whose calls are held, or fail, as a test asks.

    Attributes:
        holds: By the name of the call.
        failures: Names of calls, each of which raises once: `error`, or one that names the call.
    """

    def __init__(self, name="loopback"):
        super().__init__()
        self.name, self.failures, self.error, self.is_fenced = name, [], None, False
        self.holds = defaultdict(Hold)

    def follow(self, call):
        if call in self.failures:
            self.failures.remove(call)
            raise self.error or OSError(f"{call} failed")
        self.holds[call].pass_by()

    def listen(self, pool):
        listener = ScriptedListener(pool, self._listeners, self.name)
        listener.script = self
        return listener

    def connect(self, offer, region):
        self.follow("connect")
        plain = super().connect(offer, region)
        connection = ScriptedConnection(self, plain._listener, plain._peer, region)
        connection.script = self
        return connection


def _scripted(name):
    def call(self, *args):
        self.script.follow(name)
        result = getattr(super(type(self), self), name)(*args)
        self.script.is_fenced |= name == "fence"
        return result

    return call


class ScriptedListener(LoopbackListener):
    admit, permit, revoke, fence = map(_scripted, ("admit", "permit", "revoke", "fence"))


class ScriptedConnection(LoopbackConnection):
    write, close = map(_scripted, ("write", "close"))


def fake_prefill(stack, epoch=5, heartbeat=CALM):
    """Return a bootstrap port with nothing behind it."""
    half = PlayedPrefill(Address(beat=heartbeat), transport="loopback", epoch=epoch)
    stack.callback(half.close)
    return half


def meet(prefill, decode, room=ROOM, page_ids=DECODE_PAGES):
    """Have decode connect to a played prefill; return its Hello."""
    decode.agent.request(room, prefill.host, prefill.port, page_ids)
    prefill.hello = prefill.expect(hand_off.Hello)
    return prefill.hello


def fake_decode(stack, port, transport, epoch=2, shape=None, heartbeat=CALM):
    """Return a link to a prefill's port, and a pool that prefill may write."""
    address, shape = Address(port, heartbeat), shape or layout()
    half = PlayedDecode(address, transport=transport, layout=shape, epoch=epoch)
    stack.callback(half.close)
    return half
