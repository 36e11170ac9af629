"""`vllm serve` with NixlConnector, or with a connector that takes MooncakeConnector's transfers.

With NixlConnector, prefill computes first; its answer tells decode's engine which blocks to pull. With the others, both
halves run at once, and use the same transfer id.

Decode's engine computes the last prompt token and draws the first token itself. The token that prefill must draw is
ignored, so it is drawn in the cheapest way, and the two engines need not agree on it.
"""

import json
import re
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec

from tandem.router.stock_options import StockOptions
from tandem.router.workers.adapter import EngineTarget
from tandem.stock.dialect import EngineFacts, shared_sampling
from tandem.stock.http_engine import HttpEngine
from tandem.stock.rooms import Meeting, Offer
from tandem.vllm.node.outputs import EngineCounts, HandOffParams, StepOutput
from tandem.wire.errors import EngineFailed, NoNodeAvailable, PeerLost
from tandem.wire.generation import Finish, GenerateRequest, Grammar, Room, TokenLogprobs

# `/inference/v1/generate` needs `--enable-scale-out`.
PATH = "/v1/completions"
LEARN_S = 20.0
# Time for decode to ask for a prompt's blocks. Once it has, its engine renews the lease.
LEASE_S = 10.0
ASK = {"do_remote_decode": True, "do_remote_prefill": False}
FETCH = {"do_remote_decode": False, "do_remote_prefill": True}
# vLLM's default, on prefill.
BOOTSTRAP_PORT = 8998
_WAITING = b"num_requests_waiting_by_reason"
_LOAD = (b"num_requests_running", _WAITING, b"kv_cache_usage_perc")
_NAMES = b"|".join((*_LOAD, b"cache_config_info", b"process_start_time_seconds"))
_SAMPLE = re.compile(rb"^(?:vllm:)?(" + _NAMES + rb")(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(rb'(\w+)="([^"]*)"')
_GRAMMARS = {"json_schema": "json", "ebnf": "grammar"}
_TOKEN = len("token_id:")
_UNKNOWN = "unknown"


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None = None


class _CompletionChoice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _Logprobs | None = None
    prompt_logprobs: list[dict[int, _PromptLogprob] | None] | None = None


class _Completion(msgspec.Struct):
    choices: list[_CompletionChoice] = []
    error: Any = None
    kv_transfer_params: dict[str, Any] | None = None


class _Card(msgspec.Struct):
    id: str
    root: str
    max_model_len: int
    parent: str | None = None  # of an adapter


class _Cards(msgspec.Struct):
    data: list[_Card]


_COMPLETION = msgspec.json.Decoder(_Completion)


class VllmDialect:
    """Asks a `vllm serve`. Implements `Dialect`."""

    engine = "vllm"

    def __init__(self, http: HttpEngine, target: EngineTarget, options: StockOptions) -> None:
        self._http, self.url, self._target = http, http.url, target
        self._connector = options.kv_connector
        self._bootstrap = http.on_port(target.bootstrap_port or BOOTSTRAP_PORT)
        self._life, self._engine_id = _UNKNOWN, ""
        self._num_blocks = self._block_size = 0
        self._generation: object = None

    async def learn(self) -> EngineFacts:
        """Return the engine's facts; raise `NoNodeAvailable` if it has another connector."""
        http = self._http
        cards = msgspec.json.decode(await http.ask("/v1/models", limit_s=LEARN_S), type=_Cards).data
        version = json.loads(await http.ask("/version", limit_s=LEARN_S))["version"]
        values, pool = self._metrics(await http.ask("/metrics", limit_s=LEARN_S))
        # One block is vLLM's null block, which no request owns.
        self._num_blocks, self._block_size = (
            int(pool["num_gpu_blocks"]) - 1,
            int(pool["block_size"]),
        )
        if self._connector == "nixl":
            reference = await self._probe()
            self._engine_id = _engine_of(reference)
            self._generation = reference.get("remote_registration_generation")
        elif self._target.role == "prefill":
            self._engine_id = await self._registered_id()
        card = cards[0]
        self._life = _life_of(values)
        return EngineFacts(
            life=self._life,
            name=card.id,
            aliases=[each.id for each in cards[1:] if each.parent is None],
            kind=f"vllm-{version}-{self._connector}-{card.id}",
            version=version,
            model=card.root,
            context_length=card.max_model_len,
            num_ranks=len(values[b"kv_cache_usage_perc"]),
            max_prompt_tokens=min(card.max_model_len, self._num_blocks * self._block_size) - 1,
        )

    async def _probe(self) -> dict[str, Any]:
        """Return a reference to KV; raise `NoNodeAvailable` if the engine has no NixlConnector."""
        probe = {"prompt": [1], "max_tokens": 1, "ignore_eos": True, "kv_transfer_params": ASK}
        answer = _COMPLETION.decode(await self._http.ask(PATH, probe, LEARN_S))
        reference = answer.kv_transfer_params
        if not reference or "remote_engine_id" not in reference:
            raise NoNodeAvailable(
                f"{self.url} runs vLLM without NixlConnector: start it with --kv-transfer-config "
                '\'{"kv_connector": "NixlConnector", "kv_role": "kv_both"}\', or start the router with --kv-connector'
            )
        return reference

    async def _registered_id(self) -> str:
        """Return the id under which prefill's engine has registered at its bootstrap server."""
        ranks = json.loads(await self._bootstrap.ask("/query", limit_s=LEARN_S))
        if len(ranks) != 1:
            raise NoNodeAvailable(
                f"{self._bootstrap.url}/query lists {len(ranks)} data-parallel ranks: --kv-connector mooncake serves "
                "engines with one"
            )
        (rank,) = ranks.values()
        return str(rank["engine_id"])

    async def poll(self) -> EngineCounts:
        """Return the load; raise `PeerLost` also if another process answers."""
        values, _pool = self._metrics(await self._http.poll("/metrics"))
        if _life_of(values) != self._life:
            raise PeerLost(f"{self.url} was restarted")
        used = values[b"kv_cache_usage_perc"]
        num_pages = len(used) * self._num_blocks
        return EngineCounts(
            num_running=int(sum(values[b"num_requests_running"])),
            num_waiting=int(sum(values[_WAITING])),
            num_pages=num_pages,
            pages_free=num_pages - round(self._num_blocks * sum(used)),
            page_size=self._block_size,
        )

    def _metrics(self, page: bytes) -> tuple[dict[bytes, list[float]], dict[str, str]]:
        """Return the used metrics, each with a value per data-parallel rank, and the facts of a rank's pool."""
        values: dict[bytes, list[float]] = {}
        pool: dict[str, str] = {}
        for name, labels, value in _SAMPLE.findall(page):
            if b'reason="deferred"' in labels:
                continue  # waits for its blocks from prefill, and not for room
            values.setdefault(name, []).append(float(value))
            if name == b"cache_config_info":
                pool = {key.decode(): text.decode() for key, text in _LABEL.findall(labels)}
        if not pool or any(name not in values for name in _LOAD):
            raise NoNodeAvailable(
                f"{self.url} reports no load at /metrics: start vLLM there, without --disable-log-stats"
            )
        return values, pool

    def body(self, request: GenerateRequest, hand_off: HandOffParams | None) -> dict[str, object]:
        """Return the body of a request; see `Dialect`."""
        logprobs = request.logprobs
        is_decode = hand_off is not None and hand_off.is_decode
        body: dict[str, object] = {
            "prompt": request.prompt_ids,
            "return_token_ids": True,
            "request_id": request.request_id,
        }
        if request.cache_salt:
            body["cache_salt"] = request.cache_salt
        if logprobs is not None and logprobs.prompt_start >= 0 and not is_decode:
            body["prompt_logprobs"] = logprobs.num_top
        if hand_off is not None and not is_decode:
            # Not to end at a stop token: vLLM would free the blocks at once.
            return body | {"max_tokens": 1, "temperature": 0, "ignore_eos": True}
        return body | _sampling(request)

    async def whole(self, body: dict[str, object]) -> AsyncIterator[StepOutput]:
        """Generate without another node."""
        if "prompt_logprobs" in body:  # streams have none
            yield _output(body, _COMPLETION.decode(await self._http.ask(PATH, body)))
            return
        async for output in self._stream(body):
            yield output

    async def prefill(self, body: dict[str, object], offer: Offer) -> AsyncIterator[StepOutput]:
        """Compute a prompt, and wait until decode has its KV."""
        asked = body | {"kv_transfer_params": ASK}
        if self._connector == "mooncake":
            name = {"transfer_id": f"xfer-{uuid.uuid4()}"}
            # Of TandemConnector: it need not compute before decode has room.
            asked["kv_transfer_params"] = ASK | name | {"waits_for_grant": True}
            address = {"remote_bootstrap_addr": self._bootstrap.url}
            offer.put(FETCH | name | address | {"remote_engine_id": self._engine_id})
        answer = _COMPLETION.decode(await self._http.ask(PATH, asked))
        if self._connector == "nixl":
            offer.put(self._checked(answer.kv_transfer_params))
        output = _output(asked, answer)
        yield StepOutput("", prompt_logprobs=output.prompt_logprobs)
        await offer.landed(LEASE_S)

    def _checked(self, reference: dict[str, Any] | None) -> dict[str, Any]:
        """Return a reference of the engine that `learn` queried."""
        if not reference:
            raise EngineFailed(f"{self.url} returned no reference to its KV")
        generation = reference.get("remote_registration_generation")
        if _engine_of(reference) != self._engine_id or generation != self._generation:
            self._life = _UNKNOWN  # the next poll ends this life of the node
            raise PeerLost(f"{self.url} was restarted")
        return reference

    async def decode(
        self, body: dict[str, object], rooms: Meeting, room: Room
    ) -> AsyncIterator[StepOutput]:
        """Pull the KV of a prompt, and generate. The first token is sent only once the pull is known to be valid."""
        reference, is_confirmed = await rooms.take(room), False
        async for output in self._stream(body | {"kv_transfer_params": reference}):
            if not is_confirmed:
                await rooms.confirm(room)
                is_confirmed = True
            yield output

    async def _stream(self, body: dict[str, object]) -> AsyncIterator[StepOutput]:
        async for data in self._http.events(PATH, body | {"stream": True}):
            output = _output(body, _COMPLETION.decode(data))
            if output.token_ids or output.finish is not None:
                yield output


def _engine_of(reference: Mapping[str, Any]) -> str:
    # Data-parallel ranks have the same id with different suffixes.
    return str(reference["remote_engine_id"]).partition("_dp")[0]


def _life_of(values: Mapping[bytes, list[float]]) -> str:
    """Return what differs after a restart; constant if vLLM runs several API servers, which do not report it."""
    return str(values.get(b"process_start_time_seconds", []))


def _sampling(request: GenerateRequest) -> dict[str, object]:
    sampling = request.sampling
    params = shared_sampling(request, "max_tokens", "min_tokens")
    if sampling.seed is not None:
        # vLLM cannot skip draws. With the same seed, a replay would repeat those of the first tokens.
        params["seed"] = (sampling.seed + request.num_prior_tokens) % (1 << 63)
    if sampling.grammar is not None:
        params["structured_outputs"] = _structured(sampling.grammar)
    if request.logprobs is not None:
        params |= {"logprobs": request.logprobs.num_top, "return_tokens_as_token_ids": True}
    return params


def _structured(grammar: Grammar) -> dict[str, object]:
    if grammar.kind == "json_object":
        return {"json_object": True}
    return {_GRAMMARS.get(grammar.kind, grammar.kind): grammar.text}


def _output(body: Mapping[str, object], answer: _Completion) -> StepOutput:
    """Convert an answer or an event of a stream."""
    if answer.error is not None:
        raise EngineFailed(f"the engine failed the request: {str(answer.error)[:300]}")
    if not answer.choices:
        return StepOutput("")
    choice = answer.choices[0]
    ids = choice.token_ids or []
    logprobs: list[TokenLogprobs] = []
    if choice.logprobs is not None:
        tops = choice.logprobs.top_logprobs or [None] * len(choice.logprobs.token_logprobs)
        num_top = body.get("logprobs")
        logprobs = [
            _row(value, {int(name[_TOKEN:]): each for name, each in (top or {}).items()}, num_top)
            for value, top in zip(choice.logprobs.token_logprobs, tops, strict=True)
        ]
    # The entry of the prompt's own token comes first.
    prompt_logprobs = [
        _row(
            next(iter(entry.values())).logprob,
            {token: each.logprob for token, each in entry.items()},
            body.get("prompt_logprobs"),
        )
        for entry in choice.prompt_logprobs or ()
        if entry
    ]
    finish = _finish(choice, ids)
    return StepOutput("", ids, logprobs, finish=finish, prompt_logprobs=prompt_logprobs)


def _row(logprob: float | None, top: Mapping[int, float], num_top: object) -> TokenLogprobs:
    assert isinstance(num_top, int)
    likeliest = sorted(top.items(), key=lambda each: -each[1])[:num_top]
    return TokenLogprobs(logprob=logprob, top=likeliest)


def _finish(choice: _CompletionChoice, ids: list[int]) -> Finish | None:
    match choice.finish_reason:
        case None:
            return None
        case "length":
            return Finish(reason="length")
        case "stop":
            matched = choice.stop_reason if isinstance(choice.stop_reason, int) else None
            return Finish(reason="stop", matched=ids[-1] if matched is None and ids else matched)
        case reason:
            raise EngineFailed(f"the engine ended the request: {reason}")
