"""SGLang's prefill and decode servers in this process: their HTTP, and tokens that depend on the prompt alone."""

import asyncio
import json

from aiohttp import web

from tests.stock.fake_vllm import FakeEngine, continued

FAILED = {"type": "abort", "message": "KVTransferError", "status_code": 500}
INVALID = {"type": "abort", "message": "too hot", "status_code": 400}


class FakeSglang(FakeEngine):
    """A server of one role. Both halves of a request wait until the other one is there.

    Attributes:
        mode: Its `--disaggregation-mode`.
        is_incremental: Whether events of a stream have new tokens only.
        rooms: The rooms of its bootstrap server, by number, each with its prompt once prefill has computed it.
        peers: The servers with a bootstrap server, by port; set by `connect_sglang`.
        aborted: Ids of requests that it was asked to abort.
        num_ranks: Its data-parallel ranks.
        more_load: Further fields of each rank's load.
    """

    engine = "sglang"
    path = "/generate"

    def __init__(
        self, model: str, mode: str, *, is_incremental: bool = True, num_ranks: int = 1
    ) -> None:
        super().__init__(model)
        self.mode, self.is_incremental = mode, is_incremental
        self.rooms: dict[int, asyncio.Future[list[int]]] = {}
        self.peers: dict[int, FakeSglang] = {}
        self.aborted: list[str] = []
        self.num_ranks, self.more_load = num_ranks, {}

    def routes(self):
        return [
            web.get("/server_info", self._server_info),
            web.get("/model_info", self._model_info),
            web.get("/v1/loads", self._loads),
            web.post("/abort_request", self._abort),
        ]

    async def _server_info(self, _request):
        await self.unfrozen.wait()
        await self.reports.wait()
        return web.json_response(
            {
                "disaggregation_mode": self.mode,
                "disaggregation_bootstrap_port": self.port,
                "incremental_streaming_output": self.is_incremental,
                "startup_time": {"load_weights": self.life},
                "dtype": "bfloat16",
                "kv_cache_dtype": "auto",
                "page_size": 16,
                "dp_size": self.num_ranks,
                "context_length": None,
                "max_req_input_len": 506,
                "version": "0.5.23",
                "internal_states": [{}],
            }
        )

    async def _model_info(self, _request):
        return web.json_response({"model_path": self.model, "served_model_name": "m"})

    async def _loads(self, request):
        assert request.query["include"] == "core,disagg,queues"
        load = {
            "num_running_reqs": self.num_running,
            "num_waiting_reqs": 0,
            "num_used_tokens": 400,
            "max_total_num_tokens": 1600,
            "max_running_requests": 4,
        }
        loads = [load | self.more_load | {"dp_rank": rank} for rank in range(self.num_ranks)]
        return web.json_response({"version": "0.5.23", "loads": loads})

    async def _abort(self, request):
        self.aborted.append((await request.json())["rid"])
        return web.Response()

    async def answer(self, request, body):
        place = self.peers.get(body.get("bootstrap_port"))
        if place is None or body["bootstrap_host"] != "127.0.0.1":
            return await self._stream(request, body, [], FAILED)
        room = place.rooms.setdefault(
            body["bootstrap_room"], asyncio.get_running_loop().create_future()
        )
        if self.mode == "prefill":
            await self.computing.wait()
            if not room.done():
                room.set_result(body["input_ids"])
            return await self._stream(request, body, continued(body["input_ids"], 1))
        ids = await room
        num = body["sampling_params"]["max_new_tokens"]
        return await self._stream(request, body, continued(ids, num))

    async def _stream(self, request, body, tokens, finish=None):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        ends = {"length": {"type": "length"}, "invalid": INVALID, "": None}
        end = finish or ends.get(self.end, FAILED)
        for number in range(max(1, len(tokens))):
            if number == self.stop_at:
                await self.going.wait()
            first = number if self.is_incremental else 0
            is_last = number >= len(tokens) - 1
            meta = {"finish_reason": end if is_last else None}
            if body.get("return_logprob"):
                new = tokens[first : number + 1]
                meta["output_token_logprobs"] = [[-0.25, token, None] for token in new]
                meta["output_top_logprobs"] = [[[-0.25, token, None]] for token in new]
                if body["logprob_start_len"] == 0:
                    rows = [[-0.5, token, None] for token in body["input_ids"][1:]]
                    meta["input_token_logprobs"] = [[None, body["input_ids"][0], None], *rows]
            event = {"output_ids": tokens[first : number + 1], "meta_info": meta}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


def connect_sglang(prefills, decodes) -> None:
    """Let the halves of requests meet at prefill's bootstrap servers."""
    for server in (*prefills, *decodes):
        server.peers = {prefill.port: prefill for prefill in prefills}
