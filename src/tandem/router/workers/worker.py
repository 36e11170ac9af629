"""One edge worker: HTTP, tokenizer and detokenizer for the connections that it accepts.

The launcher runs it as `python -m tandem.router.workers.worker`. It inherits the listening socket. Standard input is its
link to the parent (`control.py`): it receives a `WorkerStart`, then exchanges messages until the end of the input stops it.
"""

import asyncio
import gc
import random
import signal
import socket
import sys
from dataclasses import replace
from functools import partial

import msgspec
import uvloop

from tandem.frontend.app import create_app
from tandem.frontend.http.edge import EDGE, begin_shutdown
from tandem.frontend.http.server import Accepting, accepting_all, serving
from tandem.frontend.options import FrontendOptions
from tandem.frontend.replies.parser import formats_by_model
from tandem.router.console.console import OverviewApi, PageFiles, RequestObserver
from tandem.router.control import WorkerLink, WorkerStart, read_start, socket_of
from tandem.router.key_limits import KeyUsage
from tandem.router.membership.membership import Members
from tandem.router.nodes.api import NodesApi
from tandem.router.nodes.cluster import Cluster
from tandem.router.pairing.policy import policy_of
from tandem.router.serving.backend import ClusterBackend
from tandem.router.workers.accepting import Acceptor, OpenConnections
from tandem.router.workers.combined import Combined
from tandem.settings.reload import ReloadedFiles
from tandem.telemetry.log import configure, get_logger
from tandem.wire.errors import ConfigInvalid
from tandem.wire.keys import operator_key

log = get_logger("router.worker")

# Exit status for an invalid configuration: a restart would not help.
CONFIG_STATUS = 2
STDIN = 0
# Interval at which changes of the usable nodes are reported to the parent.
NODES_INTERVAL_S = 0.5


async def serve(start: WorkerStart, sock: socket.socket, parent: socket.socket) -> None:
    """Serve connections of `sock` until the parent ends its side of the link or SIGTERM arrives.

    Raises:
        ConfigInvalid: The configuration is invalid.
    """
    config, has_siblings = start.config, bool(start.metrics_directory)
    cluster = Cluster(config)
    cluster.apply(start.members)
    keys = KeyUsage({}, start.metrics_directory, start.index, config.num_workers)
    backend = ClusterBackend(
        cluster,
        policy_of(config.policy, config.prefill_policy, config.decode_policy),
        config.max_attempts,
        random.Random(),
        config.node_wait_s,
        admission=replace(config.admission, num_workers=config.num_workers),
        keys=keys,
        replays_sampled=config.replay_sampled == "allow",
    )
    formats = formats_by_model(config.tool_call_parsers, config.reasoning_parsers)
    page = PageFiles()
    options = FrontendOptions(
        open_paths=page.paths,
        http=config.http,
        reply_formats=formats[""],
        model_formats={model: found for model, found in formats.items() if model},
        operator_key=operator_key(config.cluster_secret),
        max_priority=keys.max_priority,
        service="tandem-router",
    )
    app = create_app(backend, options)
    if path := config.admission.key_limits:
        app[EDGE].reloaded.append(ReloadedFiles([path], partial(keys.load, path)))
    observer = RequestObserver(cluster, backend, app[EDGE].live)
    app[EDGE].timings_sinks.append(observer)
    link = await WorkerLink.over(parent)
    nodes, overview = NodesApi(cluster, link), OverviewApi(observer, link if has_siblings else None)
    app.add_routes([*nodes.routes(), *overview.routes(), *page.routes()])
    link.message_handlers = {
        "members": lambda body: cluster.apply(msgspec.json.decode(body, type=Members)),
        "leave": lambda _body: begin_shutdown(app),
        "refuse": lambda body: backend.suspects.refuse(msgspec.json.decode(body, type=str)),
    }
    backend.suspects.on_refused = partial(link.send, "refuse")
    if has_siblings:
        combined = Combined(
            index=start.index,
            link=link,
            edge=app[EDGE],
            cluster=cluster,
            observer=observer,
            metrics_directory=start.metrics_directory,
        )
        link.question_handlers = combined.question_handlers()
        app.middlewares.append(combined.middleware())
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(link.run())
        # The parent ends its side to stop this worker.
        following.add_done_callback(lambda _task: stopping.set())
        background = [
            tasks.create_task(work)
            for work in (cluster.run(), observer.run(), _report_nodes(cluster, link))
        ]
        await _wait_for_pair(cluster, stopping, start.pair_wait_s)
        async with serving(app, sock, config.drain_timeout_s, _accepting(start)):
            log.info("edge_worker.ready", policy=config.policy)
            link.send("ready")
            _tune_garbage_collector()
            await stopping.wait()
            begin_shutdown(app)
        # All requests have finished or were cancelled: disconnect from the nodes.
        for task in (following, *background):
            task.cancel()


def _accepting(start: WorkerStart) -> Accepting:
    directory = start.metrics_directory
    if not directory:
        return accepting_all
    return Acceptor(OpenConnections(directory, start.config.num_workers), start.index).accepting


async def _wait_for_pair(cluster: Cluster, stopping: asyncio.Event, wait_s: float) -> None:
    """Wait until a pair can serve, at most `wait_s`."""
    try:
        async with asyncio.timeout(wait_s):
            while not (cluster.is_serving or stopping.is_set()):  # noqa: ASYNC110 - nodes have no event
                await asyncio.sleep(0.02)
    except TimeoutError:
        return


async def _report_nodes(cluster: Cluster, link: WorkerLink) -> None:
    """Report the usable nodes to the parent, which keeps their announcements while they are up."""
    reported: list[str] = []
    while True:
        urls = [node.url for node in cluster.roster if node.is_up]
        if urls != reported:
            reported = urls
            link.send("up", urls)
        await asyncio.sleep(NODES_INTERVAL_S)


def _tune_garbage_collector() -> None:
    """Make the garbage collector run less often, and skip the objects of imported modules.

    Serving tokens creates hardly any reference cycles, and searching for cycles took 10 % of a busy worker's time.
    """
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


def main() -> int:
    """Run one edge worker; return its exit status."""
    start = read_start(STDIN)
    if start is None:
        return 0  # the parent ended before it sent anything
    config = start.config
    # Events that all workers see are logged by the first worker only.
    is_quiet = start.index > 0 and config.log_level == "info"
    level = "warning" if is_quiet else config.log_level
    configure(level, config.log_format, role="router", worker=start.index)
    status = 0
    try:
        with socket.socket(fileno=start.socket_fd) as sock:
            uvloop.run(serve(start, sock, socket_of(STDIN)))
    except* (
        ConfigInvalid
    ) as errors:  # raised directly, or in the exception group of the tasks of `serve`
        log.critical("edge_worker.cannot_start", reason=str(errors.exceptions[0]))
        status = CONFIG_STATUS
    return status


if __name__ == "__main__":
    sys.exit(main())
