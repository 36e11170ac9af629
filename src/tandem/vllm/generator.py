"""vLLM's EngineCore in this process: its scheduler steps when the node's loop asks it to."""

import argparse
import shlex
import time
from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams
from vllm.config import KVEventsConfig, KVTransferConfig, VllmConfig
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventPublisher,
)
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.engine.arg_utils import EngineArgs
from vllm.renderers import renderer_from_config
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.executor import Executor

from tandem.engine.errors import DeviceLost
from tandem.engine.step import StepCounts
from tandem.kvtransfer.events import ReceiverTimes, SenderTimes
from tandem.kvtransfer.receiver import DecodeAgent
from tandem.kvtransfer.sender import PrefillAgent
from tandem.node.config import NodeConfig
from tandem.vllm.adapters import add_argument, digest_of, read_adapters
from tandem.vllm.connector import TandemConnector, fingerprint
from tandem.vllm.halves import Reports
from tandem.vllm.outputs import Apart, Counts, Output
from tandem.vllm.prefixes import CachedBlocks
from tandem.vllm.requests import output_of, sampling_params
from tandem.vllm.worker import DecodeWorker, PrefillWorker
from tandem.wire.errors import ConfigInvalid, InvalidRequest, TandemError
from tandem.wire.generation import GenerateRequest
from tandem.wire.messages import ModelInfo


class CacheEvents:
    """Receives vLLM's KV events and passes them on to the operator's publisher, as an `EventPublisher` of vLLM."""

    def __init__(self, cached: CachedBlocks, publisher: EventPublisher) -> None:
        self._cached, self._publisher = cached, publisher

    def publish(self, batch: EventBatch) -> None:
        """Take note of a step's events, oldest first."""
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._cached.stored(event)
            elif isinstance(event, BlockRemoved):
                self._cached.removed(event.block_hashes)
            elif isinstance(event, AllBlocksCleared):
                self._cached.cleared()
        self._publisher.publish(batch)

    def shutdown(self) -> None:
        """End the publisher."""
        self._publisher.shutdown()

    def get_publisher_config(self) -> KVEventsConfig | None:
        """Return the settings of the publisher."""
        return self._publisher.get_publisher_config()


class VllmGenerator:
    """A `Generator`.

    Args:
        config: The node. What stands behind `--` goes to vLLM as to `vllm serve`, and wins.

    Attributes:
        steps: Counts the steps that computed something, and their time.
        journal: What is cached, for routers.

    Raises:
        ConfigInvalid: vLLM refuses the settings; the message says what to do.
    """

    def __init__(self, config: NodeConfig) -> None:
        self._config, self.steps = config, StepCounts()
        args = _arguments(config)
        self._adapters = read_adapters(args.lora_modules, config.served_model_name)
        self._vllm_config = vllm_config = _vllm_config(config, args, digest_of(self._adapters))
        self._core = EngineCore(vllm_config, Executor.get_class(vllm_config), log_stats=False)
        self._inputs = InputProcessor(vllm_config, renderer_from_config(vllm_config))
        self._tasks = self._core.get_supported_tasks()
        self._scheduler: Any = self._core.scheduler
        self._connector: TandemConnector | None = self._scheduler.connector
        cached = CachedBlocks()
        self.journal = cached.journal
        self._publisher = CacheEvents(cached, self._scheduler.kv_event_publisher)
        self._scheduler.kv_event_publisher = self._publisher
        self._load_adapters()

    @property
    def _keeps_all(self) -> bool:
        return self._connector is None or self._connector.keeps_all

    @property
    def bootstrap_port(self) -> int:
        """Where this prefill's first rank listens for grants."""
        agent = _own_agent()
        return (
            agent.port if isinstance(agent, PrefillAgent) else self._config.transfer.bootstrap_port
        )

    @property
    def transfer_times(self) -> SenderTimes | ReceiverTimes | None:
        """How long hand-offs took, where the first rank runs in this process."""
        agent = _own_agent()
        return None if agent is None else agent.times

    @property
    def max_running(self) -> int:
        """Requests that vLLM runs at once."""
        return int(self._vllm_config.scheduler_config.max_num_seqs)

    @property
    def max_tokens(self) -> int:
        """Limit of prompt plus generated tokens of one request."""
        cache = self._vllm_config.cache_config
        # vLLM keeps one block for itself.
        num_tokens = (self._scheduler.kv_cache_config.num_blocks - 1) * cache.block_size
        return min(int(self._vllm_config.model_config.max_model_len), int(num_tokens))

    @property
    def model(self) -> ModelInfo:
        """The model."""
        config, model = self._config, self._vllm_config.model_config
        given = model.try_get_generation_config().get("eos_token_id")
        eos = model.hf_text_config.eos_token_id if given is None else given
        ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        return ModelInfo(
            name=config.served_model_name,
            fingerprint=fingerprint(self._vllm_config, self._scheduler.kv_cache_config),
            context_length=model.max_model_len,
            vocab_size=model.get_vocab_size(),
            eos_token_ids=sorted(ids),
            default_sampling=config.default_sampling,
            weight_version=config.weight_version,
            adapters=list(self._adapters),
        )

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        # A batch under way may outlive the requests in it, and carries reports of workers.
        return bool(self._scheduler.has_requests() or self._core.batch_queue)

    def check(self, request: GenerateRequest, apart: Apart | None) -> EngineCoreRequest:
        """Return the request in vLLM's words, or raise `InvalidRequest` or `NoNodeAvailable`."""
        prompt_ids = list(request.prompt_ids)
        if apart is not None and apart.is_decode and apart.draws_first:
            prompt_ids.append(prompt_ids[-1])  # the place of the first token, until it lands
        prompt: dict[str, object] = {
            "type": "token",
            "prompt_token_ids": prompt_ids,
            "cache_salt": request.cache_salt or None,
        }
        if request.adapter and request.adapter not in self._adapters:
            raise InvalidRequest(f"there is no adapter {request.adapter!r} on this node")
        try:
            return self._inputs.process_inputs(
                str(request.request_id),
                prompt,
                self._params(request, apart),
                supported_tasks=self._tasks,
                lora_request=self._adapters.get(request.adapter),
                priority=-request.priority,
            )
        except TandemError:
            raise
        except Exception as error:
            # vLLM has narrower limits than we have, such as a temperature of 2. It tries one library after the other for
            # a grammar, and they raise what they like.
            words = " ".join(str(error).split())[:500]
            raise InvalidRequest(f"vLLM refuses the request: {words}") from error

    def _load_adapters(self) -> None:
        """Load each once, so that a faulty one is known before requests come."""
        for name, adapter in self._adapters.items():
            try:
                self._core.add_lora(adapter)
            except Exception as error:
                words = " ".join(str(error).split())[:500]
                raise ConfigInvalid(f"vLLM cannot load {name!r}: {words}", topic="vllm") from error

    def _params(self, request: GenerateRequest, apart: Apart | None) -> SamplingParams:
        params = sampling_params(request, apart)
        if params.prompt_logprobs is not None and apart is not None and not self._keeps_all:
            raise InvalidRequest(
                "this model keeps windows or states, of which prefill leaves the prompt's last token to decode: "
                "log-probabilities of the prompt are not available"
            )
        return params

    def add(self, request_id: str, checked: object) -> None:
        """Queue a checked request under an id that no other has."""
        assert isinstance(checked, EngineCoreRequest)
        checked.request_id = request_id
        request, wave = self._core.preprocess_add_request(checked)
        self._core.add_request(request, wave)

    def abort(self, request_id: str) -> None:
        """End a request; an unknown one is ignored."""
        self._core.abort_requests([request_id])

    def step(self) -> list[Output]:
        """Run one step.

        Raises:
            DeviceLost: vLLM failed. What its scheduler knows of the requests is not to be trusted any more.
        """
        began_s = time.perf_counter()
        try:
            outputs, is_executed = self._core.step_fn()
            self._core.post_step(is_executed)
        except Exception as error:
            raise DeviceLost(f"vLLM failed: {error!r}") from error
        if is_executed:
            self.steps.num_collected += 1
            self.steps.device_seconds.observe(time.perf_counter() - began_s)
        return [output_of(each) for told in (outputs or {}).values() for each in told.outputs]

    def take_transfers(self) -> Reports:
        """Return what the connector heard."""
        return Reports() if self._connector is None else self._connector.take_news()

    def counts(self) -> Counts:
        """Return what is there now."""
        num_running, num_waiting = self._scheduler.get_request_counts()
        pool = self._scheduler.kv_cache_manager.block_pool
        return Counts(
            num_running=num_running,
            num_waiting=num_waiting,
            num_pages=pool.num_gpu_blocks - 1,
            pages_free=pool.get_num_free_blocks(),
            page_size=self._vllm_config.cache_config.block_size,
            moved_bytes=0 if self._connector is None else self._connector.moved_bytes,
        )

    def flush_cache(self) -> None:
        """Drop the cached blocks that no request reads."""
        self._core.reset_prefix_cache()
        # vLLM tells of it in its next step, which an idle node does not run.
        events = self._scheduler.kv_cache_manager.take_events()
        if events:
            self._publisher.publish(EventBatch(ts=time.time(), events=events))

    def close(self) -> None:
        """End vLLM's workers and all links."""
        self._core.shutdown()


def _own_agent() -> PrefillAgent | DecodeAgent | None:
    """Return the agent of this process's rank; vLLM's multi-process executors have theirs elsewhere."""
    connector = get_kv_transfer_group() if has_kv_transfer_group() else None
    worker = getattr(connector, "worker", None)
    return worker.agent if isinstance(worker, PrefillWorker | DecodeWorker) else None


def _arguments(config: NodeConfig) -> argparse.Namespace:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="--engine vllm", add_help=False))
    add_argument(parser)
    try:
        args: argparse.Namespace = parser.parse_args([*_own_flags(config), *config.vllm_args])
    except (SystemExit, ValueError) as error:
        raise ConfigInvalid(
            f"vLLM does not accept {shlex.join(config.vllm_args)}", topic="vllm"
        ) from error
    if args.lora_modules and not args.enable_lora:
        raise ConfigInvalid("--lora-modules needs --enable-lora", topic="vllm")
    return args


def _vllm_config(config: NodeConfig, args: argparse.Namespace, adapters: str) -> VllmConfig:
    try:
        given = EngineArgs.from_cli_args(args)
        if config.role != "colocated":
            given.kv_transfer_config = _transfer(config, adapters)
        if given.kv_events_config is None:
            given.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        made = given.create_engine_config()
    except (ValueError, TypeError, NotImplementedError, OSError) as error:
        words = " ".join(str(error).split())
        raise ConfigInvalid(f"vLLM refuses these settings: {words}", topic="vllm") from error
    parallel = made.parallel_config
    if parallel.data_parallel_size > 1:
        raise ConfigInvalid(
            "--data-parallel-size: a node is one engine: leave it out, and start more nodes",
            topic="vllm",
        )
    if parallel.nnodes > 1 or parallel.distributed_executor_backend == "ray":
        raise ConfigInvalid(
            "--nnodes, --distributed-executor-backend ray: the workers of a node must be processes of this host",
            topic="vllm",
        )
    return made


def _own_flags(config: NodeConfig) -> Sequence[str]:
    """Return our own flags as vLLM's."""
    engine = config.engine
    flags = {
        "--model": engine.model_dir,
        "--dtype": engine.dtype,
        "--tensor-parallel-size": engine.tp_size,
        "--max-num-seqs": engine.max_running_requests,
        "--max-model-len": engine.context_length,
    }
    words = [word for flag, value in flags.items() if value for word in (flag, str(value))]
    return words + ([] if engine.is_prefix_cache_enabled else ["--no-enable-prefix-caching"])


def _transfer(config: NodeConfig, adapters: str) -> KVTransferConfig:
    transfer = config.transfer
    return KVTransferConfig(
        kv_connector="TandemConnector",
        kv_role="kv_producer" if config.role == "prefill" else "kv_consumer",
        kv_load_failure_policy="fail",
        kv_connector_extra_config={
            "host": config.host,
            "bootstrap_port": transfer.bootstrap_port,
            "transfer_backend": transfer.backend,
            "transfer_interface": transfer.interface,
            "transfer_directory": transfer.directory,
            "push_granularity": transfer.push_granularity,
            "verify_kv": transfer.verify,
            "grant_timeout_s": transfer.grant_timeout_s,
            "landed_timeout_s": transfer.landed_timeout_s,
            "is_insecure": config.is_insecure,
            "adapters": adapters,
        },
    )
