"""A `vllm serve` in this process: its HTTP, and tokens that depend on the prompt alone.

It has NixlConnector, and takes MooncakeConnector's transfers with a bootstrap server on the same port.
"""

import asyncio
import json
import uuid
from contextlib import asynccontextmanager
from functools import partial

from aiohttp import web

from tandem.cli.up import free_ports
from tests.http_server import HttpServer
from tests.patience import until_async

GARBAGE = 99


def continued(prompt, num) -> list[int]:
    """Return the tokens that follow a prompt."""
    ids = list(prompt)
    for _ in range(num):
        ids.append(3 + (7 * ids[-1] + len(ids)) % 90)
    return ids[len(prompt) :]


class FakeEngine:
    """The HTTP of an engine at one address, across its restarts.

    Attributes:
        bodies: Bodies of the requests that it received, without probes.
        num_running: Requests that it runs.
        pause_s: Time between two tokens of a stream.
        stop_at: Number of tokens after which streams wait for `going`.
        life: What differs between two lives.
        computing: While it is not set, prefill's halves wait.
        unfrozen: While it is not set, nothing is answered, as after SIGSTOP.
        reports: While it is not set, polls are not answered.
        end: Reason of the last token of a stream.
        error, status: Answer to every request, unless the error is empty.
    """

    engine, path = "", ""

    def __init__(self, model: str) -> None:
        self.port = free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        self.model = model
        self.bodies: list[dict] = []
        self.num_running, self.stop_at, self.life = 0, 1 << 30, 1.0
        self.pause_s = 0.0
        self.going, self.unfrozen = asyncio.Event(), asyncio.Event()
        self.computing, self.reports = asyncio.Event(), asyncio.Event()
        for event in (self.unfrozen, self.computing, self.reports):
            event.set()
        self.end, self.error, self.status = "length", "", 500
        self._server: HttpServer | None = None
        self._open: set[asyncio.BaseTransport] = set()

    def routes(self) -> list[web.RouteDef]:
        """Return the routes but `path`."""
        raise NotImplementedError

    async def answer(self, request, body):
        """Answer a request of `path`."""
        raise NotImplementedError

    @asynccontextmanager
    async def running(self):
        await self.start()
        try:
            yield self
        finally:
            await self.kill()

    async def start(self) -> None:
        app = web.Application()
        app.add_routes([*self.routes(), web.post(self.path, self._run)])
        self._server = await HttpServer.start(app, self.port)

    async def kill(self) -> None:
        """End this life at once: no stream ends well."""
        for transport in self._open:
            transport.abort()
        if self._server is not None:
            await self._server.stop()
            self._server = None

    async def restart(self) -> None:
        await self.kill()
        self.life += 1
        self.num_running = 0
        self.forget()
        await self.start()

    def forget(self) -> None:
        """Begin a new life."""

    async def _run(self, request):
        body = await request.json()
        if body.get("prompt") != [1]:
            self.bodies.append(body)
        self.num_running += 1
        transport = request.transport
        self._open.add(transport)
        try:
            await self.unfrozen.wait()
            if self.error:
                return web.json_response({"error": {"message": self.error}}, status=self.status)
            return await self.answer(request, body)
        finally:
            self.num_running -= 1
            self._open.discard(transport)


class FakeVllm(FakeEngine):
    """A `vllm serve`."""

    engine, path = "vllm", "/v1/completions"

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.has_connector, self.generation = True, None
        self.blocks: dict[str, list[int]] = {}
        self.forget()

    def routes(self):
        return [
            web.get("/v1/models", self._models),
            web.get("/version", self._version),
            web.get("/metrics", self._metrics),
            web.get("/query", self._query),
        ]

    def forget(self) -> None:
        self.engine_id = f"engine-{self.port}-{self.life}"
        self.blocks.clear()

    async def _models(self, _request):
        await self.unfrozen.wait()
        card = {"id": "m", "root": self.model, "max_model_len": 512, "object": "model"}
        alias, adapter = card | {"id": "alias"}, card | {"id": "sql", "root": "/sql", "parent": "m"}
        return web.json_response({"object": "list", "data": [card, alias, adapter]})

    async def _version(self, _request):
        return web.json_response({"version": "0.32.0"})

    async def _metrics(self, _request):
        await self.unfrozen.wait()
        await self.reports.wait()
        labels = 'engine="0",model_name="m"'
        lines = [
            f"process_start_time_seconds {self.life}",
            f"vllm:num_requests_running{{{labels}}} {self.num_running}.0",
            f'vllm:num_requests_waiting_by_reason{{{labels},reason="capacity"}} 1.0',
            f'vllm:num_requests_waiting_by_reason{{{labels},reason="deferred"}} 9.0',
            f"vllm:kv_cache_usage_perc{{{labels}}} 0.25",
            'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="101"} 1.0',
        ]
        return web.Response(text="\n".join(lines) + "\n")

    async def _query(self, _request):
        return web.json_response({"0": {"engine_id": self.engine_id, "worker_addr": {}}})

    async def answer(self, request, body):
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_decode") and self.has_connector:
            await self.computing.wait()
            return web.json_response(self._prefilled(body))
        if body.get("stream"):
            return await self._streamed(request, body, await self._prompt_of(body, params))
        return web.json_response(self._whole(body))

    async def _prompt_of(self, body, params) -> list[int]:
        """Return the prompt whose KV decode reads: that of the reference, or garbage."""
        if not params.get("do_remote_prefill"):
            return body["prompt"]
        return await self.pull(params) or [GARBAGE]

    async def pull(self, params) -> list[int] | None:
        """Set by `connect`."""
        raise NotImplementedError

    def _prefilled(self, body) -> dict:
        name = body["kv_transfer_params"].get("transfer_id")
        if name:
            self.blocks[name] = body["prompt"]
            return self._whole(body)
        name = f"cmpl-{uuid.uuid4()}"
        self.blocks[name] = body["prompt"]
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2]],
            "remote_engine_id": self.engine_id,
            "remote_request_id": name,
            "remote_host": "127.0.0.1",
            "remote_port": self.port,
            "remote_registration_generation": self.generation,
        }
        return self._whole(body) | {"kv_transfer_params": params}

    def _whole(self, body) -> dict:
        choice = {"token_ids": continued(body["prompt"], body["max_tokens"])}
        if (num_top := body.get("prompt_logprobs")) is not None:
            entries = [{str(token): {"logprob": -0.5, "rank": 1}} for token in body["prompt"][1:]]
            choice["prompt_logprobs"] = [None, *entries] if num_top >= 0 else None
        return {"choices": [choice | {"finish_reason": "length"}]}

    async def _streamed(self, request, body, prompt):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        tokens = continued(prompt, body["max_tokens"])
        for number, token in enumerate(tokens):
            if number == self.stop_at:
                await self.going.wait()
            await asyncio.sleep(self.pause_s)
            is_last = number == len(tokens) - 1
            choice = {"token_ids": [token], "finish_reason": self.end if is_last else None}
            if "logprobs" in body:
                top = {f"token_id:{token}": -0.25, "token_id:5": -2.0}
                choice["logprobs"] = {"token_logprobs": [-0.25], "top_logprobs": [top]}
            await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


def connect(prefills, decodes) -> None:
    """Let decode's engines read the blocks of prefill's."""

    async def pull(params):
        for prefill in prefills:
            if prefill.engine_id == params["remote_engine_id"]:
                if name := params.get("transfer_id"):
                    await until_async(partial(prefill.blocks.__contains__, name))
                    assert params["remote_bootstrap_addr"] == prefill.url
                return prefill.blocks.pop(name or params["remote_request_id"], None)
        return None

    for decode in decodes:
        decode.pull = pull
