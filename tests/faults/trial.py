"""One cell of the fault matrix: run requests, hurt somebody at a stage, see what comes of it."""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Sequence

import aiohttp

from tests.faults.cells import LASTS_S, Cell
from tests.faults.hurts import hurt, victims_pids
from tests.faults.members import Member, wait_ended
from tests.faults.probe import QUICK_S, SLOW_S
from tests.faults.results import Result, judge
from tests.faults.rig import MAX_RUNNING, NotWell, Rig
from tests.faults.stages import View, in_stage
from tests.faults.streams import Answer, Arithmetic, Ask, Measured, Pauses, send
from tests.patience import PATIENCE_S

STAGE_TIMEOUT_S = 15.0
# A stage may be shorter than a busy machine's pauses: each time it is looked for in requests of its own.
MAX_TRIES = 20
NUM_STREAMS = 6
# Pages come back within 2 s of silence, and what fencing takes; how soon is told, this ends the wait for a leak.
PAGES_TIMEOUT_S = PATIENCE_S
# Of others' logs: who notices says so with one of these.
NOTICES = {
    *("node.lost", "node.down", "edge.lost", "edge_worker.crashed", "engine.died", "rank.died"),
    *("kv_link.lost", "request.replay"),
}


class StageMissed(Exception):
    """No request was seen at the stage."""


class Trials:
    """Runs cells on one cluster.

    Args:
        durations: Seconds that each lasting fault lasts.
    """

    def __init__(
        self, rig: Rig, oracle: Arithmetic | Measured, durations: dict[str, float]
    ) -> None:
        self._rig, self._oracle = rig, oracle
        self._durations = {**LASTS_S, **durations}
        self._numbers = random.Random(1)
        self._undisturbed: dict[bool, Pauses] = {}

    async def run(self, cell: Cell) -> Result:
        """Run a cell on a cluster that is well, and leave it so.

        Raises:
            StageMissed: Nobody was seen at the stage, however often it was tried.
        """
        is_streamed = cell.stage != "decoding"
        if is_streamed not in self._undisturbed:
            self._undisturbed[is_streamed] = await self._measure(is_streamed=is_streamed)
        for _ in range(MAX_TRIES):
            with contextlib.suppress(StageMissed):
                return await self._try(cell)
        raise StageMissed(f"{MAX_TRIES} times no request was seen {cell.stage}")

    async def _measure(self, *, is_streamed: bool) -> Pauses:
        """Return the longest pauses of undisturbed clients."""
        longest = Pauses()
        for _ in range(2):
            asks = await self._asks(NUM_STREAMS, is_streamed=is_streamed)
            answers = [Answer(ask) for ask in asks]
            await asyncio.gather(*(send(self._rig.session, answer) for answer in answers))
            bad = [a for a in answers if a.error or not a.verdict().is_right]
            assert not bad, f"undisturbed, and not right: {bad}"
            for answer in answers:
                longest = longest.longer(answer.longest_pauses_s())
        return longest

    async def _asks(self, num: int, *, is_streamed: bool) -> list[Ask]:
        """Return requests that no prefix cache knows: greedy, seeded, and one with a stop id in each six."""
        routers = [self._rig.members[name].url for name in ("a", "a", "b")]
        asks = []
        for i in range(num):
            first = self._numbers.randrange(2**31)
            length = 150 + 12 * (i % 6)
            prompt = [
                3 + (first * (j + 1) >> 7) % (self._oracle.num_ids - 3) for j in range(length)
            ]
            asks.append(
                self._oracle.ask(
                    routers[i % 3],
                    prompt,
                    50 + 6 * (i % 6),
                    seed=first if i % 2 else None,
                    stops_at=45 if i % 6 == 2 else None,
                    is_streamed=is_streamed,
                )
            )
        return await self._oracle.known(self._rig.session, asks)

    async def _try(self, cell: Cell) -> Result:
        rig = self._rig
        num = 2 * MAX_RUNNING + 4 if cell.stage == "waiting" else NUM_STREAMS
        asks = await self._asks(num, is_streamed=cell.stage != "decoding")
        answers = [Answer(ask) for ask in asks]
        base = {name: probe.load for name, probe in rig.probes.items() if probe.load is not None}
        health = await self._health("b" if cell.target == "router" else "a")
        for probe in rig.probes.values():
            probe.interval_s = QUICK_S
        tasks: list[asyncio.Task] = []
        try:
            if cell.stage == "idle":
                victim = self._candidates(cell)[0]
            else:
                tasks = [asyncio.create_task(send(rig.session, answer)) for answer in answers]
                victim = await self._victim(cell, base, answers, tasks)
            pids = victims_pids(cell, victim)
            at_s, began_s = time.time(), time.monotonic()
            lift = hurt(rig, cell, victim)
            if cell.stage == "idle":
                tasks = [asyncio.create_task(send(rig.session, answer)) for answer in answers]
        except BaseException:
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        finally:
            for probe in rig.probes.values():
                probe.interval_s = SLOW_S / 4
        watching = asyncio.create_task(self._watch_health(cell, health))
        lifting = asyncio.create_task(self._lift_later(cell, pids, lift, began_s, at_s))
        await asyncio.gather(*tasks)
        result = Result(cell.target, cell.fault, cell.stage, num_requests=num)
        judge(result, answers, cell, self._undisturbed[cell.stage != "decoding"], began_s)
        await self._see_pages(result, victim)
        await lifting
        watching.cancel()
        result.health = (await asyncio.gather(watching, return_exceptions=True))[0] or ""
        result.effect = await asyncio.to_thread(self._effect, cell, victim, pids)
        self._read_logs(result, at_s, cell, victim)
        try:
            result.healed_ms = round(1000 * await rig.heal())
        except NotWell as error:
            result.errors["did not heal"] = 1
            result.effect = f"{result.effect}; {error}"
        return result

    def _candidates(self, cell: Cell) -> list[Member]:
        rig = self._rig
        if cell.target in ("edge worker", "router"):
            return [rig.members["a"]]
        if cell.target == "engine process":
            is_prompts = cell.stage in ("prefilling", "pushing")
            return rig.of_role("prefill" if is_prompts else "decode")
        return rig.of_role("decode" if cell.target == "TP rank" else cell.target)

    async def _victim(
        self, cell: Cell, base: dict, answers: Sequence[Answer], tasks: Sequence[asyncio.Task]
    ) -> Member:
        """Return the first member that the stage has reached, when it has."""
        candidates = self._candidates(cell)
        deadline = time.monotonic() + STAGE_TIMEOUT_S
        told = [probe.told for probe in self._rig.probes.values()]
        while time.monotonic() < deadline and not all(task.done() for task in tasks):
            now = {n: p.load for n, p in self._rig.probes.items() if p.load is not None}
            view = View(now, base, max(len(answer.token_ids) for answer in answers))
            for member in candidates:
                # A router's requests are where their nodes are.
                nodes = (
                    [member.name] if member.role != "router" else [d for d in now if d[0] == "d"]
                )
                if any(in_stage(view, name, cell.stage) for name in nodes):
                    return member
            for event in told:
                event.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(QUICK_S):
                    await told[-1].wait()
        raise StageMissed(cell.stage)

    async def _lift_later(
        self, cell: Cell, pids: list[int], lift, began_s: float, at_s: float
    ) -> None:
        lasts_s = self._durations.get(cell.fault)
        if lasts_s is not None:
            await asyncio.sleep(max(0.0, began_s + lasts_s - time.monotonic()))
            # Others may have stood still as long: what must be noticed lasts until it is.
            while cell.must_be_noticed and time.monotonic() < began_s + PATIENCE_S:
                if await asyncio.to_thread(self._notices, at_s):
                    break
                await asyncio.sleep(0.2)
        elif cell.fault == "memory limit":
            # The kernel acts when memory is asked for, not before.
            await asyncio.to_thread(wait_ended, pids, 10.0)
        lift()

    async def _see_pages(self, result: Result, victim: Member) -> None:
        survivors = [p for name, p in self._rig.probes.items() if name != victim.name]
        begun = time.monotonic()
        while any(probe.unaccounted != 0 for probe in survivors):
            if time.monotonic() - begun > PAGES_TIMEOUT_S:
                result.pages_left = sum(probe.unaccounted or 0 for probe in survivors)
                break
            await asyncio.sleep(0.01)
        result.pages_ms = round(1000 * (time.monotonic() - begun))

    async def _health(self, name: str) -> str:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return str((await self._rig.get(f"{self._rig.members[name].url}/health")).get("detail"))
        return ""

    async def _watch_health(self, cell: Cell, base: str) -> str:
        """Return, when cancelled, the first sentence of /health that is not the usual one."""
        told, name = "", "b" if cell.target == "router" else "a"
        try:
            while True:
                now = await self._health(name)
                told = told or (now if now != base else "")
                await asyncio.sleep(0.2)
        except asyncio.CancelledError:
            return told

    def _effect(self, cell: Cell, victim: Member, pids: list[int]) -> str:
        """Say what became of the victim, and wait until what must end has ended."""
        if cell.fault in ("SIGKILL", "SIGTERM"):
            has_ended = wait_ended(pids, 15.0)
            # Whose engine or rank has ended ends with it.
            if cell.target in ("engine process", "TP rank"):
                has_ended = has_ended and wait_ended([victim.pid], 10.0)
            if not has_ended:
                victim.kill()
                return "did not end within 15 s"
            return "ended"
        is_down = not wait_ended(pids, 0) if cell.fault == "memory limit" else False
        if cell.fault == "memory limit":
            if is_down:
                return "lived on"
            if cell.target == "engine process":
                wait_ended([victim.pid], 10.0)
            return "ended by the kernel"
        return "ended" if not victim.is_running else ""

    def _notices(self, at_s: float) -> list[tuple[float, str, str]]:
        """Return what was noticed since a time, and by whom."""
        events = [event for m in self._rig.members.values() for event in m.events(at_s)]
        named = [(event["at_s"], str(event["event"]), event["of"]) for event in events]
        return [notice for notice in named if notice[1] in NOTICES]

    def _read_logs(self, result: Result, at_s: float, cell: Cell, victim: Member) -> None:
        told = Counter[str]()
        for member in self._rig.members.values():
            for event in member.events(at_s):
                name = str(event["event"])
                if name in NOTICES or event.get("level") in ("warning", "error", "critical"):
                    told[name.partition(",")[0][:60]] += 1
        result.operator = dict(told)
        if notices := self._notices(at_s):
            first_s, name, by = min(notices)
            result.noticed_ms = round(1000 * (first_s - at_s))
            result.noticed_by = f"{name} ({by})"
