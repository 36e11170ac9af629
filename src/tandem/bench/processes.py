"""The client processes of a load: started, given one start, listened to, stopped."""

import asyncio
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from tandem.bench.client import framed
from tandem.bench.records import (
    FRAME,
    ClientPlan,
    Finished,
    FromClient,
    Go,
    Progress,
    Ready,
    Sample,
)

COMMAND = (sys.executable, "-P", "-m", "tandem.bench.client")
# From the last client's Ready to the first request: time for all to hear of it.
LEAD_S = 0.1
_decoder: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)


class ClientLost(Exception):
    """A client process ended before its load had; what it wrote stands on standard error."""


@dataclass(slots=True)
class Measured:
    """What clients told.

    Attributes:
        cpu_s: Processor time of each client.
    """

    samples: list[Sample] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


def _ignore(_client: int, _progress: Progress) -> None:
    pass


async def drive(
    plans: Sequence[ClientPlan],
    listen: Callable[[int, Progress], None] = _ignore,
    stop: asyncio.Event | None = None,
) -> Measured:
    """Run the plans side by side and return what they measured.

    Args:
        plans: One for each process.
        listen: Called with the number of a client and what it did since it last told.
        stop: When it is set, what is under way is given up and counted as unfinished.

    Raises:
        ClientLost: A process died.
    """
    processes = [
        # In a session of its own: Ctrl-C is for the one that started it.
        await asyncio.create_subprocess_exec(
            *COMMAND, stdin=PIPE, stdout=PIPE, start_new_session=True
        )
        for _ in plans
    ]
    try:
        return await _run(plans, processes, listen, stop or asyncio.Event())
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _run(
    plans: Sequence[ClientPlan],
    processes: Sequence[Process],
    listen: Callable[[int, Progress], None],
    stop: asyncio.Event,
) -> Measured:
    for plan, process in zip(plans, processes, strict=True):
        await _write(process, framed(plan))
    for process in processes:
        assert isinstance(await _receive(process), Ready)
    start_s = time.monotonic() + LEAD_S
    for process in processes:
        await _write(process, framed(Go(start_s)))
    measured = Measured()

    async def follow(number: int, process: Process) -> None:
        while not isinstance(told := await _receive(process), Finished):
            assert isinstance(told, Progress)
            measured.samples += told.samples
            listen(number, told)
        measured.cpu_s.append(told.cpu_s)
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()

    stopping = asyncio.create_task(_stop(stop, processes))
    try:
        await asyncio.gather(*(follow(*each) for each in enumerate(processes)))
    finally:
        stopping.cancel()
    return measured


async def _write(process: Process, frame: bytes) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(frame)
        await process.stdin.drain()
    except ConnectionError as error:
        raise ClientLost(f"a client process ended: {error}") from error


async def _receive(process: Process) -> FromClient:
    assert process.stdout is not None
    try:
        (size,) = FRAME.unpack(await process.stdout.readexactly(FRAME.size))
        return _decoder.decode(await process.stdout.readexactly(size))
    except asyncio.IncompleteReadError as error:
        raise ClientLost(f"a client process ended with {await process.wait()}") from error


async def _stop(stop: asyncio.Event, processes: Sequence[Process]) -> None:
    """Once `stop` is set, end the clients' standard input, which ends their load."""
    await stop.wait()
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
