"""Transfer of a rank beside rank 0: its agent at the rank, and the same agent as rank 0 sees it.

```
 rank 0: group ─▶ RemoteSender ──Push──▶ pipe ──▶ rank: RankAgent.do ─▶ PrefillAgent
               ◀─ events  ◀──PushedHere──────────────── RankAgent.events ◀─┘
```
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

from typing_extensions import override

from tandem.kvtransfer.events import ReceiverEvent, SenderEvent
from tandem.kvtransfer.push_room import PageRun, Wrote
from tandem.kvtransfer.receiver import DecodeAgent
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.sender import PrefillAgent
from tandem.node.config import NodeConfig, NodeRole
from tandem.node.pool_memory import make_region
from tandem.node.pool_plan import PoolPlan
from tandem.node.rank_messages import (
    Abort,
    Expect,
    FinishPush,
    FromAgent,
    FromReceiver,
    FromSender,
    Push,
    PushByLayer,
    RankStart,
    Request,
    RunOfPages,
    ToReceiver,
    ToSender,
    WithdrawRoom,
    pack_error,
    pack_receiver_event,
    pack_sender_event,
    unpack_error,
    unpack_receiver_event,
    unpack_sender_event,
)
from tandem.node.ranks import RankProcess
from tandem.node.transfer import RankEnd, make_receiver, make_sender
from tandem.wire.channel import Waker
from tandem.wire.errors import TandemError
from tandem.wire.ids import Room, new_epoch
from tandem.wire.keys import cluster_key


class RankAgent(ABC):
    """What a rank does of its role.

    Attributes:
        bootstrap_port: Where it takes grants; 0 for nowhere.
        region: What `memory` returned.
    """

    bootstrap_port = 0
    region: MemoryRegion | None = None

    def __init__(self, config: NodeConfig, waker: Waker) -> None:
        self._config, self._waker = config, waker
        self._key = cluster_key(config.host, is_insecure=config.is_insecure)

    def memory(self, plan: PoolPlan) -> MemoryRegion | None:
        """Return the memory of the pool; None leaves it to torch. Called once, before `start`."""
        self.region = make_region(self._config, plan.memory_bytes)
        return self.region

    @abstractmethod
    def start(self, plan: PoolPlan) -> None:
        """Begin to transfer."""

    @abstractmethod
    def do(self, message: ToSender | ToReceiver | RankStart) -> None:
        """Do what rank 0's agent does."""

    def take_wrote(self) -> Wrote | None:
        """Return what the forward that comes now tells of its layers, if it is to tell."""
        return None

    @abstractmethod
    def events(self) -> Iterator[FromAgent]:
        """Yield what happened and was not told yet, oldest first."""

    def close(self) -> None:
        """End the transfers and give back the memory."""
        if self.region is not None:
            self.region.close()

    def _end(self, plan: PoolPlan) -> RankEnd:
        assert self.region is not None
        shape = plan.shape
        return RankEnd(
            new_epoch(), shape.fingerprint, plan.layout, self.region, shape.model_kv_heads
        )


class _NoAgent(RankAgent):
    @override
    def memory(self, plan: PoolPlan) -> MemoryRegion | None:
        # Nobody but tiers reads it beside the forwards.
        return super().memory(plan) if self._config.tiers.specs else None

    @override
    def start(self, plan: PoolPlan) -> None:
        del plan

    @override
    def do(self, message: ToSender | ToReceiver | RankStart) -> None:
        raise AssertionError(message)

    @override
    def events(self) -> Iterator[FromAgent]:
        return iter(())


class _SenderAgent(RankAgent):
    _agent: PrefillAgent | None = None
    _wrote: Wrote | None = None

    @override
    def start(self, plan: PoolPlan) -> None:
        self._agent = make_sender(self._config, self._end(plan), self._waker, self._key, port=0)
        self.bootstrap_port = self._agent.port

    @override
    def do(self, message: ToSender | ToReceiver | RankStart) -> None:
        assert self._agent is not None
        match message:
            case Expect():
                self._agent.expect(message.room)
            case PushByLayer():
                runs = [PageRun(r.room, r.page_ids, r.first_page_index) for r in message.runs]
                self._wrote = self._agent.push_by_layer(runs)
            case Push():
                self._agent.push(message.room, message.page_ids, message.first_page_index)
            case FinishPush():
                self._agent.finish(
                    message.room, message.first_token, message.seed, message.cached_tokens
                )
            case Abort():
                self._agent.abort(message.room, unpack_error(message.error))
            case _:
                raise AssertionError(message)

    @override
    def take_wrote(self) -> Wrote | None:
        wrote, self._wrote = self._wrote, None
        return wrote

    @override
    def events(self) -> Iterator[FromAgent]:
        assert self._agent is not None
        return map(pack_sender_event, self._agent.events())

    @override
    def close(self) -> None:
        if self._agent is not None:
            self._agent.close()
        super().close()


class _ReceiverAgent(RankAgent):
    _agent: DecodeAgent | None = None

    @override
    def start(self, plan: PoolPlan) -> None:
        self._agent = make_receiver(self._config, self._end(plan), self._waker, self._key)

    @override
    def do(self, message: ToSender | ToReceiver | RankStart) -> None:
        assert self._agent is not None
        match message:
            case Request():
                self._agent.request(
                    message.room,
                    message.bootstrap_host,
                    message.bootstrap_port,
                    message.page_ids,
                    message.have_tokens,
                )
            case WithdrawRoom():
                self._agent.withdraw(message.room, unpack_error(message.error))
            case _:
                raise AssertionError(message)

    @override
    def events(self) -> Iterator[FromAgent]:
        assert self._agent is not None
        return map(pack_receiver_event, self._agent.events())

    @override
    def close(self) -> None:
        if self._agent is not None:
            self._agent.close()
        super().close()


def rank_agent(config: NodeConfig, waker: Waker) -> RankAgent:
    """Return what a rank of this node does beside forwards."""
    kinds: dict[NodeRole, Callable[[NodeConfig, Waker], RankAgent]] = {
        "prefill": _SenderAgent,
        "decode": _ReceiverAgent,
        "colocated": _NoAgent,
    }
    return kinds[config.role](config, waker)


class RemoteSender:
    """A rank's prefill agent, as rank 0 sees it; see `SenderRank`."""

    def __init__(self, rank: RankProcess) -> None:
        self._rank = rank

    def expect(self, room: Room) -> None:
        """See `PrefillAgent.expect`."""
        self._rank.send(Expect(room=room))

    def push_by_layer(self, runs: Sequence[PageRun]) -> Wrote:
        """See `PrefillAgent.push_by_layer`. The rank's own forward tells it of layers."""
        told = [
            RunOfPages(
                room=run.room,
                page_ids=list(run.page_ids),
                first_page_index=run.first_page_index,
            )
            for run in runs
        ]
        self._rank.send(PushByLayer(runs=told))
        return lambda _layer: None

    def push(self, room: Room, page_ids: Sequence[int], first_page_index: int) -> None:
        """See `PrefillAgent.push`."""
        push = Push(room=room, page_ids=list(page_ids), first_page_index=first_page_index)
        self._rank.send(push)

    def finish(self, room: Room, first_token: int, seed: int, cached_tokens: int = 0) -> None:
        """See `PrefillAgent.finish`."""
        finish = FinishPush(
            room=room, first_token=first_token, seed=seed, cached_tokens=cached_tokens
        )
        self._rank.send(finish)

    def abort(self, room: Room, error: TandemError | None = None) -> None:
        """See `PrefillAgent.abort`."""
        self._rank.send(Abort(room=room, error=pack_error(error)))

    def events(self) -> Iterator[SenderEvent]:
        """See `PrefillAgent.events`."""
        for message in self._rank.take_events():
            assert isinstance(message, FromSender)
            yield unpack_sender_event(message)


class RemoteReceiver:
    """A rank's decode agent, as rank 0 sees it; see `ReceiverRank`."""

    def __init__(self, rank: RankProcess) -> None:
        self._rank = rank

    def request(
        self,
        room: Room,
        bootstrap_host: str,
        bootstrap_port: int,
        page_ids: Sequence[int],
        have_tokens: int = 0,
    ) -> None:
        """See `DecodeAgent.request`."""
        request = Request(
            room=room,
            bootstrap_host=bootstrap_host,
            bootstrap_port=bootstrap_port,
            page_ids=list(page_ids),
            have_tokens=have_tokens,
        )
        self._rank.send(request)

    def withdraw(self, room: Room, error: TandemError | None = None) -> None:
        """See `DecodeAgent.withdraw`."""
        self._rank.send(WithdrawRoom(room=room, error=pack_error(error)))

    def events(self) -> Iterator[ReceiverEvent]:
        """See `DecodeAgent.events`."""
        for message in self._rank.take_events():
            assert isinstance(message, FromReceiver)
            yield unpack_receiver_event(message)
