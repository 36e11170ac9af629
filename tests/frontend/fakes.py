"""A fake backend that follows a script and speaks the real protocol."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass

from tandem.frontend.backend import Bootstrap, Health, ServedModel, ServedModels
from tandem.frontend.text.tokenizer import Tokenizer
from tandem.wire.errors import AdapterNotFound, TandemError
from tandem.wire.generation import Finish, GenerateRequest, SamplingDefaults, TokenLogprobs
from tandem.wire.messages import NodeLoad, TokenDelta
from tandem.wire.token_stream import TokenReceiver


@dataclass(frozen=True)
class End:
    """The last delta of a generation."""

    token_ids: list[int]
    finish: Finish | None


# Tokens to yield as one delta, the last delta, an error to raise, or an event to wait for.
Step = list[int] | End | TandemError | asyncio.Event
Script = Callable[[GenerateRequest], Iterable[Step]]


def repeat_prompt(request: GenerateRequest) -> Iterable[Step]:
    """Repeat the prompt up to `max_new_tokens`."""
    prompt = request.prompt_ids
    count = request.sampling.max_new_tokens
    for index in range(count - 1):
        yield [prompt[index % len(prompt)]]
    yield length(prompt[(count - 1) % len(prompt)])


def stop(*token_ids: int) -> End:
    """Return an ending by a stop token, which is the last of `token_ids`."""
    return End(list(token_ids), Finish(reason="stop", matched=token_ids[-1]))


def length(*token_ids: int) -> End:
    return End(list(token_ids), Finish(reason="length"))


def say(*steps: Step) -> Script:
    return lambda _: steps


def told(token_id: int, num_top: int) -> TokenLogprobs:
    """Return the fake's log-probabilities of a token: the most likely one, with a value that identifies it."""
    likeliest = [(token_id + rank, -token_id / 100 - rank) for rank in range(num_top)]
    return TokenLogprobs(logprob=-token_id / 100, top=likeliest)


class FakeBackend:
    """A scripted backend. Like a prefill node, it sends the prompt's log-probabilities first, in runs of two."""

    def __init__(self, tokenizer: Tokenizer | None, context_length: int = 8192) -> None:
        self.served = ServedModel(
            name="smol",
            context_length=context_length,
            max_prompt_tokens=context_length - 1,
            vocab_size=49152,
            eos_token_ids=frozenset({2}),
            tokenizer=tokenizer,
            default_sampling=SamplingDefaults(),
        )
        self.others: list[ServedModel] = []
        self.unavailable: dict[str, str] = {}
        self.models_asked: list[str] = []
        self.checked: list[tuple[str, int]] = []
        self.refusal: TandemError | None = None
        self.script: Script = repeat_prompt
        self.requests: list[GenerateRequest] = []
        self.bootstraps: list[Bootstrap | None] = []
        self.aborts: dict[str, asyncio.Event] = {}
        self.num_yielded = 0
        self.cancelled: list[str] = []
        self._changed = asyncio.Event()
        self.num_flushes, self.adapter_changes = 0, []
        self.told = {"life of an engine": 1000}
        self.is_serving = True
        self.node_loads: list[NodeLoad] = []
        self.no_model: TandemError | None = None

    @property
    def client_ids(self) -> list[str]:
        """The ids that the clients know, without the random part that makes each unique."""
        return [request.request_id.rpartition("-")[0] for request in self.requests]

    def models(self) -> ServedModels:
        if self.no_model is not None:
            raise self.no_model
        return ServedModels((self.served, *self.others), self.unavailable)

    def check(self, client: str, priority: int) -> None:
        self.checked.append((client, priority))
        if self.refusal is not None:
            raise self.refusal

    async def generate(
        self,
        request: GenerateRequest,
        receiver: TokenReceiver,
        bootstrap: Bootstrap | None = None,
        model: str = "",
    ) -> None:
        self.models_asked.append(model)
        self.requests.append(request)
        self.bootstraps.append(bootstrap)
        is_finished = False
        try:
            async for delta in self._deltas(request):
                self.num_yielded += 1
                self._changed.set()
                is_finished = delta.finish is not None
                is_ordinary = delta.index and not is_finished and not delta.logprobs
                if not (is_ordinary and receiver.take_ordinary(delta.token_ids)):
                    receiver.take(delta)
                if receiver.is_ended:
                    return
                if not receiver.has_room:
                    await receiver.drain()
        except TandemError:
            is_finished = True
            raise
        finally:
            self.aborts.pop(request.request_id, None)
            if not is_finished:
                self.cancelled.append(request.request_id)
            self._changed.set()

    async def _deltas(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        aborted = self.aborts[request.request_id] = asyncio.Event()
        self._changed.set()
        for run in _prompt_runs(request):
            yield run
        index = 0
        for step in self.script(request):
            if isinstance(step, TandemError):
                raise step
            if isinstance(step, asyncio.Event):
                await _first_of(step, aborted)
                if aborted.is_set():
                    yield self._delta(request, index, End([], Finish(reason="abort")))
                    return
            else:
                end = step if isinstance(step, End) else End(step, None)
                yield self._delta(request, index, end)
                index += len(end.token_ids)
                await asyncio.sleep(0)

    def _delta(self, request: GenerateRequest, index: int, end: End) -> TokenDelta:
        return TokenDelta(
            request_id=request.request_id,
            attempt=0,
            index=index,
            token_ids=list(end.token_ids),
            finish=end.finish,
            logprobs=_told_of(request, end.token_ids),
            cached_tokens=0 if index else len(request.prompt_ids) // 2,
        )

    async def until(self, is_true: Callable[[], object]) -> None:
        """Wait until a condition holds."""
        while not is_true():
            self._changed.clear()
            await self._changed.wait()

    async def abort(self, request_id: str) -> bool:
        event = self.aborts.get(request_id)
        if event is not None:
            event.set()
        return event is not None

    async def flush_cache(self) -> None:
        self.num_flushes += 1

    async def load_adapter(self, name: str, path: str, *, in_place: bool, model: str = "") -> None:
        self.models_asked.append(model)
        self.adapter_changes.append((name, path, in_place))

    async def unload_adapter(self, name: str, model: str = "") -> None:
        self.models_asked.append(model)
        if name not in self.served.adapters:
            raise AdapterNotFound(name)
        self.adapter_changes.append((name,))

    def health(self) -> Health:
        return Health(self.is_serving, "serving" if self.is_serving else "no node")

    def token_counts(self):
        return self.told

    def loads(self):
        return self.node_loads

    def server_info(self):
        return {"role": "fake"}

    def metrics(self) -> str:
        return "# HELP fake_total Of the fake.\n# TYPE fake_total counter\nfake_total 1.0\n"


def _told_of(request: GenerateRequest, token_ids: list[int]) -> list[TokenLogprobs]:
    if request.logprobs is None:
        return []
    return [told(token_id, request.logprobs.num_top) for token_id in token_ids]


def _prompt_runs(request: GenerateRequest) -> Iterable[TokenDelta]:
    start = request.logprobs.prompt_start if request.logprobs is not None else -1
    known = _told_of(request, request.prompt_ids)
    if start >= 0:
        known[0] = TokenLogprobs(logprob=None)
    for first in range(start, len(known) if start >= 0 else start, 2):
        yield TokenDelta(
            request_id=request.request_id,
            attempt=0,
            index=0,
            token_ids=[],
            prompt_index=first,
            prompt_logprobs=known[first : first + 2],
        )


async def _first_of(*events: asyncio.Event) -> None:
    tasks = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
