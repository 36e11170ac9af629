"""What is fuzzed: each target takes bytes, and raises when something of it is left or does not go on."""

import asyncio
import contextlib
import itertools
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import zmq

from tandem.engine.grammar.messages import Limits
from tandem.engine.grammar.processes import Constraint, GrammarProcesses
from tandem.frontend.app import create_app
from tandem.frontend.http.server import listen, serving
from tandem.kvtransfer.agents.sender import SenderTimeouts
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import Pool
from tandem.kvtransfer.transports.lanes import open_stream
from tandem.node.models.checkpoint import resolve_model
from tandem.wire import hand_off, messages
from tandem.wire.channel import Codec, Link, wait
from tandem.wire.errors import InvalidRequest, MessageInvalid, Overloaded, PeerLost
from tandem.wire.generation import Epoch, GenerateRequest, Grammar, Room, SamplingParams
from tests.engine.random_grammars import random_grammar
from tests.frontend.fakes import FakeBackend
from tests.kvtransfer import rig
from tests.trust.node_rig import Cluster
from tests.trust.test_tcp_port import NUM_PAGES, PAGE, ROOM, Port

Target = Callable[[bytes], None]
UNIONS = (messages.ToEngine, messages.FromEngine, hand_off.ToPrefill, hand_off.FromPrefill)
# Short, so that a minute has many grammars; the embedded model's token of 64 dashes.
LIMITS, DASHES = Limits(compile_s=0.2, masks_s=0.2, cpu_s=0.1), 15069
# Between two frames: msgpack never uses it.
BETWEEN = b"\xc1"
REQUEST = GenerateRequest(
    request_id="a", prompt_ids=[5, 6, 7], sampling=SamplingParams(max_new_tokens=2, seed=1)
)
SEEDS = {
    "inbox": [
        messages.StartColocated(request=REQUEST),
        messages.StartPrefill(request=REQUEST, room=Room(1)),
        messages.StartDecode(
            request=REQUEST, room=Room(1), bootstrap_host="127.0.0.1", bootstrap_port=9
        ),
        messages.Cancel(request_id="a"),
        messages.FlushCache(),
        messages.LoadAdapter(name="a", path="/a"),
        messages.UnloadAdapter(adapter="a@1"),
    ],
    "bootstrap": [
        hand_off.Grant(epoch=Epoch(2), room=Room(1), page_ids=[1, 2], have_tokens=4),
        hand_off.Withdraw(epoch=Epoch(2), room=Room(1)),
        hand_off.LinkPing(epoch=Epoch(2)),
    ],
}
HTTP_SEEDS = [
    f"{line} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    for line, body in (
        ("POST /generate", '{"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2}}'),
        ("POST /v1/completions", '{"model": "m", "prompt": [5, 6], "max_tokens": 2}'),
        ("POST /abort_request", '{"rid": "a"}'),
        ("GET /server_info", ""),
    )
]


def write_seeds(name: str, directory: str) -> None:
    """Write what an honest peer says, for the fuzzer to begin with."""
    seeds = [msgspec.msgpack.encode(message) for message in SEEDS.get(name, [])]
    if name == "codec":
        seeds = [msgspec.msgpack.encode(each) for group in SEEDS.values() for each in group]
    if name == "http":
        seeds = HTTP_SEEDS
    if name == "kv_port":
        seeds = [struct.pack("<qqqq", ROOM, 1, 2 * PAGE, PAGE) + bytes(PAGE)]
    if not Path(directory).is_dir():
        return
    for number, seed in enumerate([*seeds, BETWEEN.join(seeds)]):
        Path(directory, f"seed-{number}").write_bytes(seed)


@contextlib.contextmanager
def codec() -> Iterator[Target]:
    """What is decoded can be said again, and means the same."""
    codecs = [Codec(union) for union in UNIONS]

    def take(data: bytes) -> None:
        for each in codecs:
            try:
                message = each.decode(data)
            except MessageInvalid:
                continue
            frame = each.encode(message)
            assert each.encode(each.decode(frame)) == frame

    yield take


@contextlib.contextmanager
def inbox() -> Iterator[Target]:
    """Engines go on, and nothing of a request is left when its edge has gone."""
    with contextlib.ExitStack() as stack:
        cluster = Cluster(stack)

        def take(data: bytes) -> None:
            frames = data.split(BETWEEN)[:8]
            for node in range(len(cluster.nodes)):
                cluster.tell(node, frames)
            cluster.step()
            cluster.settle()

        yield take
        cluster.serve_one()


@contextlib.contextmanager
def bootstrap() -> Iterator[Target]:
    """A prefill node holds no room for a decode node that has gone."""
    with contextlib.ExitStack() as stack:
        cluster = rig.Cluster(stack)
        timeouts = SenderTimeouts(grant_s=0.05, early_grant_s=0.05)
        prefill, shape = cluster.prefill(timeouts=timeouts), rig.layout()
        region = stack.enter_context(MemoryRegion.private(shape.pool_bytes))
        listener = cluster.transport.listen(Pool.packed(region, shape.page_bytes, shape.num_pages))
        epochs = iter(range(10, 1 << 40))

        def take(data: bytes) -> None:
            epoch = Epoch(next(epochs))
            link = Link(f"tcp://127.0.0.1:{prefill.agent.port}", hand_off.FromPrefill)
            admission = listener.admit("")
            with contextlib.closing(link):
                hello = hand_off.Hello(
                    epoch=epoch,
                    fingerprint="llama",
                    layout=shape,
                    offers=[admission.offer],
                )
                _say(link, msgspec.msgpack.encode(hello))
                for frame in data.split(BETWEEN)[:8]:
                    # In its own name: what is said in another's ends at the first check.
                    ours = frame.replace(
                        b"\xa5epoch\x02", b"\xa5epoch\xd3" + struct.pack(">q", epoch)
                    )
                    _say(link, ours)
                _say(link, msgspec.msgpack.encode(hand_off.LinkPing(epoch=Epoch(-1))))
                while not isinstance(rig.receive(link), hand_off.Refused):
                    pass
            listener.fence(admission.peer)
            list(prefill.agent.events())

        yield take
        prefill.wait_until(lambda now: now.num_early_grants == now.num_pushing == 0)


@contextlib.contextmanager
def kv_port() -> Iterator[Target]:
    """Only granted pages are written, whatever an admitted peer sends."""
    with MemoryRegion.private(PAGE * NUM_PAGES) as region:
        port = Port(region)

        def take(data: bytes) -> None:
            with open_stream(port.facts) as stream, contextlib.suppress(PeerLost, OSError):
                stream.sendall(data)
                stream.shutdown(socket.SHUT_WR)
                while stream.recv(4096):
                    pass
            port.check()

        yield take
        port.serve_one()
        port.listener.close()


@contextlib.contextmanager
def http() -> Iterator[Target]:
    """A server answers the next client, whatever the last one sent."""
    loop, stop, started = asyncio.new_event_loop(), asyncio.Event(), threading.Event()
    sock = listen("127.0.0.1", 0)
    port = sock.getsockname()[1]

    async def run() -> None:
        async with serving(create_app(FakeBackend(None)), sock):
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),), daemon=True)
    thread.start()
    started.wait()

    def take(data: bytes) -> None:
        # Whose end is not sent: the server would give up on it.
        with socket.create_connection(("127.0.0.1", port), timeout=0.05) as client:
            client.sendall(data)
            with contextlib.suppress(ConnectionResetError, TimeoutError):
                while client.recv(65536):
                    pass
        with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert client.recv(64).startswith(b"HTTP/1.1 200")

    yield take
    loop.call_soon_threadsafe(stop.set)
    thread.join()


@contextlib.contextmanager
def grammars() -> Iterator[Target]:
    """The next grammar is followed, whatever the last one was and whichever tokens were drawn."""
    model = resolve_model(None, Path.home() / ".cache" / "tandem" / "models")
    processes = GrammarProcesses(model, 49_152, frozenset({2}))
    rounds = itertools.count()

    def take(data: bytes) -> None:
        rng = random.Random(data)
        processes.limits = LIMITS
        draw(processes.open(random_grammar(rng), [], lambda: None), rng)
        processes.limits = Limits()
        plain = processes.open(Grammar(kind="regex", text=f"{next(rounds)}a*"), [], lambda: None)
        assert draw(plain, rng) == 9

    yield take


def draw(constraint: Constraint, rng: random.Random, num_tokens: int = 9) -> int:
    """Follow a grammar for some tokens; return how many it allowed. Dashes are a token of 64."""
    for number in range(num_tokens):
        try:
            mask = constraint.mask.result(60)
        except (InvalidRequest, Overloaded):
            return number
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        dashes = DASHES in allowed and rng.random() < 0.8
        constraint.accept(DASHES if dashes else int(rng.choice(allowed)))
    return num_tokens


TARGETS = {
    "codec": codec,
    "inbox": inbox,
    "bootstrap": bootstrap,
    "kv_port": kv_port,
    "http": http,
    "grammars": grammars,
}


def _say(link, frame: bytes) -> None:
    while True:
        try:
            return link.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            wait([link], 0.001)
