"""Serve thousands of requests while processes die, freeze, leave and come back; report, and judge.

    python -m tests.faults.soak --minutes 30 --report soak.md

Three prefill and three decode nodes (simulated, KV through shared memory) and a router with two edge
workers. Every 10 s somebody is hurt; one node of each role, one edge worker and the router's parent are
spared, so that there is always a way, and somebody to watch for growth. Every request must end with the
right tokens, or with one typed error. The seed makes the requests and the faults the same each time,
not their meeting.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from benchmarks.rig import result
from tandem.wire.keys import operator_key
from tests.faults.hurts import signal_all
from tests.faults.members import Member, wait_ended
from tests.faults.rig import SECRET, Rig, running_rig
from tests.faults.soak_report import Growth, described, leftovers, write_report
from tests.faults.streams import Answer, Arithmetic, Ask, send
from tests.patience import PATIENCE_S

FLAGS = (
    *("--engine", "simulated", "--page-size", "16", "--max-total-tokens", "4096"),
    *("--transfer-backend", "auto"),
)
PROFILE = {"prefill": {"base_ms": 3, "per_token_ms": 0.1}, "decode": {"base_ms": 8}}
NUM_CLIENTS = 12
HURT_INTERVAL_S = 10.0
SAMPLE_INTERVAL_S = 2.0
# How long after the end of an edge worker its clients may learn of it.
BROKEN_WITHIN_S = 5.0
# How soon they are is what the matrix tells; this ends the wait for those that a leak keeps.
PAGES_BACK_WITHIN_S = PATIENCE_S
HURTS = ("kill", "kill engine", "stop", "terminate", "kill edge worker", "leave and join")
WEIGHTS = (3, 2, 3, 3, 1, 2)


@dataclass(slots=True)
class Tally:
    """What came of the requests.

    Attributes:
        bad: A sentence for each request that ended otherwise than it must.
    """

    num_requests: int = 0
    num_right: int = 0
    num_left: int = 0
    num_tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)


class Soak:
    """One run."""

    def __init__(
        self, rig: Rig, seed: int, seconds: float, hurt_interval_s: float, least_requests: int
    ) -> None:
        self._rig, self._rng = rig, random.Random(seed)
        self._hurt_interval_s, self._least_requests = hurt_interval_s, least_requests
        self._arithmetic = Arithmetic(str(rig.model_dir))
        self._ends_at_s = time.monotonic() + seconds
        self._began_s = time.monotonic()
        self._router = rig.members["a"]
        self._broken_until_s = 0.0
        self._spared_pid = 0
        self.tally = Tally()
        self.hurts: Counter[str] = Counter()
        self.growth: list[Growth] = []
        self.page_problems = ""
        self._shared_prompt = [self._rng.randrange(100, 40_000) for _ in range(200)]

    @property
    def _is_on(self) -> bool:
        is_early = time.monotonic() < self._ends_at_s
        return is_early or self.tally.num_requests < self._least_requests

    async def run(self) -> None:
        spared = [self._rig.members["p0"], self._rig.members["d0"]]
        self._spared_pid = self._router.children()[1]
        pids = {"router": self._router.pid, "edge worker": self._spared_pid}
        for member in spared:
            pids[f"{member.role} HTTP"] = member.pid
            pids[f"{member.role} engine"] = member.children()[0]
        self.growth = [Growth(name, pid) for name, pid in pids.items()]
        async with asyncio.TaskGroup() as tasks:
            for i in range(NUM_CLIENTS):
                tasks.create_task(self._client(random.Random(self._rng.randrange(2**32)), i))
            tasks.create_task(self._hurt_all())
            tasks.create_task(self._sample())
        await self._rig.heal()
        begun = time.monotonic()
        while not await self._rig.is_accounted():
            if time.monotonic() - begun > PAGES_BACK_WITHIN_S:
                left = {name: p.unaccounted for name, p in self._rig.probes.items()}
                self.page_problems = f"pages left: {left}"
                break
            await asyncio.sleep(0.05)

    async def _client(self, rng: random.Random, number: int) -> None:
        count = 0
        while self._is_on:
            ask = self._ask(rng)
            if rng.random() < 0.12:
                await self._leave_early(ask, rng)
            else:
                answer = Answer(ask)
                began_s = time.monotonic()
                if rng.random() < 0.04:
                    await self._abort(answer, f"soak-{number}-{count}", rng)
                else:
                    await send(self._rig.session, answer)
                self._judge(answer, began_s)
            count += 1

    def _ask(self, rng: random.Random) -> Ask:
        num = rng.choice((1, 15, 16, 17, 60, 200, 500))
        prompt = [rng.randrange(100, 40_000) for _ in range(num)]
        if rng.random() < 0.3:
            prompt = self._shared_prompt[: rng.choice((48, 160, 200))] + prompt[:20]
        num_new = rng.choice((1, 2, 20, 60, 150, 300))
        return self._arithmetic.ask(
            self._router.url,
            prompt,
            num_new,
            seed=rng.randrange(1, 2**31) if rng.random() < 0.5 else None,
            stops_at=rng.randrange(num_new) if rng.random() < 0.2 else None,
            is_streamed=rng.random() < 0.7,
        )

    async def _leave_early(self, ask: Ask, rng: random.Random) -> None:
        """Go away before the first token or in the midst of tokens."""
        self.tally.num_requests += 1
        self.tally.num_left += 1
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
            async with asyncio.timeout(rng.random() * 0.5):
                async with self._rig.session.post(f"{ask.url}/generate", json=ask.body) as response:
                    await response.read()

    async def _abort(self, answer: Answer, request_id: str, rng: random.Random) -> None:
        """Have a request aborted by its id while it runs."""
        answer.ask.body["rid"] = request_id
        sending = asyncio.create_task(send(self._rig.session, answer))
        await asyncio.sleep(rng.random() * 0.5)
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            timeout = aiohttp.ClientTimeout(total=10)
            url = f"{answer.ask.url}/abort_request"
            async with self._rig.session.post(url, json={"rid": request_id}, timeout=timeout):
                pass
        await sending

    def _judge(self, answer: Answer, began_s: float) -> None:
        tally, verdict = self.tally, answer.verdict()
        tally.num_requests += 1
        tally.num_tokens += len(answer.token_ids)
        what = ""
        if not verdict.is_right:
            what = f"{verdict} error={answer.error!r}"
        elif answer.error == "connection lost" and began_s < self._broken_until_s:
            tally.errors["connection lost with its edge worker"] += 1
        elif answer.error in ("hung", "connection lost", "tokens were taken back"):
            what = f"{answer.error} {answer.message}"
        elif answer.error:
            tally.errors[answer.error] += 1
        else:
            tally.num_right += 1
        if what:
            at_s = time.monotonic() - self._began_s
            tally.bad.append(
                f"{at_s:.1f} s: {what}; {len(answer.token_ids)} of {len(answer.ask.expected)} tokens, "
                f"{len(answer.ask.body['input_ids'])} in the prompt, streamed {answer.ask.is_streamed}"
            )

    async def _hurt_all(self) -> None:
        while self._is_on:
            begun = time.monotonic()
            what = self._rng.choices(HURTS, WEIGHTS)[0]
            role = self._rng.choice(("prefill", "decode"))
            member = self._rng.choice(self._rig.of_role(role)[1:])  # the first is spared
            self.hurts[what] += 1
            await self._hurt(what, member)
            tell(
                f"{begun - self._began_s:6.0f} s  {what:17} {member.name}  requests "
                f"{self.tally.num_requests}, right {self.tally.num_right}, errors "
                f"{dict(self.tally.errors)}, bad {len(self.tally.bad)}"
            )
            next_s = begun + self._hurt_interval_s
            while self._is_on and time.monotonic() < next_s:  # noqa: ASYNC110 - of time and of requests
                await asyncio.sleep(0.1)

    async def _hurt(self, what: str, member: Member) -> None:
        """Do it, and have it back before the next one."""
        away_s = self._rng.random() * 3
        match what:
            case "kill":
                member.kill()
                await asyncio.sleep(away_s)
            case "kill engine":
                signal_all(member.children()[:1], signal.SIGKILL)
                await asyncio.to_thread(wait_ended, [member.pid], 10)
            case "stop":
                pids = member.tree()
                signal_all(pids, signal.SIGSTOP)
                await asyncio.sleep(1 + away_s)  # on both sides of what is noticed
                signal_all(pids, signal.SIGCONT)
            case "terminate":
                await asyncio.to_thread(member.stop)
                await asyncio.sleep(away_s)
            case "kill edge worker":
                self._broken_until_s = time.monotonic() + BROKEN_WITHIN_S
                # One that was started anew may have any id.
                others = [pid for pid in self._router.children() if pid != self._spared_pid]
                signal_all(others[:1], signal.SIGKILL)
            case "leave and join":
                await self._leave_and_join(member)
        if not member.is_running:
            member.start()

    async def _leave_and_join(self, member: Member) -> None:
        """Take a node out and put it back by the router's routes, where it has them."""
        headers = {"Authorization": f"Bearer {operator_key(SECRET)}"}
        session, nodes = self._rig.session, f"{self._router.url}/nodes"
        timeout = aiohttp.ClientTimeout(total=10)
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with session.get(nodes, headers=headers, timeout=timeout) as response:
                if response.status != 200:
                    await asyncio.to_thread(member.stop)
                    return
                listed = (await response.json())["nodes"]
            found = next((node["id"] for node in listed if node["url"] == member.url), "")
            async with session.delete(f"{nodes}/{found}", headers=headers, timeout=timeout):
                pass
            await asyncio.sleep(2)
            body = {"url": member.url, "role": member.role}
            async with session.post(nodes, json=body, headers=headers, timeout=timeout) as response:
                assert response.status == 200, await response.text()

    async def _sample(self) -> None:
        while self._is_on:
            for growth in self.growth:
                growth.sample(time.monotonic() - self._began_s)
            await asyncio.sleep(SAMPLE_INTERVAL_S)


async def soak(
    seconds: float,
    seed: int,
    hurt_interval_s: float = HURT_INTERVAL_S,
    least_requests: int = 0,
) -> tuple[bool, dict]:
    """Run for a time, and until so many requests were made; return whether all is well, and the report."""
    with tempfile.TemporaryDirectory(prefix="tandem-soak-") as name:
        directory, shared = Path(name), Path(name) / "shm"
        shared.mkdir()
        async with running_rig(
            directory, flags=FLAGS, profile=PROFILE, prefills=3, decodes=3, router_flags=(), is_networked=False,
            routers=("a",), shared_memory=str(shared) if os.geteuid() == 0 else "",
        ) as rig:  # fmt: skip
            run = Soak(rig, seed, seconds, hurt_interval_s, least_requests)
            await run.run()
            statuses = {m.name: await asyncio.to_thread(m.stop) for m in rig.members.values()}
            left = leftovers(directory)
    problems = [*run.tally.bad]
    problems += [f"{g.name} grew: {described(g)}" for g in run.growth if not g.is_flat]
    problems += [run.page_problems] if run.page_problems else []
    problems += [f"{name} ended with status {s}" for name, s in statuses.items() if s]
    problems += [f"left behind: {item}" for item in left]
    return not problems, {
        "seconds": seconds,
        "seed": seed,
        "requests": run.tally.num_requests,
        "right": run.tally.num_right,
        "left early": run.tally.num_left,
        "tokens": run.tally.num_tokens,
        "errors": dict(run.tally.errors),
        "hurts": dict(run.hurts),
        "wrong": run.tally.bad,
        "growth": {g.name: described(g) for g in run.growth},
        "problems": problems,
    }


def tell(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; return the exit status: 0 when all is well."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.soak", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--report", type=Path, default=None, metavar="FILE.md|FILE.json")
    args = parser.parse_args(argv)
    is_well, report = asyncio.run(soak(args.minutes * 60, args.seed))
    tell(json.dumps(report, indent=2))
    if args.report is not None:
        write_report(report, args.report)
    tell(result("soak-wrong-answers", len(report["wrong"]), 0, "requests", is_lower_better=True))
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
