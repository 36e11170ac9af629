"""The KV connector that vLLM loads, in its scheduler and in each of its workers.

Use with an unmodified `vllm serve`:

    --kv-transfer-config '{"kv_connector": "TandemConnector", "kv_role": "kv_producer",
      "kv_connector_extra_config": {"bootstrap_port": 8998}}'

`kv_producer` is prefill, `kv_consumer` decode. Requests carry `bootstrap_room` in `kv_transfer_params`; on decode also
prefill's `bootstrap_host` and `bootstrap_port`.
"""

import hashlib
import json
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from typing_extensions import override
from vllm.config import ModelConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import (
    get_inner_dp_world_group,
    get_pp_group,
    get_tp_group,
)
from vllm.utils.network_utils import get_ip
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import RequestStatus

from tandem.engine.weight_files import weight_samples
from tandem.kvtransfer.config import TransferConfig
from tandem.vllm.caches import Heads
from tandem.vllm.hand_offs import (
    BlockIds,
    DecodeHandOffs,
    PrefillHandOffs,
    PromptSource,
    WorkerOrders,
    WorkerReports,
    draws_first,
    prompt_name,
    room_of,
    source_of,
    waits_for_grant,
)
from tandem.vllm.hosts import join_hosts
from tandem.vllm.kv_config import blocks_of, groups_of, heads_of, layout_facts
from tandem.vllm.query import QueryServer
from tandem.vllm.tiers import PromptTiers
from tandem.vllm.versions import check_interface, check_version
from tandem.vllm.worker import (
    HandOffConfig,
    Rank,
    Results,
    WorkerHalf,
    make_worker,
    read_hand_off_config,
)
from tandem.wire.errors import ConfigInvalid
from tandem.wire.generation import TokenLogprobs
from tandem.wire.prefixes import scope_name

# While vLLM only waits for transfers it steps in a busy loop, which would starve the transfer threads.
IDLE_WAIT_S = 0.002

_ENDS = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
_ROLES: Mapping[str, Literal["prefill", "decode"]] = {
    "kv_producer": "prefill",
    "kv_consumer": "decode",
}


@dataclass
class StepOrders(KVConnectorMetadata):
    """`WorkerOrders` as vLLM metadata, sent to the workers."""

    orders: WorkerOrders


@dataclass
class StepReports(KVConnectorWorkerMetadata):
    """`WorkerReports` as vLLM metadata, sent to the scheduler."""

    reports: WorkerReports

    @override
    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, StepReports)
        self.reports.add(other.reports)
        return self


class TandemConnector(KVConnectorBase_V1, SupportsHMA):
    """The connector. vLLM makes one for its scheduler and one for each worker.

    Attributes:
        worker: This rank's `WorkerHalf`; None in the scheduler and before the blocks exist.
        keeps_all: Whether vLLM keeps every block of a request: no sliding windows, no recurrent state.
        moved_bytes: Bytes pushed or received by all ranks since the start; scheduler only.
        tiers: Tiers below vLLM's cache, if the node has them. Scheduler and worker then share a process.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_version()
        check_interface(type(self))
        self._config = hand_off_config(vllm_config, kv_cache_config)
        parallel = vllm_config.parallel_config
        groups = groups_of(kv_cache_config)
        self._num_groups = len(groups)
        self.keeps_all = all(group.keeps_all for group in groups)
        _, self._hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        self._num_ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        self._is_prefill = self._config.role == "prefill"
        self.worker: WorkerHalf | None = None
        self.tiers: PromptTiers | None = None
        self._is_idle = False
        # With data parallelism the other ranks wait for the dummy batch that follows.
        self._idle_wait_s = IDLE_WAIT_S if parallel.data_parallel_size == 1 else 0.0
        self._prefill = PrefillHandOffs(groups, self._num_ranks)
        self._decode = DecodeHandOffs(groups)
        self._transfers = WorkerReports()
        self.moved_bytes = 0
        self._query: QueryServer | None = None
        if role is KVConnectorRole.SCHEDULER and self._is_prefill and self._config.query_port:
            config = self._config
            self._query = QueryServer(config.host, config.query_port, config.bootstrap_port)

    # ── the scheduler's side ─────────────────────────────────────────────────────────────────────

    @override
    def on_new_request(self, request: Any) -> None:
        params = request.kv_transfer_params
        room = room_of(params)
        if self._is_prefill and room is not None and request.prompt_embeds is None:
            name = _prompt_name(request, request.num_tokens)
            if not self.keeps_all and not draws_first(params):
                _drop_last_token(request)
            self._prefill.begin(
                request.request_id,
                room,
                request.num_tokens,
                name,
                waits_for_grant=waits_for_grant(params),
            )
        elif room is not None and draws_first(params):
            # If all tokens before the placeholder were a cache hit, no grant would be sent and prefill's first token
            # would be lost. Replace the last block's hash so that it misses. Only full blocks have a hash.
            last = (_num_external(request) - 1) // self._hash_tokens
            if last < len(request.block_hashes):
                request.block_hashes[last] = secrets.token_bytes(len(request.block_hashes[last]))

    @override
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._is_prefill and not self._prefill.may_compute(request.request_id):
            return None, False
        source = _source_of(request)
        if self._is_prefill or source is None:
            num_external = self._num_in_tiers(request, num_computed_tokens)
            return num_external, bool(num_external)
        num_missing = _num_external(request) - num_computed_tokens
        num_external = self._decode.num_external(request.request_id, source, num_missing)
        return num_external, num_external > 0

    @override
    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Return all groups, so that vLLM does not zero blocks that prefill may already be writing."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    @override
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        source, page_ids = _source_of(request), blocks.get_block_ids()
        if self._is_prefill or source is None:
            if self.tiers is not None and num_external_tokens:
                self.tiers.place(request.request_id, page_ids[0])
            return
        num_tokens = _num_external(request)
        if self.tiers is not None:
            self.tiers.skip(request.request_id, num_tokens)
        is_first = draws_first(request.kv_transfer_params)
        source = replace(source, prompt=_prompt_name(request, num_tokens + (not is_first)))
        self._decode.on_allocated(
            request.request_id, source, page_ids, num_tokens, num_external_tokens
        )

    @override
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        if not self._is_prefill:
            return StepOrders(self._decode.take_orders())
        for request_id in scheduler_output.preempted_req_ids or ():
            self._prefill.on_preempted(request_id)
        num_new = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            self._prefill.on_scheduled(
                new.req_id, new.block_ids, new.num_computed_tokens, num_new[new.req_id]
            )
        cached = scheduler_output.scheduled_cached_reqs
        rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request_id, block_ids, num_before in rows:
            pages: BlockIds = block_ids or [()] * self._num_groups
            self._prefill.on_scheduled(request_id, pages, num_before, num_new[request_id])
        return StepOrders(self._prefill.take_orders())

    @override
    def update_connector_output(self, connector_output: Any) -> None:
        metadata = connector_output.kv_connector_worker_meta
        if not isinstance(metadata, StepReports):
            return
        reports = metadata.reports
        self.moved_bytes += reports.moved_bytes
        landed = self._decode.on_reports(reports)
        handed_off = Counter(self._prefill.on_reports(reports))
        self._transfers.add(
            WorkerReports(failed=reports.failed, handed_off=handed_off, landed=landed)
        )

    @override
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        is_held = False
        if self._is_prefill:
            is_held = self._prefill.on_finished(
                request.request_id, request.all_token_ids, block_ids
            )
        else:
            self._decode.on_finished(request.request_id)
        if self.tiers is not None and _has_token_ids(request):
            # Of a request that ran to its end, all tokens but the last are computed.
            is_over = request.status in _ENDS
            computed = request.all_token_ids[:-1] if is_over else ()
            is_held = self.tiers.finish(
                *(request.request_id, computed, _scope(request), block_ids[0]), is_held=is_held
            )
        return is_held, None

    def _num_in_tiers(self, request: Any, num_computed_tokens: int) -> int | None:
        """Return how many tokens after the cached ones come from a tier; None: not known yet."""
        if self.tiers is None or not _has_token_ids(request):
            return 0
        return self.tiers.num_external(
            request.request_id, request.all_token_ids, _scope(request), num_computed_tokens
        )

    def add_first_logprobs(self, request_id: str, logprobs: TokenLogprobs) -> None:
        """Send these log-probabilities to decode with the first token. Call after the step that finished the prompt."""
        self._prefill.add_logprobs(request_id, logprobs)

    def take_transfers(self) -> WorkerReports:
        """Return the transfers that ended since the last call: `handed_off`, `failed` and `landed`."""
        transfers, self._transfers = self._transfers, WorkerReports()
        return transfers

    # ── a worker's side ──────────────────────────────────────────────────────────────────────────

    @override
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        memory = next(iter(kv_caches.values()))
        memory = memory[0] if isinstance(memory, list) else memory
        tensor, pipeline = get_tp_group(), get_pp_group()
        heads = _heads_of(self._vllm_config, self._kv_cache_config, kv_caches.values())
        blocks = blocks_of(self._kv_cache_config, heads)
        rank = Rank(
            tensor.rank_in_group, tensor.world_size, pipeline.rank_in_group, pipeline.world_size
        )
        if self._vllm_config.parallel_config.nnodes_within_dp > 1:
            rank = replace(rank, hosts=self._join_hosts(rank.index))
        self.worker = make_worker(self._config, memory, blocks, rank)

    def _join_hosts(self, index: int) -> Sequence[str]:
        world, host, config = get_inner_dp_world_group(), self._config.host, self._vllm_config

        def gather(own: object) -> Sequence[Any]:
            gathered: list[Any] = [None] * world.world_size
            torch.distributed.all_gather_object(gathered, own, group=world.cpu_group)
            return gathered

        if host in ("0.0.0.0", "::") and (host := get_ip()) == "0.0.0.0":
            raise ConfigInvalid(
                "this host's address is unknown; set --host to it",
                topic="docs/vllm.md#several-hosts",
            )
        own = {"host": "", "fingerprint": ""}  # the fingerprint depends on the stage
        shared = msgspec.to_builtins(msgspec.structs.replace(self._config, **own))
        settings = _digest(config, hand_off=shared, length=config.model_config.max_model_len)
        return join_hosts(host, index, settings, gather)

    @override
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepOrders)
        # Before the forward, so that grants do not wait for it.
        if self.worker is not None:
            self.worker.follow(connector_metadata.orders)

    @override
    def start_load_kv(self, forward_context: Any, **_options: Any) -> None:
        self._is_idle = forward_context is None or forward_context.attn_metadata is None

    @override
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request runs only after all its layers have landed."""

    @override
    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_options: Any
    ) -> None:
        if self.worker is not None:
            self.worker.on_layer_written(layer_name)

    @override
    def wait_for_save(self) -> None:
        if self.worker is not None:
            self.worker.on_forward_finished()

    @override
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self.worker is not None
        wait_s = self._idle_wait_s if self._is_idle else 0.0
        results = self.worker.results(finished_req_ids, wait_s=wait_s)
        if self.tiers is not None:
            more = self.tiers.results(results.sent)
            results = Results(
                more.sent, results.received | more.received, results.failed | more.failed
            )
        return KVConnectorTransferResults(results.sent, results.received, results.failed)

    @override
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    @override
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        reports = None if self.worker is None else self.worker.take_reports()
        return None if reports is None else StepReports(reports)

    @override
    def shutdown(self) -> None:
        if self._query is not None:
            self._query.close()
        if self.worker is not None:
            self.worker.close()

    @classmethod
    @override
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return True for layer-wise pushes: replayed CUDA graphs skip the layer hooks."""
        return bool(
            extra_config.get("push_granularity", TransferConfig().push_granularity) == "layer"
        )


def _source_of(request: Any) -> PromptSource | None:
    """Return where a decode request's prompt comes from; None: decode computes it, as every prompt of embeddings."""
    return source_of(request.kv_transfer_params) if request.prompt_embeds is None else None


def _has_token_ids(request: Any) -> bool:
    """Whether the KV of a request depends on token ids, salt and adapter only."""
    return request.prompt_embeds is None and not request.mm_features


def _scope(request: Any) -> str:
    """Return what the KV of a request depends on besides its tokens."""
    adapter = request.lora_request.lora_name if request.lora_request else ""
    return scope_name(request.cache_salt or "", adapter)


def _num_external(request: Any) -> int:
    """Return how many tokens of a decode request can come from prefill: all but the last.

    The last one is the place of the first token, which prefill samples, or of the prompt's last, which decode computes.
    """
    return int(request.num_tokens) - 1


def _drop_last_token(request: Any) -> None:
    """Remove the last token of a prompt at prefill; decode computes it.

    Otherwise prefill's sliding windows and recurrent state would include that token, one more than decode needs.
    """
    if request.num_prompt_tokens > 1:
        request.prompt_token_ids.pop()
        request._all_token_ids.pop()  # noqa: SLF001 - vLLM has no public setter
        request.num_prompt_tokens -= 1
        request.block_hashes.clear()
        request.update_block_hashes()


def _prompt_name(request: Any, num_tokens: int) -> int:
    """Hash the first tokens of a request with its adapter and multimodal items: everything its KV depends on."""
    lora = request.lora_request.lora_name if request.lora_request else ""
    items = [feature.identifier for feature in request.mm_features]
    kind = json.dumps([lora, items])
    return prompt_name(request.all_token_ids[:num_tokens], kind)


def hand_off_config(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> HandOffConfig:
    """Read the settings in vLLM's `--kv-transfer-config`.

    Raises:
        ConfigInvalid: A setting is unknown or of the wrong type, or the hand-off does not support it.
    """
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    check_blocks_are_whole(vllm_config)
    role = _ROLES.get(transfer.kv_role or "")
    if role is None:
        raise ConfigInvalid(
            f"kv_role is {transfer.kv_role!r}; set kv_producer for prefill, kv_consumer for decode"
        )
    config = read_hand_off_config(
        transfer.kv_connector_extra_config,
        role=role,
        fingerprint=fingerprint(vllm_config, kv_cache_config),
    )
    if vllm_config.speculative_config is None:
        return config
    # A drafter runs its layers once for each token that it drafts, and writes the prompt's last block each time.
    return msgspec.structs.replace(config, push_granularity="chunk")


def check_blocks_are_whole(vllm_config: VllmConfig) -> None:
    """Raise ConfigInvalid if a block is split over ranks. Nodes call it too: vLLM hides what a rank of several raises."""
    parallel = vllm_config.parallel_config
    if parallel.prefill_context_parallel_size * parallel.decode_context_parallel_size > 1:
        raise ConfigInvalid(
            "--prefill-context-parallel-size, --decode-context-parallel-size: a block that is split over ranks cannot be "
            "handed off; remove the flag",
            topic="docs/vllm.md",
        )


def fingerprint(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Return a fingerprint, equal on two nodes only if they compute the same KV and lay it out alike.

    It does not depend on where the checkpoint is, nor on the version of vLLM.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    heads = _heads_of(vllm_config, kv_cache_config)
    digest = _digest(vllm_config, blocks=layout_facts(kv_cache_config, heads))
    kind = type(model.hf_text_config).__name__.removesuffix("Config")
    dtype = str(model.dtype).removeprefix("torch.")
    name = f"vllm-{kind}-{dtype}-{digest[:16]}"
    # Sizes that must be equal are part of the name, so that the operator sees which one differs.
    if heads.obstacle:
        name += f"-{heads.cause}-tp{parallel.tensor_parallel_size}"
    if parallel.pipeline_parallel_size > 1:
        name += f"-pp{parallel.pipeline_parallel_size}"
    return name


def _digest(vllm_config: VllmConfig, **more: object) -> str:
    """Hash the checkpoint and what its KV depends on besides the blocks of a rank."""
    model, transfer = vllm_config.model_config, vllm_config.kv_transfer_config
    extra = {} if transfer is None else transfer.kv_connector_extra_config
    checkpoint = _checkpoint_of(model, vllm_config.load_config.download_dir)
    facts = more | {
        "model": _model_facts(checkpoint, model),
        "dtype": str(model.dtype),
        "kv": vllm_config.cache_config.cache_dtype,
        "quantization": str(model.quantization),
        "adapters": extra.get("adapters", ""),
        # Each rank connects to ranks of the same stage.
        "stages": vllm_config.parallel_config.pipeline_parallel_size,
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    if checkpoint is not None:
        for sample in weight_samples(checkpoint):
            digest.update(sample)
    return digest.hexdigest()


def _heads_of(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, views: Iterable[Any] = ()
) -> Heads:
    num_ranks = vllm_config.parallel_config.tensor_parallel_size
    num_heads = vllm_config.model_config.get_total_num_kv_heads()
    return heads_of(kv_cache_config, num_ranks, num_heads, views)


def _checkpoint_of(model: ModelConfig, download_dir: str | None) -> Path | None:
    """Return the directory or file of the weights: of a name on the Hub, the snapshot that vLLM has loaded.

    None if the weights are in no file here, as with other sources that vLLM supports.
    """
    path = Path(model.model)
    if path.exists():
        return path
    try:
        return Path(
            snapshot_download(
                model.model, revision=model.revision, cache_dir=download_dir, local_files_only=True
            )
        )
    except (HfHubHTTPError, ValueError, OSError):
        return None


def _model_facts(checkpoint: Path | None, model: ModelConfig) -> object:
    """Return what determines the model's computation besides its weights, as a JSON value.

    That is the checkpoint's `config.json`: vLLM's parsed config also has the path, and defaults of a version.
    """
    if checkpoint is None:
        return [model.model, model.revision, str(model.hf_overrides)]
    file = checkpoint / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else model.hf_config.to_dict()
    cosmetic = ("_name_or_path", "transformers_version")
    kept = {name: value for name, value in config.items() if name not in cosmetic}
    return [kept, str(model.hf_overrides)]
