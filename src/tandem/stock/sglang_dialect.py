"""SGLang's prefill and decode servers. Both halves of a request run at once, and meet at prefill's bootstrap server.

A decode server computes no prompts itself. It streams the answer from the first token on, which prefill draws and sends with
the KV.
"""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import msgspec

from tandem.router.stock_options import StockOptions
from tandem.router.workers.adapter import EngineTarget
from tandem.stock.dialect import EngineFacts, shared_sampling
from tandem.stock.http_engine import MAX_QUOTED, HttpEngine, error_of
from tandem.stock.rooms import Meeting, Offer
from tandem.vllm.node.outputs import EngineCounts, HandOffParams, StepOutput
from tandem.wire.errors import NoNodeAvailable, PeerLost, TandemError
from tandem.wire.generation import Finish, GenerateRequest, Room, TokenLogprobs

PATH = "/generate"
LEARN_S = 20.0
# Longest step of a scheduler, which answers `/server_info` between two steps.
STEP_S = 60.0
# Time for decode's half to come, after prefill's server has sent the KV.
LANDED_S = 30.0
# SGLang's default.
BOOTSTRAP_PORT = 8998
_ANY_OBJECT = '{"type": "object"}'

# Log-probability, token id, text.
_Row = tuple[float | None, int, str | None]


class _FinishReason(msgspec.Struct):
    type: str
    matched: Any = None
    message: str = ""
    status_code: int | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: int | None = None


class _Meta(msgspec.Struct):
    finish_reason: _FinishReason | None = None
    input_token_logprobs: list[_Row] = []
    input_top_logprobs: list[list[_Row] | None] = []
    output_token_logprobs: list[_Row] = []
    output_top_logprobs: list[list[_Row] | None] = []


class _StreamEvent(msgspec.Struct):
    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    output_ids: list[int] = []
    error: _Error | str | None = None


class _Transfers(msgspec.Struct, frozen=True):
    decode_prealloc_queue_reqs: int = 0
    decode_transfer_queue_reqs: int = 0


class _Queues(msgspec.Struct, frozen=True):
    prealloc_ready: int = 0


class _RankLoad(msgspec.Struct):
    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    max_running_requests: int = 0
    disaggregation: _Transfers = _Transfers()
    queues: _Queues = _Queues()

    @property
    def num_blocked(self) -> int:
        """Requests that wait for pages or a place in the batch, and not for prefill."""
        transfers = self.disaggregation
        num_handshaking = transfers.decode_prealloc_queue_reqs - self.queues.prealloc_ready
        return self.num_waiting_reqs - transfers.decode_transfer_queue_reqs - num_handshaking


class _Loads(msgspec.Struct):
    loads: list[_RankLoad]


_STREAM_EVENT = msgspec.json.Decoder(_StreamEvent)


class SglangDialect:
    """Asks a server of SGLang's disaggregation. Implements `Dialect`."""

    engine = "sglang"

    def __init__(self, http: HttpEngine, target: EngineTarget, _options: StockOptions) -> None:
        self._http, self.url, self._target = http, http.url, target
        self._life, self._page_size = "", 1
        self._is_incremental = False
        self._bootstrap: dict[str, object] = {}
        self._aborts = set[asyncio.Task[None]]()

    async def learn(self) -> EngineFacts:
        """Return the server's facts; raise `NoNodeAvailable` if it has another role."""
        info = await self._info()
        model = json.loads(await self._http.ask("/model_info", limit_s=LEARN_S))
        role, mode = self._target.role, info["disaggregation_mode"]
        if mode != role:
            raise NoNodeAvailable(
                f"{self.url} runs with --disaggregation-mode {mode}: start it with {role}, or list it in the other role"
            )
        reported = info.get("disaggregation_bootstrap_port", BOOTSTRAP_PORT)
        self._bootstrap = {
            "bootstrap_host": urlsplit(self.url).netloc.rpartition(":")[0],
            "bootstrap_port": self._target.bootstrap_port or reported,
        }
        self._is_incremental = bool(info.get("incremental_streaming_output"))
        self._life, self._page_size = _life_of(info), info.get("page_size") or 1
        name, longest = model["served_model_name"], info["max_req_input_len"]
        layout = f"{info.get('dtype')}-{info.get('kv_cache_dtype')}-{self._page_size}"
        return EngineFacts(
            life=self._life,
            name=name,
            kind=f"sglang-{info['version']}-{layout}-{model.get('weight_version')}-{name}",
            version=info["version"],
            model=model["model_path"],
            # SGLang leaves six tokens free.
            context_length=info.get("context_length") or longest + 6,
            max_prompt_tokens=longest - 1,
            num_ranks=info.get("dp_size", 1),
            takes_prompts=False,
        )

    async def _info(self) -> dict[str, Any]:
        info: dict[str, Any] = json.loads(await self._http.ask("/server_info", limit_s=STEP_S))
        return info

    async def poll(self) -> EngineCounts:
        """Return the load; raise `PeerLost` also if another process answers."""
        page = await self._http.poll("/v1/loads?include=core,disagg,queues")
        if _life_of(await self._info()) != self._life:
            raise PeerLost(f"{self.url} was restarted")
        ranks, size = msgspec.json.decode(page, type=_Loads).loads, self._page_size
        num_tokens = sum(each.max_total_num_tokens for each in ranks)
        return EngineCounts(
            num_running=sum(each.num_running_reqs for each in ranks),
            num_waiting=sum(each.num_blocked for each in ranks),
            max_running=sum(each.max_running_requests for each in ranks),
            num_pages=num_tokens // size,
            pages_free=(num_tokens - sum(each.num_used_tokens for each in ranks)) // size,
            page_size=size,
        )

    def body(self, request: GenerateRequest, hand_off: HandOffParams | None) -> dict[str, object]:
        """Return the body of a request; see `Dialect`."""
        logprobs = request.logprobs
        is_decode = hand_off is not None and hand_off.is_decode
        body: dict[str, object] = {
            "input_ids": request.prompt_ids,
            "sampling_params": _sampling(request),
            # Not the request's own: a second attempt may come before the first one has been aborted.
            "rid": uuid.uuid4().hex,
            "stream": True,
        }
        if request.cache_salt:
            body["extra_key"] = request.cache_salt
        if hand_off is not None:
            body["bootstrap_room"] = hand_off.room
        if logprobs is not None:
            has_prompt = logprobs.prompt_start >= 0 and not is_decode
            body |= {"return_logprob": True, "top_logprobs_num": logprobs.num_top}
            body["logprob_start_len"] = 0 if has_prompt else -1
        return body

    async def whole(self, body: dict[str, object]) -> AsyncIterator[StepOutput]:
        """Generate without another node."""
        async for output in self._stream(body):
            yield output

    async def prefill(self, body: dict[str, object], offer: Offer) -> AsyncIterator[StepOutput]:
        """Compute a prompt, and send its KV to decode's server."""
        offer.put(self._bootstrap)
        async for output in self._stream(body | self._bootstrap):
            yield StepOutput("", prompt_logprobs=output.prompt_logprobs)
        await offer.landed(LANDED_S)

    async def decode(
        self, body: dict[str, object], rooms: Meeting, room: Room
    ) -> AsyncIterator[StepOutput]:
        """Get the KV of a prompt, and generate."""
        is_confirmed = False
        async for output in self._stream(body | dict(await rooms.take(room))):
            if not is_confirmed:
                await rooms.confirm(room)
                is_confirmed = True
            yield output

    async def _stream(self, body: dict[str, object]) -> AsyncIterator[StepOutput]:
        num_seen = 0
        has_prompt = body.get("logprob_start_len") == 0
        with self._aborting(body["rid"]):
            async for data in self._http.events(PATH, body):
                answer = _STREAM_EVENT.decode(data)
                _check(answer, self.url)
                output = _output(answer, 0 if self._is_incremental else num_seen)
                if has_prompt:
                    output.prompt_logprobs.extend(_prompt_rows(answer.meta_info))
                    has_prompt = False
                num_seen += len(output.token_ids)
                if output.token_ids or output.finish is not None:
                    yield output

    @contextmanager
    def _aborting(self, rid: object) -> Iterator[None]:
        """Abort the request if the block ends early: SGLang looks only every few seconds for closed connections."""
        try:
            yield
        except BaseException:
            task = asyncio.create_task(self._abort(rid))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)
            raise

    async def _abort(self, rid: object) -> None:
        with suppress(TandemError):  # the closed connection aborts it, too
            await self._http.ask("/abort_request", {"rid": rid}, LEARN_S)


def _life_of(info: Mapping[str, Any]) -> str:
    """Return what differs after a restart: how long each part of the start took, or the epoch of a node of ours."""
    return json.dumps([info.get("startup_time"), info.get("epoch")])


def _sampling(request: GenerateRequest) -> dict[str, object]:
    sampling = request.sampling
    params = shared_sampling(request, "max_new_tokens", "min_new_tokens")
    if sampling.seed is not None:
        # SGLang draws by seed and position, and only with --enable-deterministic-inference.
        params["sampling_seed"] = sampling.seed
    if (grammar := sampling.grammar) is not None:
        is_any = grammar.kind == "json_object"
        kind, text = ("json_schema", _ANY_OBJECT) if is_any else (grammar.kind, grammar.text)
        params[kind] = text
    return params


def _check(answer: _StreamEvent, url: str) -> None:
    """Raise the error that an event reports: the stream has status 200 also if the request is invalid."""
    reason = answer.meta_info.finish_reason
    if (error := answer.error) is not None:
        error = _Error(error) if isinstance(error, str) else error
        raise error_of(url, error.code or 500, error.message[:MAX_QUOTED])
    if reason is not None and reason.type not in ("stop", "length"):
        raise error_of(url, reason.status_code or 500, (reason.message or reason.type)[:MAX_QUOTED])


def _output(answer: _StreamEvent, num_seen: int) -> StepOutput:
    """Convert an event of a stream, without its first `num_seen` tokens."""
    meta, ids = answer.meta_info, answer.output_ids[num_seen:]
    rows = _rows(meta.output_token_logprobs, meta.output_top_logprobs)[num_seen:]
    return StepOutput("", ids, rows, finish=_finish(meta.finish_reason, ids))


def _prompt_rows(meta: _Meta) -> list[TokenLogprobs]:
    """Return the log-probabilities of a prompt from its second token on."""
    return _rows(meta.input_token_logprobs, meta.input_top_logprobs)[1:]


def _rows(tokens: list[_Row], tops: list[list[_Row] | None]) -> list[TokenLogprobs]:
    padded = tops + [None] * (len(tokens) - len(tops))
    return [
        TokenLogprobs(
            logprob=logprob,
            top=[(token, value) for value, token, _ in top or () if value is not None],
        )
        for (logprob, _token, _text), top in zip(tokens, padded, strict=True)
    ]


def _finish(reason: _FinishReason | None, ids: list[int]) -> Finish | None:
    if reason is None:
        return None
    if reason.type == "length":
        return Finish(reason="length")
    last = ids[-1] if ids else None
    return Finish(
        reason="stop", matched=reason.matched if isinstance(reason.matched, int) else last
    )
