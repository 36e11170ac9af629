"""One edge worker: HTTP, tokenizer and detokenizer for the connections that it accepts.

The launcher runs it as `python -m tandem.router.worker`. It inherits the listening socket, and standard input is its link
to the parent (`control.py`): a `WorkerStart`, messages both ways while it serves, and the end of the input to stop it.
"""

import asyncio
import gc
import random
import signal
import socket
import sys

import msgspec
import uvloop

from tandem.frontend.app import create_app
from tandem.frontend.edge import EDGE, leave
from tandem.frontend.options import FrontendOptions
from tandem.frontend.reply_parser import reply_formats
from tandem.frontend.server import Accepting, accepting_all, serving
from tandem.router.accepting import Acceptor, OpenConnections
from tandem.router.backend import ClusterBackend
from tandem.router.cluster import Cluster
from tandem.router.combined import Combined
from tandem.router.console import Observer, OverviewApi, PageFiles
from tandem.router.control import Link, WorkerStart, socket_of, started
from tandem.router.membership import Members
from tandem.router.nodes_api import NodesApi
from tandem.router.policy import policy_of
from tandem.telemetry.log import configure, get_logger
from tandem.wire.errors import ConfigInvalid
from tandem.wire.keys import operator_key

log = get_logger("router.worker")

# Exit status: starting this worker again would not help.
CONFIG_STATUS = 2
STDIN = 0
# How often the parent hears which nodes are up, if that has changed.
NODES_INTERVAL_S = 0.5
# For the first pair, before one of several workers accepts: until then it would reject what others can serve.
MEETING_S = 2.0


async def serve(start: WorkerStart, sock: socket.socket, parent: socket.socket) -> None:
    """Serve connections of `sock` until the parent ends its side of the link or SIGTERM comes.

    Raises:
        ConfigInvalid: The configuration cannot work.
    """
    config, has_siblings = start.config, bool(start.metrics_directory)
    cluster = Cluster(config)
    cluster.apply(start.members)
    backend = ClusterBackend(
        cluster,
        policy_of(config.policy, config.prefill_policy, config.decode_policy),
        config.max_attempts,
        random.Random(),
        config.node_wait_s,
        admission=config.admission.for_one_of(config.num_workers),
    )
    page = PageFiles()
    options = FrontendOptions(
        open_paths=page.paths,
        http=config.http,
        reply_formats=reply_formats(config.tool_call_parser, config.reasoning_parser),
        operator_key=operator_key(config.cluster_secret),
        service="tandem-router",
    )
    app = create_app(backend, options)
    observer = Observer(cluster, backend, app[EDGE].live)
    app[EDGE].timings_sinks.append(observer)
    link = await Link.over(parent)
    nodes, overview = NodesApi(cluster, link), OverviewApi(observer, link if has_siblings else None)
    app.add_routes([*nodes.routes(), *overview.routes(), *page.routes()])
    link.on_told = {
        "members": lambda body: cluster.apply(msgspec.json.decode(body, type=Members)),
        "leave": lambda _body: leave(app),
    }
    if has_siblings:
        combined = Combined(
            index=start.index,
            link=link,
            edge=app[EDGE],
            cluster=cluster,
            observer=observer,
            metrics_directory=start.metrics_directory,
        )
        link.on_asked = combined.replies()
        app[EDGE].responses.ask_others = combined.response_elsewhere
        app.middlewares.append(combined.middleware())
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(link.run())
        # The parent ends its side to stop this worker.
        following.add_done_callback(lambda _task: stopping.set())
        beside = [
            tasks.create_task(work)
            for work in (cluster.run(), observer.run(), _report_nodes(cluster, link))
        ]
        if has_siblings:
            await _meet(cluster, stopping)
        async with serving(app, sock, config.drain_timeout_s, _accepting(start)):
            log.info("edge_worker.ready", policy=config.policy)
            link.tell("ready")
            _calm_collector()
            await stopping.wait()
            leave(app)
        # Requests have ended or were cut: leave the nodes.
        for task in (following, *beside):
            task.cancel()


def _accepting(start: WorkerStart) -> Accepting:
    directory = start.metrics_directory
    if not directory:
        return accepting_all
    return Acceptor(OpenConnections(directory, start.config.num_workers), start.index).accepting


async def _meet(cluster: Cluster, stopping: asyncio.Event) -> None:
    """Wait for a pair that can serve, for a while."""
    try:
        async with asyncio.timeout(MEETING_S):
            while not (cluster.is_serving or stopping.is_set()):  # noqa: ASYNC110 - nodes have no event
                await asyncio.sleep(0.02)
    except TimeoutError:
        return


async def _report_nodes(cluster: Cluster, link: Link) -> None:
    """Tell the parent which nodes are up: announcements of those hold without being repeated."""
    reported: list[str] = []
    while True:
        urls = [node.url for node in cluster.roster if node.is_up]
        if urls != reported:
            reported = urls
            link.tell("up", urls)
        await asyncio.sleep(NODES_INTERVAL_S)


def _calm_collector() -> None:
    """Have the garbage collector look less often, and not at what was imported: that stays.

    Tokens make hardly any cycles, and looking for them took a tenth of a busy worker's time.
    """
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


def main() -> int:
    """Run one edge worker; return its exit status."""
    start = started(STDIN)
    if start is None:
        return 0  # the parent was gone before it sent anything
    config = start.config
    # What all workers see alike is logged by the first of them.
    is_quiet = start.index > 0 and config.log_level == "info"
    level = "warning" if is_quiet else config.log_level
    configure(level, config.log_format, role="router", worker=start.index)
    status = 0
    try:
        with socket.socket(fileno=start.socket_fd) as sock:
            uvloop.run(serve(start, sock, socket_of(STDIN)))
    except* ConfigInvalid as errors:  # as they are, and in the group of the tasks of `serve`
        log.critical("edge_worker.cannot_start", reason=str(errors.exceptions[0]))
        status = CONFIG_STATUS
    return status


if __name__ == "__main__":
    sys.exit(main())
