"""`python -m tandem.vllm.node.engine`: the engine process of a node that runs vLLM."""

import multiprocessing
from typing import TYPE_CHECKING

from tandem.node.answers import Answers
from tandem.node.config import NodeConfig
from tandem.node.life.ending import StepWatch, end_process
from tandem.node.life.engine_process import Joined, Ready
from tandem.node.loop import EngineLoop
from tandem.node.metrics import Measures
from tandem.node.process.engine_host import Parent, host, run_until_lost
from tandem.telemetry import log as logs
from tandem.vllm.node.role import VllmRole
from tandem.vllm.versions import check_version, unsupported
from tandem.wire.channel import Inbox, Waker, tcp_address
from tandem.wire.generation import new_epoch
from tandem.wire.keys import cluster_key
from tandem.wire.messages import ToEngine

if TYPE_CHECKING:
    from tandem.vllm.node.generator import VllmGenerator
    from tandem.vllm.node.joined_ranks import JoinedRanks

log = logs.get_logger(__name__)


class VllmProcess:
    """Builds vLLM's engine from the config and runs the node's loop on it."""

    def __init__(self, config: NodeConfig, parent: Parent) -> None:
        self._config, self._parent = config, parent
        self._running: VllmGenerator | JoinedRanks | None = None

    def run(self) -> int:
        """Serve until the loop ends; return the exit status."""
        version = check_version()
        from tandem.vllm.node.environment import prepare_environment

        prepare_environment(self._config)
        try:
            # These import vLLM, which reads the environment.
            from tandem.vllm.node.arguments import parse_arguments, vllm_config_of
            from tandem.vllm.node.generator import VllmGenerator
            from tandem.vllm.node.joined_ranks import JoinedRanks
        except ImportError as error:
            raise unsupported(str(error)) from error

        config, epoch, waker = self._config, new_epoch(), Waker()
        args = parse_arguments(config)
        vllm_config = vllm_config_of(config, args)
        if vllm_config.parallel_config.node_rank:
            self._running = ranks = JoinedRanks(vllm_config)
            self._parent.follow(ranks)
            self._parent.report(Joined())
            return ranks.run()
        self._running = generator = VllmGenerator(config, args, vllm_config)
        model = generator.model
        log.info("engine.loaded", engine=f"vLLM {version}", fingerprint=model.fingerprint)
        key = cluster_key(config.host, is_insecure=config.is_insecure)
        address = tcp_address(config.host, config.engine_port)
        inbox: Inbox[ToEngine] = Inbox(address, ToEngine, key, config.heartbeat)
        answers = Answers(inbox, epoch, generator.journal, generator.tier_journals)
        role = VllmRole(
            config.role,
            generator,
            answers,
            max_waiting=config.engine.max_waiting_requests,
        )
        watch = StepWatch(config.step_timeout_s, generator.steps)
        loop = EngineLoop(
            role,
            inbox,
            answers,
            waker,
            heartbeat=config.heartbeat,
            measures=Measures(generator.steps, generator.transfer_times),
            on_drained=self._parent.report_drained,
            wait_s=generator.wait_s,
            on_pass=watch.on_pass,
        )
        self._parent.follow(loop)
        self._parent.report(
            Ready(
                epoch=epoch,
                engine_port=inbox.port,
                bootstrap_port=generator.bootstrap_port if config.role == "prefill" else None,
                max_prompt_tokens=generator.max_tokens - 1,
                model=model,
            )
        )
        try:
            is_lost = not run_until_lost(loop)
        finally:
            watch.stop()
            inbox.close()
        if not is_lost:
            generator.leave()
        return int(is_lost)

    def close(self) -> None:
        """Stop vLLM's workers, also those that still start, and close all links."""
        if self._running is not None:
            self._running.close()
        # If a worker has died, vLLM waits for the others in a thread, which ends with this process.
        for worker in multiprocessing.active_children():
            worker.kill()


if __name__ == "__main__":
    end_process(host(VllmProcess))
