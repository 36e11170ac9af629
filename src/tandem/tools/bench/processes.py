"""Sends a load from one or several processes, for rates that keep one Python process busy."""

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import repeat
from typing import Any

import msgspec
import uvloop

from tandem.tools.bench.client import Sample, drive
from tandem.tools.bench.config import BenchConfig
from tandem.tools.bench.load import PlannedRequest, planned
from tandem.tools.query import QueryFailed
from tandem.wire.channel import raise_descriptor_limit


class Sent(msgspec.Struct, frozen=True):
    """The samples of a load, or of one process, and the mean CPU time of a process."""

    samples: list[Sample]
    cpu_s: float


def send_load(config: BenchConfig) -> Sent:
    """Send the load from `config.num_processes` processes.

    Raises:
        QueryFailed: A process failed.
    """
    num_requests, limit = len(planned(config)), config.concurrency
    raise_descriptor_limit(limit or num_requests, "requests at once")
    count = min(config.num_processes, num_requests, limit or num_requests)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, spawn, _start_together, (spawn.Barrier(count),)) as pool:
        try:
            sent = list(pool.map(_send_share, range(count), repeat(count), repeat(config)))
        except BrokenProcessPool as error:
            raise QueryFailed(
                "a process of the load ended early; its memory may be short"
            ) from error
        except KeyboardInterrupt:  # leaving the block waits for the processes
            for process in multiprocessing.active_children():
                process.kill()
            raise
    samples = [sample for each in sent for sample in each.samples]
    return Sent(samples, sum(each.cpu_s for each in sent) / count)


def _start_together(barrier: Any) -> None:
    """Wait for the other processes. Ctrl-C stops the parent, which ends them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    barrier.wait()


def _send_share(index: int, count: int, config: BenchConfig) -> Sent:
    """Send every `count`-th request, with this process's part of the concurrency."""
    start_cpu_s = time.process_time()
    requests, limit = planned(config)[index::count], config.concurrency
    samples = uvloop.run(_drive(config, requests, limit // count + (index < limit % count)))
    return Sent(samples, time.process_time() - start_cpu_s)


async def _drive(
    config: BenchConfig, requests: Sequence[PlannedRequest], concurrency: int
) -> list[Sample]:
    parent = multiprocessing.parent_process()
    assert parent is not None
    # A load does not outlive a parent that was killed.
    asyncio.get_running_loop().add_reader(parent.sentinel, os._exit, 1)
    return await drive(config, requests, concurrency)
