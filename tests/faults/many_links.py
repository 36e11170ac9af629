"""Serve over forty links of one decode node while prefills restart; report, and judge.

    python -m tests.faults.many_links --minutes 3 --links 40

The decode node is a real one (HTTP and engine processes, simulated forwards). The prefills are in this
process: the real roles and agents over simulated engines, in one loop, each with a port and a pool of its
own. Every request must end with the right tokens; one whose prefill has just been restarted may end with
`peer_lost` instead, since no router is there to replay it.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tandem.engine.config import EngineConfig
from tandem.engine.core import Engine
from tandem.engine.forward import Ints
from tandem.engine.profile import Profile
from tandem.engine.shape import ModelShape
from tandem.engine.simulated import SimulatedLauncher, SimulatedPages, read_model
from tandem.kvtransfer.bootstrap import SenderEnd
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.sender import PrefillAgent, SenderTimeouts
from tandem.kvtransfer.transports.base import TransportConfig
from tandem.kvtransfer.transports.registry import transports
from tandem.node.answers import Ticket
from tandem.node.pool import PoolPlan
from tandem.prefill.role import PrefillRole
from tandem.wire.channel import DEFAULT_HEARTBEAT, Heartbeat, Peer, Waker, wait
from tandem.wire.generation import (
    GenerateRequest,
    RequestId,
    Room,
    SamplingParams,
    new_epoch,
    new_room,
)
from tandem.wire.keys import ChannelKey
from tandem.wire.messages import StartPrefill
from tests.faults.rig import SECRET, Rig, running_rig
from tests.faults.soak import tell
from tests.faults.soak_report import num_descriptors
from tests.faults.streams import Answer, Arithmetic, send

PAGE_SIZE, NUM_TOKENS = 16, 2048
PROFILE = {"decode": {"base_ms": 8}}
NUM_CLIENTS = 12
RESTART_INTERVAL_S = 5.0
# Of an engine, at most, for a link: its worker and four descriptors, and what the transport needs.
THREADS_PER_LINK, DESCRIPTORS_PER_LINK = {"tcp": 5, "shm": 1}, {"tcp": 8, "shm": 6}
# The watch over steps (`node/step_watch.py`) begins after the first of them.
THREADS_OF_STEPS = 1


Model = tuple[ModelShape, Ints]


class Deaf:
    """Takes the answers of prefills: those of decode have all that they say."""

    num_failed = 0

    def token(self, *_told, **_more) -> None:
        """Nobody reads it here."""

    def fail(self, _ticket, _error) -> None:
        self.num_failed += 1


class Prefill:
    """A prefill node without processes."""

    def __init__(
        self, config: EngineConfig, model: Model, backend: str, heartbeat: Heartbeat, waker: Waker
    ) -> None:
        shape, ordinary_ids = model
        self._plan = PoolPlan(shape, NUM_TOKENS // PAGE_SIZE, PAGE_SIZE)
        self._region = MemoryRegion.private(self._plan.memory_bytes)
        pages = SimulatedPages(
            self._region.array(), self._plan.num_pages, PAGE_SIZE, 2 * shape.num_layers
        )
        launcher = SimulatedLauncher(Profile(), ordinary_ids, shape.num_layers, pages=pages)
        self._engine = Engine(launcher, shape, config, self._plan.num_pages)
        self._transports, self._waker = transports(backend, TransportConfig()), waker
        self._timeouts = SenderTimeouts(heartbeat=heartbeat)
        self.restarted_s, self.num_running = float("-inf"), 0
        self._start(0)

    def _start(self, port: int) -> None:
        end = SenderEnd(
            new_epoch(),
            self._engine.shape.fingerprint,
            self._plan.layout,
            self._region,
            self._transports,
        )
        key = ChannelKey.from_secret(SECRET)
        self.agent = PrefillAgent(
            f"tcp://127.0.0.1:{port}", end, waker=self._waker, key=key, timeouts=self._timeouts
        )
        self.port = self.agent.port
        self.role = PrefillRole(self._engine, self.agent, Deaf(), 1000)  # type: ignore[arg-type]

    def restart(self) -> None:
        """Become another life at the same port, with nothing under way."""
        self.agent.close()
        self._start(self.port)
        self.restarted_s = time.monotonic()

    def close(self) -> None:
        self.agent.close()
        self._region.close()


@dataclass(slots=True)
class Cost:
    """Threads and descriptors of a process."""

    threads: int
    descriptors: int

    @classmethod
    def of(cls, pid: int) -> "Cost":
        return cls(len(list(Path(f"/proc/{pid}/task").iterdir())), num_descriptors(pid))


@dataclass(slots=True)
class Tally:
    """What came of the requests."""

    num_right: int = 0
    num_restarts: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)


class ManyLinks:
    """One run."""

    def __init__(
        self, rig: Rig, num_links: int, backend: str, seconds: float, heartbeat: Heartbeat
    ) -> None:
        self._rig, self._rng = rig, random.Random(1)
        self._waker, self._calls = Waker(), deque()
        config = EngineConfig(model_dir=str(rig.model_dir), page_size=PAGE_SIZE)
        model = read_model(config, "real")
        self.prefills = [
            Prefill(config, model, backend, heartbeat, self._waker) for _ in range(num_links)
        ]
        self._lost_within_s = 4 * heartbeat.interval_s
        self._arithmetic = Arithmetic(str(rig.model_dir))
        self._decode = rig.members["d0"]
        self._seconds, self._ends_at_s = seconds, 0.0
        self._is_over = False
        self._thread = threading.Thread(target=self._run_prefills, name="prefills")
        self.tally = Tally()

    async def run(self) -> None:
        self._thread.start()
        engine = self._decode.children()[0]
        self.before = Cost.of(engine)
        # Each link once, all at the same time.
        await asyncio.gather(*(self._request(prefill) for prefill in self.prefills))
        self.begun = self.most = Cost.of(engine)
        self.num_linked = sum(p.agent.statistics().num_links for p in self.prefills)
        self._ends_at_s = time.monotonic() + self._seconds
        async with asyncio.TaskGroup() as tasks:
            for _ in range(NUM_CLIENTS):
                tasks.create_task(self._client())
            tasks.create_task(self._restart_often())
            tasks.create_task(self._look(engine))
        await asyncio.gather(*(self._request(prefill) for prefill in self.prefills))
        self.after = Cost.of(engine)
        self.own = Cost.of(os.getpid())

    def close(self) -> None:
        self._is_over = True
        self._waker.wake()
        self._thread.join()
        for prefill in self.prefills:
            prefill.close()
        self._waker.close()

    # ── the prefills' thread ─────────────────────────────────────────────────────────────────────

    def _run_prefills(self) -> None:
        while not self._is_over:
            while self._calls:
                self._calls.popleft()()
            for prefill in self.prefills:
                prefill.role.poll()
                if prefill.role.has_work:
                    prefill.role.step()
            if not any(prefill.role.has_work for prefill in self.prefills):
                wait([], 0.05, self._waker)

    def _call(self, call) -> None:
        self._calls.append(call)
        self._waker.wake()

    # ── the clients ──────────────────────────────────────────────────────────────────────────────

    @property
    def _is_on(self) -> bool:
        return time.monotonic() < self._ends_at_s

    async def _client(self) -> None:
        while self._is_on:
            await self._request(self._rng.choice(self.prefills))

    async def _request(self, prefill: Prefill) -> None:
        num = self._rng.choice((1, 16, 17, 200))
        prompt = [self._rng.randrange(100, 40_000) for _ in range(num)]
        room, name = new_room(), f"many-{self._rng.randrange(2**48)}"
        ask = self._arithmetic.ask(self._decode.url, prompt, self._rng.choice((1, 20, 60)))
        ask.body.update(
            bootstrap_host="127.0.0.1", bootstrap_port=prefill.port, bootstrap_room=int(room)
        )
        prefill.num_running += 1
        began_s = time.monotonic()
        self._call(lambda: self._start(prefill, room, name, prompt))
        answer = await send(self._rig.session, Answer(ask))
        prefill.num_running -= 1
        self._judge(answer, began_s - prefill.restarted_s)

    def _start(self, prefill: Prefill, room: Room, name: str, prompt: list[int]) -> None:
        request = GenerateRequest(
            request_id=RequestId(name),
            prompt_ids=prompt,
            sampling=SamplingParams(temperature=0, max_new_tokens=1),
        )
        ticket = Ticket(Peer(b"edge"), request.request_id, 0)
        prefill.role.start(ticket, StartPrefill(request=request, room=room))

    def _judge(self, answer: Answer, since_restart_s: float) -> None:
        if not answer.error and answer.verdict().is_right:
            self.tally.num_right += 1
        elif answer.error == "peer_lost" and since_restart_s < self._lost_within_s:
            self.tally.errors["peer_lost after a restart"] += 1
        else:
            self.tally.bad.append(f"{answer.error} {answer.message} {answer.verdict()}")

    async def _restart_often(self) -> None:
        while self._is_on:
            await asyncio.sleep(RESTART_INTERVAL_S)
            if idle := [prefill for prefill in self.prefills if not prefill.num_running]:
                self.tally.num_restarts += 1
                self._call(self._rng.choice(idle).restart)

    async def _look(self, engine: int) -> None:
        while self._is_on:
            now = Cost.of(engine)
            self.most = Cost(
                max(self.most.threads, now.threads), max(self.most.descriptors, now.descriptors)
            )
            await asyncio.sleep(0.5)


async def many_links(
    seconds: float,
    num_links: int,
    backend: str = "shm",
    heartbeat: Heartbeat = DEFAULT_HEARTBEAT,
) -> dict:
    """Run for a time; return the report, with what is wrong in `problems`."""
    flags = (
        *("--engine", "simulated", "--page-size", str(PAGE_SIZE), "--max-total-tokens", "8192"),
        *("--transfer-backend", backend, "--verify-kv", "always"),
        *("--heartbeat-interval-ms", str(1000 * heartbeat.interval_s)),
    )
    with tempfile.TemporaryDirectory(prefix="tandem-links-") as name:
        async with running_rig(
            Path(name), flags=flags, profile=PROFILE, prefills=0, decodes=1, routers=(), is_networked=False,
        ) as rig:  # fmt: skip
            with contextlib.closing(ManyLinks(rig, num_links, backend, seconds, heartbeat)) as run:
                await run.run()
            status = await asyncio.to_thread(rig.members["d0"].stop)
    threads = run.after.threads - run.before.threads
    descriptors = run.after.descriptors - run.before.descriptors
    is_dear = (
        threads > num_links * THREADS_PER_LINK[backend] + THREADS_OF_STEPS
        or descriptors > num_links * DESCRIPTORS_PER_LINK[backend]
    )
    problems = [*run.tally.bad]
    problems += [f"{run.num_linked} links stood"] if run.num_linked != num_links else []
    problems += [f"{threads} threads and {descriptors} descriptors more"] if is_dear else []
    problems += [f"decode ended with status {status}"] if status else []
    return {
        "seconds": seconds,
        "links": run.num_linked,
        "right": run.tally.num_right,
        "restarts of a prefill": run.tally.num_restarts,
        "errors": dict(run.tally.errors),
        "decode's engine, before any link": str(run.before),
        "with all links": str(run.begun),
        "at most": str(run.most),
        "at the end, with all links": str(run.after),
        "the prefills' process at the end": str(run.own),
        "problems": problems,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; return the exit status: 0 when all is well."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.many_links", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--minutes", type=float, default=3.0, help="(default: %(default)s)")
    parser.add_argument("--links", type=int, default=40, help="(default: %(default)s)")
    parser.add_argument("--transfer-backend", choices=("shm", "tcp"), default="shm")
    args = parser.parse_args(argv)
    report = asyncio.run(many_links(args.minutes * 60, args.links, args.transfer_backend))
    tell(json.dumps(report, indent=2))
    return int(bool(report["problems"]))


if __name__ == "__main__":
    sys.exit(main())
