"""Protocols that are wrong, each in one place: what the explorers must catch."""

from dataclasses import replace

from tandem.kvtransfer.session import (
    RECEIVER,
    SENDER,
    Action,
    GrantArrived,
    LandedArrived,
    LinkLost,
    ReceiverState,
    ReleasedArrived,
    SenderState,
    Step,
    TimedOut,
    WithdrawArrived,
    WithdrawAsked,
)
from tests.kvtransfer.model.rules import Rules

_S, _R, _A = SenderState, ReceiverState, Action


def sender(state, event, target, *actions):
    arrows = {**SENDER[state], event: Step(target, actions)}
    return Rules(sender={**SENDER, state: arrows})


def receiver(state, event, target, *actions):
    arrows = {**RECEIVER[state], event: Step(target, actions)}
    return Rules(receiver={**RECEIVER, state: arrows})


def habit(name):
    return Rules(habits=frozenset({name}))


MUTANTS = {
    "decode frees on its own Withdraw": receiver(
        _R.GRANTED, WithdrawAsked, _R.CLOSED, _A.SEND_WITHDRAW, _A.REVOKE, _A.TELL_SAFE
    ),
    "decode frees when Landed is late": receiver(
        _R.GRANTED, TimedOut, _R.CLOSED, _A.SEND_WITHDRAW, _A.REVOKE, _A.TELL_FAILED
    ),
    "decode revokes and does not fence a lost link": receiver(
        _R.GRANTED, LinkLost, _R.CLOSED, _A.REVOKE, _A.TELL_FAILED
    ),
    "decode does not fence a link lost after Withdraw": receiver(
        _R.WITHDRAWN, LinkLost, _R.CLOSED, _A.REVOKE, _A.TELL_SAFE
    ),
    # The first is wrong beside a prefill that passes over the Withdraw of a room that is over: as of now a
    # second last word ends such a room.
    "decode waits for ever after a Landed that crossed": replace(
        receiver(_R.WITHDRAWN, LandedArrived, _R.WITHDRAWN),
        habits=frozenset({"pass over the Withdraw of an unknown room"}),
    ),
    "decode waits for ever after a Released that crossed": receiver(
        _R.WITHDRAWN, ReleasedArrived, _R.WITHDRAWN
    ),
    "prefill answers a Withdraw under its own writes": sender(
        _S.PUSHING, WithdrawArrived, _S.RELEASED, _A.SEND_RELEASED, _A.TELL_RELEASED
    ),
    "prefill does not stop its writes when the link is lost": sender(
        _S.PUSHING, LinkLost, _S.PUSHING
    ),
    "prefill says Landed when it is granted": sender(
        _S.WAITING, GrantArrived, _S.LANDED, _A.TELL_GRANTED, _A.SEND_LANDED, _A.TELL_PUSHED
    ),
    "prefill does not answer the Withdraw of an early grant": sender(
        _S.GRANTED_EARLY, WithdrawArrived, _S.REFUSING
    ),
    "prefill does not answer a grant that came after an abort": sender(
        _S.REFUSING, GrantArrived, _S.RELEASED
    ),
    "prefill says Landed before the writes are done": habit(
        "say Landed before the writes are done"
    ),
    "prefill says it stopped while a write goes on": habit("stop without waiting for the write"),
    "prefill releases after a write that broke": habit("release after a write that broke"),
    "prefill answers a second grant with Released": habit("release a second grant"),
    "a fence is called done when it begins": habit("call a fence done when it begins"),
}
