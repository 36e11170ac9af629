"""The ranks of a node on a host that is not its first: vLLM's workers without an engine."""

import socket
import threading

from vllm.config import VllmConfig
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from tandem.node.life.engine_process import Order
from tandem.telemetry.log import get_logger
from tandem.vllm.hosts import JOIN_S, end_with_node, watch_until_lost
from tandem.wire.errors import EngineFailed

log = get_logger(__name__)


class JoinedRanks:
    """vLLM's workers on this host, which take their steps from the engine on the node's first host.

    The constructor returns when all hosts have joined and the model is loaded. From then on this process ends with the
    first host's rank 0, which serves torch's store on the master port.

    Raises:
        EngineFailed: The first host has ended meanwhile.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        parallel = vllm_config.parallel_config
        first = parallel.master_addr, parallel.master_port
        log.info("ranks.joining", first_host=first[0], port=first[1], number=parallel.node_rank)
        self._executor = MultiprocExecutor(vllm_config, monitor_workers=False)
        try:
            connection = socket.create_connection(first, JOIN_S)
        except OSError as error:
            raise EngineFailed(f"the node's first host has ended: {error}") from error
        threading.Thread(
            target=watch_until_lost, args=([connection], end_with_node), daemon=True
        ).start()

    def run(self) -> int:
        """Wait until the ranks end; return the exit status."""
        self._executor.start_worker_monitor(inline=True)
        return 1

    def order(self, order: Order) -> None:
        """Do nothing: the engine on the first host drains."""

    def stop(self) -> None:
        """End the ranks, which ends `run` and the node."""
        self._executor.shutdown()

    def close(self) -> None:
        """End the ranks, unless they have ended."""
        self._executor.shutdown()
