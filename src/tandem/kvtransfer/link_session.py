"""The life of one link as a pure state machine: a table for each end. No I/O, no clock.

```
 decode, which connects                          prefill, which accepts
 OPENING     resolving the host, making an       CONNECTING  Hello arrived; a worker connects to
             offer of one transport                          decode's pool
 CONNECTING  socket opened, Hello not sent yet   UP          Welcome sent
 GREETED     Hello sent, no answer yet           CLOSED      closed; never comes back
 REDIRECTED  socket opened to another rank,
             Hello not sent to it yet
 REGREETED   Hello sent to that rank
 UP          Welcome arrived: rooms may use it
 FENCING     lost; writes over it are being
             made impossible
 CLOSED      no write can arrive over it

 decode   OPENING ─▶ CONNECTING ─▶ GREETED ──────────────────────────────┬─▶ UP
             ▲                        ├─▶ REDIRECTED ─▶ REGREETED ───────┘
             └─ offer refused ────────┴────────────────────┘
          each of these ─ lost ─▶ FENCING ─▶ CLOSED
 prefill  CONNECTING ─▶ UP;  each of these ─ lost ─▶ CLOSED
```

A driver feeds in events and executes the returned actions, in order. The tables keep three
invariants. A link is lost at most once, and is never open again. Its socket or connection is closed once.
Decode reports a link as fenced only after it has reported it as lost.
"""

from enum import Enum

from tandem.kvtransfer.session import Machine, State, Table, to


class LinkEvent(Enum):
    """An event of a link at one end."""

    # Decode.
    OFFER_READY = "OfferReady"  # the host is resolved and a transport made an offer
    OFFER_REFUSED = "OfferRefused"  # prefill cannot use the offer, and a transport is left to try
    HELLO_SENT = "HelloSent"
    REDIRECT_ARRIVED = "RedirectArrived"
    WELCOME_ARRIVED = "WelcomeArrived"
    FENCED = "Fenced"  # no write over this link can arrive any more
    # Prefill.
    CONNECTED = "Connected"  # the worker reached decode's pool through one of the offers
    # Both.
    LOST = "Lost"  # refused, silent, broken, timed out, or the peer violated the protocol
    SHUT_DOWN = "ShutDown"  # this end's agent is being closed


class ReceiverLink(Enum):
    """State of a link at decode."""

    OPENING = "opening"
    CONNECTING = "connecting"
    GREETED = "greeted"
    REDIRECTED = "redirected"
    REGREETED = "regreeted"
    UP = "up"
    FENCING = "fencing"
    CLOSED = "closed"


class SenderLink(Enum):
    """State of a link at prefill."""

    CONNECTING = "connecting"
    UP = "up"
    CLOSED = "closed"


class LinkAction(Enum):
    """An action of the driver."""

    OFFER_NEXT = "offer next"  # close the socket, fence the refused offer, make the next one
    OPEN_SOCKET = "open socket"
    REOPEN_SOCKET = "reopen socket"  # to the rank that the Redirect names
    CLOSE_SOCKET = "close socket"
    SEND_WELCOME = "send Welcome"
    SEND_REFUSED = "send Refused"
    REMOVE = (
        "remove"  # from the links of this end, so that the next Hello or request makes a new one
    )
    REPORT_UP = "report up"
    REPORT_LOST = "report lost"
    REPORT_FENCED = "report fenced"
    FENCE = "fence"
    CLOSE_CONNECTION = "close connection"  # writes in flight fail


_R, _S, _A, _E = ReceiverLink, SenderLink, LinkAction, LinkEvent

_LOSE_RECEIVER = {
    _E.LOST: to(_R.FENCING, _A.REMOVE, _A.CLOSE_SOCKET, _A.REPORT_LOST, _A.FENCE),
    _E.SHUT_DOWN: to(_R.CLOSED, _A.CLOSE_SOCKET),
}
_LOSE_SENDER = {
    _E.LOST: to(_S.CLOSED, _A.REMOVE, _A.SEND_REFUSED, _A.CLOSE_CONNECTION, _A.REPORT_LOST),
    _E.SHUT_DOWN: to(_S.CLOSED, _A.CLOSE_CONNECTION),
}

RECEIVER_LINK: Table[ReceiverLink, LinkEvent, LinkAction] = {
    _R.OPENING: {
        _E.OFFER_READY: to(_R.CONNECTING, _A.OPEN_SOCKET),
        _E.LOST: to(_R.FENCING, _A.REMOVE, _A.REPORT_LOST, _A.FENCE),
        _E.SHUT_DOWN: to(_R.CLOSED),
    },
    _R.CONNECTING: {_E.HELLO_SENT: to(_R.GREETED), **_LOSE_RECEIVER},
    _R.GREETED: {
        _E.WELCOME_ARRIVED: to(_R.UP, _A.REPORT_UP),
        _E.REDIRECT_ARRIVED: to(_R.REDIRECTED, _A.REOPEN_SOCKET),
        _E.OFFER_REFUSED: to(_R.OPENING, _A.OFFER_NEXT),
        **_LOSE_RECEIVER,
    },
    _R.REDIRECTED: {_E.HELLO_SENT: to(_R.REGREETED), **_LOSE_RECEIVER},
    _R.REGREETED: {
        _E.WELCOME_ARRIVED: to(_R.UP, _A.REPORT_UP),
        _E.OFFER_REFUSED: to(_R.OPENING, _A.OFFER_NEXT),
        **_LOSE_RECEIVER,
    },
    _R.UP: {**_LOSE_RECEIVER},
    _R.FENCING: {
        _E.FENCED: to(_R.CLOSED, _A.REPORT_FENCED),
        # These crossed with the loss: the offer became ready too late, or a second thing failed.
        _E.OFFER_READY: to(_R.FENCING),
        _E.LOST: to(_R.FENCING),
    },
    _R.CLOSED: {_E.LOST: to(_R.CLOSED), _E.SHUT_DOWN: to(_R.CLOSED)},
}

SENDER_LINK: Table[SenderLink, LinkEvent, LinkAction] = {
    _S.CONNECTING: {_E.CONNECTED: to(_S.UP, _A.SEND_WELCOME), **_LOSE_SENDER},
    _S.UP: {**_LOSE_SENDER},
    # Connecting crossed with the loss, or a second thing failed.
    _S.CLOSED: {
        _E.CONNECTED: to(_S.CLOSED),
        _E.LOST: to(_S.CLOSED),
        _E.SHUT_DOWN: to(_S.CLOSED),
    },
}

NOT_OPEN: frozenset[Enum] = frozenset({_R.FENCING, _R.CLOSED, _S.CLOSED})


class LinkSession(Machine[State, LinkEvent, LinkAction]):
    """One end of one link."""

    @property
    def is_open(self) -> bool:
        """Whether the link is up or may still come up."""
        return self.state not in NOT_OPEN


def receiver_link() -> LinkSession[ReceiverLink]:
    """Return decode's end of a new link."""
    return LinkSession(RECEIVER_LINK, ReceiverLink.OPENING)


def sender_link() -> LinkSession[SenderLink]:
    """Return prefill's end of a new link."""
    return LinkSession(SENDER_LINK, SenderLink.CONNECTING)
