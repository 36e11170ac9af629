"""The ranks of a node on a host that is not its first: vLLM's workers without an engine."""

from vllm.config import VllmConfig
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from tandem.node.life.engine_process import Order
from tandem.telemetry.log import get_logger

log = get_logger(__name__)


class JoinedRanks:
    """vLLM's workers on this host, which take their steps from the engine on the node's first host.

    The constructor returns when all hosts have joined and the model is loaded.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        parallel = vllm_config.parallel_config
        first = f"{parallel.master_addr}, port {parallel.master_port}"
        log.info("ranks.joining", first_host=first, number=parallel.node_rank)
        self._executor = MultiprocExecutor(vllm_config, monitor_workers=False)

    def run(self) -> int:
        """Wait until the ranks end; return the exit status."""
        self._executor.start_worker_monitor(inline=True)
        return 1

    def order(self, order: Order) -> None:
        """Do nothing: the engine on the first host drains."""

    def stop(self) -> None:
        """End the ranks, which ends the node."""
        self._executor.shutdown()

    def close(self) -> None:
        """End the ranks, which ends the node."""
        self._executor.shutdown()
