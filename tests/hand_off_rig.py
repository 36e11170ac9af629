"""A prefill and a decode role in one process, with their engines, agents and pools, over real links."""

import functools
from collections import defaultdict

import torch

from tandem.decode.role import DecodeRole
from tandem.engine.attention.backends import choose_backend
from tandem.engine.config import EngineConfig
from tandem.engine.execution.launcher import ModelLauncher
from tandem.engine.execution.runner import ModelRunner
from tandem.engine.model.loading import load_model
from tandem.engine.pages.pool import make_pool
from tandem.engine.scheduling.core import Engine
from tandem.engine.scheduling.request import ActiveRequest, Stage
from tandem.kvtransfer.agents.receiver import ReceiverTimeouts
from tandem.kvtransfer.agents.sender import SenderTimeouts
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import TransportConfig
from tandem.kvtransfer.transports.registry import transports
from tandem.node.answers import Ticket
from tandem.node.ranks.pool import PoolPlan, bytes_of
from tandem.node.tiers.tiering import Tiering
from tandem.prefill.role import PrefillRole
from tandem.wire.channel import Peer, Waker, wait
from tandem.wire.generation import (
    GenerateRequest,
    RequestId,
    SamplingParams,
    TokenLogprobs,
    new_room,
)
from tandem.wire.messages import StartDecode, StartPrefill
from tests.agents import decode_agent, prefill_agent
from tests.calm import calm_receiver
from tests.node.tier_rig import ScriptedStack
from tests.patience import patiently

PAGE = 8
NUM_PAGES = 60
# For tests in which the peer is dead, and waiting has no use.
IMPATIENT = calm_receiver(connect_s=0.5, released_s=0.5)


class CollectedAnswers:
    """Stores answers instead of sending them."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.finishes: dict[str, list[str]] = defaultdict(list)
        self.errors: dict[str, Exception] = {}
        self.prompt_positions: dict[str, list[int]] = defaultdict(list)
        self.by_tier: dict[str, dict[str, int]] = defaultdict(dict)
        self.logprobs: dict[str, list[TokenLogprobs]] = defaultdict(list)
        self.cached: dict[str, int] = {}
        self.phases: dict[str, list[str]] = defaultdict(list)
        self.num_failed = 0

    def token(
        self,
        ticket,
        index,
        token_ids,
        finish=None,
        cached_tokens=0,
        *,
        cached_by_tier=None,
        logprobs=None,
        phases=None,
    ):
        self.by_tier[ticket.request_id] |= cached_by_tier or {}
        self.cached.setdefault(ticket.request_id, cached_tokens)
        self.phases[ticket.request_id] += [phase.name for phase in phases or ()]
        assert index == len(self.tokens[ticket.request_id])
        self.tokens[ticket.request_id] += token_ids
        self.logprobs[ticket.request_id] += [logprobs] if logprobs else []
        if finish is not None:
            self.finishes[ticket.request_id].append(finish.reason)

    def prompt_logprobs(self, ticket, first_position, entries, index):
        assert index == len(self.tokens[ticket.request_id])
        self.prompt_positions[ticket.request_id] += range(
            first_position, first_position + len(entries)
        )

    def fail(self, ticket, error):
        self.errors[ticket.request_id] = error


class BrokenRunner:
    """A forward that fails."""

    device = torch.device("cpu")

    def forward(self, inputs, sampled=None, on_layer_written=None):
        raise ZeroDivisionError


@functools.lru_cache(maxsize=4)
def _loaded(path: str, dtype: str):
    """Return a model, which engines may share: loading and checking it takes longer than most tests."""
    return load_model(EngineConfig(model_dir=path, dtype=dtype))


class Pair:
    """A prefill and a decode role with their engines, agents and pools.

    Args:
        transport: Name of a transport, or the transport itself.
        pushes_layers: Whether to push each layer once it is computed, or complete chunks.
        timeouts, sender_timeouts: Time limits of decode and of prefill.
        has_tiers: Whether both roles have a stack of tiers, `prefill_tiers` and `decode_tiers`.
    """

    def __init__(
        self,
        path,
        transport,
        decode_page: int = PAGE,
        *,
        pushes_layers: bool = True,
        timeouts: ReceiverTimeouts | None = None,
        sender_timeouts: SenderTimeouts | None = None,
        has_tiers: bool = False,
        dtype: str = "float32",
    ) -> None:
        self._has_tiers, self._dtype = has_tiers, dtype
        self.waker = Waker()
        self.prefill_answers, self.decode_answers = CollectedAnswers(), CollectedAnswers()
        self.colocated = self._engine(path, PAGE)[0]
        self.prefill_engine, plan, source = self._engine(path, PAGE, MemoryRegion.private)
        self.decode_engine, decode_plan, target = self._engine(
            path, decode_page, MemoryRegion.shared
        )
        self.source, self.target = source, target
        is_named = isinstance(transport, str)
        allowed = transports(transport, TransportConfig()) if is_named else [transport]
        common = {"fingerprint": self.prefill_engine.shape.fingerprint, "waker": self.waker}
        self.sender = prefill_agent(
            plan.layout,
            source,
            allowed,
            min_push_bytes=1,
            verify="always",
            timeouts=sender_timeouts,
            **common,
        )
        self.receiver = decode_agent(
            decode_plan.layout, target, allowed, timeouts=timeouts, **common
        )
        self.prefill = PrefillRole(
            self.prefill_engine,
            self.sender,
            self.prefill_answers,
            100,
            tiering=self._tiering(self.prefill_engine, source),
            pushes_layers=pushes_layers,
        )
        self.decode = DecodeRole(
            self.decode_engine,
            self.receiver,
            self.decode_answers,
            50,
            100,
            tiering=self._tiering(self.decode_engine, target),
        )

    def _tiering(self, engine, region):
        if not self._has_tiers:
            return None
        pages = region.array().reshape(engine.cache.num_pages, -1)
        return Tiering(
            engine, ScriptedStack(pages), timeout_s=60, min_tokens=PAGE, saves_at_once=True
        )

    @property
    def prefill_tiers(self) -> ScriptedStack:
        return self.prefill._tiering._stack

    @property
    def decode_tiers(self) -> ScriptedStack:
        return self.decode._tiering._stack

    def _engine(self, path, page_size, make_region=None):
        config = EngineConfig(
            model_dir=str(path),
            dtype=self._dtype,
            page_size=page_size,
            chunked_prefill_size=24,
            has_tiers=self._has_tiers,
        )
        model, shape = _loaded(str(path), self._dtype)
        plan = PoolPlan(shape, NUM_PAGES * PAGE // page_size, page_size)
        region = make_region(plan.layout.pool_bytes) if make_region else None
        pool = make_pool(shape, plan.num_pages, page_size, "cpu", region and bytes_of(region))
        runner = ModelRunner(model, pool, choose_backend(config, shape))
        launcher = ModelLauncher(runner, shape, page_size)
        return Engine(launcher, shape, config, plan.num_pages), plan, region

    def ticket(self, name: str) -> Ticket:
        return Ticket(Peer(b"edge"), RequestId(name), 0)

    def start(
        self,
        name: str,
        prompt,
        decode_first: bool = True,
        deadline_s=None,
        num_prior_tokens: int = 0,
        **sampling,
    ) -> GenerateRequest:
        request = GenerateRequest(
            request_id=RequestId(name),
            prompt_ids=prompt,
            sampling=SamplingParams(**{"temperature": 0, "ignore_eos": True, **sampling}),
            deadline_s=deadline_s,
            num_prior_tokens=num_prior_tokens,
        )
        room = new_room()
        halves = [
            lambda: self.decode.start(
                self.ticket(name),
                StartDecode(
                    request=request,
                    room=room,
                    bootstrap_host="127.0.0.1",
                    bootstrap_port=self.sender.port,
                ),
            ),
            lambda: self.prefill.start(self.ticket(name), StartPrefill(request=request, room=room)),
        ]
        for half in halves if decode_first else reversed(halves):
            half()
        return request

    def run_until(self, is_done) -> None:
        for _ in patiently():
            busy = False
            for role in (self.prefill, self.decode):
                role.poll()
                if role.has_work:
                    role.step()
                    busy = True
            if is_done():
                return
            if not busy:
                wait([], 0.01, self.waker)
        raise AssertionError((self.sender.statistics(), self.receiver.statistics()))

    def alone(self, *requests: GenerateRequest) -> dict[str, list[int]]:
        """Return the tokens that a single engine generates, by request."""
        for request in requests:
            self.colocated.submit(request)
        tokens = {request.request_id: [] for request in requests}
        while self.colocated.has_work:
            for token in self.colocated.step().tokens:
                tokens[token.request.request.request_id].append(token.token)
        return tokens

    def running(self) -> list[ActiveRequest]:
        """Return the requests that decode is generating for."""
        halves = [half.active for half in self.decode._by_ticket.values()]
        return [active for active in halves if active.stage is Stage.RUNNING]

    def all_pages_are_back(self) -> bool:
        for engine in (self.prefill_engine, self.decode_engine):
            engine.cache.check_integrity()
            counts = engine.counts()
            if counts.free + counts.cached != counts.total:
                return False
        return True

    def answer_tiers(self) -> bool:
        """Answer all pending calls to tiers. Returns False, for use in a polled condition."""
        self.prefill_tiers.answer_all()
        self.decode_tiers.answer_all()
        return False

    def run_with_tiers_until(self, is_done) -> None:
        self.run_until(lambda: self.answer_tiers() or is_done())

    def start_anew(self) -> None:
        """End the requests that a test left, and clear caches and recorded answers; tiers keep their pages."""
        for role in (self.prefill, self.decode):
            for ticket in role.tickets():
                role.cancel(ticket)
        settled = self.run_with_tiers_until if self._has_tiers else self.run_until
        settled(self.all_pages_are_back)
        for role in (self.prefill, self.decode):
            role.flush_cache()
        for answers in (self.prefill_answers, self.decode_answers):
            answers.__init__()

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()
        self.waker.close()
        self.source.close()
        self.target.close()


def prompt_of(length: int) -> list[int]:
    return [3 + (i * 7) % 300 for i in range(length)]
