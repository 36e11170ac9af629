"""Products that are wrong, each in one place: what the simulation must catch."""

from unittest import mock

import msgspec

from tandem.decode.role import DecodeRole
from tandem.engine.scheduling.core import Engine
from tandem.engine.scheduling.request import Stage
from tandem.kvtransfer.agents.receiver_links import PrefillLinks
from tandem.kvtransfer.agents.sender import PrefillAgent
from tandem.kvtransfer.session import (
    RECEIVER,
    SENDER,
    Action,
    ReceiverState,
    RoomEvent,
    SenderState,
    Step,
)
from tandem.node.life.life import EngineDrain
from tandem.node.loop import EngineLoop
from tandem.node.role import Deadlines
from tandem.router.admission import Admission
from tandem.router.nodes.cluster import Roster
from tandem.router.nodes.node import NodeWork
from tandem.router.serving.backend import ClusterBackend
from tandem.router.serving.progress import Progress
from tandem.router.serving.request import Replays
from tandem.wire.engine_client import EngineClient
from tandem.wire.errors import NodeDraining, PeerLost
from tandem.wire.token_stream import TokenStream
from tests.simulation.scenarios import ALL, FAILING, ORDERED
from tests.simulation.threads import SimulatedWorker

_S, _R, _A = SenderState, ReceiverState, Action


def changed(owner, name, wrong):
    """Return what has `wrong(original, ...)` called instead of a method."""
    original = getattr(owner, name)

    def call(*args, **named):
        return wrong(original, *args, **named)

    return mock.patch.object(owner, name, call)


def arrow(table, state, event, target, *actions):
    """Return what has a table lead elsewhere."""
    return mock.patch.dict(table, {state: {**table[state], event: Step(target, actions)}})


def _take_any_index(accept, progress, delta):
    return accept(progress, msgspec.structs.replace(delta, index=progress.next_index))


def _forget_sent(remaining, progress):
    request = remaining(progress)
    num = len(progress.sent_ids)
    prompt_ids = request.prompt_ids[: len(request.prompt_ids) - num]
    return msgspec.structs.replace(request, prompt_ids=prompt_ids)


def _count_anew(remaining, progress):
    return msgspec.structs.replace(remaining(progress), num_prior_tokens=0)


def _free_granted(cancel, role, ticket):
    """Give granted pages back without waiting for prefill's word."""
    half = role._by_ticket.get(ticket)
    is_granted = half is not None and half.active.stage is Stage.RESERVED
    cancel(role, ticket)
    if is_granted and half.hand_off.room in role._granted:
        role._engine.reclaim(half.active)


def _land_at_once(_original, agent, part, landed):
    part.landed = landed
    agent._apply(part, RoomEvent.WRITES_DONE)


def _stop_at_once(_original, worker, _room, stopped):
    worker._control.post(stopped)


def _fenced_at_once(drop, links, link, error):
    is_first = link.session.is_open
    drop(links, link, error)
    if is_first:
        links._on_fenced(link)


def _give_up(_original, _replays, error):
    raise error


def _count_hand_over(after, replays, error):
    after(replays, PeerLost(error.message) if isinstance(error, NodeDraining) else error)


def _end_with_hand_over(after, replays, error):
    if isinstance(error, NodeDraining):
        raise error
    after(replays, error)


def _forget_local(hand_over, role, error):
    for half in list(role._by_ticket.values()):
        if half.hand_off is None:
            del role._by_ticket[half.ticket]
            role._stop(half, error)
    hand_over(role, error)


def _never_refuse(start, loop, ticket, message):
    with mock.patch.object(loop._drain, "is_on", False):
        start(loop, ticket, message)


def _always_left(_original, progress):
    request = progress._request
    if request.deadline_s is None:
        return None
    return max(0.0, request.deadline_s - (progress._clock() - progress._started))


async def _abort_on_nodes(_original, backend, request_id):
    for node in backend._cluster.roster:
        if node.client is not None:
            node.client.abort(request_id)
    return True


def _nothing(_original, *_args, **_named):
    return None


# By the seeds that are to show it.
MUTANTS = {
    FAILING: {
        "the edge takes a token whatever its index": changed(Progress, "accept", _take_any_index),
        "a replay forgets what was sent": changed(Progress, "remaining", _forget_sent),
        "a replay counts from 0": changed(Progress, "remaining", _count_anew),
        "a replay is never made": changed(Replays, "after", _give_up),
        "a half that ended keeps its share of the load": changed(
            NodeWork, "release", lambda release, work, **_: work.stream.close()
        ),
        "a lost engine fails no stream": changed(TokenStream, "fail", _nothing),
        "decode frees granted pages when it cancels": changed(DecodeRole, "cancel", _free_granted),
        "prefill says Landed before the writes are done": changed(
            PrefillAgent, "_conclude", _land_at_once
        ),
        "prefill never gives pages back": changed(Engine, "release", _nothing),
        "decode frees on its own Withdraw": arrow(
            RECEIVER,
            _R.GRANTED,
            RoomEvent.WITHDRAW_REQUESTED,
            _R.CLOSED,
            _A.SEND_WITHDRAW,
            _A.REPORT_SAFE,
        ),
        "prefill answers a Withdraw under its own writes": arrow(
            SENDER,
            _S.PUSHING,
            RoomEvent.WITHDRAW_ARRIVED,
            _S.RELEASED,
            _A.SEND_RELEASED,
            _A.REPORT_RELEASED,
        ),
        "decode waits for ever after a Landed that crossed": arrow(
            RECEIVER, _R.WITHDRAWN, RoomEvent.LANDED_ARRIVED, _R.WITHDRAWN
        ),
        "decode waits for ever after a Released that crossed": arrow(
            RECEIVER, _R.WITHDRAWN, RoomEvent.RELEASED_ARRIVED, _R.WITHDRAWN
        ),
        "prefill does not stop its writes when the link is lost": arrow(
            SENDER, _S.PUSHING, RoomEvent.LINK_LOST, _S.PUSHING
        ),
        "prefill sends Landed when it is granted": arrow(
            SENDER,
            _S.WAITING,
            RoomEvent.GRANT_ARRIVED,
            _S.LANDED,
            _A.REPORT_GRANTED,
            _A.REPORT_PUSHED,
        ),
        "prefill reports that it stopped while a write goes on": changed(
            SimulatedWorker, "stop", _stop_at_once
        ),
        "a silent prefill is not noticed": changed(PrefillLinks, "_keep_alive", _nothing),
    },
    ORDERED: {
        "a hand-over loses the request": changed(Replays, "after", _end_with_hand_over),
        "a node is drained while requests are left": changed(
            EngineDrain,
            "take_end",
            lambda take_end, drain, _left, *args, **named: take_end(drain, 0, *args, **named),
        ),
        "a node that drains takes requests": changed(EngineLoop, "_start", _never_refuse),
        "a removed node is known for ever": changed(Roster, "remove", _nothing),
    },
    ALL: {
        "prompts computed on decode count for ever": changed(NodeWork, "finish_prompt", _nothing),
        "an answer that began ends with its deadline": changed(
            Progress, "remaining_s", _always_left
        ),
        "admission keeps the place of a finished request": changed(Admission, "release", _nothing),
        "an abort reaches only those that run": changed(ClusterBackend, "abort", _abort_on_nodes),
    },
}

# Nodes begin what is too late.
LATE = changed(Deadlines, "passed", lambda _passed, _all: iter(()))

# Seen where a node hands over, or is removed, at some step of one request that decode computes alone.
OF_BLOWS = {
    "a hand-over uses up an attempt": changed(Replays, "after", _count_hand_over),
    "a removal at once looks like a death": changed(
        EngineClient, "stop", lambda stop, client, _failure=None: stop(client)
    ),
    "decode that drains forgets prompts of its own": changed(
        DecodeRole, "hand_over", _forget_local
    ),
}

# Nobody gets a wrong token of these, but nodes work for nobody.
WASTEFUL = {
    "a client leaves": changed(EngineClient, "cancel", _nothing),
    "its router dies": changed(EngineLoop, "_drop_lost_edges", _nothing),
}

# Seen where prefills are stopped in the middle of a write.
OF_STOPPED_WRITERS = {
    "decode frees when Landed is late": arrow(
        RECEIVER, _R.GRANTED, RoomEvent.TIMED_OUT, _R.CLOSED, _A.SEND_WITHDRAW, _A.REPORT_FAILED
    ),
    "decode does not fence a lost link": arrow(
        RECEIVER, _R.GRANTED, RoomEvent.LINK_LOST, _R.CLOSED, _A.REPORT_FAILED
    ),
    "decode does not fence a link lost after Withdraw": arrow(
        RECEIVER, _R.WITHDRAWN, RoomEvent.LINK_LOST, _R.CLOSED, _A.REPORT_SAFE
    ),
    "a fence is called done when it begins": changed(PrefillLinks, "drop", _fenced_at_once),
}
