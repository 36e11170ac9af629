"""The share of a transfer that prefill does not hide when it pushes each layer as soon as it is computed.

    python -m benchmarks.overlap [--tokens 1024 4096 16384] [--chunk 2048 8192] [--rounds 5]

Pages are those of Llama 3 8B (32 layers, 8 KV heads of 128, bfloat16, 16 tokens): 128 KiB a token, 2 GiB for 16k.
Two processes run real agents. The real role and engine drive the prefill agent. Only the forward is simulated: it
sleeps for each layer, as a host does while a GPU computes, and reports the layer through the real callback. The time per
layer is chosen, and printed, so that the computation of a prompt takes `--compute` times as long as its transfer.

    whole      all pages are pushed at once, without computation: time from push to Landed at decode
    exposed    layers are pushed during computation: time from the last computed layer to Landed at decode

Both include checksums (`--verify-kv`). Their rounds are interleaved, and the table shows medians. The last line shows the
largest ratio of exposed to whole over all cases.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from benchmarks.rig import parse, parser_of, result
from tandem.engine.config import EngineOptions
from tandem.engine.execution.launcher import ModelLauncher
from tandem.engine.scheduling.core import Engine
from tandem.engine.scheduling.forward import ForwardInputs, OnLayerWritten
from tandem.engine.shape import ModelShape
from tandem.kvtransfer.agents.receiver import DecodeAgent
from tandem.kvtransfer.agents.sender import PrefillAgent
from tandem.kvtransfer.agents.sender_links import SenderEnd
from tandem.kvtransfer.checksum import Verify
from tandem.kvtransfer.events import PushDone, RoomGranted, RoomLanded, SenderEvent
from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import TransportConfig
from tandem.kvtransfer.transports.registry import transports
from tandem.node.answers import Ticket
from tandem.node.life.ending import SWITCH_S
from tandem.prefill.role import PrefillRole
from tandem.telemetry import log as logs
from tandem.wire.channel import Peer, Waker, wait
from tandem.wire.errors import TandemError
from tandem.wire.generation import (
    GenerateRequest,
    RequestId,
    Room,
    SamplingParams,
    new_epoch,
    new_room,
)
from tandem.wire.messages import StartPrefill

GOAL = 0.125
NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, VOCAB_SIZE = 32, 8, 128, 16, 256
FINGERPRINT = "llama-8b-stand-in"
TIMEOUT_S = 60.0

E = TypeVar("E")


def layout_for(num_tokens: int) -> KVLayout:
    """Return the layout of a pool that holds one prompt."""
    num_pages = -(-num_tokens // PAGE_SIZE)
    return KVLayout(num_pages, PAGE_SIZE, NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, "bfloat16", 2)


class StandInRunner:
    """A runner that sleeps for the time of a forward.

    Attributes:
        token_s: Seconds per token and layer.
        computed_at_s: Time at which the latest forward completed its last layer.
    """

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.token_s = self.computed_at_s = 0.0

    def forward(
        self,
        inputs: ForwardInputs,
        sampled: torch.Tensor | None = None,
        on_layer_written: OnLayerWritten | None = None,
    ) -> torch.Tensor:
        """Sleep, and report each layer to `on_layer_written`."""
        del sampled
        done_at_s = time.monotonic()
        for layer in range(NUM_LAYERS):
            done_at_s += self.token_s * inputs.num_rows
            time.sleep(max(0.0, done_at_s - time.monotonic()))
            self.computed_at_s = time.monotonic()
            if on_layer_written is not None:
                on_layer_written(layer)
        return torch.zeros(len(inputs.logit_rows), VOCAB_SIZE)


class Answers:
    """The sink of the role's answers. An error ends the benchmark."""

    num_failed = 0

    def token(self, *_args: object, **_options: object) -> None:
        """Ignore a token."""

    def fail(self, ticket: Ticket, error: TandemError) -> None:
        """End the benchmark."""
        raise SystemExit(f"{ticket.request_id}: {error}")


class Decode:
    """The decode process. For each line on stdin it grants pages; it replies with the time of Landed."""

    def __init__(self, transport: str, most_tokens: int, port: int) -> None:
        arguments = ["--decode", transport, str(most_tokens), str(port)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.overlap", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def grant(self, room: Room, num_tokens: int) -> None:
        """Grant pages for a prompt."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{room} {num_tokens}\n")
        self._process.stdin.flush()

    def landed_at_s(self) -> float:
        """Wait for the prompt; return the time of Landed on the monotonic clock, which both processes share."""
        assert self._process.stdout is not None
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def decode(transport: str, most_tokens: int, port: int) -> None:
    """Run as the decode process until stdin closes."""
    layout, waker = layout_for(most_tokens), Waker()
    # Page ids are permuted as in a pool in use. Otherwise a prompt would be one contiguous copy.
    pages = np.random.default_rng(0).permutation(layout.num_pages).tolist()
    with MemoryRegion.shared(layout.pool_bytes, "overlap") as region:
        agent = DecodeAgent(
            epoch=new_epoch(),
            fingerprint=FINGERPRINT,
            layout=layout,
            region=region,
            transports=transports(transport, TransportConfig()),
            waker=waker,
        )
        for line in sys.stdin:
            room, num_tokens = map(int, line.split())
            num_pages = -(-num_tokens // PAGE_SIZE)
            agent.request(Room(room), "127.0.0.1", port, pages[:num_pages])
            event = _next(agent.events, waker)
            at_s = time.monotonic()
            if not isinstance(event, RoomLanded):
                raise SystemExit(f"the prompt did not land: {event}")
            print(at_s, flush=True)
        agent.close()
    waker.close()


def _next(events: Callable[[], Iterable[E]], waker: Waker) -> E:
    """Wait for one event of an agent."""
    until_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until_s:
        for event in events():
            return event
        wait([], 1.0, waker)
    raise SystemExit("the agent reported no event within 60 s")


class Prefill:
    """A prefill node in this process: role, engine with simulated forwards, agent, pool."""

    def __init__(self, transport: str, most_tokens: int, chunk: int, verify: Verify) -> None:
        self.layout, self._waker = layout_for(most_tokens), Waker()
        self._region = MemoryRegion.private(self.layout.pool_bytes)
        self._region.array().view(np.uint64)[:] = np.arange(self.layout.pool_bytes // 8)
        self.agent = PrefillAgent(
            "tcp://127.0.0.1:0",
            SenderEnd(
                new_epoch(),
                FINGERPRINT,
                self.layout,
                self._region,
                transports(transport, TransportConfig()),
            ),
            waker=self._waker,
            verify=verify,
        )
        self.runner = StandInRunner()
        self._role = self._make_role(most_tokens, chunk)

    def whole_s(self, far: Decode, num_tokens: int) -> float:
        """Push all pages of a prompt at once; return the seconds from push to Landed."""
        room, num_pages = new_room(), -(-num_tokens // PAGE_SIZE)
        self.agent.expect(room)
        far.grant(room, num_tokens)
        self._expect(RoomGranted)
        start_s = time.monotonic()
        self.agent.push(room, range(num_pages), 0)
        self.agent.finish(room, 1, 1)
        landed_at_s = far.landed_at_s()
        self._expect(PushDone)
        return landed_at_s - start_s

    def exposed_s(self, far: Decode, num_tokens: int) -> float:
        """Push a prompt during its computation; return the seconds from the last computed layer to Landed."""
        room, ticket = new_room(), Ticket(Peer(b"edge"), RequestId("r"), 0)
        request = GenerateRequest(
            request_id=ticket.request_id,
            prompt_ids=[2] * num_tokens,
            sampling=SamplingParams(max_new_tokens=2, temperature=0, ignore_eos=True),
        )
        self._role.start(ticket, StartPrefill(request=request, room=room))
        far.grant(room, num_tokens)
        while self._role.tickets():
            self._role.poll()
            if self._role.has_work:
                self._role.step()
            else:
                wait([], 0.05, self._waker)
        return far.landed_at_s() - self.runner.computed_at_s

    def close(self) -> None:
        """Release the agent, the waker and the memory."""
        self.agent.close()
        self._waker.close()
        self._region.close()

    def _expect(self, kind: type[SenderEvent]) -> None:
        event = _next(self.agent.events, self._waker)
        if not isinstance(event, kind):
            raise SystemExit(f"the hand-off failed: {event}")

    def _make_role(self, most_tokens: int, chunk: int) -> PrefillRole:
        shape = ModelShape(
            num_layers=NUM_LAYERS,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            vocab_size=VOCAB_SIZE,
            context_length=2 * most_tokens,
            eos_token_ids=frozenset(),
            dtype="bfloat16",
            kv_dtype="bfloat16",
            fingerprint=FINGERPRINT,
        )
        config = EngineOptions(
            page_size=PAGE_SIZE,
            chunked_prefill_size=chunk,
            is_prefix_cache_enabled=False,
        )
        launcher = ModelLauncher(self.runner, shape, PAGE_SIZE)
        engine = Engine(launcher, shape, config, self.layout.num_pages)
        return PrefillRole(engine, self.agent, Answers(), 4)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Case:
    """The measurements of one prompt length."""

    whole_s: float
    exposed_s: float
    layer_s: float

    @property
    def share(self) -> float:
        """The fraction of the transfer that is not hidden."""
        return self.exposed_s / self.whole_s


def measure(prefill: Prefill, far: Decode, num_tokens: int, rounds: int, compute: float) -> Case:
    """Measure one prompt length."""
    prefill.whole_s(
        far, num_tokens
    )  # touches the memory before the rounds, so that page faults are not measured
    whole, exposed = [], []
    for _ in range(rounds):
        whole.append(prefill.whole_s(far, num_tokens))
        # The preceding transfer determines the time per layer, so that load of the host affects both parts of a round.
        prefill.runner.token_s = compute * whole[-1] / NUM_LAYERS / num_tokens
        exposed.append(prefill.exposed_s(far, num_tokens))
    whole_s = statistics.median(whole)
    return Case(whole_s, statistics.median(exposed), compute * whole_s / NUM_LAYERS)


def run(args: argparse.Namespace) -> None:
    """Measure all cases and report."""
    print(
        f"{'transport':<11}{'tokens':>8}{'MiB':>7}{'chunk':>7}{'layer ms':>10}"
        f"{'compute ms':>12}{'whole ms':>10}{'GB/s':>7}{'exposed ms':>12}{'share':>8}"
    )
    shares = []
    most_tokens = max(args.tokens) + PAGE_SIZE  # the engine reserves a slot for the first token
    for transport in args.transport:
        for chunk in args.chunk:
            prefill = Prefill(transport, most_tokens, chunk, args.verify_kv)
            far = Decode(transport, most_tokens, prefill.agent.port)
            for num_tokens in args.tokens:
                case = measure(prefill, far, num_tokens, args.rounds, args.compute)
                size_bytes = num_tokens * prefill.layout.all_heads_bytes
                print(
                    f"{transport:<11}{num_tokens:>8}{size_bytes >> 20:>7}{chunk:>7}"
                    f"{case.layer_s * 1e3:>10.2f}{case.layer_s * NUM_LAYERS * 1e3:>12.1f}"
                    f"{case.whole_s * 1e3:>10.1f}{size_bytes / case.whole_s / 1e9:>7.2f}"
                    f"{case.exposed_s * 1e3:>12.2f}{case.share:>8.3f}",
                    flush=True,
                )
                shares.append(case.share)
            far.close()
            prefill.close()
    print(result("exposed_transfer_share", max(shares), GOAL, is_lower_better=True))


def main() -> None:
    """Run the benchmark, or its decode process."""
    parser = parser_of("overlap", "Measure the share of a transfer that prefill does not hide.")
    add = parser.add_argument
    add("--tokens", type=int, nargs="+", default=[1024, 4096, 16384], help="prompt lengths")
    add("--chunk", type=int, nargs="+", default=[2048, 8192], help="tokens per forward")
    add("--transport", nargs="+", default=["shm", "tcp"], help="transports to measure")
    add("--rounds", type=int, default=5, help="rounds per case")
    add("--compute", type=float, default=2.0, help="computation time divided by transfer time")
    add("--verify-kv", choices=["off", "always"], default="always", help="checksums")
    add("--decode", nargs=3, help=argparse.SUPPRESS)
    quick = {"tokens": [1024], "chunk": [2048], "transport": ["shm"], "rounds": 1}
    args = parse(parser, quick, child_options=("decode",))
    logs.configure("error", "console", role="benchmark")
    sys.setswitchinterval(SWITCH_S)
    if args.decode:
        transport, most_tokens, port = args.decode
        return decode(transport, int(most_tokens), int(port))
    return run(args)


if __name__ == "__main__":
    main()
