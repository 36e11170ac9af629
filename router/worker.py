"""One edge worker: HTTP, tokenizer and detokenizer for the connections it accepts.

Run by the launcher as `python -m router.worker`, with a listening socket inherited and a
`WorkerStart` as one line of JSON on standard input, which stays open as long as the parent lives.
"""

import asyncio
import random
import signal
import socket
import sys

import msgspec
import uvloop

from frontend.app import create_app
from frontend.options import FrontendOptions
from frontend.reply_parser import reply_formats
from frontend.server import serving
from router.backend import ClusterBackend
from router.cluster import Cluster
from router.config import RouterConfig
from router.policy import POLICIES
from telemetry.log import configure, get_logger
from wire.errors import ConfigInvalid

log = get_logger("router.worker")

# Exit status that says: starting me again would not help.
CONFIG_STATUS = 2
# Shorter than the launcher's deadline: streams that run on are cut before the process is.
DRAIN_TIMEOUT_S = 3.0


class WorkerStart(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is told at its start.

    Attributes:
        index: 0 ... num_workers - 1.
        listen_fd: The inherited socket, listening, shared with the other workers.
    """

    config: RouterConfig
    index: int
    listen_fd: int


async def serve(config: RouterConfig, sock: socket.socket) -> None:
    """Serve connections of `sock` until the parent is gone or SIGTERM comes.

    Raises:
        ConfigInvalid: The configuration cannot work.
    """
    cluster = Cluster(config)
    policy, rng = POLICIES[config.policy], random.Random()
    backend = ClusterBackend(cluster, policy, config.max_attempts, rng)
    formats = reply_formats(config.tool_call_parser, config.reasoning_parser)
    app = create_app(backend, FrontendOptions(api_keys=config.api_keys, reply_formats=formats))
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(cluster.run())
        async with serving(app, sock, DRAIN_TIMEOUT_S):
            log.info("edge_worker.ready", policy=config.policy)
            await _told_to_stop()
        # Requests have ended or were cut: leave the nodes.
        watching.cancel()


async def _told_to_stop() -> None:
    """Return when standard input ends, which is when the parent stops or dies, or on SIGTERM."""
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, told.set)
    loop.add_reader(sys.stdin.fileno(), told.set)
    await told.wait()
    loop.remove_reader(sys.stdin.fileno())


def main() -> int:
    """Run one edge worker; return its exit status."""
    line = sys.stdin.buffer.readline()
    if not line:
        return 0  # the parent was gone before it said anything
    start = msgspec.json.decode(line, type=WorkerStart)
    config = start.config
    # What all workers see alike is said by the first of them.
    is_quiet = start.index > 0 and config.log_level == "info"
    level = "warning" if is_quiet else config.log_level
    configure(level, config.log_format, role="router", worker=start.index)
    try:
        with socket.socket(fileno=start.listen_fd) as sock:
            uvloop.run(serve(config, sock))
    except ConfigInvalid as error:
        log.critical("edge_worker.cannot_start", reason=error.message)
        return CONFIG_STATUS
    return 0


if __name__ == "__main__":
    sys.exit(main())
