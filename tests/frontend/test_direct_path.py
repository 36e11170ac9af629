"""The answer is the same if the receiver accepts ordinary tokens, or gets every token as a delta.

Tested over the real wire, from an engine's batches to the bytes of events.
"""

import asyncio
import json
import random
from contextlib import asynccontextmanager

import pytest

from tandem.frontend.options import FrontendOptions
from tandem.node.answers import Answers, Ticket
from tandem.wire.channel import Peer
from tandem.wire.engine_client import EngineClient
from tandem.wire.generation import Finish
from tandem.wire.messages import StartColocated
from tandem.wire.token_stream import Relay, SoleStream
from tests.frontend.conftest import serve
from tests.frontend.fakes import FakeBackend
from tests.patience import PATIENCE_S
from tests.router.fake_node import FakeEngine

TEXT = 'hello 👋🏽 wörld, žluťoučký STOP\n日本語テキスト 😀😀 a<b<|S>TO STO "quoted\\" ou stout 12'
ROUTES = ["/generate", "/v1/completions", "/v1/chat/completions"]
STOPS = [[], ["zzz"], ["STOP"], ["👋", "ou"], [" "], ["\N{REPLACEMENT CHARACTER}", "TO S"]]


class WireBackend(FakeBackend):
    """An engine behind the real wire. Counts tokens that take the direct path, if it is enabled."""

    def __init__(self, tokenizer, client: EngineClient, *, is_direct: bool) -> None:
        super().__init__(tokenizer)
        self.client, self.is_direct, self.num_direct = client, is_direct, 0

    async def generate(self, request, receiver, bootstrap=None, model=""):
        receiver = Counted(self, receiver)
        relay = Relay(receiver)
        with self.client.generate(StartColocated(request=request), relay.on_change) as stream:
            await relay.run(SoleStream(stream, receiver).take)


class Counted:
    """A receiver that counts ordinary tokens, and rejects them unless `is_direct` is true."""

    def __init__(self, backend, receiver) -> None:
        self._backend, self._receiver = backend, receiver
        self.take, self.drain = receiver.take, receiver.drain

    @property
    def has_room(self) -> bool:
        return self._receiver.has_room

    @property
    def is_ended(self) -> bool:
        return self._receiver.is_ended

    def take_ordinary(self, token_ids) -> bool:
        is_taken = self._backend.is_direct and self._receiver.take_ordinary(token_ids)
        self._backend.num_direct += is_taken
        return is_taken


@asynccontextmanager
async def connected(tokenizer, *, is_direct):
    engine = FakeEngine()
    client = EngineClient(engine.address)
    try:
        async with asyncio.TaskGroup() as tasks, asyncio.timeout(PATIENCE_S):
            tasks.create_task(client.run())
            await client.answered.wait()
            yield engine, WireBackend(tokenizer, client, is_direct=is_direct)
            client.stop()
    finally:
        engine.close()


class ToEngine:
    """Where `Answers` sends to."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    def send(self, _peer, message) -> None:
        self._engine.send(message)


async def say(rng, engine, replies) -> None:
    """Say each choice its reply, a token now and then two a step, some steps at once."""
    starts = [await engine.next(StartColocated) for _ in replies]
    answers = Answers(ToEngine(engine), engine.epoch)
    waiting = dict.fromkeys(range(len(replies)), 0)
    while waiting:
        for choice, index in list(waiting.items()):
            ids, start = replies[choice], starts[choice]
            end = min(index + rng.choice([0, 1, 1, 1, 1, 1, 1, 2]), len(ids))
            if end > index:
                ticket = Ticket(Peer(b""), start.request.request_id, 0, start.stream)
                finish = Finish(reason="length") if end == len(ids) else None
                answers.token(ticket, index, ids[index:end], finish)
                waiting[choice] = end
            if end == len(ids):
                del waiting[choice]
        answers.flush()
        if rng.random() < 0.5:
            await asyncio.sleep(0.001)


def body_of(rng, route, stops, num_choices) -> dict:
    min_tokens = rng.choice([0, 0, 5])
    if route == "/generate":
        sampling = {"max_new_tokens": 4000, "stop": stops, "min_new_tokens": min_tokens}
        return {"input_ids": [[1, 2, 3]] * num_choices, "sampling_params": sampling, "stream": True}
    usage = {"include_usage": True, "continuous_usage_stats": rng.random() < 0.5}
    body = {"n": num_choices, "stop": stops, "min_tokens": min_tokens, "max_tokens": 4000}
    body |= {"model": "smol", "stream": True, "stream_options": usage}
    if route == "/v1/completions":
        return body | {"prompt": [1, 2, 3]}
    return body | {"messages": [{"role": "user", "content": "hi"}]}


def told(data: bytes, *, is_incremental: bool) -> dict:
    """Return what each choice was told in all, and the last usage."""
    *events, done, nothing = data.split(b"\n\n")
    assert (done, nothing) == (b"data: [DONE]", b"")
    result = {}
    for event in (json.loads(event.removeprefix(b"data: ")) for event in events):
        if event.get("usage"):
            result["usage"] = event["usage"]
        if "text" in event:
            ids, end = event["output_ids"], event["meta_info"]["finish_reason"]
            text, known, _ = result.get(event["index"], ("", [], None))
            if is_incremental:
                result[event["index"]] = (text + event["text"], known + ids, end)
            else:
                assert (event["text"].startswith(text), ids[: len(known)]) == (True, known)
                result[event["index"]] = (event["text"], ids, end)
            assert event["meta_info"]["completion_tokens"] == len(result[event["index"]][1])
        for choice in event.get("choices", ()):
            text, end = result.get(choice["index"], ("", None))
            assert end is None
            new = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            result[choice["index"]] = (text + new, choice["finish_reason"])
    return result


async def ask(seed, tokenizer, route, *, is_direct):
    """Return the client's answer, and how many runs of ordinary tokens were accepted."""
    rng = random.Random(seed)
    ids, stops, is_incremental = tokenizer.encode(TEXT), rng.choice(STOPS), rng.random() < 0.3
    replies = [ids, *(rng.choices(ids, k=rng.randint(2, 60)) for _ in range(2))]
    body = body_of(rng, route, stops, len(replies))
    options = FrontendOptions(incremental_streaming_output=is_incremental)
    async with (
        connected(tokenizer, is_direct=is_direct) as (engine, backend),
        serve(backend, options) as client,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(say(rng, engine, replies))
        async with client.post(route, json=body) as response:
            data = await response.read()
    return told(data, is_incremental=is_incremental), backend.num_direct


@pytest.mark.parametrize("route", ROUTES)
async def test_answer_is_the_same_with_and_without_ordinary_tokens(tokenizer, route):
    num_direct = 0
    for seed in range(8):
        through_pieces, _ = await ask(seed, tokenizer, route, is_direct=False)
        direct, taken = await ask(seed, tokenizer, route, is_direct=True)
        assert direct == through_pieces, seed
        num_direct += taken
    assert num_direct


async def test_slow_client_gets_everything_in_fewer_events(tokenizer):
    rng, ids = random.Random(0), tokenizer.encode(TEXT) * 40
    async with (
        connected(tokenizer, is_direct=True) as (engine, backend),
        serve(backend) as client,
        asyncio.TaskGroup() as tasks,
    ):
        saying = tasks.create_task(say(rng, engine, [ids]))
        body = body_of(rng, "/generate", [], 1)
        async with client.post("/generate", json=body) as response:
            await saying
            data = await response.read()
    text, known, end = told(data, is_incremental=False)[0]
    assert (text, known, end["type"]) == (tokenizer.decode(ids), ids, "length")
    assert 0 < backend.num_direct < data.count(b"\n\n") < len(ids) / 2
