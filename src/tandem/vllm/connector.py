"""The KV connector that vLLM loads, in its scheduler and in each of its workers.

In an unmodified `vllm serve`:

    --kv-transfer-config '{"kv_connector": "TandemConnector", "kv_role": "kv_producer",
      "kv_connector_extra_config": {"bootstrap_port": 8998}}'

`kv_producer` is prefill, `kv_consumer` decode. A request names its room in `kv_transfer_params`: `bootstrap_room`, and for
decode also `bootstrap_host` and `bootstrap_port` of the prefill.
"""

import hashlib
import json
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import msgspec
from typing_extensions import override
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.kv_cache_interface import KVCacheConfig

from tandem.engine.weight_files import weight_samples
from tandem.vllm.halves import (
    BlockIds,
    DecodeHalves,
    Orders,
    PrefillHalves,
    Reports,
    draws_first,
    prompt_name,
    room_of,
    source_of,
)
from tandem.vllm.kv_config import blocks_of, facts_of, groups_of
from tandem.vllm.versions import check_version
from tandem.vllm.worker import HandOffConfig, Rank, WorkerHalf, make_worker
from tandem.wire.errors import ConfigInvalid, EngineFailed

# With only transfers to wait for, vLLM steps without a pause, and would leave no time to the threads that move bytes.
IDLE_WAIT_S = 0.002

_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode"}


@dataclass
class StepOrders(KVConnectorMetadata):
    """Orders as vLLM carries them to its workers."""

    orders: Orders


@dataclass
class StepReports(KVConnectorWorkerMetadata):
    """Reports as vLLM carries them to its scheduler."""

    reports: Reports

    @override
    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, StepReports)
        self.reports.add(other.reports)
        return self


class TandemConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module. vLLM makes one for its scheduler and one for each worker.

    Attributes:
        worker: In a worker, its half; None before the blocks exist.
        keeps_all: Whether vLLM keeps every block of a request: the model has no windows and no states.
        moved_bytes: In the scheduler: pushed or received by all ranks so far.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_version()
        self._config = hand_off_config(vllm_config, kv_cache_config)
        parallel = vllm_config.parallel_config
        groups = groups_of(kv_cache_config)
        self._num_groups = len(groups)
        self.keeps_all = all(group.keeps_all for group in groups)
        self._hash_tokens = kv_cache_config.hash_block_size or vllm_config.cache_config.block_size
        self._num_ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        self._is_prefill = self._config.role == "prefill"
        self.worker: WorkerHalf | None = None
        self._is_idle = False
        self._prefill = PrefillHalves(groups, self._num_ranks)
        self._decode = DecodeHalves(groups)
        self._news = Reports()
        self._loading: dict[str, Any] = {}  # requests of decode whose blocks are awaited
        self.moved_bytes = 0

    # ── the scheduler's side ─────────────────────────────────────────────────────────────────────

    @override
    def on_new_request(self, request: Any) -> None:
        room = room_of(request.kv_transfer_params)
        if self._is_prefill and room is not None:
            name = _prompt_name(request, request.num_prompt_tokens)
            if not self.keeps_all and not draws_first(request.kv_transfer_params):
                _leave_last_out(request)
            self._prefill.begin(request.request_id, room, request.num_prompt_tokens, name)
        elif room is not None and draws_first(request.kv_transfer_params):
            # A prompt that is cached here to its end would be asked of nobody, and its first token neither: its last
            # block must not be found. A request has as many hashes as whole blocks.
            last = (_num_prompt(request) - 1) // self._hash_tokens
            if last < len(request.block_hashes):
                request.block_hashes[last] = secrets.token_bytes(len(request.block_hashes[last]))

    @override
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._is_prefill:
            return (0 if self._prefill.may_compute(request.request_id) else None), False
        source = source_of(request.kv_transfer_params)
        num_missing = _num_prompt(request) - num_computed_tokens
        num_external = self._decode.num_external(request.request_id, source, num_missing)
        return num_external, num_external > 0

    @override
    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Keep vLLM from clearing blocks that prefill may write already."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    @override
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        source = source_of(request.kv_transfer_params)
        if self._is_prefill or source is None:
            return
        page_ids = blocks.get_block_ids()
        num_tokens = _num_prompt(request)
        if num_external_tokens:
            self._loading[request.request_id] = request
        is_first = draws_first(request.kv_transfer_params)
        source = replace(source, prompt=_prompt_name(request, num_tokens + (not is_first)))
        is_new = self._decode.allocated(
            request.request_id, source, page_ids, num_tokens, num_external_tokens
        )
        if is_new and not num_external_tokens and is_first:
            # Nothing would bring the first token, and vLLM would go on behind what holds its place.
            error = EngineFailed(
                "vLLM found the whole prompt in its cache, and asked for no first token"
            )
            self._news.failed[request.request_id] = error.info()

    @override
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        if not self._is_prefill:
            return StepOrders(self._decode.take_orders())
        for request_id in scheduler_output.preempted_req_ids or ():
            if self._prefill.preempted(request_id):
                error = EngineFailed("vLLM needed the blocks of this prompt for others")
                self._news.failed[request_id] = error.info()
        num_new = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            self._prefill.computes(
                new.req_id, new.block_ids, new.num_computed_tokens, num_new[new.req_id]
            )
        cached = scheduler_output.scheduled_cached_reqs
        rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request_id, block_ids, num_before in rows:
            pages: BlockIds = block_ids or [()] * self._num_groups
            self._prefill.computes(request_id, pages, num_before, num_new[request_id])
        return StepOrders(self._prefill.take_orders())

    @override
    def update_connector_output(self, connector_output: Any) -> None:
        told = connector_output.kv_connector_worker_meta
        if not isinstance(told, StepReports):
            return
        reports = told.reports
        self.moved_bytes += reports.moved_bytes
        landed = self._decode.heard(reports)
        for request_id, first in landed.items():
            request = self._loading.pop(request_id)
            if draws_first(request.kv_transfer_params):
                _put_first(request, first.token)
        handed_off = Counter(self._prefill.heard(reports))
        self._news.add(Reports(failed=reports.failed, handed_off=handed_off, landed=landed))

    @override
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._is_prefill:
            first = request.output_token_ids[0] if request.num_output_tokens else None
            return self._prefill.finished(request.request_id, first, block_ids), None
        self._loading.pop(request.request_id, None)
        self._decode.finished(request.request_id)
        return False, None

    def take_news(self) -> Reports:
        """Return what happened since the last call: `handed_off`, `failed` and `landed`."""
        news, self._news = self._news, Reports()
        return news

    # ── a worker's side ──────────────────────────────────────────────────────────────────────────

    @override
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        memory = next(iter(kv_caches.values()))
        memory = memory[0] if isinstance(memory, list) else memory
        blocks = blocks_of(self._kv_cache_config)
        tensor = get_tp_group()
        rank = Rank(tensor.rank_in_group, tensor.world_size, get_pp_group().rank_in_group)
        self.worker = make_worker(self._config, memory, blocks, rank)

    @override
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepOrders)
        # Before the forward, so that a grant need not wait for it.
        if self.worker is not None:
            self.worker.follow(connector_metadata.orders)

    @override
    def start_load_kv(self, forward_context: Any, **_options: Any) -> None:
        self._is_idle = forward_context is None or forward_context.attn_metadata is None

    @override
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request runs when all its layers have landed."""

    @override
    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_options: Any
    ) -> None:
        if self.worker is not None:
            self.worker.wrote(layer_name)

    @override
    def wait_for_save(self) -> None:
        if self.worker is not None:
            self.worker.saved()

    @override
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self.worker is not None
        wait_s = IDLE_WAIT_S if self._is_idle else 0.0
        results = self.worker.results(finished_req_ids, wait_s=wait_s)
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
        if self.worker is not None:
            self.worker.close()

    @classmethod
    @override
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Replayed graphs skip the hooks of layers."""
        return bool(extra_config.get("push_granularity", "layer") == "layer")


def _num_prompt(request: Any) -> int:
    """Return how many prompt tokens of a decode's request may come from prefill.

    vLLM computes the last one: that is the place of the answer's first token, if prefill draws it.
    """
    return int(request.num_prompt_tokens) - 1


def _leave_last_out(request: Any) -> None:
    """Have prefill compute all of a prompt but its last token, which decode computes.

    What is kept of a window, or as a state, would else be that of the last token, and not of the one before.
    """
    if request.num_prompt_tokens > 1:
        request.prompt_token_ids.pop()
        request._all_token_ids.pop()  # noqa: SLF001 - vLLM has no other way
        request.num_prompt_tokens -= 1
        request.block_hashes.clear()
        request.update_block_hashes()


def _prompt_name(request: Any, num_tokens: int) -> int:
    """Return the name of a request's first tokens, and of what else vLLM computes their KV from."""
    lora = request.lora_request.lora_name if request.lora_request else ""
    items = [feature.identifier for feature in request.mm_features]
    kind = json.dumps([lora, items])
    return prompt_name(request.prompt_token_ids[:num_tokens], kind)


def _put_first(request: Any, token: int) -> None:
    """Put the answer's first token, which prefill drew, in its place at the end of vLLM's prompt."""
    request.prompt_token_ids[-1] = token
    request._all_token_ids[-1] = token  # noqa: SLF001 - vLLM has no other way
    request.block_hashes.clear()
    request.update_block_hashes()


def hand_off_config(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> HandOffConfig:
    """Return the settings in vLLM's `--kv-transfer-config`.

    Raises:
        ConfigInvalid: A setting is unknown or of the wrong type.
    """
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    role = _ROLES.get(transfer.kv_role or "")
    if role is None:
        raise ConfigInvalid("kv_role: give kv_producer to prefill and kv_consumer to decode")
    given: Mapping[str, object] = transfer.kv_connector_extra_config
    same = fingerprint(vllm_config, kv_cache_config)
    settings = {"fingerprint": same, **given, "role": role}
    if unknown := sorted(settings.keys() - {each.name for each in fields(HandOffConfig)}):
        raise ConfigInvalid(f"kv_connector_extra_config: {', '.join(unknown)} is not known")
    try:
        return msgspec.convert(settings, HandOffConfig)
    except msgspec.ValidationError as error:
        raise ConfigInvalid(f"kv_connector_extra_config: {error}") from error


# How a model and its KV are divided among workers: a rank is linked to the same rank of the other half.
_SIZES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
    "cp_kv_cache_interleave_size",
)


def fingerprint(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Return a name that is equal on two nodes only if they compute the same KV in the same version of vLLM."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    transfer = vllm_config.kv_transfer_config
    extra = {} if transfer is None else transfer.kv_connector_extra_config
    facts = {
        "vllm": check_version(),
        "model": model.hf_config.to_dict(),
        "revision": model.revision,
        "dtype": str(model.dtype),
        "kv": cache.cache_dtype,
        "quantization": str(model.quantization),
        "adapters": extra.get("adapters", ""),
        "blocks": facts_of(kv_cache_config),
        "ranks": [[name, getattr(vllm_config.parallel_config, name, 1)] for name in _SIZES],
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    path = Path(model.model)
    if path.is_dir():
        for sample in weight_samples(path):
            digest.update(sample)
    kind = type(model.hf_text_config).__name__.removesuffix("Config")
    dtype = str(model.dtype).removeprefix("torch.")
    return f"vllm-{kind}-{dtype}-{digest.hexdigest()[:16]}"
