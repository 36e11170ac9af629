"""Runs vLLM's EngineCore in this process; the node's loop calls each step."""

import argparse
import contextlib
import time
from collections.abc import Mapping, Sequence, Set
from functools import partial
from typing import Any, NamedTuple

import zmq
from vllm.config import KVEventsConfig, VllmConfig
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventPublisher,
)
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.renderers import renderer_from_config
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.executor import Executor

from tandem.engine.errors import DeviceLost
from tandem.engine.scheduling.step import StepCounts
from tandem.kvtransfer.agents.receiver import DecodeAgent
from tandem.kvtransfer.agents.sender import PrefillAgent
from tandem.kvtransfer.events import ReceiverTimes, SenderTimes
from tandem.node.config import NodeConfig
from tandem.node.life.ending import end_process_after
from tandem.node.process.engine_host import RANK_LOST_GRACE_S
from tandem.node.ranks.pool import Piece, pool_pages
from tandem.node.tiers.tiers import open_stack
from tandem.vllm.connector import (
    IDLE_WAIT_S,
    TandemConnector,
    fingerprint,
)
from tandem.vllm.hand_offs import WorkerReports
from tandem.vllm.node.adapters import Adapters, names_and_paths
from tandem.vllm.node.data_parallel import DataParallelGroup
from tandem.vllm.node.entry import Entry
from tandem.vllm.node.outputs import EngineCounts, HandOffParams, StepOutput
from tandem.vllm.node.requests import output_of, sampling_params
from tandem.vllm.tiers import PromptTiers
from tandem.vllm.worker import DecodeWorker, PrefillWorker
from tandem.wire.errors import AdapterGone, ConfigInvalid, InvalidRequest, TandemError
from tandem.wire.events.cached import CachedBlocks
from tandem.wire.generation import Finish, GenerateRequest
from tandem.wire.messages import ModelInfo
from tandem.wire.prefixes import PageSpace, PrefixJournal

# Maximum time that an idle rank of a data-parallel group lets the others wait, so that they can start to step.
IDLE_MEET_S = 0.01
# Maximum time that a rank that stops waits for the others to stop. Shorter than the time that its parent allows.
LEAVE_S = 2.0


class CacheEvents:
    """An `EventPublisher` that records vLLM's KV events and forwards them to the operator's publisher."""

    def __init__(self, cached: CachedBlocks, publisher: EventPublisher) -> None:
        self._cached, self._publisher = cached, publisher

    def publish(self, batch: EventBatch) -> None:
        """Record and forward the events of a step, oldest first."""
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._cached.on_stored(event)
            elif isinstance(event, BlockRemoved):
                self._cached.on_removed(event.block_hashes, event.group_idx)
            elif isinstance(event, AllBlocksCleared):
                self._cached.on_cleared()
        self._publisher.publish(batch)

    def shutdown(self) -> None:
        """Shut down the publisher."""
        self._publisher.shutdown()

    def get_publisher_config(self) -> KVEventsConfig | None:
        """Return the settings of the publisher."""
        return self._publisher.get_publisher_config()


class Checked(NamedTuple):
    """A request that vLLM accepts, and the tokens of its answer so far."""

    request: EngineCoreRequest
    prior_ids: Sequence[int]


class VllmGenerator:
    """A `Generator` that runs vLLM.

    Args:
        config: The node's config.
        args, vllm_config: The same as arguments and settings of vLLM.

    Attributes:
        steps: Number and duration of the steps that computed something.
        journal: Changes of the cached prefixes, for routers.
        adapters: The LoRA adapters.

    Raises:
        ConfigInvalid: vLLM rejects the settings; the message says what to do.
    """

    def __init__(
        self, config: NodeConfig, args: argparse.Namespace, vllm_config: VllmConfig
    ) -> None:
        self._config, self.steps, self._vllm_config = config, StepCounts(), vllm_config
        self._group = self._lockstep = None
        if vllm_config.parallel_config.data_parallel_size > 1:
            self._group = DataParallelGroup(vllm_config, config.role, config.step_timeout_s)
            self._lockstep = self._group.lockstep
        try:
            self._core = EngineCore(
                vllm_config,
                Executor.get_class(vllm_config),
                log_stats=False,
                # A step may wait minutes for the answer of a rank on a different host that has ended.
                executor_fail_callback=partial(end_process_after, RANK_LOST_GRACE_S),
            )
        except zmq.ZMQError as error:
            raise ConfigInvalid(
                f"vLLM cannot publish KV events: {error}; set a different --kv-events-endpoint or "
                "--kv-events-replay-endpoint",
                topic="docs/kv-events.md",
            ) from error
        self._inputs = InputProcessor(vllm_config, renderer_from_config(vllm_config))
        self._tasks = self._core.get_supported_tasks()
        self._scheduler: Any = self._core.scheduler
        self._entry = Entry(self._core)
        self._connector: TandemConnector | None = self._scheduler.connector
        cached = CachedBlocks()
        self.journal = cached.journal
        self._publisher = CacheEvents(cached, self._scheduler.kv_event_publisher)
        self._scheduler.kv_event_publisher = self._publisher
        lora = vllm_config.lora_config
        limit = 0 if lora is None else lora.max_cpu_loras or lora.max_loras
        self.adapters = Adapters(self._core, limit, self._used_adapters)
        self._load_adapters(args)
        self._tiers = self._open_tiers()
        if self._group is not None:
            self._group.wait_ready(self.model.fingerprint)

    def _open_tiers(self) -> PromptTiers | None:
        """Open the tiers of `--kv-tier`, if there are any."""
        if not self._config.tiers.specs:
            return None
        connector, worker = self._connector, _local_worker()
        assert connector is not None
        assert worker is not None
        if not (connector.keeps_all and worker.caches.indexes):
            raise ConfigInvalid(
                "--kv-tier: this model's layers keep different blocks, which tiers cannot store; remove it",
                topic="docs/tiers.md#with-vllm",
            )
        space = PageSpace(
            self.model.fingerprint, "bytes", self._vllm_config.cache_config.block_size
        )
        pieces = [Piece(each.base, each.stride, each.num_bytes) for each in worker.caches.pieces]
        pages = pool_pages(worker.caches.region, pieces)
        tiers = PromptTiers(
            partial(open_stack, self._config.tiers, pages, space),
            space,
            self._config.tiers.min_tokens,
            worker.waker,
        )
        connector.tiers = get_kv_transfer_group().tiers = tiers
        return tiers

    @property
    def tier_journals(self) -> Mapping[str, PrefixJournal]:
        """Changes of the prefixes in each tier, by its name."""
        return {} if self._tiers is None else self._tiers.stack.journals()

    @property
    def bootstrap_port(self) -> int:
        """Port on which prefill's first rank listens for grants."""
        agent = _local_agent()
        return (
            agent.port if isinstance(agent, PrefillAgent) else self._config.transfer.bootstrap_port
        )

    @property
    def transfer_times(self) -> SenderTimes | ReceiverTimes | None:
        """Durations of hand-offs; None unless the first rank runs in this process."""
        agent = _local_agent()
        return None if agent is None else agent.times

    @property
    def max_tokens(self) -> int:
        """Maximum number of prompt plus generated tokens of one request."""
        cache = self._vllm_config.cache_config
        # vLLM reserves one block, the null block.
        num_tokens = (self._scheduler.kv_cache_config.num_blocks - 1) * cache.block_size
        return min(int(self._vllm_config.model_config.max_model_len), int(num_tokens))

    @property
    def model(self) -> ModelInfo:
        """The model."""
        config, model = self._config, self._vllm_config.model_config
        configured = model.try_get_generation_config().get("eos_token_id")
        eos = model.hf_text_config.eos_token_id if configured is None else configured
        ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        return ModelInfo(
            name=config.served_model_name,
            fingerprint=fingerprint(self._vllm_config, self._scheduler.kv_cache_config),
            context_length=model.max_model_len,
            vocab_size=model.get_vocab_size(),
            eos_token_ids=sorted(ids),
            default_sampling=config.default_sampling,
            weight_version=config.weight_version,
            aliases=list(config.served_model_names[1:]),
        )

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        lockstep = self._lockstep
        is_running = self._has_requests if lockstep is None else lockstep.is_running
        return self._has_failed or is_running

    @property
    def _has_requests(self) -> bool:
        # A batch in flight can outlive its requests and still carries reports of the workers.
        return bool(self._entry or self._scheduler.has_requests() or self._core.batch_queue)

    def wait_s(self, at_most_s: float) -> float:
        """Return how long the loop may wait while there is no work, in seconds."""
        return at_most_s if self._lockstep is None else min(at_most_s, IDLE_MEET_S)

    def meet(self) -> None:
        """Agree with the other data-parallel ranks whether the next step runs.

        Raises:
            DeviceLost: A rank has ended or hangs.
        """
        if self._lockstep is not None:
            self._lockstep.meet(has_requests=self._has_requests)

    def leave(self) -> None:
        """Stay in step until all data-parallel ranks leave, at most `LEAVE_S`. The first to end takes the others along."""
        if self._lockstep is None:
            return
        self._lockstep.is_leaving, end_s = True, time.monotonic() + LEAVE_S
        with contextlib.suppress(DeviceLost):
            while not self._lockstep.can_leave and time.monotonic() < end_s:
                self.meet()
                if self.has_work:
                    self.step()

    @property
    def _has_failed(self) -> bool:
        """Whether a worker process has died, which no step of an idle vLLM would report."""
        return getattr(self._core.model_executor, "is_failed", False)

    def check(self, request: GenerateRequest, hand_off: HandOffParams | None) -> Checked:
        """Convert a request for `add`, or raise `InvalidRequest` or `NoNodeAvailable`."""
        num_prompt = len(request.prompt_ids) - request.num_prior_tokens
        prompt: dict[str, object] = {
            "type": "token",
            "prompt_token_ids": request.prompt_ids[:num_prompt],
            "cache_salt": request.cache_salt or None,
        }
        adapter = self.adapters.find(request.adapter) if request.adapter else None
        if request.adapter and adapter is None:
            raise AdapterGone(request.adapter)
        try:
            asked = self._inputs.process_inputs(
                str(request.request_id),
                prompt,
                sampling_params(request, hand_off),
                supported_tasks=self._tasks,
                lora_request=adapter,
                priority=-request.priority,
            )
        except TandemError:
            raise
        except Exception as error:
            # vLLM's limits are narrower than ours: its temperature is at most 2, for example. Its grammar libraries raise
            # exceptions of many types.
            words = " ".join(str(error).split())[:500]
            raise InvalidRequest(f"vLLM rejects the request: {words}") from error
        num_tokens, limit = len(request.prompt_ids), self.max_tokens
        if num_tokens >= limit:  # vLLM has checked the prompt alone
            raise InvalidRequest(
                f"the prompt and the answer so far have {num_tokens} tokens, and this node serves {limit} in all"
            )
        return Checked(asked, request.prompt_ids[num_prompt:])

    def _load_adapters(self, args: argparse.Namespace) -> None:
        for name, path in names_and_paths(args.lora_modules, self._config.served_model_names):
            try:
                self.adapters.load(name, path)
            except (TandemError, OSError) as error:
                raise ConfigInvalid(f"--lora-modules: {error}", topic="docs/vllm.md") from error

    def _used_adapters(self) -> Set[int]:
        """Return the numbers of the adapters that queued and running requests need."""
        requests = (*self._scheduler.requests.values(), *self._entry.waiting())
        return {each.lora_request.lora_int_id for each in requests if each.lora_request}

    def add(self, request_id: str, checked: object) -> None:
        """Queue a checked request under a unique id."""
        assert isinstance(checked, Checked)
        checked.request.request_id = request_id
        self._entry.add(checked.request, checked.prior_ids)

    def abort(self, request_id: str) -> None:
        """Abort a request; an unknown id is ignored."""
        self._entry.abort(request_id)

    def land(self, request_id: str, first_id: int) -> Finish | None:
        """Give a landed request its first token; return how it ends the answer, or raise `EngineFailed`."""
        return self._entry.land(request_id, first_id)

    def step(self) -> list[StepOutput]:
        """Run one step.

        Raises:
            DeviceLost: vLLM failed, and the state of its scheduler is unreliable.
        """
        if self._has_failed:
            raise DeviceLost("a worker process of vLLM has died")
        began_s = time.perf_counter()
        try:
            self._entry.admit()
            if not (self._lockstep or self._scheduler.has_requests() or self._core.batch_queue):
                time.sleep(IDLE_WAIT_S)  # all requests wait for their grammars
            outputs, is_executed = self._core.step_fn()
            self._core.post_step(is_executed)
            if self._lockstep is not None:
                if not is_executed:
                    self._core.execute_dummy_batch()
                self._lockstep.on_step(has_requests=self._has_requests)
        except Exception as error:
            also = "" if self._lockstep is None else ", or a different data-parallel rank has ended"
            raise DeviceLost(f"vLLM failed{also}: {error!r}") from error
        if is_executed:
            self.steps.num_collected += 1
            self.steps.device_seconds.observe(time.perf_counter() - began_s)
        found = [output_of(each) for batch in (outputs or {}).values() for each in batch.outputs]
        for output in found:
            if self._connector is not None and output.logprobs:
                self._connector.add_first_logprobs(output.request_id, output.logprobs[0])
        return found

    def take_transfers(self) -> WorkerReports:
        """Return the transfers that ended since the last call."""
        return WorkerReports() if self._connector is None else self._connector.take_transfers()

    def counts(self) -> EngineCounts:
        """Return the current counts."""
        num_running, num_waiting = self._scheduler.get_request_counts()
        pool, agent = self._scheduler.kv_cache_manager.block_pool, _local_agent()
        return EngineCounts(
            num_running=num_running,
            num_waiting=num_waiting + len(self._entry),
            max_running=int(self._vllm_config.scheduler_config.max_num_seqs),
            num_pages=pool.num_gpu_blocks - 1,
            pages_free=pool.get_num_free_blocks(),
            page_size=self._vllm_config.cache_config.block_size,
            moved_bytes=0 if self._connector is None else self._connector.moved_bytes,
            ending_s=0.0 if agent is None else agent.statistics().ending_s,
            tiers=[] if self._tiers is None else self._tiers.stack.loads(),
        )

    def flush_cache(self) -> None:
        """Drop the cached blocks that no request reads."""
        self._core.reset_prefix_cache()
        # vLLM would publish these events in its next step, which an idle node does not run.
        events = self._scheduler.kv_cache_manager.take_events()
        if events:
            self._publisher.publish(EventBatch(ts=time.time(), events=events))

    def close(self) -> None:
        """Stop vLLM's workers and close all links."""
        if self._tiers is not None:
            self._tiers.close()
        self._core.shutdown()


def _local_worker() -> PrefillWorker | DecodeWorker | None:
    """Return the worker of the rank in this process; None if vLLM runs its ranks in other processes."""
    connector = get_kv_transfer_group() if has_kv_transfer_group() else None
    worker = getattr(connector, "worker", None)
    return worker if isinstance(worker, PrefillWorker | DecodeWorker) else None


def _local_agent() -> PrefillAgent | DecodeAgent | None:
    worker = _local_worker()
    return None if worker is None else worker.agent
