"""One edge worker: HTTP, tokenizer and detokenizer for the connections it is given.

Run by the launcher as `python -m tandem.router.worker`, with a socket inherited and a `WorkerStart` as one
line of JSON on standard input, which stays open as long as the parent lives. Another line says that it
is about to end (`frontend/edge.py`), the end of the input that it is to. A router's only worker
inherits the listening socket; one of several a door, through which the parent hands connections.
"""

import asyncio
import gc
import os
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import msgspec
import uvloop
from aiohttp import web

from tandem.frontend.app import create_app
from tandem.frontend.edge import EDGE, leave
from tandem.frontend.options import FrontendOptions
from tandem.frontend.reply_parser import reply_formats
from tandem.frontend.server import serving
from tandem.router.backend import ClusterBackend
from tandem.router.cluster import Cluster
from tandem.router.config import RouterConfig
from tandem.router.door import Door
from tandem.router.membership_files import MemberFiles
from tandem.router.nodes_api import NodesApi
from tandem.router.observer import Observer
from tandem.router.overview_api import OverviewApi
from tandem.router.page_files import PageFiles
from tandem.router.policies import policy_of
from tandem.router.pool import Pool
from tandem.router.siblings import Siblings
from tandem.telemetry.log import configure, get_logger
from tandem.wire.errors import ConfigInvalid
from tandem.wire.keys import operator_key

log = get_logger("router.worker")

# Exit status that says: starting me again would not help.
CONFIG_STATUS = 2
STDIN = 0


class WorkerStart(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is told at its start.

    Attributes:
        index: 0 ... num_workers - 1.
        socket_fd: The inherited socket.
        nodes_directory: Of the `MemberFiles` of its router.
        pool_directory: Of the `Pool` that this worker is one of; empty when it is alone.
    """

    config: RouterConfig
    index: int
    socket_fd: int
    nodes_directory: str
    pool_directory: str = ""


@dataclass(frozen=True, slots=True)
class _Apis:
    """What siblings ask for too."""

    nodes: NodesApi
    overview: OverviewApi


async def serve(start: WorkerStart, sock: socket.socket) -> None:
    """Serve connections of `sock` until the parent is gone or SIGTERM comes.

    Raises:
        ConfigInvalid: The configuration cannot work.
    """
    config = start.config
    cluster = Cluster(config, MemberFiles(start.nodes_directory))
    policy, rng = (
        policy_of(config.policy, config.prefill_policy, config.decode_policy),
        random.Random(),
    )
    admission = config.admission.for_one_of(config.num_workers)
    backend = ClusterBackend(
        cluster, policy, config.max_attempts, rng, config.node_wait_s, admission=admission
    )
    formats = reply_formats(config.tool_call_parser, config.reasoning_parser)
    page = PageFiles()
    options = FrontendOptions(
        open_paths=page.paths,
        http=config.http,
        reply_formats=formats,
        operator_key=operator_key(config.cluster_secret),
        service="tandem-router",
    )
    app = create_app(backend, options)
    nodes = NodesApi(cluster)
    app[EDGE].timings_sinks.append(backend.recent)
    observer = Observer(cluster, backend, app[EDGE].metrics)
    overview = OverviewApi(observer)
    app.add_routes([*nodes.routes(), *overview.routes(), *page.routes()])
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(cluster.run())
        looking = tasks.create_task(observer.run())
        async with _serving(app, sock, cluster, _Apis(nodes, overview), start):
            log.info("edge_worker.ready", policy=config.policy)
            _calm_collector()
            await _told_to_stop(partial(leave, app))
        # Requests have ended or were cut: leave the nodes.
        watching.cancel()
        looking.cancel()


@asynccontextmanager
async def _serving(
    app: web.Application,
    sock: socket.socket,
    cluster: Cluster,
    apis: _Apis,
    start: WorkerStart,
) -> AsyncIterator[None]:
    if not start.pool_directory:
        async with serving(app, sock, start.config.drain_timeout_s):
            yield
        return
    pool = Pool(start.pool_directory, start.config.num_workers)
    siblings = Siblings(pool, start.index)
    app.middlewares.append(siblings.answering())
    door = Door(sock, pool, start.index, cluster)
    async with (
        siblings.reachable(app[EDGE], apis.nodes, apis.overview),
        door.serving(app, start.config.drain_timeout_s),
    ):
        yield


def _calm_collector() -> None:
    """Have the garbage collector look less often, and not at what was imported: that stays.

    Tokens make hardly any cycles, and looking for them took a tenth of a busy worker's time.
    """
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


async def _told_to_stop(leave: Callable[[], None]) -> None:
    """Return when standard input ends, which is when the parent stops or dies, or on SIGTERM.

    Args:
        leave: Called when the end is near, at the latest when it is here.
    """
    loop, told = asyncio.get_running_loop(), asyncio.Event()

    def read() -> None:
        leave()
        if not os.read(STDIN, 64):
            told.set()

    loop.add_signal_handler(signal.SIGTERM, told.set)
    loop.add_reader(STDIN, read)
    await told.wait()
    leave()
    loop.remove_reader(STDIN)


def main() -> int:
    """Run one edge worker; return its exit status."""
    with open(STDIN, "rb", buffering=0, closefd=False) as parent:
        line = parent.readline()  # and nothing of what comes after it
    if not line:
        return 0  # the parent was gone before it said anything
    start = msgspec.json.decode(line, type=WorkerStart)
    config = start.config
    # What all workers see alike is said by the first of them.
    is_quiet = start.index > 0 and config.log_level == "info"
    level = "warning" if is_quiet else config.log_level
    configure(level, config.log_format, role="router", worker=start.index)
    status = 0
    try:
        with socket.socket(fileno=start.socket_fd) as sock:
            uvloop.run(serve(start, sock))
    except* ConfigInvalid as errors:  # as they are, and in the group of the tasks of `serve`
        log.critical("edge_worker.cannot_start", reason=str(errors.exceptions[0]))
        status = CONFIG_STATUS
    return status


if __name__ == "__main__":
    sys.exit(main())
