"""CPU time of a hand-off without the copies: both agents, their threads and messages, and the copy plans.

The transport writes nothing, so the result is the overhead that every transport pays. A page has 16 tokens and 2 MiB
(Llama-3-8B in bf16: 32 layers, 8 KV heads). Prompts are pushed whole and layer by layer. In the second case, a
simulated forward completes layers at the rate of the link.

    python -m benchmarks.data_path [--pages 1000] [--rounds 9] [--link-gbs 50] [--quick]

Both ends run in one process. The benchmark measures the CPU time of the process and subtracts that of an idle process. The
first table shows medians in milliseconds of CPU per GB.

The second table shows how busy a simulated RDMA adapter stays while prompts are pushed layer by layer. The adapter moves
bytes at a fixed rate without the CPU. The table shows the share of the time from first to last byte in which it is busy, with
one write in flight and with several.
"""

import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks.rig import parse, parser_of, result
from tandem.kvtransfer.agents.receiver import DecodeAgent
from tandem.kvtransfer.agents.sender import PrefillAgent
from tandem.kvtransfer.agents.sender_links import SenderEnd
from tandem.kvtransfer.agents.sender_rooms import PageRun
from tandem.kvtransfer.events import PushDone, RoomGranted, RoomLanded
from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.plan import CopyPlan, Int64s
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.sharding import Shard
from tandem.kvtransfer.transports.base import (
    Connection,
    PeerAdmission,
    PeerKey,
    Pool,
    Transport,
    new_peer_key,
)
from tandem.kvtransfer.transports.one_sided import OneSidedConnection, PoolAddresses
from tandem.wire.channel import Waker, wait
from tandem.wire.generation import Room, new_epoch, new_room
from tandem.wire.hand_off import RankAddress, TransportOffer

LAYERS, HEADS, HEAD_DIM, ITEMSIZE = 32, 8, 128, 2
PATIENCE_S = 120.0
TOKEN = 7


class NullConnection:
    """A sending end that writes nothing and only counts bytes."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def write(self, room: Room, plan: CopyPlan) -> None:
        """Count the bytes of a plan."""
        self.num_bytes += plan.total_bytes

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


class Adapter:
    """A simulated RDMA adapter: writes take time one after the other, and no bytes are copied.

    Attributes:
        busy_s: Total time of its writes.
        first_s, last_s: Start of the first write and end of the last one.
    """

    def __init__(self, gb_per_s: float) -> None:
        self._bytes_per_s = gb_per_s * 1e9
        self._ends_s: list[float] = [0.0]
        self.reset()

    def reset(self) -> None:
        """Reset the times."""
        self.busy_s, self.first_s, self.last_s = 0.0, 0.0, 0.0

    def read(self, address: int, into: Int64s, *, is_in_pool: bool = False) -> int:
        """Read the token, which takes no time."""
        into[:] = TOKEN
        return 0

    def writes(self, plan: CopyPlan) -> Iterator[int]:
        """Queue a plan behind the writes in flight; yield its id."""
        now_s, took_s = time.perf_counter(), plan.total_bytes / self._bytes_per_s
        self.first_s = self.first_s or now_s
        self.busy_s += took_s
        self.last_s = max(now_s, self.last_s) + took_s
        self._ends_s.append(self.last_s)
        yield len(self._ends_s) - 1

    def is_done(self, transfer: int) -> bool:
        """Return whether a write has ended."""
        return time.perf_counter() >= self._ends_s[transfer]

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


class AdapterTransport:
    """A transport with a simulated adapter.

    Args:
        posts: Whether several writes may be in flight.
    """

    name = "null"

    def __init__(self, gb_per_s: float, *, posts: bool) -> None:
        self.adapter, self._posts = Adapter(gb_per_s), posts

    def listen(self, pool: Pool) -> "NullListener":
        """Return the receiving end."""
        return NullListener()

    def connect(self, offer: TransportOffer, region: MemoryRegion) -> Connection:
        """Return the sending end."""
        places = PoolAddresses(pool_address=1, pool_bytes=1 << 40, token_address=1, token=TOKEN)
        connection = OneSidedConnection(places, region, lambda _token: self.adapter, 2)
        return connection if self._posts else Blocking(connection)


class Blocking:
    """A connection that waits for each write."""

    def __init__(self, connection: Connection) -> None:
        self.write, self.close = connection.write, connection.close


class NullListener:
    """A receiving end that receives nothing."""

    num_violations = 0

    def admit(self, toward_host: str) -> PeerAdmission:
        """Admit every peer."""
        return PeerAdmission(new_peer_key(), TransportOffer(name="null", descriptor={}))

    def permit(self, peer: PeerKey, room: Room, page_ids: object) -> None:
        """Do nothing: writes are not checked."""

    def revoke(self, peer: PeerKey, room: Room) -> None:
        """Do nothing: writes are not checked."""

    def fence(self, peer: PeerKey) -> None:
        """Do nothing: no write can arrive."""

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


class NullTransport:
    """A transport whose writes do nothing."""

    name = "null"

    def __init__(self) -> None:
        self.connections: list[NullConnection] = []

    def listen(self, pool: Pool) -> NullListener:
        """Return the receiving end."""
        return NullListener()

    def connect(self, offer: TransportOffer, region: MemoryRegion) -> NullConnection:
        """Return the sending end."""
        self.connections.append(NullConnection())
        return self.connections[-1]


@dataclass(frozen=True)
class Case:
    """The configurations of the two nodes.

    Attributes:
        prefill_page, decode_page: Tokens per page.
        prefill_tp, decode_tp: Number of ranks that share the heads.
    """

    name: str
    prefill_page: int = 16
    decode_page: int = 16
    prefill_tp: int = 1
    decode_tp: int = 1


CASES = (
    Case("16 to 16 tokens"),
    Case("16 to 32 tokens", decode_page=32),
    Case("tp 2 to 1", prefill_tp=2),
    Case("tp 1 to 2", decode_tp=2),
)


def layout_of(num_pages: int, page_size: int, tp: int) -> KVLayout:
    """Return the layout of a rank's pool for a prompt of `num_pages` pages of 16 tokens."""
    own = num_pages * 16 // page_size + 1
    return KVLayout(own, page_size, LAYERS, HEADS // tp, HEAD_DIM, "bfloat16", ITEMSIZE)


class Ends:
    """The agents of all ranks of both nodes."""

    def __init__(self, case: Case, num_pages: int, ending: ExitStack, transport: Transport) -> None:
        self.waker = Waker()
        self.case, self.transport = case, transport
        others: list[RankAddress] = []
        self.prefills: list[PrefillAgent] = []
        for rank in reversed(range(case.prefill_tp)):
            layout = layout_of(num_pages, case.prefill_page, case.prefill_tp)
            region = MemoryRegion.private(layout.pool_bytes)
            agent = PrefillAgent(
                "tcp://127.0.0.1:0",
                SenderEnd(
                    new_epoch(),
                    "same",
                    layout,
                    region,
                    [self.transport],
                    ranks=[RankAddress(0), *others] if rank == 0 else (),
                    shard=Shard(rank, case.prefill_tp, HEADS),
                ),
                waker=self.waker,
                verify="off",
            )
            ending.callback(agent.close)
            others.insert(0, RankAddress(agent.port))
            self.prefills.insert(0, agent)
        self.decodes: list[DecodeAgent] = []
        for rank in range(case.decode_tp):
            layout = layout_of(num_pages, case.decode_page, case.decode_tp)
            agent_of_decode = DecodeAgent(
                epoch=new_epoch(),
                fingerprint="same",
                layout=layout,
                region=MemoryRegion.private(layout.pool_bytes),
                transports=[self.transport],
                waker=self.waker,
                shard=Shard(rank, case.decode_tp, HEADS),
                verify="off",
            )
            ending.callback(agent_of_decode.close)
            self.decodes.append(agent_of_decode)

    def hand_off(self, num_pages: int, layer_s: float | None = None) -> None:
        """Hand off one prompt.

        Args:
            layer_s: Seconds per layer of the simulated forward; None pushes the whole prompt at once.
        """
        room, pages = new_room(), range(num_pages * 16 // self.case.prefill_page)
        granted = list(range(num_pages * 16 // self.case.decode_page))
        for decode in self.decodes:
            decode.request(room, "127.0.0.1", self.prefills[0].port, granted)
        for prefill in self.prefills:
            prefill.expect(room)
        self._until(RoomGranted, self.prefills)
        if layer_s is not None:
            forwards = [
                prefill.push_by_layer([PageRun(room, pages, 0)]) for prefill in self.prefills
            ]
            began_s = time.perf_counter()
            for layer in range(LAYERS):
                time.sleep(max(0.0, began_s + (layer + 1) * layer_s - time.perf_counter()))
                for on_layer_written in forwards:
                    on_layer_written(layer)
        for prefill in self.prefills:
            prefill.push(room, pages, 0)
            prefill.finish(room, 1, 0)
        self._until(PushDone, self.prefills)
        self._until(RoomLanded, self.decodes)

    def _until(self, kind: type, agents: Sequence[PrefillAgent | DecodeAgent]) -> None:
        waiting, deadline = set(agents), time.monotonic() + PATIENCE_S
        while waiting:
            for agent in list(waiting):
                for event in agent.events():
                    assert isinstance(event, kind), event
                    waiting.discard(agent)
            if waiting:
                assert time.monotonic() < deadline
                wait([], 1.0, self.waker)


def bytes_of(num_pages: int) -> int:
    """Return the size in bytes of pages of 16 tokens."""
    return num_pages * 16 * LAYERS * 2 * HEADS * HEAD_DIM * ITEMSIZE


def measure(case: Case, num_pages: int, rounds: int, layer_s: float | None = None) -> float:
    """Return the median CPU milliseconds per GB of one case."""
    with ExitStack() as ending:
        ends = Ends(case, num_pages, ending, NullTransport())
        ends.hand_off(num_pages, layer_s)  # connects the links
        idle = idle_cpu()
        samples = []
        for _ in range(rounds):
            began, cpu = time.monotonic(), time.process_time()
            ends.hand_off(num_pages, layer_s)
            used = time.process_time() - cpu - idle * (time.monotonic() - began)
            samples.append(1000 * used / (bytes_of(num_pages) / 1e9))
    return statistics.median(samples)


def busy_share(num_pages: int, rounds: int, gb_per_s: float, *, posts: bool) -> float:
    """Return the median busy share of an adapter while a prompt is pushed layer by layer."""
    transport = AdapterTransport(gb_per_s, posts=posts)
    layer_s = bytes_of(num_pages) / LAYERS / gb_per_s / 1e9
    with ExitStack() as ending:
        ends = Ends(CASES[0], num_pages, ending, transport)
        shares = []
        for _ in range(rounds + 1):
            transport.adapter.reset()
            ends.hand_off(num_pages, layer_s)
            adapter = transport.adapter
            shares.append(adapter.busy_s / (adapter.last_s - adapter.first_s))
    return statistics.median(shares[1:])


def idle_cpu() -> float:
    """Return the CPU time per second of the idle process."""
    began, cpu = time.monotonic(), time.process_time()
    threading.Event().wait(0.5)
    return (time.process_time() - cpu) / (time.monotonic() - began)


def lines(num_pages: int, rounds: int, gb_per_s: float) -> Iterator[str]:
    """Measure all cases; yield the tables, then the results."""
    yield f"{num_pages} pages of 16 tokens; CPU ms per GB, both ends together"
    yield f"{'':18}{'whole':>10}{'by layer':>10}"
    figures, layer_s = {}, bytes_of(num_pages) / LAYERS / gb_per_s / 1e9
    for case in CASES:
        whole = measure(case, num_pages, rounds)
        layers = measure(case, num_pages, rounds, layer_s)
        figures[case.name] = whole, layers
        yield f"{case.name:18}{whole:10.2f}{layers:10.2f}"
    yield f"busy share of an adapter of {gb_per_s:g} GB/s"
    yield f"{'':18}{'one write':>10}{'several':>10}"
    shares = []
    for pages in (num_pages // 16, num_pages):
        one, several = (busy_share(pages, rounds, gb_per_s, posts=posts) for posts in (False, True))
        shares.append(several)
        yield f"{f'{pages * 16:,} tokens':18}{one:10.2f}{several:10.2f}"
    yield result("data_path_link_busy", min(shares), 0.95)
    equal_whole, equal_layers = figures.pop(CASES[0].name)
    whole, layers = map(max, zip(*figures.values(), strict=True))
    yield result("data_path_whole", equal_whole, 1.0, "ms/GB", is_lower_better=True)
    yield result("data_path_unequal_whole", whole, 3.0, "ms/GB", is_lower_better=True)
    yield result("data_path_unequal_by_layer", layers, 15.0, "ms/GB", is_lower_better=True)
    yield result("data_path_by_layer", equal_layers, 5.0, "ms/GB", is_lower_better=True)


def main() -> None:
    parser = parser_of("data_path", "Measure the CPU time of a hand-off without the copies.")
    parser.add_argument("--pages", type=int, default=1000, help="pages of 16 tokens per prompt")
    parser.add_argument("--rounds", type=int, default=9, help="hand-offs per case")
    parser.add_argument(
        "--link-gbs", type=float, default=50.0, help="rate of the simulated adapter in GB/s"
    )
    args = parse(parser, {"pages": 32, "rounds": 1})
    for line in lines(args.pages, args.rounds, args.link_gbs):
        print(line, flush=True)


if __name__ == "__main__":
    main()
