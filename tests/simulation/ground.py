"""Puts the simulation under the product: sockets, threads, time, chance and HTTP, and nothing else.

The product's own classes are replaced where its modules hold them, so that no code of it has to know.
While that is so, a real socket or thread is an error: a simulation that had one would not be one.
"""

import asyncio
import contextlib
import functools
import inspect
import secrets
import sys
import threading
import time

import structlog
import zmq

import tandem.kvtransfer.agents.control
import tandem.kvtransfer.agents.receiver_links
import tandem.router.nodes.watch
import tandem.wire.async_link
import tandem.wire.channel
import tandem.wire.hosts
from tests.simulation import sockets, threads
from tests.simulation.processes import CURRENT

ROOMS = ("router", "frontend", "prefill", "decode", "node", "kvtransfer", "wire")
PACKAGES = tuple(f"tandem.{room}." for room in ROOMS)
CHANCE = ("randbits", "token_bytes", "token_hex")


async def fetch_info(session, url):
    """See `tandem.router.nodes.watch.fetch_info`."""
    del session
    process = CURRENT.get()
    return await process.world.server_info(process, url)


REPLACED = {
    tandem.wire.channel.Inbox: sockets.SimulatedInbox,
    tandem.wire.channel.Link: sockets.SimulatedLink,
    tandem.wire.channel.Waker: sockets.SimulatedWaker,
    tandem.wire.channel.wait: sockets.wait,
    tandem.wire.async_link.AsyncLink: sockets.SimulatedAsyncLink,
    tandem.wire.hosts.resolve: sockets.resolve,
    tandem.kvtransfer.agents.control.ControlThread: threads.SimulatedControlThread,
    tandem.kvtransfer.agents.control.LinkWorker: threads.SimulatedWorker,
    tandem.router.nodes.watch.fetch_info: fetch_info,
}


@contextlib.contextmanager
def simulated():
    """Replace what touches the machine, for as long as the block runs."""
    logs = structlog.get_config()
    for owner, name, _, stand_in in _places():
        setattr(owner, name, stand_in)
    try:
        yield
    finally:
        for owner, name, original, _ in _places():
            setattr(owner, name, original)
        structlog.configure(**logs)


@functools.cache
def _places():
    """Return each (owner, name, original, stand-in)."""
    by_id = {id(original): stand_in for original, stand_in in REPLACED.items()}
    places = [
        (module, attribute, value, by_id[id(value)])
        for name, module in sorted(sys.modules.items())
        if name.startswith(PACKAGES)
        for attribute, value in vars(module).items()
        if id(value) in by_id
    ]
    places += [(secrets, name, getattr(secrets, name), _drawn(name)) for name in CHANCE]
    return [
        *places,
        *_clocks(),
        (zmq, "Context", zmq.Context, _refused("socket")),
        (threading.Thread, "start", threading.Thread.start, _refused("thread")),
    ]


def _now() -> float:
    return asyncio.get_running_loop().time()


def _clocks():
    """Return where a clock is taken unless one is given: in the defaults of classes."""
    for name, module in sorted(sys.modules.items()):
        if not name.startswith(PACKAGES):
            continue
        for _, owner in inspect.getmembers(module, inspect.isclass):
            if owner.__module__ != name or not inspect.isfunction(owner.__init__):
                continue
            make = owner.__init__
            positional, named = make.__defaults__ or (), make.__kwdefaults__ or {}
            if time.monotonic in positional:
                ours = tuple(_now if each is time.monotonic else each for each in positional)
                yield make, "__defaults__", positional, ours
            if time.monotonic in named.values():
                ours = {k: _now if v is time.monotonic else v for k, v in named.items()}
                yield make, "__kwdefaults__", named, ours


def _drawn(name):
    """Return what draws from the seed instead."""

    def draw(size=32):
        chance = CURRENT.get().world.draw
        if name == "randbits":
            return chance.getrandbits(size)
        drawn = chance.randbytes(size)
        return drawn if name == "token_bytes" else drawn.hex()

    return draw


def _refused(what):
    def refuse(*_args, **_named):
        raise AssertionError(f"a real {what} was made in a simulation")

    return refuse
