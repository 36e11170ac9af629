"""One process of the load client. Run by `processes.py` with frames on its standard input and output.

    plan ─▶ Ready ─▶ Go ─▶ the load, with Progress every quarter of a second ─▶ Finished

The end of its standard input stops it: what is under way is reported as unfinished.
"""

import asyncio
import contextlib
import resource
import sys
import time
from typing import BinaryIO

import msgspec
import uvloop
from typing_extensions import override

from tandem.bench.answer import Answer, Broken, Tally
from tandem.bench.conversation import PATHS, Conversation
from tandem.bench.http import Address, Connections
from tandem.bench.prompts import PromptMaker
from tandem.bench.records import (
    FRAME,
    UNFINISHED,
    ClientPlan,
    Finished,
    FromClient,
    Go,
    Job,
    Progress,
    Ready,
    Sample,
    Turn,
)

PROGRESS_S = 0.25


class Client:
    """Sends the jobs of a plan and collects samples."""

    def __init__(self, plan: ClientPlan) -> None:
        self._plan = plan
        self._maker = PromptMaker(plan.rules)
        server = plan.server
        self._connections = Connections(
            Address.of(server.url + PATHS[server.api], server.api_key), server.timeout_s
        )
        self._places = asyncio.Semaphore(plan.concurrency or len(plan.jobs) or 1)
        self._freed_s = 0.0  # when a place was last given back
        self._tally = Tally()
        self._samples: list[Sample] = []
        self._num_running = 0

    async def run(self, start_s: float) -> None:
        """Send every job when it is due and there is a place for it; return when all have ended."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for job in self._plan.jobs:
                    # Made before it is due: making it takes longer than sending it.
                    conversation = Conversation(self._plan, self._maker, job)
                    body = conversation.body(0)
                    due_s = start_s + job.due_s
                    await asyncio.sleep(max(due_s - time.monotonic(), 0))
                    await self._places.acquire()
                    due_s = max(due_s, self._freed_s)
                    tasks.create_task(self._converse(job, conversation, body, due_s))
        finally:
            self._connections.close()

    async def _converse(
        self, job: Job, conversation: Conversation, body: bytes, due_s: float
    ) -> None:
        try:
            for number, turn in enumerate(job.turns):
                if number:
                    await asyncio.sleep(self._plan.think_time_s)
                    body, due_s = conversation.body(number), time.monotonic()
                answer = Answer(
                    self._plan.server.api,
                    time.monotonic(),
                    self._tally,
                    is_kept=conversation.is_kept,
                )
                if not await self._ask(turn, body, answer, due_s):
                    return  # what should follow has nothing to follow on
                conversation.hear(answer)
        finally:
            self._places.release()
            if self._plan.concurrency:
                self._freed_s = time.monotonic()

    async def _ask(self, turn: Turn, body: bytes, answer: Answer, due_s: float) -> bool:
        """Send one request and keep its sample; tell whether it ended well."""
        failure, error = "", ""
        self._num_running += 1
        try:
            await self._connections.post(body, answer)
            if self._plan.server.is_eos_ignored and answer.output_tokens < turn.output_tokens:
                failure, error = "short", _short(answer.output_tokens, turn.output_tokens)
        except Broken as broken:
            failure, error = broken.kind, str(broken)
        except asyncio.CancelledError:
            failure = UNFINISHED
            raise
        finally:
            self._num_running -= 1
            self._samples.append(
                Sample(
                    due_s=due_s,
                    sent_s=answer.sent_s,
                    arrival_s=answer.times.tobytes(),
                    arrival_tokens=answer.counts.tobytes(),
                    output_tokens=answer.output_tokens or answer.num_tokens,
                    prompt_tokens=answer.prompt_tokens or turn.input_tokens,
                    cached_tokens=answer.cached_tokens,
                    failure=failure,
                    error=error,
                )
            )
        return not failure

    def progress(self) -> Progress:
        """Return what happened since it was last asked."""
        self._connections.fail_silent(time.monotonic())
        samples, self._samples = self._samples, []
        return self._tally.take(self._num_running, samples)


def _short(got: int, asked: int) -> str:
    return (
        f"ended after {got} of {asked} tokens: give --disable-ignore-eos if answers may end early, or a "
        "smaller --output-len if the context is too short"
    )


def framed(message: FromClient | ClientPlan | Go) -> bytes:
    """Return a message as both ends of a pipe read it."""
    payload = msgspec.msgpack.encode(message)
    return FRAME.pack(len(payload)) + payload


def _read(pipe: BinaryIO) -> bytes:
    return pipe.read(*FRAME.unpack(pipe.read(FRAME.size)))


async def _tell(client: Client, pipe: asyncio.WriteTransport) -> None:
    while True:
        await asyncio.sleep(PROGRESS_S)
        pipe.write(framed(client.progress()))


async def _run(plan: ClientPlan, start_s: float) -> None:
    """Run the load until it has ended or standard input has."""
    client, loop = Client(plan), asyncio.get_running_loop()
    # A pipe that the loop writes: a slow reader must not hold up what is timed here.
    pipe, told = await loop.connect_write_pipe(_Pipe, sys.stdout)
    _, commands = await loop.connect_read_pipe(_Pipe, sys.stdin)
    telling = asyncio.create_task(_tell(client, pipe))
    load = asyncio.create_task(client.run(start_s))
    commands.is_closed.add_done_callback(lambda _: load.cancel())
    before_s = time.process_time()
    with contextlib.suppress(asyncio.CancelledError):
        await load
    cpu_s = time.process_time() - before_s
    telling.cancel()
    if told.is_closed.done():  # the command was killed: nobody hears it
        return
    pipe.write(framed(client.progress()))
    pipe.write(framed(Finished(cpu_s=cpu_s)))
    pipe.close()
    await told.is_closed


class _Pipe(asyncio.Protocol):
    def __init__(self) -> None:
        self.is_closed = asyncio.get_running_loop().create_future()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed.set_result(None)


def main() -> None:
    """Do one plan."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    plan = msgspec.msgpack.decode(_read(sys.stdin.buffer), type=ClientPlan)
    sys.stdout.buffer.write(framed(Ready()))
    sys.stdout.buffer.flush()
    if told := sys.stdin.buffer.read(FRAME.size):
        start = msgspec.msgpack.decode(sys.stdin.buffer.read(*FRAME.unpack(told)), type=Go)
        uvloop.run(_run(plan, start.start_s))


if __name__ == "__main__":
    main()
