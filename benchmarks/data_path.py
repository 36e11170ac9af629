"""CPU time of a hand-off beside the copying itself: both agents, their threads and messages, the plans of copies.

The transport writes nothing, so that what is measured is what every transport pays. A page is 2 MiB at 16 tokens
(Llama-3-8B in bf16: 32 layers, 8 KV heads). Prompts are pushed as a whole, and layer by layer as a forward
reports them.

    python -m benchmarks.data_path [--pages 1000] [--rounds 9] [--quick]

Both ends are in one process, whose CPU time all threads share; what an idle process uses is subtracted. The table shows
medians in milliseconds of CPU per GB.
"""

import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks.rig import parse, parser_of, result
from tandem.kvtransfer.bootstrap import SenderEnd
from tandem.kvtransfer.events import Granted, Landed, PushDone
from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.plan import CopyPlan
from tandem.kvtransfer.push_room import PageRun
from tandem.kvtransfer.receiver import DecodeAgent
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.sender import PrefillAgent
from tandem.kvtransfer.sharding import Shard
from tandem.kvtransfer.transports.base import Admission, PeerKey, Pool, new_peer_key
from tandem.wire.channel import Waker, wait
from tandem.wire.generation import Room, new_epoch, new_room
from tandem.wire.hand_off import TransportOffer

LAYERS, HEADS, HEAD_DIM, ITEMSIZE = 32, 8, 128, 2
PATIENCE_S = 120.0


class NullConnection:
    """Writes nothing. Counts the bytes."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def write(self, room: Room, plan: CopyPlan) -> None:
        """Count the bytes of a plan."""
        self.num_bytes += plan.total_bytes

    def close(self) -> None:
        """Nothing is open."""


class NullListener:
    """Receives nothing."""

    num_violations = 0

    def admit(self, toward_host: str) -> Admission:
        """Admit anybody."""
        return Admission(new_peer_key(), TransportOffer(name="null", descriptor={}))

    def permit(self, peer: PeerKey, room: Room, page_ids: object) -> None:
        """Nothing is checked."""

    def revoke(self, peer: PeerKey, room: Room) -> None:
        """Nothing is checked."""

    def fence(self, peer: PeerKey) -> None:
        """Nothing can arrive."""

    def close(self) -> None:
        """Nothing is open."""


class NullTransport:
    """A transport without a transport."""

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
    """Two ends.

    Attributes:
        prefill_page, decode_page: Tokens of a page.
        prefill_tp, decode_tp: Ranks, which divide the heads.
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
    """Return a rank's pool for prompts of so many pages of 16 tokens."""
    own = num_pages * 16 // page_size + 1
    return KVLayout(own, page_size, LAYERS, HEADS // tp, HEAD_DIM, "bfloat16", ITEMSIZE)


class Ends:
    """The agents of all ranks of two nodes."""

    def __init__(self, case: Case, num_pages: int, ending: ExitStack) -> None:
        self.waker = Waker()
        self.case, self.transport = case, NullTransport()
        ports: list[int] = []
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
                    rank_ports=tuple(ports) if rank == 0 else (),
                    shard=Shard(rank, case.prefill_tp, HEADS),
                ),
                waker=self.waker,
                verify="off",
            )
            ending.callback(agent.close)
            ports.insert(0, agent.port)
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

    def hand_off(self, num_pages: int, *, by_layer: bool) -> None:
        """Hand one prompt off."""
        room, pages = new_room(), range(num_pages * 16 // self.case.prefill_page)
        granted = list(range(num_pages * 16 // self.case.decode_page))
        for decode in self.decodes:
            decode.request(room, "127.0.0.1", self.prefills[0].port, granted)
        for prefill in self.prefills:
            prefill.expect(room)
        self._until(Granted, self.prefills)
        for prefill in self.prefills:
            if by_layer:
                wrote = prefill.push_by_layer([PageRun(room, pages, 0)])
                for layer in range(LAYERS):
                    wrote(layer)
            prefill.push(room, pages, 0)
            prefill.finish(room, 1, 0)
        self._until(PushDone, self.prefills)
        self._until(Landed, self.decodes)

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


def measure(case: Case, num_pages: int, rounds: int, *, by_layer: bool) -> float:
    """Return the median of the CPU milliseconds per GB of one case."""
    gigabytes = num_pages * 16 * LAYERS * 2 * HEADS * HEAD_DIM * ITEMSIZE / 1e9
    with ExitStack() as ending:
        ends = Ends(case, num_pages, ending)
        ends.hand_off(num_pages, by_layer=by_layer)  # links come up
        idle = idle_cpu()
        samples = []
        for _ in range(rounds):
            began, cpu = time.monotonic(), time.process_time()
            ends.hand_off(num_pages, by_layer=by_layer)
            used = time.process_time() - cpu - idle * (time.monotonic() - began)
            samples.append(1000 * used / gigabytes)
    return statistics.median(samples)


def idle_cpu() -> float:
    """Return the share of a core that the process uses without a hand-off."""
    began, cpu = time.monotonic(), time.process_time()
    threading.Event().wait(0.5)
    return (time.process_time() - cpu) / (time.monotonic() - began)


def lines(num_pages: int, rounds: int) -> Iterator[str]:
    """Measure all cases; yield the table, then the results."""
    yield f"{num_pages} pages of 16 tokens, ms of CPU per GB of both ends together"
    yield f"{'':18}{'whole':>10}{'by layer':>10}"
    figures = {}
    for case in CASES:
        whole = measure(case, num_pages, rounds, by_layer=False)
        layers = measure(case, num_pages, rounds, by_layer=True)
        figures[case.name] = whole, layers
        yield f"{case.name:18}{whole:10.2f}{layers:10.2f}"
    equal_whole, equal_layers = figures.pop(CASES[0].name)
    whole, layers = map(max, zip(*figures.values(), strict=True))
    yield result("data_path_whole", equal_whole, 1.0, "ms/GB", is_lower_better=True)
    yield result("data_path_unequal_whole", whole, 3.0, "ms/GB", is_lower_better=True)
    yield result("data_path_unequal_by_layer", layers, 15.0, "ms/GB", is_lower_better=True)
    yield result("data_path_by_layer", equal_layers, 5.0, "ms/GB", is_lower_better=True)


def main() -> None:
    parser = parser_of("data_path", "CPU time of a hand-off beside the copying itself.")
    parser.add_argument("--pages", type=int, default=1000, help="pages of 16 tokens a prompt")
    parser.add_argument("--rounds", type=int, default=9, help="hand-offs of each case")
    args = parse(parser, {"pages": 20, "rounds": 1})
    for line in lines(args.pages, args.rounds):
        print(line, flush=True)


if __name__ == "__main__":
    main()
